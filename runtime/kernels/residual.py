"""Attention residuals: a layer's input is a learned mixture of the running sum and the sums of the finished blocks.

    v = [bank..., total];  k_j = v_j * rsqrt(mean(v_j^2) + eps);  s_j = <k_j, score>;  result = sum_j softmax(s)_j * v_j

`score` is the product of the checkpoint's norm gain and projection. The values are mixed raw; there is no 1/sqrt(size).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.kernels.norms import rms_normalised
from runtime.kernels.rows import by_rows


def mix_residuals(bank: Sequence[Tensor], total: Tensor, score: Tensor, *, eps: float, is_tiled: bool) -> Tensor:
    """Return the mixture of the bank and the running sum.

    bank     each [batch, tokens, size], oldest first
    total    [batch, tokens, size]
    score    [size]
    returns  [batch, tokens, size]
    """

    def mix(sources: Tensor) -> Tensor:  # [..., n_sources, size]
        scores = (rms_normalised(sources, eps) * score).sum(-1)
        return (torch.softmax(scores, -1).unsqueeze(-1) * sources).sum(-2)

    return by_rows(mix, torch.stack([*bank, total], dim=-2), is_tiled=is_tiled)
