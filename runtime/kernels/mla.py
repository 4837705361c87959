"""Multi-head latent attention without rotation: keys and values are projections of one cached latent per token.

    score[h,t,s] = (q_nope[t,h] . k_nope[s,h] + q_rot[t,h] . k_rot[s]) * (N + R)^-0.5, causal;    o = sum_s softmax(score)_s v[s,h]
    k_nope[s,h] = W_k[h] latent[s];    v[s,h] = W_v[h] latent[s];    kv_b[h] = [W_k[h]; W_v[h]]

The R "rope" elements exist and count in the scale, but the model never rotates them.

Shapes: B batch, T new tokens, S tokens in all (the T new ones last), H heads, N nope size, R rope size, V value size, L latent size.

    q_nope   [B, T, H, N]
    q_rot    [B, T, H, R]
    latent   [B, S, L], normalised
    k_rot    [B, S, R]
    kv_b     [H, N + V, L]
    returns  [B, T, H, V]

A decode step on a GPU keeps its cache in buffers of fixed size and the number of past tokens in device memory, so that one CUDA graph
serves all positions: append, q_latent = W_k^T q_nope, attention by splits of SPLIT_POSITIONS, their merge in order, o = W_v o_latent. Splits
behind the last token end at once. A split's place is a matter of positions, never of rows. With an indexer a split is 128 of the selected
positions: while all are selected, the same numbers are added in the same order.
"""

import math

import torch
from torch import Tensor

from runtime.kernels.indexer import attend_selected
from runtime.kernels.launch import DOT_PRECISION, OPTIONS, block_of, constexpr, is_ready, jit, ready, rows_of, runs_kernels, tensor, tl, warps_of
from runtime.kernels.norms import rms_norm, rms_normalised_f32
from runtime.kernels.q8_0 import expand_q8_0
from runtime.kernels.rows import by_rows
from runtime.kernels.sigmoid import exp_f32, sigmoid, sigmoid_f32

SPLIT_POSITIONS = 128
# A tensor core's least height, filled with heads: rows never share a product.
_TILE_HEADS = 16
_TILE_LATENTS = 32
_TILE_VALUES = 16
_MERGED_AT_ONCE = 16
_Q8_0_BLOCK = 32


def attend_absorbed(q_nope: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, kv_b: Tensor) -> Tensor:
    """Attend in the space of the latents, row by row: a row's shapes depend on its position alone, and so do its bits."""
    if runs_kernels(q_nope, q_rot, latent, k_rot, kv_b):
        q, n_past = torch.cat([q_nope, q_rot], dim=-1), latent.shape[1] - q_nope.shape[1]
        past = torch.full((1,), n_past, dtype=torch.int32, device=q.device)
        kv_b = ready(kv_b)
        texts = (_launch_attention(q[b], ready(latent[b]), ready(k_rot[b]), past, kv_b, None, None, None) for b in range(q.shape[0]))
        return torch.stack([*texts])
    n_nope = q_nope.shape[-1]
    w_k, w_v = kv_b[:, :n_nope], kv_b[:, n_nope:]
    scale = (n_nope + q_rot.shape[-1]) ** -0.5
    q_latent = by_rows(lambda rows: torch.einsum("...hn,hnl->...hl", rows, w_k), q_nope, is_tiled=True)
    n_past = latent.shape[1] - q_nope.shape[1]
    outputs = []
    for t in range(q_nope.shape[1]):
        known, known_rot = latent[:, : n_past + t + 1], k_rot[:, : n_past + t + 1]
        scores = q_latent[:, t] @ known.transpose(1, 2) + q_rot[:, t] @ known_rot.transpose(1, 2)  # [B, H, n_past + t + 1]
        outputs.append(torch.softmax(scores * scale, -1) @ known)
    return by_rows(lambda rows: torch.einsum("...hl,hvl->...hv", rows, w_v), torch.stack(outputs, dim=1), is_tiled=True)


def attend_expanded(q_nope: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, kv_b: Tensor, *, n_query_rows: int = 256) -> Tensor:
    """Attend with keys and values written out, `n_query_rows` queries at a time: the scores take B * H * n_query_rows * S floats."""
    n_nope = q_nope.shape[-1]
    scale = (n_nope + q_rot.shape[-1]) ** -0.5
    k_nope, v = torch.einsum("bsl,hnl->bhsn", latent, kv_b).split([n_nope, kv_b.shape[1] - n_nope], dim=-1)
    q_nope, q_rot = q_nope.transpose(1, 2), q_rot.transpose(1, 2)  # [B, H, T, ...]
    n_tok, n_past = q_nope.shape[2], latent.shape[1] - q_nope.shape[2]
    outputs = []
    for start in range(0, n_tok, n_query_rows):
        end = min(start + n_query_rows, n_tok)
        n_known = n_past + end
        scores = q_nope[:, :, start:end] @ k_nope[:, :, :n_known].transpose(-1, -2)
        scores = (scores + q_rot[:, :, start:end] @ k_rot[:, None, :n_known].transpose(-1, -2)) * scale
        is_future = torch.ones(end - start, n_known, dtype=torch.bool, device=scores.device).triu(n_past + start + 1)
        outputs.append(torch.softmax(scores.masked_fill(is_future, -math.inf), -1) @ v[:, :, :n_known])
    return torch.cat(outputs, dim=2).transpose(1, 2)


def mla_decode_(
    q: Tensor, kv: Tensor, latent: Tensor, k_rot: Tensor, n_past: Tensor, *, kv_b: Tensor | tuple[Tensor, Tensor], gain: Tensor, eps: float,
    gate: Tensor | None = None, positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Append the new tokens of one text to its cache, in place, and return what they attend to.

    q          [T, H, N + R]
    kv         [T, L + R]: latents before their norm, and k_rot
    latent     [S, L], and k_rot [S, R]: the cache's buffers, of S >= n_past + T rows; those from n_past on may hold anything
    n_past     int32 [1], on the device; it stays as it is
    kv_b       [H, N + V, L] float32, or its Q8_0 as int8 [H, N + V, L] and float16 scales [H, N + V, L/32]
    gain       [L], and eps: of the latents' norm
    gate       [T, H, V] or None: the result is multiplied by sigmoid(gate)
    positions  int32 [T, K] or None: all that each token attends to, as `indexer.select_in_cache` returns them; else it attends to all before it
    returns    [T, H, V]

    While a token's positions are all that it sees, the result is that without `positions`: bit for bit in the plain form and under Triton's
    interpreter. A GPU runs the same kernel, in which only the addresses differ; its bits have not been compared.

    For the static buffers of a CUDA graph; a caller that runs past S writes nothing there and gets wrong rows, so it must count.
    """
    if runs_kernels(kv, latent, k_rot, gain):
        assert is_ready(latent) and is_ready(k_rot)
        _launch_append(kv, latent, k_rot, n_past, ready(gain), eps)
    else:
        new, new_rot = kv.split([latent.shape[-1], k_rot.shape[-1]], dim=-1)
        written = slice(int(n_past), int(n_past) + q.shape[0])
        latent[written] = rms_norm(new.unsqueeze(0), gain, eps=eps, is_tiled=True)[0]
        k_rot[written] = new_rot
    return attend_in_cache(q, latent, k_rot, n_past, kv_b=kv_b, gate=gate, positions=positions)


def attend_in_cache(
    q: Tensor, latent: Tensor, k_rot: Tensor, n_past: Tensor, *, kv_b: Tensor | tuple[Tensor, Tensor], gate: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return what the new tokens attend to, of a cache that has them: `mla_decode_` without its first step; arguments are as there."""
    weights, scales = (kv_b, None) if isinstance(kv_b, Tensor) else kv_b
    if scales is not None:
        assert weights.dtype is torch.int8 and scales.dtype is torch.float16
    floats = [q, latent, k_rot, *([gate] if gate is not None else []), *([weights] if scales is None else [])]
    if runs_kernels(*floats):
        # Weights too: a copy of them at every step would go unnoticed.
        assert all(is_ready(x) for x in (latent, k_rot, weights, *([scales] if scales is not None else [])))
        return _launch_attention(q, latent, k_rot, n_past, weights, scales, gate, positions)
    matrix = weights if scales is None else expand_q8_0(weights.flatten(0, 1), scales.flatten(0, 1)).view(weights.shape)
    q_nope, q_rot = q.unsqueeze(0).split([q.shape[-1] - k_rot.shape[-1], k_rot.shape[-1]], dim=-1)
    end = int(n_past) + q.shape[0]
    seen = (q_nope, q_rot, latent[None, :end], k_rot[None, :end], matrix.to(q.dtype))
    o = (attend_absorbed(*seen) if positions is None else attend_selected(*seen, positions[None].long()))[0]
    return o if gate is None else o * sigmoid(gate)


def _launch_append(kv: Tensor, latent: Tensor, k_rot: Tensor, n_past: Tensor, gain: Tensor, eps: float) -> None:
    kv, distance = rows_of(kv, 1)
    n_latents, n_rope = latent.shape[1], k_rot.shape[1]
    block = block_of(n_latents)
    _append_kernel[(kv.shape[0],)](kv, latent, k_rot, n_past, gain, latent.shape[0], eps, distance, n_latents, block, n_rope, block_of(n_rope),
                                   num_warps=warps_of(block), **OPTIONS)  # fmt: skip


@jit("n_positions")
def _append_kernel(kv: tensor, latent: tensor, k_rot: tensor, n_past: tensor, gain: tensor, n_positions: tensor, eps: tensor,
                   DISTANCE: constexpr, L: constexpr, L_BLOCK: constexpr, R: constexpr, R_BLOCK: constexpr) -> None:  # fmt: skip
    """Write one token's latent, normalised, and its k_rot."""
    t, at, rot = tl.program_id(0), tl.arange(0, L_BLOCK), tl.arange(0, R_BLOCK)
    position = tl.load(n_past).to(tl.int64) + t
    is_in = (at < L) & (position < n_positions)
    values = tl.load(kv + t * DISTANCE + at, mask=at < L, other=0.0)
    out = rms_normalised_f32(values, eps, L) * tl.load(gain + at, mask=at < L, other=0.0)
    tl.store(latent + position * L + at, out, mask=is_in)
    k_t = tl.load(kv + t * DISTANCE + L + rot, mask=rot < R, other=0.0)
    tl.store(k_rot + position * R + rot, k_t, mask=(rot < R) & (position < n_positions))


def _launch_attention(
    q: Tensor, latent: Tensor, k_rot: Tensor, n_past: Tensor, weights: Tensor, scales: Tensor | None, gate: Tensor | None,
    positions: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return [T, H, V] for q [T, H, N + R], the cache with the T new tokens in it, and weights [H, N + V, L]."""
    (n_tok, n_heads, _), n_latents, n_rope = q.shape, latent.shape[1], k_rot.shape[1]
    q, q_distance = rows_of(q, 2)
    n_nope = q.shape[2] - n_rope
    n_values = weights.shape[1] - n_nope
    n_positions = latent.shape[0] if positions is None else positions.shape[1]
    n_splits = -(-n_positions // SPLIT_POSITIONS)
    is_q8_0 = scales is not None

    def floats(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=q.device)

    q_latent, partial = floats(n_tok, n_heads, n_latents), floats(n_tok, n_splits, n_heads, n_latents)
    sums, o_latent, o = floats(2, n_tok, n_splits, n_heads), floats(n_tok, n_heads, n_latents), floats(n_tok, n_heads, n_values)
    l_block, tile = block_of(n_latents), min(_TILE_LATENTS, block_of(n_latents))
    scale_of = scales if is_q8_0 else weights
    _queries_kernel[(n_heads, -(-n_latents // tile))](
        q, weights, scale_of, q_latent, n_tok, q_distance, n_heads, n_nope, block_of(n_nope), n_rope, n_values, n_latents, tile, is_q8_0, _Q8_0_BLOCK,
        num_warps=4, **OPTIONS,
    )  # fmt: skip
    _attention_kernel[(n_splits, -(-n_heads // _TILE_HEADS), n_tok)](
        q, q_latent, latent, k_rot, n_past, n_past if positions is None else ready(positions), partial, sums, n_positions, (n_nope + n_rope) ** -0.5,
        q_distance, n_heads, _TILE_HEADS, n_nope, n_rope, block_of(n_rope, least=16), n_latents, tile, SPLIT_POSITIONS, positions is not None,
        DOT_PRECISION,
        num_warps=8, **OPTIONS,
    )  # fmt: skip
    _merge_kernel[(n_tok, n_heads)](
        partial, sums, n_past, o_latent, n_splits, n_heads, n_latents, l_block, SPLIT_POSITIONS, _MERGED_AT_ONCE, num_warps=4, **OPTIONS
    )
    gates, gate_distance = (o, 0) if gate is None else rows_of(gate, 2)
    _values_kernel[(n_heads, -(-n_values // _TILE_VALUES))](
        o_latent, weights, scale_of, gates, o, n_tok, gate_distance, n_heads, n_nope, n_values, _TILE_VALUES, n_latents, l_block,
        gate is not None, is_q8_0, _Q8_0_BLOCK, num_warps=4, **OPTIONS,
    )  # fmt: skip
    return o


@jit()
def _weights_f32(
    weights: tensor, scales: tensor, row: tensor, at: tensor, is_in: tensor, L: constexpr, IS_Q8_0: constexpr, Q8_0_BLOCK: constexpr
) -> tensor:
    """Return the weights [rows, columns] as float32; an int8 times a float16 is exact in it."""
    w = tl.load(weights + row[:, None] * L + at[None, :], mask=is_in, other=0).to(tl.float32)
    if IS_Q8_0:
        w = w * tl.load(scales + row[:, None] * (L // Q8_0_BLOCK) + (at // Q8_0_BLOCK)[None, :], mask=is_in, other=0.0).to(tl.float32)
    return w


@jit("n_tok")
def _queries_kernel(q: tensor, weights: tensor, scales: tensor, q_latent: tensor, n_tok: tensor,
                    Q_DISTANCE: constexpr, H: constexpr, N: constexpr, N_BLOCK: constexpr, R: constexpr, V: constexpr, L: constexpr, TILE: constexpr,
                    IS_Q8_0: constexpr, Q8_0_BLOCK: constexpr) -> None:  # fmt: skip
    """q_latent[t, h] = W_k[h]^T q_nope[t, h] for TILE latents of one head and all tokens, one after another."""
    head, nope, at = tl.program_id(0), tl.arange(0, N_BLOCK), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_in = (nope < N)[:, None] & (at < L)[None, :]
    w = _weights_f32(weights, scales, (head * (N + V) + nope).to(tl.int64), at, is_in, L, IS_Q8_0, Q8_0_BLOCK)
    for t in range(n_tok):
        row = t * H + head
        q_t = tl.load(q + t * Q_DISTANCE + head * (N + R) + nope, mask=nope < N, other=0.0)
        tl.store(q_latent + row * L + at, tl.sum(w * q_t[:, None], 0), mask=at < L)


@jit("n_positions")
def _attention_kernel(q: tensor, q_latent: tensor, latent: tensor, k_rot: tensor, n_past: tensor, positions: tensor, partial: tensor,
                      sums: tensor, n_positions: tensor, scale: tensor, Q_DISTANCE: constexpr, H: constexpr, HEADS: constexpr, N: constexpr,
                      R: constexpr, R_BLOCK: constexpr, L: constexpr, TILE: constexpr, SPLIT: constexpr, IS_SELECTED: constexpr,
                      PRECISION: constexpr) -> None:  # fmt: skip
    """One token, HEADS heads, SPLIT positions: the sum of exp(score - highest) * latent, of exp(score - highest), and the highest score."""
    split, t = tl.program_id(0), tl.program_id(2)
    n_seen = tl.minimum(tl.load(n_past) + t + 1, n_positions)
    if split * SPLIT >= n_seen:
        return
    head, position = tl.program_id(1) * HEADS + tl.arange(0, HEADS), split * SPLIT + tl.arange(0, SPLIT)
    is_head, is_seen = head < H, position < n_seen
    row, place = (t * H + head).to(tl.int64), position.to(tl.int64)
    if IS_SELECTED:
        place = tl.load(positions + t.to(tl.int64) * n_positions + place, mask=is_seen, other=0).to(tl.int64)
    scores = tl.zeros((HEADS, SPLIT), tl.float32)
    for start in range(0, L, TILE):
        at = start + tl.arange(0, TILE)
        is_in = at < L
        part = tl.load(q_latent + row[:, None] * L + at[None, :], mask=is_head[:, None] & is_in[None, :], other=0.0)
        # What is not seen is not read: a NaN there times a share of 0 would still be NaN.
        keys = tl.load(latent + place[None, :] * L + at[:, None], mask=is_seen[None, :] & is_in[:, None], other=0.0)
        scores = tl.dot(part, keys, scores, input_precision=PRECISION)
    rot = tl.arange(0, R_BLOCK)
    part = tl.load(q + t * Q_DISTANCE + head[:, None] * (N + R) + N + rot[None, :], mask=is_head[:, None] & (rot < R)[None, :], other=0.0)
    keys = tl.load(k_rot + place[None, :] * R + rot[:, None], mask=is_seen[None, :] & (rot < R)[:, None], other=0.0)
    scores = tl.dot(part, keys, scores, input_precision=PRECISION)
    scores = tl.where(is_seen[None, :], scores * scale, float("-inf"))
    highest = tl.max(scores, 1)
    shares = exp_f32(scores - highest[:, None])
    n_splits = tl.num_programs(0)
    out = (t * n_splits + split).to(tl.int64) * H + head
    tl.store(sums + out, highest, mask=is_head)
    tl.store(sums + tl.num_programs(2).to(tl.int64) * n_splits * H + out, tl.sum(shares, 1), mask=is_head)
    for start in range(0, L, TILE):
        at = start + tl.arange(0, TILE)
        is_in = at < L
        values = tl.load(latent + place[:, None] * L + at[None, :], mask=is_seen[:, None] & is_in[None, :], other=0.0)
        total = tl.dot(shares, values, input_precision=PRECISION)
        tl.store(partial + out[:, None] * L + at[None, :], total, mask=is_head[:, None] & is_in[None, :])


@jit("n_splits")
def _merge_kernel(partial: tensor, sums: tensor, n_past: tensor, o_latent: tensor, n_splits: tensor, H: constexpr, L: constexpr, L_BLOCK: constexpr,
                  SPLIT: constexpr, AT_ONCE: constexpr) -> None:  # fmt: skip
    """o_latent of one token and head: its splits, AT_ONCE at a time, in order."""
    t, head, at, one = tl.program_id(0), tl.program_id(1), tl.arange(0, L_BLOCK), tl.arange(0, AT_ONCE)
    n_used = tl.minimum((tl.load(n_past) + t + SPLIT) // SPLIT, n_splits)
    start_row = t.to(tl.int64) * n_splits
    sums_of = sums + tl.num_programs(0).to(tl.int64) * n_splits * H
    highest = tl.full((), float("-inf"), tl.float32)
    for start in range(0, n_used, AT_ONCE):
        row = (start_row + start + one) * H + head
        highest = tl.maximum(highest, tl.max(tl.load(sums + row, mask=start + one < n_used, other=float("-inf")), 0))
    total, denominator = tl.zeros((L_BLOCK,), tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, n_used, AT_ONCE):
        is_used = start + one < n_used
        row = (start_row + start + one) * H + head
        share = exp_f32(tl.load(sums + row, mask=is_used, other=float("-inf")) - highest)
        denominator += tl.sum(share * tl.load(sums_of + row, mask=is_used, other=0.0), 0)
        tile = tl.load(partial + row[:, None] * L + at[None, :], mask=is_used[:, None] & (at < L)[None, :], other=0.0)
        total += tl.sum(share[:, None] * tile, 0)
    tl.store(o_latent + (t * H + head) * L + at, tl.div_rn(total, denominator), mask=at < L)


@jit("n_tok")
def _values_kernel(o_latent: tensor, weights: tensor, scales: tensor, gate: tensor, o: tensor, n_tok: tensor,
                   GATE_DISTANCE: constexpr, H: constexpr, N: constexpr, V: constexpr, TILE: constexpr, L: constexpr, L_BLOCK: constexpr,
                   HAS_GATE: constexpr, IS_Q8_0: constexpr, Q8_0_BLOCK: constexpr) -> None:  # fmt: skip
    """o[t, h] = W_v[h] o_latent[t, h] for TILE values of one head and all tokens, one after another."""
    head, value, at = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE), tl.arange(0, L_BLOCK)
    is_in = (value < V)[:, None] & (at < L)[None, :]
    w = _weights_f32(weights, scales, (head * (N + V) + N + value).to(tl.int64), at, is_in, L, IS_Q8_0, Q8_0_BLOCK)
    for t in range(n_tok):
        row = t * H + head
        out = tl.sum(w * tl.load(o_latent + row * L + at, mask=at < L, other=0.0)[None, :], 1)
        if HAS_GATE:
            out = out * sigmoid_f32(tl.load(gate + t * GATE_DISTANCE + head * V + value, mask=value < V, other=0.0))
        tl.store(o + row * V + value, out, mask=value < V)
