"""How far one set of logits is from another."""

from typing import NamedTuple

import torch
from torch import Tensor


class Comparison(NamedTuple):
    """Over all positions: mean KL(other || this) in nats, share of equal argmax, and the largest difference of a logit."""

    mean_kl: float
    equal_argmax: float
    max_difference: float


def compare_logits(this: Tensor, other: Tensor) -> Comparison:
    """Compare logits of the same text, float32 [tokens, vocabulary] each, in float64."""
    p, q = (torch.log_softmax(x.double(), dim=-1) for x in (other, this))
    kl = (p.exp() * (p - q)).sum(-1)
    same = (this.argmax(-1) == other.argmax(-1)).double().mean()
    return Comparison(float(kl.mean()), float(same), float((this - other).abs().max()))
