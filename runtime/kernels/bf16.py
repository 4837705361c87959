"""The product of a bfloat16 matrix, the router's gate, with 1..16 rows of float32: weights exact, activations to 24 bits.

A row's product has the same bits whatever the other rows are and however many there are.
"""

import torch
from torch import Tensor

from runtime.kernels.cuda_library import Variant, check, find_library
from runtime.kernels.driver import raw_stream
from runtime.kernels.launch import DOT_PRECISION, IS_INTERPRETED, OPTIONS, constexpr, jit, ready, runs_kernels, tensor, tl
from runtime.kernels.rows import TILE_ROWS, linear

_BLOCK_SIZE = 32


def bf16_product(x: Tensor, weight: Tensor, out: Tensor | None = None, *, variant: Variant | None = None) -> Tensor:
    """Return x @ weight^T.

    x        float32 [M, K], M in 1..16, contiguous, K a multiple of 32
    weight   bfloat16 [N, K], contiguous
    out      float32 [M, N], contiguous, or None
    variant  of the compiled kernels, if not the device's own
    returns  float32 [M, N]
    """
    n_rows_of_x, n_cols = x.shape
    assert 1 <= n_rows_of_x <= TILE_ROWS and n_cols == weight.shape[1] and n_cols % _BLOCK_SIZE == 0
    is_trained = torch.is_grad_enabled() and weight.requires_grad
    if is_trained or not runs_kernels(x):
        value = linear(x.unsqueeze(0), weight.float(), is_tiled=True).squeeze(0)
        return value if out is None else out.copy_(value)
    x, weight, n_rows = ready(x), ready(weight), weight.shape[0]
    if out is None:
        out = torch.empty(n_rows_of_x, n_rows, dtype=torch.float32, device=x.device)
    library = None if IS_INTERPRETED else find_library(x.device, variant)
    if library is None:
        _product_kernel[(-(-n_rows // 16),)](x, weight, out, n_rows_of_x, n_rows, n_cols, DOT_PRECISION, num_warps=1, **OPTIONS)
        return out
    stream = raw_stream(x.device)
    pointers = (weight.data_ptr(), x.data_ptr(), out.data_ptr())
    check(library, library.ktier_bf16(stream, x.device.index, *pointers, n_rows_of_x, n_rows, n_cols, True), "a bfloat16 product")
    return out


@jit()
def exact_dot(x: tensor, w: tensor, PRECISION: constexpr) -> tensor:
    """Return x @ w for float32 of which every w is exact in bfloat16: three products on tensor cores, the smallest part of x first."""
    if PRECISION == "ieee":
        return tl.dot(x, w, input_precision="ieee")
    short = w.to(tl.bfloat16)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(high, short, tl.dot(middle, short, tl.dot(low, short)))


@jit("n_rows_of_x")
def _product_kernel(x: tensor, weight: tensor, out: tensor, n_rows_of_x: tensor, n_rows: tensor, N_COLS: constexpr, PRECISION: constexpr) -> None:
    """16 rows of weights against 16 rows of x."""
    m, n, k = tl.arange(0, 16), tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, 32)
    is_row, is_in = m < n_rows_of_x, n < n_rows
    total = tl.zeros((16, 16), tl.float32)
    for start in range(0, N_COLS, 32):
        weights = tl.load(weight + n[None, :].to(tl.int64) * N_COLS + start + k[:, None], mask=is_in[None, :], other=0.0).to(tl.float32)
        values = tl.load(x + m[:, None] * N_COLS + start + k[None, :], mask=is_row[:, None], other=0.0)
        total += exact_dot(values, weights, PRECISION)
    tl.store(out + m[:, None] * n_rows + n[None, :], total, mask=is_row[:, None] & is_in[None, :])
