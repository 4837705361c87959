"""MXFP4 in torch and in Triton: the exact values of layout.mxfp4, on the device where the bytes lie."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from layout.mxfp4 import BLOCK_SIZE, E2M1_VALUES, NAN_SCALE
from runtime.kernels.bf16 import exact_dot
from runtime.kernels.launch import constexpr, jit, tensor, tl


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Expand MXFP4 to float32, exactly.

    packed   uint8 [rows, cols/2]; the low nibble is the even column
    scale    uint8 [rows, cols/32]; E8M0, value 2**(s - 127); 255 gives NaN (it is refused at extraction)
    returns  float32 [rows, cols]
    """
    pairs, scales = _tables(packed.device)
    values = F.embedding(packed.int(), pairs).view(packed.shape[0], -1, BLOCK_SIZE)
    return (values * F.embedding(scale.int(), scales)).flatten(1)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two values of every byte [256, 2] and the value of every scale [256, 1]."""
    byte = np.arange(256)
    pairs = np.stack([E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]], axis=1)
    # A table, as exp2 need not be exact on a GPU.
    scales = np.full((256, 1), np.nan, np.float32)
    scales[:NAN_SCALE, 0] = np.ldexp(np.float32(1), byte[:NAN_SCALE] - 127)
    return torch.from_numpy(pairs).to(device), torch.from_numpy(scales).to(device)


@jit()
def mxfp4_tile(x: tensor, row: tensor, packed: tensor, scale: tensor, n: tensor, K: constexpr, PRECISION: constexpr) -> tensor:
    """Return float32 [16, 32]: rows `row` of x [., K] (-1 counts as zeros) times rows n, 32 of them, of a matrix of K columns.

    A block's sum of 32 products, the even columns first, is multiplied by its scale.
    """
    byte = tl.arange(0, 16)
    x_at = x + row[:, None].to(tl.int64) * K + 2 * byte[None, :]
    packed_at = packed + n[None, :] * (K // 2) + byte[:, None]
    is_row = (row >= 0)[:, None]
    total = tl.zeros((16, 32), tl.float32)
    for start in range(0, K // 32, 2):
        for i in tl.static_range(2):
            block = start + i
            is_in = block < K // 32
            pair = tl.load(packed_at + block * 16, mask=is_in, other=0).to(tl.int32)
            part = exact_dot(tl.load(x_at + block * 32, mask=is_row & is_in, other=0.0), _e2m1(pair & 15), PRECISION)
            part += exact_dot(tl.load(x_at + block * 32 + 1, mask=is_row & is_in, other=0.0), _e2m1(pair >> 4), PRECISION)
            total += part * _e8m0(tl.load(scale + n * (K // 32) + block, mask=is_in, other=127).to(tl.int32))[None, :]
    return total


@jit()
def _e2m1(nibble: tensor) -> tensor:
    """Return the value of a nibble, 0..15, as float32."""
    exponent, fraction = (nibble >> 1) & 3, nibble & 1
    halves = tl.where(exponent == 0, fraction, (2 + fraction) << tl.maximum(exponent - 1, 0))
    return tl.where(nibble > 7, -halves, halves).to(tl.float32) * 0.5


@jit()
def _e8m0(exponent: tensor) -> tensor:
    """Return 2**(exponent - 127): 2**-127 is subnormal, 255 is NaN."""
    bits = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(tl.float32, bitcast=True)
