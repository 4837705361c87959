"""Sigmoid, SiLU and softplus with the same bits wherever an element lies in its tensor.

On a CPU torch's own kernels for them round otherwise in the vector loop than in its tail (one element in 25 for sigmoid with AVX-512),
and threads put tails anywhere. exp, log1p and the four operations do not.
"""

import torch
from torch import Tensor

# exp(80) is finite in float32, so that the gradient is 0 and not NaN for very negative arguments.
_LEAST_ARGUMENT = -80.0
# Above it softplus(x) is x in float32.
_LINEAR_FROM = 20.0


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)), any shape."""
    return 1 / (1 + torch.exp(-x.clamp(min=_LEAST_ARGUMENT)))


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), any shape."""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), any shape."""
    return torch.where(x > _LINEAR_FROM, x, torch.log1p(torch.exp(x.clamp(max=_LINEAR_FROM))))
