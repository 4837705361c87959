"""Row-wise work whose bits for a row depend neither on the other rows nor on how many there are.

A matrix product picks its kernel, and with it the order of its sums, by the number of rows, on a CPU as on a GPU. Decode arithmetic
therefore computes sums over features on tiles of one fixed height. Elementwise operations need no tiles, provided that they treat every
element alike (sigmoid.py).
"""

from collections.abc import Callable
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS = 16


class Arithmetic(Enum):
    """How a forward pass computes. The two agree within rounding; only DECODE gives the same bits for any split of a text into blocks."""

    DECODE = "decode"
    PROMPT = "prompt"

    @property
    def is_tiled(self) -> bool:
        return self is Arithmetic.DECODE


def forbid_tf32() -> None:
    """Make every float32 product of this process a real float32 product. TF32 keeps 10 bits of the fraction."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def by_rows(function: Callable[..., Tensor], *inputs: Tensor, is_tiled: bool) -> Tensor:
    """Apply a function that treats every row alone.

    function  [..., a], [..., b], ... -> [..., c], where a, b and c may be several dimensions; it may only count dimensions from the end
    inputs    each [batch, tokens, ...]
    returns   [batch, tokens, ...]

    If tiled, the function only ever sees contiguous inputs of TILE_ROWS rows; the last tile is filled up with zeros.
    """
    if not is_tiled:
        return function(*inputs)
    flat = [x.flatten(0, 1) for x in inputs]
    n_rows = flat[0].shape[0]
    tiles = [function(*(_tile(x, start) for x in flat)) for start in range(0, n_rows, TILE_ROWS)]
    return torch.cat(tiles)[:n_rows].unflatten(0, inputs[0].shape[:2])


def _tile(rows: Tensor, start: int) -> Tensor:
    tile = rows[start : start + TILE_ROWS]
    n_missing = TILE_ROWS - tile.shape[0]
    # A full tile can be a strided view where a filled one is not, and strides too can choose the kernel.
    return F.pad(tile, [0, 0] * (tile.dim() - 1) + [0, n_missing]) if n_missing else tile.contiguous()


def linear(x: Tensor, weight: Tensor, *, is_tiled: bool) -> Tensor:
    """Return x @ weight^T.

    x        [batch, tokens, in]
    weight   [out, in]
    returns  [batch, tokens, out]
    """
    return by_rows(lambda rows: rows @ weight.T, x, is_tiled=is_tiled)
