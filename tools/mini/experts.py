"""All experts of a layer in a few batched products, for training: the runtime's formula, on weights that are at hand together.

Pairs of row and expert are sorted into blocks that belong to one expert each, so every shape follows from the number of pairs alone, nothing
is dropped, and nothing waits for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from manifests.geometry import Geometry
from runtime.kernels.situ import situ

_MOST_BLOCK_ROWS = 128


class Matrices(NamedTuple):
    """A layer's experts: gate (w1) and up (w3) [experts, intermediate, latent], down (w2) [experts, latent, intermediate]."""

    gate: Tensor
    down: Tensor
    up: Tensor


class BatchedExperts:
    """Runs experts of given matrices; `loads` holds how many pairs each expert of a layer had in the last pass, int64 [experts]."""

    def __init__(self, geometry: Geometry, matrices: dict[int, Matrices]) -> None:
        self._geometry, self._matrices = geometry, matrices
        self.loads: dict[int, Tensor] = {}

    def run(self, layer: int, z: Tensor, ids: Tensor, is_tiled: bool) -> Tensor:
        """Return the output of every (row, expert) pair: z [rows, latent], ids int64 [rows, k] -> [rows, k, latent]."""
        assert not is_tiled
        g, flat = self._geometry, ids.flatten()
        n_rows = _block_rows(flat.numel(), g.n_experts)
        self.loads[layer], places, owners = sorted_into_blocks(flat, n_experts=g.n_experts, n_block_rows=n_rows)
        pairs = z.unsqueeze(1).expand(-1, ids.shape[1], -1).reshape(flat.numel(), -1)
        blocks = z.new_zeros(owners.numel() * n_rows, z.shape[-1]).index_copy(0, places, pairs).unflatten(0, (-1, n_rows))
        # A product picks each block's matrices: its gradient adds up in one order, where that of an index would add as it comes.
        pick = (owners.unsqueeze(1) == torch.arange(g.n_experts, device=z.device)).to(z.dtype)
        gate, down, up = ((pick @ each.flatten(1)).unflatten(1, each.shape[1:]) for each in self._matrices[layer])
        hidden = situ(blocks @ gate.mT, blocks @ up.mT, beta=g.situ_beta, linear_beta=g.situ_linear_beta)
        return (hidden @ down.mT).flatten(0, 1).index_select(0, places).unflatten(0, ids.shape)


def _block_rows(n_pairs: int, n_experts: int) -> int:
    """Return a power of two near the pairs of an expert, so that little of its last block is empty."""
    return min(_MOST_BLOCK_ROWS, max(4, 1 << (n_pairs // n_experts // 2).bit_length()))


def sorted_into_blocks(ids: Tensor, *, n_experts: int, n_block_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Place pairs so that each block of rows belongs to one expert.

    ids      int64 [pairs], the expert of each
    returns  loads int64 [experts]; places int64 [pairs], all different; owners int64 [blocks]: whose block it is, empty ones are somebody's
    """
    numbers = torch.arange(n_experts, device=ids.device)
    loads = (ids.unsqueeze(1) == numbers).sum(0)
    n_blocks = (loads + n_block_rows - 1) // n_block_rows
    last_blocks = n_blocks.cumsum(0)
    order = torch.sort(ids, stable=True).indices
    sorted_ids = ids[order]
    rank = torch.arange(ids.numel(), device=ids.device) - (loads.cumsum(0) - loads)[sorted_ids]
    places = torch.empty_like(order).scatter_(0, order, (last_blocks - n_blocks)[sorted_ids] * n_block_rows + rank)
    most_blocks = ids.numel() // n_block_rows + n_experts
    owners = torch.searchsorted(last_blocks, torch.arange(most_blocks, device=ids.device), right=True)
    return loads, places, owners.clamp(max=n_experts - 1)
