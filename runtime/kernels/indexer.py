"""K3.1's lightning indexer: which cached positions a token attends to, and attention to those alone.

    score[t,s] = sum_i w[t,i] * relu(q[t,i] . k[s]) * (I * D)^-0.5,  s <= t
    token t attends to the min(K, t + 1) positions of the highest scores; of equal scores the lower position is taken first

Nothing here is rotated. The form is inferred from related models and from names in release notes: no output of the released model has been
compared. While t < K all positions are selected, and the scores have no influence.

Shapes: B batch, T new tokens, S tokens in all (the T new ones last), I index heads, D index head size, K positions at most.

    q         [B, T, I, D]
    weights   [B, T, I]
    k         [B, S, D], normalised
    returns   positions, int64 [B, T, min(K, S)], rising; a row that sees fewer has all that it sees first, and later ones behind them

Plain torch, row by row: a row's shapes depend on its position alone, and so do its bits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.rows import by_rows


def index_keys(x: Tensor, gain: Tensor, bias: Tensor | None, *, eps: float, is_tiled: bool) -> Tensor:
    """Return the LayerNorm of the projected keys: x [B, T, D], gain and bias [D] -> [B, T, D]."""
    return by_rows(lambda rows: F.layer_norm(rows, gain.shape, gain, bias, eps), x, is_tiled=is_tiled)


def index_scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """Return the scores [B, T, S]; -inf at the positions behind each token."""
    n_tok, n_all = q.shape[1], k.shape[1]
    seen = [_row_scores(q[:, t], weights[:, t], k[:, : n_all - n_tok + t + 1]) for t in range(n_tok)]
    return torch.stack([F.pad(row, (0, n_all - row.shape[1]), value=-torch.inf) for row in seen], dim=1)


def select_positions(q: Tensor, weights: Tensor, k: Tensor, n_most: int) -> Tensor:
    """Return the positions that each token attends to, n_most at most."""
    n_past, n_kept = k.shape[1] - q.shape[1], min(n_most, k.shape[1])
    everything = torch.arange(n_kept, device=k.device).expand(q.shape[0], -1)
    rows = []
    for t in range(q.shape[1]):
        n_seen = n_past + t + 1
        rows.append(everything if n_seen <= n_kept else _highest(_row_scores(q[:, t], weights[:, t], k[:, :n_seen]), n_kept))
    return torch.stack(rows, dim=1)


def attend_selected(q_nope: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, kv_b: Tensor, positions: Tensor) -> Tensor:
    """Attend to the selected positions only, in the space of the latents; shapes and formula are those of mla.py.

    positions  int64 [B, T, K], rising, as `select_positions` returns them; those behind a token are left out
    returns    [B, T, H, V]
    """
    n_nope, n_past = q_nope.shape[-1], latent.shape[1] - q_nope.shape[1]
    w_k, w_v = kv_b[:, :n_nope], kv_b[:, n_nope:]
    scale = (n_nope + q_rot.shape[-1]) ** -0.5
    q_latent = by_rows(lambda rows: torch.einsum("...hn,hnl->...hl", rows, w_k), q_nope, is_tiled=True)
    outputs = []
    for t in range(q_nope.shape[1]):
        chosen = positions[:, t, : n_past + t + 1]
        known, known_rot = _at(latent, chosen), _at(k_rot, chosen)
        scores = q_latent[:, t] @ known.transpose(1, 2) + q_rot[:, t] @ known_rot.transpose(1, 2)  # [B, H, min(K, n_past + t + 1)]
        outputs.append(torch.softmax(scores * scale, -1) @ known)
    return by_rows(lambda rows: torch.einsum("...hl,hvl->...hv", rows, w_v), torch.stack(outputs, dim=1), is_tiled=True)


def _row_scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """Return one token's scores: q [B, I, D], weights [B, I], k [B, seen, D] -> [B, seen]."""
    products = torch.relu(q @ k.transpose(1, 2))
    return (weights.unsqueeze(1) @ products).squeeze(1) * (q.shape[1] * q.shape[2]) ** -0.5


def _highest(scores: Tensor, n_kept: int) -> Tensor:
    """Return the places of the highest scores, rising: [B, seen] -> int64 [B, n_kept]."""
    by_rank = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return by_rank[:, :n_kept].sort(dim=-1).values


def _at(values: Tensor, positions: Tensor) -> Tensor:
    """Return the rows at each text's positions: [B, S, size], [B, K] -> [B, K, size]."""
    return values.gather(1, positions.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
