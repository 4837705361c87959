"""What the store knows of drives before it reads: who holds what, how fast each is, and how many requests it takes at once."""

import math
from collections.abc import Sequence

import numpy as np

from layout.drives import DirectoryFacts, group_by_device
from layout.prepared import Prepared
from runtime.storage.cache import ExpertKey
from runtime.storage.schedule import DriveFacts

# Requests in flight on a drive that was not measured, and on a file system in memory.
DEFAULT_DEPTH = 3
RAM_DEPTH = 16
MOST_DEPTH = 32
# What one request reads of a file in memory, at least.
_RAM_READ_BYTES_PER_S = 2.5e9


class Holders:
    """Which drives hold an expert, found quickly."""

    def __init__(self, holds: Sequence[np.ndarray]) -> None:
        # One bit per drive.
        masks = np.zeros(holds[0].shape, np.int64)
        for n, held in enumerate(holds):
            masks |= held.astype(np.int64) << n
        self._drives_of = {int(mask): tuple(n for n in range(len(holds)) if mask >> n & 1) for mask in np.unique(masks)}
        self._masks = [[int(mask) for mask in row] for row in masks]

    def __getitem__(self, key: ExpertKey) -> tuple[int, ...]:
        return self._drives_of[self._masks[key.layer][key.expert]]


def depths_of(prepared: Prepared, drives: Sequence[int], facts: Sequence[DirectoryFacts], limits: Sequence[float | None] | None) -> list[int]:
    """Return how many requests each drive has in flight at most."""
    profiles, slowed = [prepared.manifest.drives[n].profile for n in drives], limits or [None] * len(drives)
    return [
        min(MOST_DEPTH, profile.depth) if profile else _unmeasured_depth(fact, limit)
        for profile, fact, limit in zip(profiles, facts, slowed, strict=True)
    ]


def n_ahead(depth: int) -> int:
    """Return how many requests wait at a drive beyond those in flight, so that it does not idle while the engine is busy with an arrival."""
    return 1 + depth // 4


def drive_facts(
    prepared: Prepared,
    drives: Sequence[int],
    facts: Sequence[DirectoryFacts],
    servers: Sequence[int] | None,
    limits: Sequence[float | None] | None,
    depths: Sequence[int],
) -> list[DriveFacts]:
    """Return what is known of the drives. Rates count only if all are known: a measured one is not to be compared with a guess."""
    numbers = group_by_device(facts) if servers is None else [servers[n] for n in drives]
    dense = {number: n for n, number in enumerate(dict.fromkeys(numbers))}
    profiles = [prepared.manifest.drives[n].profile for n in drives]
    rates = [profile.read_bytes_per_s if profile else limit for profile, limit in zip(profiles, limits or [None] * len(drives), strict=True)]
    return [
        DriveFacts(dense[number], prepared.manifest.drives[n].tier, depth + n_ahead(depth), rate if all(rates) else None)
        for n, number, depth, rate in zip(drives, numbers, depths, rates, strict=True)
    ]


def _unmeasured_depth(facts: DirectoryFacts, limit: float | None) -> int:
    """Return how many requests saturate a drive that nobody measured. One that is slowed down needs no more than bring it to its limit."""
    if not facts.is_ram_backed:
        return DEFAULT_DEPTH
    return RAM_DEPTH if limit is None else min(RAM_DEPTH, max(DEFAULT_DEPTH, math.ceil(limit / _RAM_READ_BYTES_PER_S)))
