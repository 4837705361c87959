"""Attention residuals: a layer's input is a learned mixture of the running sum and the sums of the finished blocks.

    v = [bank..., total];  k_j = v_j * rsqrt(mean(v_j^2) + eps);  s_j = <k_j, score>;  result = sum_j softmax(s)_j * v_j

`score` is the product of the checkpoint's norm gain and projection. The values are mixed raw; there is no 1/sqrt(size).

On a GPU one launch scores every (row, source) and a second one mixes and normalises each row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.kernels.launch import OPTIONS, block_of, constexpr, is_ready, jit, ready, rows_of, runs_kernels, tensor, tl, warps_of
from runtime.kernels.norms import rms_norm, rms_normalised, rms_normalised_f32
from runtime.kernels.rows import by_rows
from runtime.kernels.sigmoid import exp_f32, rsqrt_f32

# The bank and the running sum together; one binary serves any number up to it.
MAX_SOURCES = 16


def mix_residuals(bank: Sequence[Tensor], total: Tensor, score: Tensor, *, eps: float, is_tiled: bool) -> Tensor:
    """Return the mixture of the bank and the running sum.

    bank     each [batch, tokens, size], oldest first
    total    [batch, tokens, size]
    score    [size]
    returns  [batch, tokens, size]
    """
    if is_tiled and len(bank) < MAX_SOURCES and runs_kernels(*bank, total, score):
        return _launch(torch.stack([*bank]), total, (), score, score, eps)[0]

    def mix(sources: Tensor) -> Tensor:  # [..., n_sources, size]
        scores = (rms_normalised(sources, eps) * score).sum(-1)
        return (torch.softmax(scores, -1).unsqueeze(-1) * sources).sum(-2)

    return by_rows(mix, torch.stack([*bank, total], dim=-2), is_tiled=is_tiled)


def mix_and_norm(bank: Tensor, total: Tensor, score: Tensor, gain: Tensor, *, eps: float, is_tiled: bool) -> tuple[Tensor, Tensor]:
    """Return the mixture of the bank and the running sum, and its rms_norm.

    bank     [n, batch, tokens, size], n in 1..MAX_SOURCES-1, oldest first; may be the corner bank[:n, :, :tokens] of a larger buffer of one batch
    total    [batch, tokens, size]
    score    [size]
    gain     [size], of the norm
    returns  two of [batch, tokens, size]
    """
    if is_tiled and bank.shape[0] < MAX_SOURCES and runs_kernels(bank, total, score, gain):
        return _launch(bank, ready(total), (), score, gain, eps)
    mixed = mix_residuals(list(bank), total, score, eps=eps, is_tiled=is_tiled)
    return mixed, rms_norm(mixed, gain, eps=eps, is_tiled=is_tiled)


def add_mix_and_norm_(bank: Tensor, total: Tensor, addends: Sequence[Tensor], score: Tensor, gain: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Add one or two tensors to the running sum, in place, and return `mix_and_norm` of it in decode arithmetic.

    total    [batch, tokens, size]; two addends are added to each other first
    addends  each [batch, tokens, size]
    """
    assert 1 <= len(addends) <= 2
    if bank.shape[0] < MAX_SOURCES and runs_kernels(bank, total, *addends, score, gain):
        assert is_ready(total)
        return _launch(bank, total, addends, score, gain, eps)
    total.add_(addends[0] if len(addends) == 1 else addends[0] + addends[1])
    return mix_and_norm(bank, total, score, gain, eps=eps, is_tiled=True)


def _launch(bank: Tensor, total: Tensor, addends: Sequence[Tensor], score: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = total.shape[-1]
    total, score, gain = ready(total), ready(score), ready(gain)
    n_rows, n_sources = total.numel() // size, bank.shape[0] + 1
    if not (is_ready(bank[0]) and bank.stride(0) % size == 0):
        bank = ready(bank)
    # Of one source, so that a larger buffer needs no copy.
    n_bank_rows = bank.stride(0) // size
    scores = torch.empty(n_rows, MAX_SOURCES, dtype=torch.float32, device=total.device)
    mixed, normed = torch.empty_like(total), torch.empty_like(total)
    block = block_of(size)
    (first, first_distance), (second, second_distance) = ([*(rows_of(x, 1) for x in addends), (total, 0), (total, 0)])[:2]
    _score_kernel[(n_rows, n_sources)](
        bank, total, first, second, score, scores, n_sources, n_bank_rows, eps,
        MAX_SOURCES, len(addends), first_distance, second_distance, size, block, num_warps=warps_of(block), **OPTIONS,
    )  # fmt: skip
    _mix_kernel[(n_rows,)](bank, total, scores, gain, mixed, normed, n_sources, n_bank_rows, eps, MAX_SOURCES, size, block,
                           num_warps=warps_of(block), **OPTIONS)  # fmt: skip
    return mixed, normed


@jit("n_sources", "n_bank_rows")
def _score_kernel(bank: tensor, total: tensor, first: tensor, second: tensor, score: tensor, scores: tensor, n_sources: tensor,
                  n_bank_rows: tensor, eps: tensor, MAX: constexpr, N_ADDENDS: constexpr, FIRST_DISTANCE: constexpr, SECOND_DISTANCE: constexpr,
                  SIZE: constexpr, BLOCK: constexpr) -> None:  # fmt: skip
    """Write scores[row, source]; the program of the running sum adds to it and writes it."""
    row, source, at = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    is_in = at < SIZE
    start = bank + (source.to(tl.int64) * n_bank_rows + row) * SIZE
    if source == n_sources - 1:
        start = total + row.to(tl.int64) * SIZE
    values = tl.load(start + at, mask=is_in, other=0.0)
    # The first is decided when compiling, the second when running.
    if N_ADDENDS > 0:  # noqa: SIM102
        if source == n_sources - 1:
            more = tl.load(first + row * FIRST_DISTANCE + at, mask=is_in, other=0.0)
            if N_ADDENDS == 2:
                more += tl.load(second + row * SECOND_DISTANCE + at, mask=is_in, other=0.0)
            values += more
            tl.store(start + at, values, mask=is_in)
    rms = rsqrt_f32(tl.div_rn(tl.sum(values * values, 0), SIZE * 1.0) + eps)
    tl.store(scores + row * MAX + source, tl.sum(values * rms * tl.load(score + at, mask=is_in, other=0.0), 0))


@jit("n_sources", "n_bank_rows")
def _mix_kernel(bank: tensor, total: tensor, scores: tensor, gain: tensor, mixed: tensor, normed: tensor, n_sources: tensor,
                n_bank_rows: tensor, eps: tensor, MAX: constexpr, SIZE: constexpr, BLOCK: constexpr) -> None:  # fmt: skip
    """Write one row of `mixed` and `normed`; sources that are not there weigh 0."""
    row, at, source = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, MAX)
    is_in = at < SIZE
    s = tl.load(scores + row * MAX + source, mask=source < n_sources, other=float("-inf"))
    highest = tl.max(s, 0)
    denominator = tl.sum(exp_f32(s - highest), 0)
    out = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(MAX):
        is_there = j < n_sources
        start = bank + ((j * n_bank_rows).to(tl.int64) + row) * SIZE
        if j == n_sources - 1:
            start = total + row.to(tl.int64) * SIZE
        s_j = tl.load(scores + row * MAX + j, mask=is_there, other=float("-inf"))
        out += tl.div_rn(exp_f32(s_j - highest), denominator) * tl.load(start + at, mask=is_in & is_there, other=0.0)
    tl.store(mixed + row * SIZE + at, out, mask=is_in)
    tl.store(normed + row * SIZE + at, rms_normalised_f32(out, eps, SIZE) * tl.load(gain + at, mask=is_in, other=0.0), mask=is_in)
