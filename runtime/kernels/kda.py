"""Kimi Delta Attention: a linear attention whose memory decays per channel and is corrected by the delta rule.

Per head, with q and k normalised, q scaled, g the log-decay per key channel and beta the write strength:

    S_t = diag(exp g_t) S_(t-1);   S_t += k_t (beta_t (v_t - S_t^T k_t))^T;   o_t = S_t^T q_t

Shapes: B batch, T tokens, H heads, K key size, V value size, P = 3 H K channels of q, k and v together.

A decode step on a GPU is two launches. The first has one program per head and part: convolution, SiLU, norm and scale of q, k and v for all
tokens at once, and the decay. The second has one program per head and VALUE_COLUMNS columns of the memory: it reads them once, goes token
by token, and writes them once. Two, because the programs of a head share q and k, and the convolution's past may be replaced in place.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.launch import OPTIONS, block_of, constexpr, is_ready, jit, ready, rows_of, runs_kernels, tensor, tl
from runtime.kernels.norms import L2_EPS, l2_norm
from runtime.kernels.sigmoid import exp_f32, rsqrt_f32, sigmoid, sigmoid_f32, silu, silu_f32, softplus, softplus_f32

CHUNK_TOKENS = 16
# Of D, below: chunks are taken together up to 64 MiB of it.
_MOST_DECAY_ELEMENTS = 1 << 24
# Of the memory per program: 384 programs for K3's 96 heads of 128.
VALUE_COLUMNS = 32
# Tokens per tile of the convolution.
_TILE_TOKENS = 16


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
    if runs_kernels(q, k, v, g, beta, memory):
        after = torch.empty(memory.shape, dtype=torch.float32, device=memory.device)
        return _launch_steps(ready(q), ready(k), ready(v), ready(torch.exp(g)), ready(beta), ready(memory), after), after
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


def kda_decode(
    u: Tensor, z: Tensor, beta: Tensor, past: Tensor, memory: Tensor, *, kernel: Tensor, dt_bias: Tensor, a_log: Tensor, lower_bound: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a KDA layer's outputs before norm and gate, and its new state, from what the products of its input give.

    u        [B, T, P], of q, k and v
    z        [B, T, H * K], of the decay, without its bias
    beta     [B, T, H], before the sigmoid
    past     [B, n-1, P], the inputs of the convolution before u
    memory   [B, H, K, K]
    kernel   [P, n]; dt_bias [H * K]; a_log [H]
    returns  o [B, T, H, K], memory, past
    """
    if runs_kernels(u, z, beta, past, memory, kernel, dt_bias, a_log):
        new_past, after = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (past, memory))
        q, k, v, decay, strength = _launch_prepare(u, z, beta, ready(past), new_past, kernel, dt_bias, a_log, lower_bound, memory.shape)
        return _launch_steps(q, k, v, decay, strength, ready(memory), after), after, new_past
    n_heads, size = memory.shape[1:3]
    y, new_past = short_conv(u, kernel, past)
    q, k, v = silu(y).unflatten(-1, (3, n_heads, size)).unbind(2)
    q, k = l2_norm(q, is_tiled=True) * size**-0.5, l2_norm(k, is_tiled=True)
    g = log_decay((z + dt_bias).unflatten(-1, (n_heads, size)), a_log, lower_bound=lower_bound)
    o, after = kda_recurrent(q, k, v, g, sigmoid(beta), memory)
    return o, after, new_past


def kda_decode_(
    u: Tensor, z: Tensor, beta: Tensor, past: Tensor, memory: Tensor, *, kernel: Tensor, dt_bias: Tensor, a_log: Tensor, lower_bound: float | None
) -> Tensor:
    """Return the outputs of `kda_decode` and replace `past` and `memory` by the new state, in place.

    For the static buffers of a CUDA graph. Arguments as in `kda_decode`, the bits too.
    """
    if not runs_kernels(u, z, beta, past, memory, kernel, dt_bias, a_log):
        o, after, new_past = kda_decode(u, z, beta, past, memory, kernel=kernel, dt_bias=dt_bias, a_log=a_log, lower_bound=lower_bound)
        memory.copy_(after)
        past.copy_(new_past)
        return o
    assert is_ready(past) and is_ready(memory)
    return _launch_steps(*_launch_prepare(u, z, beta, past, past, kernel, dt_bias, a_log, lower_bound, memory.shape), memory, memory)


def _launch_prepare(
    u: Tensor, z: Tensor, beta: Tensor, past: Tensor, new_past: Tensor, kernel: Tensor, dt_bias: Tensor, a_log: Tensor,
    lower_bound: float | None, shape: torch.Size,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q, k, v, exp(g) and the strengths, and write `new_past`, which may be `past`."""
    batch, n_heads, size = shape[:3]
    n_tok, n_taps = u.shape[1], kernel.shape[1]
    (u, u_distance), (z, z_distance), (beta, beta_distance) = (rows_of(x, 1) for x in (u, z, beta))
    out = torch.empty(4, batch, n_tok, n_heads, size, dtype=torch.float32, device=u.device)
    strength = torch.empty(batch, n_tok, n_heads, dtype=torch.float32, device=u.device)
    _prepare_kernel[(n_heads, 4, batch)](
        u, z, beta, past, new_past, ready(kernel), ready(dt_bias), ready(a_log), out, strength, n_tok,
        size**-0.5, 0.0 if lower_bound is None else lower_bound, L2_EPS, u_distance, z_distance, beta_distance,
        n_heads, size, block_of(size), n_taps, block_of(n_taps - 1), lower_bound is not None, _TILE_TOKENS, num_warps=4, **OPTIONS,
    )  # fmt: skip
    q, k, v, decay = out.unbind(0)
    return q, k, v, decay, strength


@jit("n_tok")
def _prepare_kernel(u: tensor, z: tensor, beta: tensor, past: tensor, new_past: tensor, kernel: tensor, dt_bias: tensor, a_log: tensor,
                    out: tensor, strength: tensor, n_tok: tensor, q_scale: tensor, lower_bound: tensor, eps: tensor,
                    U_DISTANCE: constexpr, Z_DISTANCE: constexpr, BETA_DISTANCE: constexpr, H: constexpr, K: constexpr, BLOCK: constexpr,
                    N_TAPS: constexpr, PAST_BLOCK: constexpr, HAS_BOUND: constexpr, TILE: constexpr) -> None:  # fmt: skip
    """One head of one part: q, k, v, or the decay with the strengths. Rows are tokens, columns channels."""
    head, part, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_in = at < K
    P: constexpr = 3 * H * K
    N_PAST: constexpr = N_TAPS - 1
    if part == 3:
        a = exp_f32(tl.load(a_log + head))
        bias = tl.load(dt_bias + head * K + at, mask=is_in, other=0.0)
        for start in range(0, n_tok, TILE):
            tok = start + tl.arange(0, TILE)
            row = batch * n_tok + tok
            is_live = (tok < n_tok)[:, None] & is_in[None, :]
            x = tl.load(z + row[:, None] * Z_DISTANCE + head * K + at[None, :], mask=is_live, other=0.0) + bias[None, :]
            g = lower_bound * sigmoid_f32(a * x) if HAS_BOUND else -a * softplus_f32(x)
            # `out` holds the batch of q, then of k, v and the decay.
            row_out = 3 * tl.num_programs(2) * n_tok + row
            tl.store(out + (row_out[:, None] * H + head) * K + at[None, :], exp_f32(g), mask=is_live)
            logit = tl.load(beta + row * BETA_DISTANCE + head, mask=tok < n_tok, other=0.0)
            tl.store(strength + row * H + head, sigmoid_f32(logit), mask=tok < n_tok)
    else:
        channel = (part * H + head) * K + at
        u_start = u + batch * n_tok * U_DISTANCE
        past_start = past + batch * N_PAST * P
        for start in range(0, n_tok, TILE):
            tok = start + tl.arange(0, TILE)
            y = tl.zeros((TILE, BLOCK), tl.float32)
            for tap in tl.static_range(N_TAPS):
                source = tok + (tap - N_PAST)
                is_old = (source < 0)[:, None] & is_in[None, :]
                is_new = ((source >= 0) & (source < n_tok))[:, None] & is_in[None, :]
                old = tl.load(past_start + (source + N_PAST)[:, None] * P + channel[None, :], mask=is_old, other=0.0)
                new = tl.load(u_start + source[:, None] * U_DISTANCE + channel[None, :], mask=is_new, other=0.0)
                weight = tl.load(kernel + channel * N_TAPS + tap, mask=is_in, other=0.0)
                y += tl.where(is_old, old, new) * weight[None, :]
            y = silu_f32(y)
            if part < 2:
                y = y * rsqrt_f32(tl.sum(y * y, 1) + eps)[:, None]
            if part == 0:
                y = y * q_scale
            is_live = (tok < n_tok)[:, None] & is_in[None, :]
            row_out = (part * tl.num_programs(2) + batch) * n_tok + tok
            tl.store(out + (row_out[:, None] * H + head) * K + at[None, :], y, mask=is_live)
        slot = tl.arange(0, PAST_BLOCK)
        source = n_tok - N_PAST + slot
        is_old = ((source < 0) & (slot < N_PAST))[:, None] & is_in[None, :]
        is_new = ((source >= 0) & (slot < N_PAST))[:, None] & is_in[None, :]
        old = tl.load(past_start + (source + N_PAST)[:, None] * P + channel[None, :], mask=is_old, other=0.0)
        new = tl.load(u_start + source[:, None] * U_DISTANCE + channel[None, :], mask=is_new, other=0.0)
        # Every thread has read the past before any replaces it.
        tl.debug_barrier()
        tl.store(new_past + (batch * N_PAST + slot)[:, None] * P + channel[None, :], tl.where(is_old, old, new), mask=is_old | is_new)


def _launch_steps(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return the outputs, and write the memory after the last token; `after` may be `before`."""
    batch, n_tok, n_heads, n_keys = q.shape
    n_values = v.shape[-1]
    o = torch.empty(batch, n_tok, n_heads, n_values, dtype=torch.float32, device=q.device)
    columns = min(VALUE_COLUMNS, block_of(n_values))
    _steps_kernel[(n_heads, -(-n_values // columns), batch)](
        q, k, v, decay, beta, before, after, o, n_tok, n_heads, n_keys, block_of(n_keys), n_values, columns, num_warps=4, **OPTIONS
    )
    return o


@jit("n_tok")
def _steps_kernel(q: tensor, k: tensor, v: tensor, decay: tensor, beta: tensor, before: tensor, after: tensor, o: tensor, n_tok: tensor,
                  H: constexpr, K: constexpr, K_BLOCK: constexpr, V: constexpr, COLUMNS: constexpr) -> None:  # fmt: skip
    """All tokens of COLUMNS columns of one head's memory."""
    head, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    key, value = tl.arange(0, K_BLOCK), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_value = key < K, value < V
    at = ((batch * H + head) * K + key)[:, None] * V + value[None, :]
    is_in = is_key[:, None] & is_value[None, :]
    memory = tl.load(before + at, mask=is_in, other=0.0)
    for t in range(n_tok):
        row = (batch * n_tok + t) * H + head
        k_t = tl.load(k + row * K + key, mask=is_key, other=0.0)
        q_t = tl.load(q + row * K + key, mask=is_key, other=0.0)
        memory = memory * tl.load(decay + row * K + key, mask=is_key, other=0.0)[:, None]
        v_t = tl.load(v + row * V + value, mask=is_value, other=0.0)
        write = tl.load(beta + row) * (v_t - tl.sum(memory * k_t[:, None], 0))
        memory += k_t[:, None] * write[None, :]
        tl.store(o + row * V + value, tl.sum(memory * q_t[:, None], 0), mask=is_value)
    tl.store(after + at, memory, mask=is_in)


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Go CHUNK_TOKENS tokens at a time. Shapes and result as in `kda_recurrent`, equal to it up to rounding."""
    batch, n_heads, size = q.shape[0], q.shape[2], q.shape[3]
    n_at_once = max(1, _MOST_DECAY_ELEMENTS // (batch * n_heads * CHUNK_TOKENS**2 * size))
    outputs = []
    for part in zip(*(x.split(n_at_once * CHUNK_TOKENS, dim=1) for x in (q, k, v, g, beta)), strict=True):
        o, memory = _chunks(*(_in_chunks(x) for x in part), memory=memory)
        outputs.append(o.flatten(2, 3).transpose(1, 2)[:, : part[0].shape[1]])
    return torch.cat(outputs, dim=1), memory


def _in_chunks(x: Tensor) -> Tensor:
    """Return [B, T, H, ...] as [B, H, chunks, C, ...]. Zeros fill the last chunk: a token of zeros writes nothing, and nothing decays."""
    x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, -x.shape[1] % CHUNK_TOKENS])
    return x.unflatten(1, (-1, CHUNK_TOKENS)).movedim(3, 1)


def _chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Solve N chunks of C tokens: what does not need the memory for all at once, the rest one after the other.

    With G the running sum of g in a chunk, D_ijd = exp(G_id - G_jd) for i >= j, and S the memory before the chunk:

        A_ij = beta_i sum_d k_id k_jd D_ijd  (i > j);    P_ij = sum_d q_id k_jd D_ijd  (i >= j)
        (I + A) U = beta V;   (I + A) Y = beta (K exp G);   W = U - Y S
        O = (Q exp G) S + P W;   S' = diag(exp G_C) S + (K exp(G_C - G))^T W

    q, k, g [B, H, N, C, K]; v [B, H, N, C, V]; beta [B, H, N, C]; memory [B, H, K, V]; returns O [B, H, N, C, V] and the last S'.
    """
    total = g.cumsum(-2)
    decay = _decay_between(total)  # [B, H, N, C, C, K]
    from_start = torch.exp(total)
    to_end = torch.exp(total[..., -1:, :] - total)
    a = beta.unsqueeze(-1) * _decayed_products(k, k, decay)
    # Unit triangular: only what is below the diagonal of A is read, and the diagonal counts as 1.
    solved = torch.linalg.solve_triangular(a, beta.unsqueeze(-1) * torch.cat([v, k * from_start], -1), upper=False, unitriangular=True)
    wanted, known = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    kept, keys = from_start[..., -1, :].unsqueeze(-1), (k * to_end).transpose(-1, -2)
    memories, writes = [], []
    for u, y, keep, key in zip(*(x.unbind(2) for x in (wanted, known, kept, keys)), strict=True):
        memories.append(memory)
        writes.append(u - y @ memory)
        memory = keep * memory + key @ writes[-1]
    o = (q * from_start) @ torch.stack(memories, 2) + _decayed_products(q, k, decay) @ torch.stack(writes, 2)
    return o, memory


def _decay_between(total: Tensor) -> Tensor:
    """Return exp(G_i - G_j) for i >= j and 0 elsewhere: [..., C, K] -> [..., C, C, K]."""
    n_tok = total.shape[-2]
    is_later = torch.ones(n_tok, n_tok, dtype=torch.bool, device=total.device).triu(1).unsqueeze(-1)
    # Masked before exp, and never factored into exp(G_i) * exp(-G_j): either would overflow and give NaN.
    return torch.exp((total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(is_later, -math.inf))


def _decayed_products(x: Tensor, y: Tensor, decay: Tensor) -> Tensor:
    """Return sum_d x_id y_jd D_ijd: [..., C, C]."""
    return (x.unsqueeze(-2) * y.unsqueeze(-3) * decay).sum(-1)
