"""How many experts each drive shall hold of each layer: evenly over the layers, the base certain to fit.

Pools are file systems; drives in one pool share its room, drives of the base tiers first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layout.sizes import format_size
from manifests.errors import NoSpaceError
from manifests.manifest import BASE_TIERS


@dataclass(frozen=True, slots=True)
class PlanDrive:
    """A drive to plan for.

    server   drives on one device share a number: they are read one after another
    pool     drives of one file system share a number, and with it the room there
    limit    most experts that it may hold, None for as many as fit
    present  bool [n_layers, n_experts], files that are there now
    """

    tier: str
    read_bytes_per_s: float
    server: int
    pool: int
    limit: int | None
    present: np.ndarray

    @property
    def is_base(self) -> bool:
        return self.tier in BASE_TIERS


def keep_within_limits(drives: Sequence[PlanDrive], present: np.ndarray) -> np.ndarray:
    """Return which files stay, bool like present [n_drives, n_layers, n_experts]: all, or as many as the drive's limit allows.

    What is nowhere else in tiers A and B stays first; of the others, each layer keeps about as many.
    """
    kept = present.copy()
    for number, drive in enumerate(drives):
        if drive.limit is None or kept[number].sum() <= drive.limit:
            continue
        elsewhere = np.zeros_like(kept[number])
        for other, held in zip(drives, kept, strict=True):
            if other.is_base and other is not drive:
                elsewhere |= held
        is_needed = kept[number] & ~elsewhere & drive.is_base
        # Its rank within the layer: the first of each layer go before the second of any.
        rank = np.cumsum(kept[number], axis=1)
        layers, experts = np.nonzero(kept[number])
        order = np.lexsort((rank[layers, experts], ~is_needed[layers, experts]))[drive.limit :]
        kept[number, layers[order], experts[order]] = False
    return kept


def quotas(drives: Sequence[PlanDrive], kept: np.ndarray, pool_room: Sequence[int], record_bytes: int) -> np.ndarray:
    """Return how many experts each drive shall hold of each layer, what is kept included; int [n_drives, n_layers].

    kept       bool [n_drives, n_layers, n_experts], layers with experts only
    pool_room  experts that each pool can take beside those

    In every layer the base drives can take what is missing of the base. Raises NoSpaceError if there is too little room for that.
    """
    n_experts, n_drives = kept.shape[2], len(drives)
    n_kept = kept.sum(axis=2)
    is_base = np.array([drive.is_base for drive in drives])
    missing = n_experts - kept[is_base].any(axis=0).sum(axis=1) if is_base.any() else np.full(kept.shape[1], n_experts)
    room = _room_of_drives(drives, n_kept.sum(axis=1), n_kept.size // n_drives * n_experts, pool_room)
    lacking = int(missing.sum()) - int(room[is_base].sum())
    if lacking > 0:
        raise NoSpaceError(
            f"tiers A and B have room for {kept.shape[1] * n_experts - lacking:,} of {kept.shape[1] * n_experts:,} experts: {lacking:,} "
            f"({format_size(lacking * record_bytes)}) too many; make room, raise the limit, lower the reserve or add a drive"
        )
    out = n_kept + _reserved(room * is_base, missing)
    for number in range(n_drives):
        out[number] = levelled(out[number], int(room[number] + n_kept[number].sum() - out[number].sum()), n_experts)
    return out


def _room_of_drives(drives: Sequence[PlanDrive], n_kept: np.ndarray, n_all: int, pool_room: Sequence[int]) -> np.ndarray:
    """Divide the room of each pool among its drives: the base tiers' share it evenly, the others get what they leave. int [n_drives]."""
    most = np.array([n_all if drive.limit is None else min(n_all, drive.limit) for drive in drives]) - n_kept
    most = np.maximum(0, most)
    room = np.zeros(len(drives), np.int64)
    for pool, n_left in enumerate(pool_room):
        for is_base in (True, False):
            members = [n for n, drive in enumerate(drives) if drive.pool == pool and drive.is_base == is_base]
            room[members] = share_evenly(most[members], max(0, n_left))
            n_left -= int(room[members].sum())
    return room


def share_evenly(most: np.ndarray, total: int) -> np.ndarray:
    """Share a total out as evenly as the most that each can take allows; int like most."""
    shares = np.zeros(len(most), np.int64)
    order = np.argsort(most, kind="stable")
    for position, number in enumerate(order):
        shares[number] = min(int(most[number]), total // (len(order) - position))
        total -= int(shares[number])
    return shares


def _reserved(room: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Share what is missing in each layer out over the drives in proportion to their room; int [n_drives, n_layers] with sums `missing`."""
    totals = _apportion(room, int(missing.sum()))
    out = np.zeros((len(room), len(missing)), np.int64)
    for layer, n in enumerate(missing):
        out[:, layer] = _apportion(totals - out.sum(axis=1), int(n))
    return out


def _apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """Return whole numbers in proportion to whole weights, none above its weight, with this sum (at most that of the weights)."""
    if total == 0:
        return np.zeros_like(weights)
    exact = weights * total
    shares = exact // weights.sum()
    remainder = np.where(shares < weights, exact % weights.sum(), -1)
    shares[np.argsort(-remainder, kind="stable")[: total - shares.sum()]] += 1
    return shares


def levelled(counts: np.ndarray, extra: int, most: int) -> np.ndarray:
    """Return counts with `extra` added where they are lowest, none raised above `most`; what finds no place is left out."""
    extra = min(extra, int(np.maximum(0, most - counts).sum()))
    low, high = int(counts.min(initial=0)), most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.maximum(0, middle - counts).sum() <= extra else (low, middle - 1)
    out = np.maximum(counts, low)
    n_over = extra - int((out - counts).sum())
    out[np.flatnonzero((out == low) & (out < most))[:n_over]] += 1
    return out
