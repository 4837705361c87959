"""Which experts a row uses, and how their outputs are added up.

    chosen = the k highest of scores + bias;    w_j = scores_j / (sum of the chosen scores + 1e-20) * scaling;    y = sum_j w_j out_j

The bias affects the choice only. Shapes: B batch, T tokens, E experts, k chosen per row.
"""

import torch
from torch import Tensor

from runtime.kernels.launch import OPTIONS, block_of, constexpr, jit, ready, runs_kernels, tensor, tl, warps_of
from runtime.kernels.norms import rms_norm, rms_normalised_f32
from runtime.kernels.rows import by_rows
from runtime.kernels.sigmoid import sigmoid, sigmoid_f32

_SUM_EPS = 1e-20


def choose_experts(scores: Tensor, bias: Tensor, n_chosen: int) -> Tensor:
    """Return the numbers of the chosen experts, rising. Of equal sums the lowest number is chosen first.

    scores   [B, T, E]
    bias     [E]
    returns  int64 [B, T, k]
    """
    by_rank = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    return by_rank[..., :n_chosen].sort(dim=-1).values


def expert_weights(scores: Tensor, ids: Tensor, *, scaling: float, is_tiled: bool) -> Tensor:
    """Return the share of each chosen expert: scores [B, T, E], ids [B, T, k] -> [B, T, k]."""
    return by_rows(lambda rows: rows / (rows.sum(-1, keepdim=True) + _SUM_EPS) * scaling, scores.gather(-1, ids), is_tiled=is_tiled)


def route(logits: Tensor, bias: Tensor, n_chosen: int, *, scaling: float, is_tiled: bool) -> tuple[Tensor, Tensor]:
    """Return the chosen experts of each row and their weights, from the gate's logits; one launch on a GPU.

    logits   [B, T, E], before the sigmoid
    bias     [E]
    returns  ids int64 [B, T, k], rising, and weights float32 [B, T, k]
    """
    if is_tiled and runs_kernels(logits, bias):
        return _launch_route(ready(logits), ready(bias), n_chosen, scaling)
    scores = sigmoid(logits)
    ids = choose_experts(scores, bias, n_chosen)
    return ids, expert_weights(scores, ids, scaling=scaling, is_tiled=is_tiled)


def _launch_route(logits: Tensor, bias: Tensor, n_chosen: int, scaling: float) -> tuple[Tensor, Tensor]:
    n_experts = logits.shape[-1]
    ids = torch.empty(*logits.shape[:-1], n_chosen, dtype=torch.int64, device=logits.device)
    weights = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    grid = (ids.numel() // n_chosen,)
    _route_kernel[grid](logits, bias, ids, weights, scaling, _SUM_EPS, n_experts, n_chosen, block_of(n_experts), num_warps=4, **OPTIONS)
    return ids, weights


@jit()
def _route_kernel(logits: tensor, bias: tensor, ids: tensor, weights: tensor, scaling: tensor, sum_eps: tensor,
                  E: constexpr, K: constexpr, BLOCK: constexpr) -> None:  # fmt: skip
    """Write one row's K experts and weights."""
    row, expert = tl.program_id(0), tl.arange(0, BLOCK)
    is_in = expert < E
    scores = tl.where(is_in, sigmoid_f32(tl.load(logits + row * E + expert, mask=is_in, other=0.0)), 0.0)
    # Adding 0 turns -0 into 0, which must tie with it.
    sums = scores + tl.load(bias + expert, mask=is_in, other=0.0) + 0.0
    bits = sums.to(tl.int32, bitcast=True)
    # Whole numbers in the order of the floats; below them the expert's number, so that of equals the lowest is the highest key.
    # A NaN is above every number, as in torch's sort, and the ids stay valid.
    rank = tl.where(sums == sums, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF).to(tl.int64)
    keys = tl.where(is_in, (rank << 32) | (0x7FFFFFFF - expert).to(tl.int64), -0x8000000000000000)
    is_chosen = expert < 0
    for _ in range(K):
        is_highest = keys == tl.max(keys, 0)
        is_chosen = is_chosen | is_highest
        keys = tl.where(is_highest, -0x8000000000000000, keys)
    total = tl.sum(tl.where(is_chosen, scores, 0.0), 0)
    place = row * K + tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    tl.store(ids + place, expert.to(tl.int64), mask=is_chosen)
    tl.store(weights + place, tl.div_rn(scores, total + sum_eps) * scaling, mask=is_chosen)


def combine_experts(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum over experts: outputs [B, T, k, L], weights [B, T, k] -> [B, T, L]."""
    terms = (outputs * weights.unsqueeze(-1)).unbind(-2)
    # In expert order, one by one: any other order gives other bits.
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def combine_and_norm(outputs: Tensor, weights: Tensor, gain: Tensor, *, eps: float, is_tiled: bool) -> Tensor:
    """Return rms_norm(combine_experts(outputs, weights), gain); one launch on a GPU, which adds in the same order.

    outputs  [B, T, k, L]
    weights  [B, T, k]
    gain     [L]
    returns  [B, T, L]
    """
    if not (is_tiled and runs_kernels(outputs, weights, gain)):
        return rms_norm(combine_experts(outputs, weights), gain, eps=eps, is_tiled=is_tiled)
    outputs, weights, gain = ready(outputs), ready(weights), ready(gain)
    k, size = outputs.shape[-2:]
    y = torch.empty(*weights.shape[:-1], size, dtype=torch.float32, device=outputs.device)
    block = block_of(size)
    _combine_kernel[(weights.numel() // k,)](outputs, weights, gain, y, eps, k, size, block, num_warps=warps_of(block), **OPTIONS)
    return y


@jit()
def _combine_kernel(outputs: tensor, weights: tensor, gain: tensor, y: tensor, eps: tensor, K: constexpr, SIZE: constexpr, BLOCK: constexpr) -> None:
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    is_in = at < SIZE
    start = outputs + row.to(tl.int64) * K * SIZE
    total = tl.load(start + at, mask=is_in, other=0.0) * tl.load(weights + row * K)
    for j in tl.static_range(1, K):
        total += tl.load(start + j * SIZE + at, mask=is_in, other=0.0) * tl.load(weights + row * K + j)
    tl.store(y + row * SIZE + at, rms_normalised_f32(total, eps, SIZE) * tl.load(gain + at, mask=is_in, other=0.0), mask=is_in)
