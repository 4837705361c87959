"""Rounding to MXFP4 and to bfloat16 inside the training pass: the values are exactly those of the exported bytes, gradients pass straight through."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from layout.mxfp4 import BLOCK_SIZE, E2M1_VALUES

# From 2**_LEAST_EXPONENT on a scale is a normal float32.
_LEAST_EXPONENT, _BIAS = -126, 127
_SIGN = 8


class Mxfp4(Function):
    """Round [..., cols] to MXFP4, blocks of 32 along the last dimension; the gradient is that of the identity."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        codes, exponents = quantise_mxfp4(x)
        return dequantised(codes, exponents)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class BFloat16(Function):
    """Round to bfloat16, as float32; the gradient is that of the identity."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().float()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def as_mxfp4(x: Tensor) -> Tensor:
    rounded: Tensor = Mxfp4.apply(x)  # type: ignore[no-untyped-call]
    return rounded


def as_bfloat16(x: Tensor) -> Tensor:
    rounded: Tensor = BFloat16.apply(x)  # type: ignore[no-untyped-call]
    return rounded


def quantise_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and exponents of the nearest MXFP4 values.

    x        float32 [..., cols], cols a multiple of 32
    returns  codes int64 [..., cols / 32, 32], 0..15; exponents int32 [..., cols / 32], the scale is 2**exponent

    Of the two scales around the block's largest value, the one of the smaller squared error.
    """
    blocks = x.detach().unflatten(-1, (-1, BLOCK_SIZE))
    # frexp's mantissa is in [0.5, 1): the lower scale puts the largest value into [4, 8), where 6 is the most there is, the higher into [2, 4).
    lower = (torch.frexp(blocks.abs().amax(-1)).exponent - 3).clamp(min=_LEAST_EXPONENT)
    candidates = [(_codes(blocks, exponents), exponents) for exponents in (lower, lower + 1)]
    # In float64, so that a GPU and a CPU choose alike.
    errors = [(_values(codes, exponents) - blocks).double().square().sum(-1) for codes, exponents in candidates]
    is_lower = errors[0] <= errors[1]
    (low, _), (high, _) = candidates
    return torch.where(is_lower.unsqueeze(-1), low, high), torch.where(is_lower, lower, lower + 1)


def dequantised(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return the values of `quantise_mxfp4`'s result, float32 [..., cols]."""
    return _values(codes, exponents).flatten(-2)


def packed(codes: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes as a checkpoint has them: uint8 [..., cols / 2], the low nibble is the even column, and the scales uint8 [..., cols / 32]."""
    even, odd = codes.flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)
    return (even | odd << 4).to(torch.uint8), (exponents + _BIAS).to(torch.uint8)


def _codes(blocks: Tensor, exponents: Tensor) -> Tensor:
    codes = torch.bucketize(blocks.abs() / _powers_of_2(exponents).unsqueeze(-1), _tables(blocks.device)[1])
    # A zero has no sign, so that equal values have equal bytes.
    return torch.where((blocks < 0) & (codes > 0), codes + _SIGN, codes)


def _values(codes: Tensor, exponents: Tensor) -> Tensor:
    return _tables(codes.device)[0][codes] * _powers_of_2(exponents).unsqueeze(-1)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 16 values, and what lies half-way between neighbours of the first 8."""
    values = torch.from_numpy(E2M1_VALUES)
    return values.to(device), ((values[1:_SIGN] + values[: _SIGN - 1]) / 2).to(device)


def _powers_of_2(exponents: Tensor) -> Tensor:
    # From the bits, as a GPU's exp2 need not be exact.
    return ((exponents + _BIAS).int() << 23).view(torch.float32)
