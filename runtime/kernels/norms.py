"""RMS and L2 normalisation over the last dimension."""

import torch
from torch import Tensor

from runtime.kernels.rows import by_rows

# Of KDA's q and k. The configuration has no key for it; this is the value of the kernels that the author's code calls.
L2_EPS = 1e-6


def rms_norm(x: Tensor, gain: Tensor, *, eps: float, is_tiled: bool) -> Tensor:
    """Return x * rsqrt(mean(x^2) + eps) * gain.

    x        [batch, tokens, ..., size]
    gain     [size]
    returns  the shape of x
    """
    return by_rows(lambda rows: rms_normalised(rows, eps) * gain, x, is_tiled=is_tiled)


def rms_normalised(rows: Tensor, eps: float) -> Tensor:
    """Return the rows [..., size] divided by the root of their mean square; for use inside `by_rows`."""
    return rows * torch.rsqrt((rows * rows).mean(-1, keepdim=True) + eps)


def l2_norm(x: Tensor, *, is_tiled: bool) -> Tensor:
    """Return x * rsqrt(sum(x^2) + L2_EPS), of x [batch, tokens, ..., size]."""
    return by_rows(lambda rows: rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + L2_EPS), x, is_tiled=is_tiled)
