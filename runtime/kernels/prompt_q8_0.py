"""The product of a Q8_0 matrix with many rows, for the prompt pass: the matrix is written out as float16, part by part, for a general product.

Both factors are sums of two float16, the second of which is what the first leaves over:

    w = w_high + w_low, exactly: a quant times a scale has 18 bits and is a multiple of 2^-24. Weights above 65504 become infinite.
    x = (x_high + x_low) 2^e, e by row: to 2^-23 of x, or to 2^-40 of the largest in its row.
    x w = (x_low w_high + x_high w_low + x_high w_high) 2^e;  x_low w_low, below 2^-24 of it, is left out.

The three products are one, over columns that lie thrice side by side. Tensor cores cut bits off in long sums, so columns are taken up to
MOST_COLUMNS at a time, and these sums are added in float32, in order. The matrix is taken some rows at a time: the scratch stays small.

A row's bits may depend on how many rows there are, but not on what is in the others.
"""

import torch
from torch import Tensor

from layout.q8_0 import BLOCK_SIZE
from runtime.kernels.launch import OPTIONS, constexpr, jit, ready, runs_kernels, tensor, tl
from runtime.kernels.q8_0 import Q8Matrix
from runtime.kernels.rows import TILE_ROWS

MOST_COLUMNS = 1024
# For the written-out part of the matrix and the sums that it gives, together.
SCRATCH_BYTES = 400_000_000
_N_PARTS = 3
# The largest of a row is brought to 2^14 up to 2^15: float16 ends at 65504.
_LARGEST_EXPONENT = 14
_COLUMNS_AT_ONCE = 128

# Why prompts are not to be run with this product on a device.
_rejected: dict[torch.device, str] = {}


def reject_prompt_products(device: torch.device, reason: str) -> None:
    """Have plain torch run prompts on a device from now on."""
    _rejected[device] = reason


def why_no_prompt_products(device: torch.device) -> str | None:
    """Return why this product is not to be used on a device, or None; a device without a number is the current one."""
    numbered = torch.device(device.type, torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
    return _rejected.get(numbered)


def q8_0_product_of_many(x: Tensor, w: Q8Matrix, *, scratch_bytes: int = SCRATCH_BYTES) -> Tensor:
    """Return x @ w^T.

    x        float32 [M, n_cols]
    returns  float32 [M, n_rows]

    A row with an infinity is NaN. Without kernels the product is a float32 one.
    """
    (n_rows_of_x, n_cols), n_rows = x.shape, w.n_rows
    assert n_cols == w.n_cols
    if not runs_kernels(x):
        return x @ w.expand().T
    parts, factors = split_rows(x, columns_at_once(n_cols))
    out = torch.empty(n_rows_of_x, n_rows, dtype=torch.float32, device=x.device)
    step = _rows_at_once(w, n_rows_of_x, scratch_bytes)
    for start in range(0, n_rows, step):
        end = min(start + step, n_rows)
        _write_product(parts, expand_halves(w, start, end), factors, out[:, start:end])
    return out


def _write_product(x: Tensor, w: Tensor, factors: Tensor, out: Tensor) -> None:
    """Write the product of some of the matrix' rows. A function, so that its sums are let go of before those of the next rows are made."""
    sums = _float32_sums(x, w)
    torch.mul(sums[0] if len(sums) == 1 else sums.sum(0), factors, out=out)


def columns_at_once(n_cols: int) -> int:
    """Return into how many columns the sums are cut: the most blocks that divide the columns evenly, up to MOST_COLUMNS."""
    n_blocks = n_cols // BLOCK_SIZE
    return BLOCK_SIZE * max(n for n in range(1, MOST_COLUMNS // BLOCK_SIZE + 1) if n_blocks % n == 0)


def split_rows(x: Tensor, n_columns: int) -> tuple[Tensor, Tensor]:
    """Return x as float16 parts, and what to multiply their products by.

    x        float32 [M, K]
    returns  float16 [K / n_columns, M, 3 n_columns]: of the columns of each cut x_low, x_high and x_high again; float32 [M, 1], powers of two
    """
    n_rows, n_cols = x.shape
    exponent = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).view(torch.int32) >> 23
    # Both the factor and its inverse are to be normal numbers: a row of less than 2^-112 keeps fewer bits.
    exponent = (254 + _LARGEST_EXPONENT - exponent).clamp(1, 253)
    rest = (x * (exponent << 23).view(torch.float32)).view(n_rows, -1, n_columns).transpose(0, 1)
    parts = torch.empty(n_cols // n_columns, n_rows, _N_PARTS, n_columns, dtype=torch.float16, device=x.device)
    low, high, again = parts.unbind(2)
    high.copy_(rest)
    again.copy_(high)
    low.copy_(rest.sub_(high))
    return parts.flatten(2), ((254 - exponent) << 23).view(torch.float32)


def expand_halves(w: Q8Matrix, start: int, end: int) -> Tensor:
    """Return rows start to end of a matrix as float16 parts: [n_cols / C, end - start, 3 C] with w_high, w_low and w_high again of C columns.

    start  a multiple of 16
    """
    assert start % TILE_ROWS == 0
    n_columns = columns_at_once(w.n_cols)
    parts = torch.empty(w.n_cols // n_columns, end - start, _N_PARTS * n_columns, dtype=torch.float16, device=w.data.device)
    grid = (-(-(end - start) // TILE_ROWS), w.n_cols // n_columns)
    _halves_kernel[grid](
        ready(w.data[start // TILE_ROWS :]), parts, end - start, w.n_cols // BLOCK_SIZE, n_columns, _COLUMNS_AT_ONCE, num_warps=4, **OPTIONS
    )
    return parts


def halves(values: Tensor) -> Tensor:
    """Return the parts of float32 [rows, C] as `expand_halves` does those of one cut: [rows, 3 C]."""
    high = values.half()
    return torch.cat([high, (values - high).half(), high], dim=1)


def product_bytes(n_rows_of_x: int, n_cols: int) -> int:
    """Return the device memory that a product takes beside x and its result."""
    return SCRATCH_BYTES + n_rows_of_x * n_cols * (2 * _N_PARTS + 4)


def _rows_at_once(w: Q8Matrix, n_rows_of_x: int, scratch_bytes: int) -> int:
    """Return how many rows of the matrix are taken at a time: alike, multiples of 128 if there is room."""
    n_sums = w.n_cols // columns_at_once(w.n_cols) + 1
    most = max(TILE_ROWS, scratch_bytes // (2 * _N_PARTS * w.n_cols + 4 * n_rows_of_x * n_sums))
    unit = 128 if most >= 128 else TILE_ROWS
    n_steps = -(-w.n_rows // (most // unit * unit))
    return -(-w.n_rows // n_steps // unit) * unit


def _float32_sums(x: Tensor, w: Tensor) -> Tensor:
    """Return the products of float16 parts, summed in float32: [S, M, C], [S, N, C] -> [S, M, N]."""
    if x.is_cuda:
        return torch.bmm(x, w.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(x.float(), w.float().transpose(1, 2))


@jit("n_rows", "n_blocks")
def _halves_kernel(data: tensor, parts: tensor, n_rows: tensor, n_blocks: tensor, C: constexpr, AT_ONCE: constexpr) -> None:
    """One tile of 16 rows, C columns: both halves, and the first once more."""
    tile, cut, n, k = tl.program_id(0), tl.program_id(1), tl.arange(0, 16), tl.arange(0, AT_ONCE)
    row = tile * 16 + n
    base = data + tile.to(tl.int64) * n_blocks * 544
    quant_at = (n[:, None] % 8 * 4 + k[None, :] % 32 // 8) * 16 + n[:, None] // 8 * 8 + k[None, :] % 8
    out = parts + (cut.to(tl.int64) * n_rows + row)[:, None] * (3 * C) + k[None, :]
    for start in range(0, C, AT_ONCE):
        block = (cut * C + start + k) // 32
        is_in = (start + k < C)[None, :] & (n < 16)[:, None]
        quants = (tl.load(base + block[None, :] * 544 + quant_at, mask=is_in, other=128).to(tl.int32) - 128).to(tl.float32)
        scale_at = base + block[None, :] * 544 + 512 + 2 * n[:, None]
        value = quants * tl.load(scale_at.to(tl.pointer_type(tl.float16)), mask=is_in, other=0.0).to(tl.float32)
        high = value.to(tl.float16)
        is_there = is_in & (row < n_rows)[:, None]
        tl.store(out + start, high, mask=is_there)
        tl.store(out + C + start, (value - high.to(tl.float32)).to(tl.float16), mask=is_there)
        tl.store(out + 2 * C + start, high, mask=is_there)
