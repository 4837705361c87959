"""SiTU, the activation of every feed-forward block: SwiGLU with both factors capped by tanh."""

import torch
from torch import Tensor

from runtime.kernels.launch import OPTIONS, constexpr, jit, rows_of, runs_kernels, tensor, tl
from runtime.kernels.sigmoid import expm1_f32, sigmoid, sigmoid_f32

_BLOCK = 1024


def situ(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """Return beta * tanh(gate/beta) * sigmoid(gate) * linear_beta * tanh(up/linear_beta); all of one shape.

    The sigmoid takes the uncapped gate.
    """
    return beta * torch.tanh(gate / beta) * sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)


def situ_halves(gate_up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """Return SiTU of the two halves of each row, the gate first: [..., 2 * size] -> [..., size]; one launch on a GPU."""
    size = gate_up.shape[-1] // 2
    if not runs_kernels(gate_up):
        return situ(gate_up[..., :size], gate_up[..., size:], beta=beta, linear_beta=linear_beta)
    rows, distance = rows_of(gate_up, 1)
    y = torch.empty(*gate_up.shape[:-1], size, dtype=torch.float32, device=gate_up.device)
    grid = (y.numel() // size, -(-size // _BLOCK))
    _situ_kernel[grid](rows, y, beta, linear_beta, distance, size, _BLOCK, num_warps=4, **OPTIONS)
    return y


@jit()
def _situ_kernel(gate_up: tensor, y: tensor, beta: tensor, linear_beta: tensor, DISTANCE: constexpr, SIZE: constexpr, BLOCK: constexpr) -> None:
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = at < SIZE
    gate = tl.load(gate_up + row * DISTANCE + at, mask=is_in, other=0.0)
    up = tl.load(gate_up + row * DISTANCE + SIZE + at, mask=is_in, other=0.0)
    tl.store(y + row * SIZE + at, situ_f32(gate, up, beta, linear_beta), mask=is_in)


@jit()
def situ_f32(gate: tensor, up: tensor, beta: tensor, linear_beta: tensor) -> tensor:
    """Return SiTU of float32 within 12 units in the last place; the operations go in the order of `situ`."""
    y = beta * tanh_f32(tl.div_rn(gate, beta)) * sigmoid_f32(gate)
    return y * linear_beta * tanh_f32(tl.div_rn(up, linear_beta))


@jit()
def tanh_f32(x: tensor) -> tensor:
    """Return tanh(x) of float32 within 4 units in the last place: t / (t + 2) with t = exp(2|x|) - 1, and the sign of x."""
    size = tl.abs(x)
    # tanh(10) is 1 in float32.
    t = expm1_f32(2.0 * tl.where(size > 10.0, 10.0, size))
    y = tl.div_rn(t, t + 2.0)
    return tl.where(x < 0.0, -y, y)
