"""Sigmoid, SiLU and softplus with the same bits wherever an element lies in its tensor.

On a CPU torch's own kernels for them round otherwise in the vector loop than in its tail (one element in 25 for sigmoid with AVX-512),
and threads put tails anywhere. exp, log1p and the four operations do not.

The GPU's fast exp loses a bit for every doubling of its argument, so the kernels reduce the argument and sum a polynomial instead: the
functions ending in _f32 stay within 2 units in the last place (3 for softplus), with the same bits on every device.
"""

import torch
from torch import Tensor

from runtime.kernels.launch import OPTIONS, constexpr, jit, ready, runs_kernels, tensor, tl

# exp(80) is finite in float32, so that the gradient is 0 and not NaN for very negative arguments.
_LEAST_ARGUMENT = -80.0
# Above it softplus(x) is x in float32.
_LINEAR_FROM = 20.0

_BLOCK = 1024


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), any shape."""
    return 1 / (1 + torch.exp(-x.clamp(min=_LEAST_ARGUMENT)))


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), any shape."""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), any shape."""
    return torch.where(x > _LINEAR_FROM, x, torch.log1p(torch.exp(x.clamp(max=_LINEAR_FROM))))


def gate_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), of two tensors of one shape, in one launch on a GPU."""
    if not runs_kernels(x, gate):
        return x * sigmoid(gate)
    x, gate = ready(x), ready(gate)
    y, n_elements = torch.empty_like(x), x.numel()
    _gate_kernel[(-(-n_elements // _BLOCK),)](x, gate, y, n_elements, _BLOCK, num_warps=4, **OPTIONS)
    return y


@jit("n_elements")
def _gate_kernel(x: tensor, gate: tensor, y: tensor, n_elements: tensor, BLOCK: constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < n_elements
    tl.store(y + at, tl.load(x + at, mask=is_in, other=0.0) * sigmoid_f32(tl.load(gate + at, mask=is_in, other=0.0)), mask=is_in)


@jit()
def exp_f32(x: tensor) -> tensor:
    """Return exp(x) of float32: 0 below -87, exp(88) above 88, NaN of NaN."""
    y = tl.where(x < -87.0, -87.0, tl.where(x > 88.0, 88.0, x))
    n = _halvings(y)
    # n is whole and at most 127, so it times the short 355/512 is exact.
    e = 1.0 + _expm1_near_0((y - n * 0.693359375) + n * 2.1219444005469057e-4)
    return tl.where(x < -87.0, 0.0, e * _power_of_2(n))


@jit()
def expm1_f32(x: tensor) -> tensor:
    """Return exp(x) - 1 of float32 for x in 0..80."""
    n = _halvings(x)
    power = _power_of_2(n)
    return power * _expm1_near_0((x - n * 0.693359375) + n * 2.1219444005469057e-4) + (power - 1.0)


@jit()
def _halvings(x: tensor) -> tensor:
    """Return the whole n with x - n ln 2 in about -0.35..0.35."""
    return tl.floor(x * 1.4426950408889634 + 0.5)


@jit()
def _power_of_2(n: tensor) -> tensor:
    """Return 2**n for whole n in -126..127."""
    return ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@jit()
def _expm1_near_0(r: tensor) -> tensor:
    """Return exp(r) - 1 for |r| <= 0.35 by its Taylor series; the first term left out, r^8 / 8!, is under 6e-9."""
    p = r * (1.0 / 5040.0) + (1.0 / 720.0)
    p = p * r + (1.0 / 120.0)
    p = p * r + (1.0 / 24.0)
    p = p * r + (1.0 / 6.0)
    p = p * r + 0.5
    return r + r * r * p


@jit()
def sigmoid_f32(x: tensor) -> tensor:
    return tl.div_rn(1.0, 1.0 + exp_f32(-tl.where(x < -80.0, -80.0, x)))


@jit()
def silu_f32(x: tensor) -> tensor:
    return x * sigmoid_f32(x)


@jit()
def softplus_f32(x: tensor) -> tensor:
    """Return max(x, 0) + log1p(exp(-|x|)), with log1p(e) = 2 artanh(s), s = e / (2 + e) <= 1/3, by its series up to s^17."""
    e = exp_f32(-tl.abs(x))
    s = tl.div_rn(e, 2.0 + e)
    ss = s * s
    p = ss * (1.0 / 17.0) + (1.0 / 15.0)
    p = p * ss + (1.0 / 13.0)
    p = p * ss + (1.0 / 11.0)
    p = p * ss + (1.0 / 9.0)
    p = p * ss + (1.0 / 7.0)
    p = p * ss + (1.0 / 5.0)
    p = p * ss + (1.0 / 3.0)
    return tl.where(x < 0.0, 0.0, x) + 2.0 * (s + s * ss * p)


@jit()
def rsqrt_f32(x: tensor) -> tensor:
    """Return 1 / sqrt(x), both steps correctly rounded."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))
