"""SiTU, the activation of every feed-forward block: SwiGLU with both factors capped by tanh."""

import torch
from torch import Tensor

from runtime.kernels.sigmoid import sigmoid


def situ(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """Return beta * tanh(gate/beta) * sigmoid(gate) * linear_beta * tanh(up/linear_beta); all of one shape.

    The sigmoid takes the uncapped gate.
    """
    return beta * torch.tanh(gate / beta) * sigmoid(gate) * linear_beta * torch.tanh(up / linear_beta)
