"""Q8_0 on the device where the quants lie: the exact values of layout.q8_0, and the product of a matrix with 1..16 rows.

A matrix is kept in tiles of 16 rows, so that a GPU reads it in one stream; it takes as many bytes as in its file, but for rows added to fill
the last tile. Per tile and block of 32 columns there are 544 bytes: for g in 0..7 and t in 0..3 the quants of row g and then of row g + 8,
columns 8t..8t+7, each with 128 added; then the 16 scales, float16.

A row's product has the same bits whatever the other rows are and however many there are.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from layout.q8_0 import BLOCK_BYTES, BLOCK_SIZE
from runtime.kernels.bf16 import exact_dot
from runtime.kernels.cuda_library import Variant, check, find_library
from runtime.kernels.driver import raw_stream
from runtime.kernels.launch import DOT_PRECISION, IS_INTERPRETED, OPTIONS, constexpr, jit, ready, runs_kernels, tensor, tl
from runtime.kernels.rows import TILE_ROWS, by_rows

_QUANT_BYTES = TILE_ROWS * BLOCK_SIZE
_TILE_BLOCK_BYTES = TILE_ROWS * BLOCK_BYTES


class Q8Matrix(NamedTuple):
    """A Q8_0 matrix [n_rows, n_cols] as the kernels read it.

    data  uint8 [ceil(n_rows / 16), n_cols / 32, 544]
    """

    data: Tensor
    n_rows: int
    n_cols: int

    def expand(self) -> Tensor:
        """Return the matrix as float32 [n_rows, n_cols]."""
        return expand_q8_0(*self.split())

    def split(self) -> tuple[Tensor, Tensor]:
        """Return the quants, int8 [n_rows, n_cols], and the scales, float16 [n_rows, n_cols/32]."""
        quants, scales = _untile(self.data)
        return quants.flatten(0, 1)[: self.n_rows].flatten(1), scales.flatten(0, 1)[: self.n_rows]

    def rows(self, ids: Tensor) -> Tensor:
        """Return some rows: ids int64 [...] -> float32 [..., n_cols]."""
        flat = ids.flatten()
        quants, scales = _untile(self.data[flat // TILE_ROWS])
        at = (torch.arange(flat.numel(), device=flat.device), flat % TILE_ROWS)
        return expand_q8_0(quants[at].flatten(1), scales[at]).unflatten(0, ids.shape)


def expand_q8_0(quants: Tensor, scales: Tensor) -> Tensor:
    """Expand Q8_0 to float32: scale times quant, as float32 multiplies them.

    quants   int8 [rows, cols]
    scales   float16 [rows, cols/32]
    returns  float32 [rows, cols]
    """
    blocks = quants.unflatten(-1, (-1, BLOCK_SIZE)).to(torch.float32)
    return (blocks * scales.to(torch.float32).unsqueeze(-1)).flatten(1)


def pack_q8_0(raw: Tensor) -> Q8Matrix:
    """Return a matrix of the spine in tiles, on the device of its blocks: uint8 [rows, cols/32*34] as the file has them."""
    blocks = raw.unflatten(1, (-1, BLOCK_BYTES))
    n_rows, n_blocks = blocks.shape[:2]
    return _tiled(blocks[..., 2:], blocks[..., :2], n_rows, n_blocks * BLOCK_SIZE)


def concat(matrices: list[Q8Matrix]) -> Q8Matrix:
    """Return one matrix of the rows of several, so that products with one input are one launch."""
    n_rows, n_cols = sum(m.n_rows for m in matrices), matrices[0].n_cols
    assert all(m.n_cols == n_cols for m in matrices)
    if all(m.n_rows % TILE_ROWS == 0 for m in matrices[:-1]):
        return Q8Matrix(torch.cat([m.data for m in matrices]), n_rows, n_cols)
    quants, scales = (torch.cat(parts) for parts in zip(*(m.split() for m in matrices), strict=True))
    return _tiled(quants.view(torch.uint8).unflatten(1, (-1, BLOCK_SIZE)), scales.view(torch.uint8).unflatten(1, (-1, 2)), n_rows, n_cols)


def q8_0_product(x: Tensor, w: Q8Matrix, out: Tensor | None = None, *, variant: Variant | None = None) -> Tensor:
    """Return x @ w^T.

    x        float32 [M, n_cols], M in 1..16, contiguous
    out      float32 [M, n_rows], contiguous, or None
    variant  of the compiled kernels, if not the device's own
    returns  float32 [M, n_rows]

    On a GPU an activation counts to 24 bits, or to 2^-40 of the largest among a few hundred neighbours in its row. A row with an infinity is NaN.
    """
    n_rows_of_x, n_cols = x.shape
    assert 1 <= n_rows_of_x <= TILE_ROWS and n_cols == w.n_cols
    if not runs_kernels(x):
        return _assigned(out, by_rows(lambda rows: rows @ w.expand().T, x.unsqueeze(0), is_tiled=True).squeeze(0))
    x = ready(x)
    if out is None:
        out = torch.empty(n_rows_of_x, w.n_rows, dtype=torch.float32, device=x.device)
    library = None if IS_INTERPRETED else find_library(x.device, variant)
    if library is None:
        tiles = w.data.shape[0]
        _product_kernel[(tiles,)](x, w.data, out, n_rows_of_x, w.n_rows, n_cols // BLOCK_SIZE, DOT_PRECISION, num_warps=1, **OPTIONS)
        return out
    stream = raw_stream(x.device)
    pointers = (w.data.data_ptr(), x.data_ptr(), out.data_ptr())
    check(library, library.ktier_q8_0(stream, x.device.index, *pointers, n_rows_of_x, w.n_rows, n_cols, True), "a Q8_0 product")
    return out


def _assigned(out: Tensor | None, value: Tensor) -> Tensor:
    return value if out is None else out.copy_(value)


def _tiled(quants: Tensor, scales: Tensor, n_rows: int, n_cols: int) -> Q8Matrix:
    """Lay out quants, uint8 [rows, blocks, 32], and the bytes of the scales, uint8 [rows, blocks, 2], in tiles."""
    fill = -n_rows % TILE_ROWS
    # Signed byte q as q + 128 is the top bit turned over.
    pieces = F.pad(quants ^ 0x80, [0, 0, 0, 0, 0, fill], value=0x80).view(-1, 2, 8, n_cols // BLOCK_SIZE, 4, 8)
    tiled_quants = pieces.permute(0, 3, 2, 4, 1, 5).reshape(-1, n_cols // BLOCK_SIZE, _QUANT_BYTES)
    tiled_scales = F.pad(scales, [0, 0, 0, 0, 0, fill]).unflatten(0, (-1, TILE_ROWS)).transpose(1, 2).flatten(2)
    return Q8Matrix(torch.cat([tiled_quants, tiled_scales], dim=-1), n_rows, n_cols)


def _untile(data: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [tiles, 16, blocks, 32] and float16 [tiles, 16, blocks]."""
    n_blocks = data.shape[1]
    quants = (data[..., :_QUANT_BYTES] ^ 0x80).view(torch.int8).view(-1, n_blocks, 8, 4, 2, 8)
    scales = data[..., _QUANT_BYTES:].contiguous().view(torch.float16)
    return quants.permute(0, 4, 2, 1, 3, 5).reshape(-1, TILE_ROWS, n_blocks, BLOCK_SIZE), scales.transpose(1, 2)


@jit("n_rows_of_x")
def _product_kernel(x: tensor, data: tensor, out: tensor, n_rows_of_x: tensor, n_rows: tensor, N_BLOCKS: constexpr, PRECISION: constexpr) -> None:
    """One tile of 16 rows of weights against 16 rows of x; a block's float32 sum is multiplied by its scale."""
    tile, m, n, k = tl.program_id(0), tl.arange(0, 16), tl.arange(0, 16), tl.arange(0, 32)
    is_row = m < n_rows_of_x
    quant_at = (n[None, :] % 8 * 4 + k[:, None] // 8) * 16 + n[None, :] // 8 * 8 + k[:, None] % 8
    base = data + tile.to(tl.int64) * N_BLOCKS * 544
    total = tl.zeros((16, 16), tl.float32)
    for start in range(0, N_BLOCKS, 4):
        for i in tl.static_range(4):
            block = start + i
            is_in = block < N_BLOCKS
            quants = (tl.load(base + block * 544 + quant_at, mask=is_in, other=128).to(tl.int32) - 128).to(tl.float32)
            scales = tl.load((base + block * 544 + 512).to(tl.pointer_type(tl.float16)) + n, mask=is_in, other=0.0).to(tl.float32)
            values = tl.load(x + m[:, None] * N_BLOCKS * 32 + block * 32 + k[None, :], mask=is_row[:, None] & is_in, other=0.0)
            total += exact_dot(values, quants, PRECISION) * scales[None, :]
    at = tile * 16 + n
    tl.store(out + m[:, None] * n_rows + at[None, :], total, mask=is_row[:, None] & (at < n_rows)[None, :])
