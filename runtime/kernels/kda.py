"""Kimi Delta Attention: a linear attention whose memory decays per channel and is corrected by the delta rule.

Per head, with q and k normalised, q scaled, g the log-decay per key channel and beta the write strength:

    S_t = diag(exp g_t) S_(t-1);   S_t += k_t (beta_t (v_t - S_t^T k_t))^T;   o_t = S_t^T q_t

Shapes: B batch, T tokens, H heads, K key size, V value size, P = 3 H K channels of q, k and v together.
"""

import math

import torch
from torch import Tensor

from runtime.kernels.sigmoid import sigmoid, softplus

CHUNK_TOKENS = 16


def short_conv(u: Tensor, kernel: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve each channel causally over the last tokens: y_t = sum_i kernel_i * u_(t - n + 1 + i), without bias.

    u        [B, T, P]
    kernel   [P, n]; the last column multiplies the current token
    past     [B, n-1, P], the inputs of the tokens before u
    returns  y [B, T, P], and the last n-1 inputs [B, n-1, P]
    """
    n_tok, n_taps = u.shape[1], kernel.shape[1]
    u = torch.cat([past, u], dim=1)
    y = u[:, :n_tok] * kernel[:, 0]
    for tap in range(1, n_taps):
        y = y + u[:, tap : tap + n_tok] * kernel[:, tap]
    return y, u[:, n_tok:]


def log_decay(z: Tensor, a_log: Tensor, *, lower_bound: float | None) -> Tensor:
    """Return the log-decay g: lower_bound * sigmoid(exp(a_log) * z), or -exp(a_log) * softplus(z) where there is no bound.

    z        [B, T, H, K]
    a_log    [H]
    returns  [B, T, H, K], at most 0
    """
    a = torch.exp(a_log).unsqueeze(-1)
    return -a * softplus(z) if lower_bound is None else lower_bound * sigmoid(a * z)


def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Go token by token. No shape depends on T, so a token's bits do not depend on the block that it comes in.

    q, k, g  [B, T, H, K]
    v        [B, T, H, V]
    beta     [B, T, H]
    memory   [B, H, K, V], before the first token
    returns  o [B, T, H, V], and the memory after the last token
    """
    outputs = []
    for t in range(q.shape[1]):
        memory = torch.exp(g[:, t]).unsqueeze(-1) * memory
        write = beta[:, t].unsqueeze(-1) * (v[:, t] - _read(memory, k[:, t]))
        memory = memory + k[:, t].unsqueeze(-1) * write.unsqueeze(-2)
        outputs.append(_read(memory, q[:, t]))
    return torch.stack(outputs, dim=1), memory


def _read(memory: Tensor, key: Tensor) -> Tensor:
    """Return S^T key: [B, H, K, V], [B, H, K] -> [B, H, V]."""
    return (key.unsqueeze(-2) @ memory).squeeze(-2)


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Go CHUNK_TOKENS tokens at a time. Shapes and result as in `kda_recurrent`, equal to it up to rounding."""
    outputs = []
    for start in range(0, q.shape[1], CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        heads_first = (x[:, part].transpose(1, 2) for x in (q, k, v, g, beta))
        o, memory = _chunk(*heads_first, memory=memory)
        outputs.append(o.transpose(1, 2))
    return torch.cat(outputs, dim=1), memory


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Solve one chunk of C tokens.

    With G the running sum of g and D_ijd = exp(G_id - G_jd) for i >= j:

        A_ij = beta_i sum_d k_id k_jd D_ijd  (i > j);    P_ij = sum_d q_id k_jd D_ijd  (i >= j)
        (I + A) W = beta (V - (K exp G) S);   O = (Q exp G) S + P W;   S' = diag(exp G_C) S + (K exp(G_C - G))^T W

    q, k, g [B, H, C, K]; v [B, H, C, V]; beta [B, H, C]; memory [B, H, K, V]; returns O [B, H, C, V] and S'.
    """
    total = g.cumsum(-2)
    decay = _decay_between(total)  # [B, H, C, C, K]
    from_start = torch.exp(total)
    to_end = torch.exp(total[..., -1:, :] - total)
    a = beta.unsqueeze(-1) * _decayed_products(k, k, decay)
    wanted = beta.unsqueeze(-1) * (v - (k * from_start) @ memory)
    # Unit triangular: only what is below the diagonal of A is read, and the diagonal counts as 1.
    writes = torch.linalg.solve_triangular(a, wanted, upper=False, unitriangular=True)
    o = (q * from_start) @ memory + _decayed_products(q, k, decay) @ writes
    return o, from_start[..., -1, :].unsqueeze(-1) * memory + (k * to_end).transpose(-1, -2) @ writes


def _decay_between(total: Tensor) -> Tensor:
    """Return exp(G_i - G_j) for i >= j and 0 elsewhere: [B, H, C, K] -> [B, H, C, C, K]."""
    n_tok = total.shape[-2]
    is_later = torch.ones(n_tok, n_tok, dtype=torch.bool, device=total.device).triu(1).unsqueeze(-1)
    # Masked before exp, and never factored into exp(G_i) * exp(-G_j): either would overflow and give NaN.
    return torch.exp((total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(is_later, -math.inf))


def _decayed_products(x: Tensor, y: Tensor, decay: Tensor) -> Tensor:
    """Return sum_d x_id y_jd D_ijd: [B, H, C, C]."""
    return (x.unsqueeze(-2) * y.unsqueeze(-3) * decay).sum(-1)
