"""RMS and L2 normalisation over the last dimension."""

import torch
from torch import Tensor

from runtime.kernels.launch import OPTIONS, block_of, constexpr, jit, ready, rows_of, runs_kernels, tensor, tl, warps_of
from runtime.kernels.rows import by_rows
from runtime.kernels.sigmoid import rsqrt_f32, sigmoid, sigmoid_f32

# Of KDA's q and k. The configuration has no key for it; this is the value of the kernels that the author's code calls.
L2_EPS = 1e-6


def rms_norm(x: Tensor, gain: Tensor, *, eps: float, is_tiled: bool) -> Tensor:
    """Return x * rsqrt(mean(x^2) + eps) * gain.

    x        [batch, tokens, ..., size]
    gain     [size]
    returns  the shape of x
    """
    if is_tiled and runs_kernels(x, gain):
        return _launch_rms(x, gain, None, eps)
    return by_rows(lambda rows: rms_normalised(rows, eps) * gain, x, is_tiled=is_tiled)


def rms_normalised(rows: Tensor, eps: float) -> Tensor:
    """Return the rows [..., size] divided by the root of their mean square; for use inside `by_rows`."""
    return rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + eps)


def l2_norm(x: Tensor, *, is_tiled: bool) -> Tensor:
    """Return x * rsqrt(sum(x^2) + L2_EPS), of x [batch, tokens, ..., size]."""
    if is_tiled and runs_kernels(x):
        x = ready(x)
        y, size = torch.empty_like(x), x.shape[-1]
        block = block_of(size)
        _l2_kernel[(x.numel() // size,)](x, y, L2_EPS, size, block, num_warps=warps_of(block), **OPTIONS)
        return y
    return by_rows(lambda rows: rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + L2_EPS), x, is_tiled=is_tiled)


def rms_norm_gated(x: Tensor, gain: Tensor, gate: Tensor, *, eps: float, is_tiled: bool) -> Tensor:
    """Return rms_norm(x, gain) * sigmoid(gate): the norm per head and KDA's output gate, in one launch on a GPU.

    x, gate  [batch, tokens, ..., size]
    gain     [size]
    returns  the shape of x
    """
    if is_tiled and runs_kernels(x, gain, gate):
        return _launch_rms(x, gain, gate, eps)
    return rms_norm(x, gain, eps=eps, is_tiled=is_tiled) * sigmoid(gate)


def _launch_rms(x: Tensor, gain: Tensor, gate: Tensor | None, eps: float) -> Tensor:
    rows, distance = rows_of(x, 1)
    size, block = x.shape[-1], block_of(x.shape[-1])
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    n_parts = 1 if gate is None or gate.dim() < 4 else gate.shape[-2]
    gates, gate_distance = (rows, 0) if gate is None else rows_of(gate, 1 if n_parts == 1 else 2)
    _rms_kernel[(rows.shape[0],)](
        rows, ready(gain), gates, y, eps, distance, gate_distance, n_parts, size, block, gate is not None, num_warps=warps_of(block), **OPTIONS
    )
    return y


@jit()
def _rms_kernel(x: tensor, gain: tensor, gate: tensor, y: tensor, eps: tensor, DISTANCE: constexpr, GATE_DISTANCE: constexpr, N_PARTS: constexpr,
                SIZE: constexpr, BLOCK: constexpr, HAS_GATE: constexpr) -> None:  # fmt: skip
    """One row; N_PARTS of them lie side by side in a row of the gate."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    is_in = at < SIZE
    out = rms_normalised_f32(tl.load(x + row * DISTANCE + at, mask=is_in, other=0.0), eps, SIZE) * tl.load(gain + at, mask=is_in, other=0.0)
    if HAS_GATE:
        start = gate + (row // N_PARTS) * GATE_DISTANCE + (row % N_PARTS) * SIZE
        out = out * sigmoid_f32(tl.load(start + at, mask=is_in, other=0.0))
    tl.store(y + row * SIZE + at, out, mask=is_in)


@jit()
def _l2_kernel(x: tensor, y: tensor, eps: tensor, SIZE: constexpr, BLOCK: constexpr) -> None:
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    is_in = at < SIZE
    values = tl.load(x + row * SIZE + at, mask=is_in, other=0.0)
    tl.store(y + row * SIZE + at, values * rsqrt_f32(tl.sum(values * values, 0) + eps), mask=is_in)


@jit()
def rms_normalised_f32(values: tensor, eps: tensor, SIZE: constexpr) -> tensor:
    """Return one row, filled up with zeros behind its SIZE elements, divided by the root of its mean square."""
    return values * rsqrt_f32(tl.div_rn(tl.sum(values * values, 0), SIZE * 1.0) + eps)
