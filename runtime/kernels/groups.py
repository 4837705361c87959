"""Which rows use which expert: the tables by which the grouped product finds its work.

Every (row, rank) pair may be a group. The first row that chose an expert leads its group; the members keep their own row numbers, so a row's
place in the tile is always its number. A pair that leads no group, or whose expert has no address, is an empty group.

Shapes: M rows (at most TILE_ROWS), k experts per row, n groups.

    addresses  int64 [n], where the expert's record lies on the device; 0 for an empty group
    rows       int32 [n, TILE_ROWS], the row's number, or -1
    places     int32 [n, TILE_ROWS], row * k + rank: where the result of (row, expert) belongs, or -1
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from runtime.kernels.launch import OPTIONS, block_of, constexpr, jit, runs_on, tensor, tl
from runtime.kernels.rows import TILE_ROWS


class Groups(NamedTuple):
    """Tables of groups; see above."""

    addresses: Tensor
    rows: Tensor
    places: Tensor

    @classmethod
    def empty(cls, n: int, device: torch.device) -> "Groups":
        return cls.within(torch.zeros(cls.n_bytes(n), dtype=torch.uint8, device=device), n)

    @staticmethod
    def n_bytes(n: int) -> int:
        return n * (8 + 2 * 4 * TILE_ROWS)

    @classmethod
    def within(cls, memory: Tensor, n: int) -> "Groups":
        """Return tables of n groups in uint8 [n_bytes(n)], so that one copy of it is a copy of all."""
        at = 8 * n, (8 + 4 * TILE_ROWS) * n
        rows, places = (part.view(torch.int32).view(n, TILE_ROWS) for part in (memory[at[0] : at[1]], memory[at[1] :]))
        return cls(memory[: at[0]].view(torch.int64), rows, places)

    def part(self, groups: slice) -> "Groups":
        return Groups(self.addresses[groups], self.rows[groups], self.places[groups])

    def arrays(self) -> "GroupArrays":
        """Return tables on the host as arrays of the same memory."""
        return GroupArrays(*(table.numpy() for table in self))


class GroupArrays(NamedTuple):
    """Tables of groups on the host."""

    addresses: np.ndarray
    rows: np.ndarray
    places: np.ndarray


def group_resident(ids: Tensor, known: Tensor, out: Groups) -> None:
    """Write the group of every pair, n = M k of them.

    ids    int64 [M, k], distinct in a row
    known  int64 [experts], the address of each expert's record, 0 where there is none
    """
    n_rows, k = ids.shape
    if runs_on(ids, known):
        _group_kernel[(n_rows * k,)](ids, known, *out, n_rows, k, TILE_ROWS, block_of(k), num_warps=1, **OPTIONS)
        return
    flat = ids.flatten()
    is_member = ids.unsqueeze(0) == flat.view(-1, 1, 1)  # [M k, M, k]
    uses, rank = is_member.any(-1), is_member.int().argmax(-1)
    number = torch.arange(n_rows, device=ids.device)
    is_led = uses.int().argmax(-1) == torch.arange(len(flat), device=ids.device) // k
    out.addresses.copy_(torch.where(is_led, known[flat], 0))
    is_used = uses & (out.addresses != 0).unsqueeze(-1)
    for table, value in ((out.rows, number.expand_as(rank)), (out.places, number * k + rank)):
        table.fill_(-1)
        table[:, :n_rows] = torch.where(is_used, value, -1).int()


@jit("n_rows")
def _group_kernel(ids: tensor, known: tensor, addresses: tensor, rows: tensor, places: tensor, n_rows: tensor,
                  K: constexpr, TILE: constexpr, WIDTH: constexpr) -> None:  # fmt: skip
    pair, row, rank = tl.program_id(0), tl.arange(0, TILE), tl.arange(0, WIDTH)
    expert = tl.load(ids + pair)
    is_there = (row < n_rows)[:, None] & (rank < K)[None, :]
    is_member = (tl.load(ids + row[:, None] * K + rank[None, :], mask=is_there, other=-1) == expert) & is_there
    # A row has an expert at most once, so that the sum is its rank.
    uses, at = tl.sum(is_member.to(tl.int32), 1), tl.sum(tl.where(is_member, rank[None, :], 0), 1)
    leader = tl.min(tl.where(uses > 0, row, TILE), 0)
    address = tl.where(leader == pair // K, tl.load(known + expert), 0)
    is_used = (uses > 0) & (address != 0)
    tl.store(addresses + pair, address)
    tl.store(rows + pair * TILE + row, tl.where(is_used, row, -1))
    tl.store(places + pair * TILE + row, tl.where(is_used, row * K + at, -1))


def groups_of(chosen: np.ndarray, experts: Sequence[int], addresses: Sequence[int], *, out: GroupArrays) -> None:
    """Write the groups of given experts, n of them: chosen int64 [M, k]."""
    n_rows, k = chosen.shape
    out.addresses[:] = addresses
    if n_rows == 1:
        # A plain token's, made while the device waits: a few lines instead of many small arrays.
        ranks = chosen[0].tolist()
        out.rows[:, 1:] = out.places[:, 1:] = -1
        out.rows[:, 0] = 0
        out.places[:, 0] = [ranks.index(expert) for expert in experts]
        return
    is_member = chosen[None] == np.asarray(experts)[:, None, None]  # [n, M, k]
    uses, rank, number = is_member.any(-1), is_member.argmax(-1), np.arange(n_rows)
    for table, value in ((out.rows, number), (out.places, number * k + rank)):
        table[:] = -1
        table[:, :n_rows] = np.where(uses, value, -1)
