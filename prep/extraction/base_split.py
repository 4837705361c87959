"""Which drive shall hold which expert when each is written once: the base of an extraction. Pure and deterministic.

It is split over the drives of tiers A and B within each layer, by weight and room. Further copies are `placement_plan`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manifests.errors import NoSpaceError
from manifests.geometry import Geometry
from manifests.manifest import BASE_TIERS


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drive to plan for.

    weight   share of the base that it should take, relative to the others: its rate where measured, else 1
    pool     drives of one file system share a number, and with it the room there
    limit    most experts that it may hold, None for as many as fit
    present  bool [n_layers, n_experts], experts that are there already: keeping them costs no copy
    """

    tier: str
    weight: float
    pool: int
    limit: int | None
    present: np.ndarray


def plan_base(geometry: Geometry, candidates: Sequence[Candidate], *, pool_room: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    """Return for each candidate the experts that it shall hold, bool [n_layers, n_experts]: each once, on a drive of tier A or B.

    pool_room  most experts that each pool can hold, those that are there included

    Raises NoSpaceError if tiers A and B cannot hold every expert.
    """
    return _split_base(geometry, candidates, _Room(candidates, list(pool_room)), np.random.default_rng(seed))


def _split_base(geometry: Geometry, candidates: Sequence[Candidate], room: "_Room", rng: np.random.Generator) -> list[np.ndarray]:
    holds = [np.zeros((geometry.n_layers, geometry.n_experts), np.bool_) for _ in candidates]
    base = [n for n, candidate in enumerate(candidates) if candidate.tier in BASE_TIERS]
    n_left = geometry.n_routed_experts
    for layer in geometry.moe_layers:
        shares = room.shares(base, geometry.n_experts, n_left)
        if sum(shares) < geometry.n_experts:
            raise NoSpaceError(
                f"tiers A and B have room for {room.total(base) + geometry.n_routed_experts - n_left} of {geometry.n_routed_experts} experts; "
                "make room, raise the limit, lower the reserve or add a drive"
            )
        for drive, experts in _split(layer, geometry.n_experts, base, shares, candidates, rng).items():
            holds[drive][layer, experts] = True
            room.take(drive, len(experts))
        n_left -= geometry.n_experts
    return holds


class _Room:
    """How many more experts each drive can take."""

    def __init__(self, candidates: Sequence[Candidate], pool_room: list[int]) -> None:
        self._candidates, self._pool_room = candidates, pool_room
        self._limits = [candidate.limit for candidate in candidates]

    def of(self, drive: int) -> int:
        room, limit = self._pool_room[self._candidates[drive].pool], self._limits[drive]
        return max(0, room if limit is None else min(room, limit))

    def total(self, drives: list[int]) -> int:
        """Room of several drives together, counting a shared file system once."""
        by_pool: dict[int, int] = {}
        for drive in drives:
            pool = self._candidates[drive].pool
            by_pool[pool] = min(by_pool.get(pool, 0) + self.of(drive), max(0, self._pool_room[pool]))
        return sum(by_pool.values())

    def take(self, drive: int, n: int) -> None:
        self._pool_room[self._candidates[drive].pool] -= n
        limit = self._limits[drive]
        self._limits[drive] = None if limit is None else limit - n

    def shares(self, drives: list[int], n_wanted: int, n_left: int) -> list[int]:
        """Split n_wanted experts of one layer by weight, leaving room for the n_left of all layers to come; less than n_wanted if full."""
        shares = [0] * len(drives)
        rooms = {drive: self.of(drive) for drive in drives}
        pools = {self._candidates[drive].pool: self._pool_room[self._candidates[drive].pool] for drive in drives}
        # A drive that cannot take its share in every layer takes what it can, evenly over the layers.
        caps = {drive: -(-rooms[drive] * n_wanted // max(n_left, 1)) for drive in drives}
        for _ in range(n_wanted):
            open_drives = [i for i, d in enumerate(drives) if shares[i] < min(caps[d], rooms[d]) and pools[self._candidates[d].pool] > 0]
            if not open_drives:
                break
            best = min(open_drives, key=lambda i: (shares[i] + 1) / self._candidates[drives[i]].weight)
            shares[best] += 1
            pools[self._candidates[drives[best]].pool] -= 1
        return shares


def _split(
    layer: int, n_experts: int, base: list[int], shares: list[int], candidates: Sequence[Candidate], rng: np.random.Generator
) -> dict[int, list[int]]:
    """Deal one layer's experts out; a drive keeps what it has as far as its share goes."""
    # By lot, those on the fewest drives first: they have the least choice of where to stay.
    n_homes = np.sum([candidates[d].present[layer] for d in base], axis=0)
    order = sorted(rng.permutation(n_experts).tolist(), key=lambda expert: n_homes[expert])
    dealt: dict[int, list[int]] = {drive: [] for drive in base}
    left = dict(zip(base, shares, strict=True))
    homeless = []
    for expert in order:
        keepers = [d for d in base if left[d] and candidates[d].present[layer, expert]]
        if not keepers:
            homeless.append(expert)
            continue
        keeper = max(keepers, key=lambda d: left[d])
        dealt[keeper].append(expert)
        left[keeper] -= 1
    for expert in homeless:
        taker = max(base, key=lambda d: left[d])
        dealt[taker].append(expert)
        left[taker] -= 1
    return dealt
