"""Which experts a row uses, and how their outputs are added up.

    chosen = the k highest of scores + bias;    w_j = scores_j / (sum of the chosen scores + 1e-20) * scaling;    y = sum_j w_j out_j

The bias affects the choice only. Shapes: B batch, T tokens, E experts, k chosen per row.
"""

import torch
from torch import Tensor

from runtime.kernels.rows import by_rows

_SUM_EPS = 1e-20


def choose_experts(scores: Tensor, bias: Tensor, n_chosen: int) -> Tensor:
    """Return the numbers of the chosen experts, rising. Of equal sums the lowest number is chosen first.

    scores   [B, T, E]
    bias     [E]
    returns  int64 [B, T, k]
    """
    by_rank = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices
    return by_rank[..., :n_chosen].sort(dim=-1).values


def expert_weights(scores: Tensor, ids: Tensor, *, scaling: float, is_tiled: bool) -> Tensor:
    """Return the share of each chosen expert: scores [B, T, E], ids [B, T, k] -> [B, T, k]."""
    return by_rows(lambda rows: rows / (rows.sum(-1, keepdim=True) + _SUM_EPS) * scaling, scores.gather(-1, ids), is_tiled=is_tiled)


def combine_experts(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum over experts: outputs [B, T, k, L], weights [B, T, k] -> [B, T, L]."""
    terms = (outputs * weights.unsqueeze(-1)).unbind(-2)
    # In expert order, one by one: any other order gives other bits.
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
