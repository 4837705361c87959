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

The plain forms go row by row: a row's shapes depend on its position alone, and so do its bits.

A decode step keeps the keys in a buffer of fixed size and the number of past tokens in device memory, as mla.py does: append, a sort key for
every position there is room for, the K highest of them, their positions in rising order. A sort key has the score above and the position below,
so no two are equal: any correct selection finds the same set, and torch.topk and torch.sort do it with shapes that do not change. Which of two
nearly equal scores is higher is a matter of rounding, so that a GPU and a CPU may select different positions there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.kernels.launch import DOT_PRECISION, OPTIONS, block_of, constexpr, is_ready, jit, ready, rows_of, runs_kernels, tensor, tl, warps_of
from runtime.kernels.rows import by_rows
from runtime.kernels.sigmoid import rsqrt_f32

# Positions that one program scores.
_SPLIT_POSITIONS = 128
# A tensor core's least height, filled with heads: rows never share a product.
_TILE_HEADS = 16
_TILE_SIZE = 32
# The lower half of a sort key has it less the position.
_LAST_POSITION = 0x7FFFFFFF


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


def append_index_keys_(k: Tensor, index_k: Tensor, n_past: Tensor, *, gain: Tensor, bias: Tensor | None, eps: float) -> None:
    """Append the normalised index keys of the new tokens of one text to its cache, in place.

    k        [T, D], projected; T may be any number
    index_k  [S, D], the cache's buffer, of S >= n_past + T rows; those from n_past on may hold anything
    n_past   int32 [1], on the device; it stays as it is
    """
    if not runs_kernels(k, index_k, gain, *([bias] if bias is not None else [])):
        start = int(n_past)
        index_k[start : start + k.shape[0]] = index_keys(k.unsqueeze(0), gain, bias, eps=eps, is_tiled=True)[0]
        return
    assert is_ready(index_k)
    (k, distance), block, gain = rows_of(k, 1), block_of(index_k.shape[1]), ready(gain)
    _append_key_kernel[(k.shape[0],)](
        k, index_k, n_past, gain, gain if bias is None else ready(bias), index_k.shape[0], eps, distance, index_k.shape[1], block, bias is not None,
        num_warps=warps_of(block), **OPTIONS,
    )  # fmt: skip


def select_in_cache(q: Tensor, weights: Tensor, index_k: Tensor, n_past: Tensor, n_most: int) -> Tensor:
    """Return the positions that each new token of one text attends to; the new tokens' keys are in the cache.

    q        [T, I, D], and weights [T, I]
    index_k  [S, D], the cache's buffer; what lies behind a token is not looked at
    n_past   int32 [1], on the device
    returns  int32 [T, min(n_most, S)], rising; a token that sees fewer has all that it sees first, and later ones behind them

    For the static buffers of a CUDA graph: time and memory go by S, the room, not by the text. T sort keys of 8 bytes for each position.
    """
    n_kept = min(n_most, index_k.shape[0])
    if not runs_kernels(q, weights, index_k):
        end = int(n_past) + q.shape[0]
        found = select_positions(q.unsqueeze(0), weights.unsqueeze(0), index_k[None, :end], n_kept)[0]
        unseen = torch.arange(found.shape[1], n_kept, device=found.device).expand(len(found), -1)
        return torch.cat([found, unseen], dim=1).int()
    highest = torch.topk(_sort_keys(q, weights, index_k, n_past), n_kept, dim=-1, sorted=False).values
    return torch.sort(_LAST_POSITION - (highest & _LAST_POSITION).int(), dim=-1).values


def _sort_keys(q: Tensor, weights: Tensor, index_k: Tensor, n_past: Tensor) -> Tensor:
    """Return int64 [T, S]: the higher a position's score, the higher its key; of equal scores the lower position's is higher."""
    assert is_ready(index_k)
    (n_tok, n_heads, size), n_positions = q.shape, index_k.shape[0]
    (q, q_distance), (weights, distance) = rows_of(q, 2), rows_of(weights, 1)
    keys = torch.empty(n_tok, n_positions, dtype=torch.int64, device=q.device)
    _sort_keys_kernel[(-(-n_positions // _SPLIT_POSITIONS), n_tok)](
        q, weights, index_k, n_past, keys, n_positions, (n_heads * size) ** -0.5,
        q_distance, distance, n_heads, _TILE_HEADS, size, _TILE_SIZE, _SPLIT_POSITIONS, _LAST_POSITION, DOT_PRECISION, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return keys


@jit("n_positions")
def _append_key_kernel(k: tensor, index_k: tensor, n_past: tensor, gain: tensor, bias: tensor, n_positions: tensor, eps: tensor,
                       DISTANCE: constexpr, D: constexpr, BLOCK: constexpr, HAS_BIAS: constexpr) -> None:  # fmt: skip
    """Write one token's key, normalised."""
    t, at = tl.program_id(0), tl.arange(0, BLOCK)
    position, is_in = tl.load(n_past).to(tl.int64) + t, at < D
    values = tl.load(k + t * DISTANCE + at, mask=is_in, other=0.0)
    centred = tl.where(is_in, values - tl.div_rn(tl.sum(values, 0), D * 1.0), 0.0)
    out = centred * rsqrt_f32(tl.div_rn(tl.sum(centred * centred, 0), D * 1.0) + eps) * tl.load(gain + at, mask=is_in, other=0.0)
    if HAS_BIAS:
        out = out + tl.load(bias + at, mask=is_in, other=0.0)
    tl.store(index_k + position * D + at, out, mask=is_in & (position < n_positions))


@jit("n_positions")
def _sort_keys_kernel(q: tensor, weights: tensor, index_k: tensor, n_past: tensor, keys: tensor, n_positions: tensor, scale: tensor,
                      Q_DISTANCE: constexpr, DISTANCE: constexpr, H: constexpr, HEADS: constexpr, D: constexpr, TILE: constexpr, SPLIT: constexpr,
                      LAST_POSITION: constexpr, PRECISION: constexpr) -> None:  # fmt: skip
    """One token, SPLIT positions: their scores, HEADS heads at a time, as whole numbers above the positions."""
    split, t = tl.program_id(0), tl.program_id(1)
    position, n_seen = split * SPLIT + tl.arange(0, SPLIT), tl.minimum(tl.load(n_past) + t + 1, n_positions)
    is_seen, place = position < n_seen, position.to(tl.int64)
    scores = tl.zeros((SPLIT,), tl.float32)
    if split * SPLIT < n_seen:
        for first in range(0, H, HEADS):
            head = first + tl.arange(0, HEADS)
            products = tl.zeros((HEADS, SPLIT), tl.float32)
            for start in range(0, D, TILE):
                at = start + tl.arange(0, TILE)
                part = tl.load(q + t * Q_DISTANCE + head[:, None] * D + at[None, :], mask=(head < H)[:, None] & (at < D)[None, :], other=0.0)
                known = tl.load(index_k + place[None, :] * D + at[:, None], mask=is_seen[None, :] & (at < D)[:, None], other=0.0)
                products = tl.dot(part, known, products, input_precision=PRECISION)
            w = tl.load(weights + t * DISTANCE + head, mask=head < H, other=0.0)
            # A NaN stays one.
            scores += tl.sum(tl.where(products < 0.0, 0.0, products) * w[:, None], 0)
    # Adding 0 turns -0 into 0, which must tie with it.
    scores = scores * scale + 0.0
    bits = scores.to(tl.int32, bitcast=True)
    # Whole numbers in the order of the floats; a NaN is above every number, as in torch's sort, and what is not seen below them.
    rank = tl.where(scores == scores, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)
    rank = tl.where(is_seen, rank, -0x80000000).to(tl.int64)
    tl.store(keys + t.to(tl.int64) * n_positions + place, (rank << 32) | (LAST_POSITION - position).to(tl.int64), mask=position < n_positions)


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
