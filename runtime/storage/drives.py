"""What the store knows of drives before it reads: who holds what, how fast each is, and how many requests it takes at once."""

import math
from collections.abc import Sequence

import numpy as np

from layout.direct import round_up
from layout.drives import DirectoryFacts, group_by_device
from layout.prepared import Prepared
from runtime.storage.cache import ExpertKey
from runtime.storage.schedule import DriveFacts

# Requests in flight on a drive that was not measured, and on a file system in memory.
DEFAULT_DEPTH = 3
RAM_DEPTH = 16
MOST_DEPTH = 32
# What one request reads of a file in memory, at least, and of a drive that was not measured, at most.
_REQUEST_BYTES_PER_S = 2.5e9
# A drive's requests together read one record, in pieces of no less than this: so records arrive one after another instead of all at the end.
LEAST_PIECE = 1 << 20
# How long the engine may be busy elsewhere before a drive idles.
_AHEAD_S = 2e-3
# A token's layer at once, and of a prompt's only what the engine takes in next: of what lies there longer, less is in the processor's cache.
_MOST_AHEAD = 64


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


def pieces_of(n_bytes: int, depths: Sequence[int], steps: Sequence[int], are_whole: Sequence[bool] | None = None) -> list[int | None]:
    """Return into which pieces each drive's requests are cut, in bytes, for records of n_bytes; None leaves them whole.

    steps      what a piece is a multiple of, by drive
    are_whole  where a request must be one read all the same
    """
    pieces = [round_up(max(LEAST_PIECE, -(-n_bytes // depth)), step) for depth, step in zip(depths, steps, strict=True)]
    return [None if is_whole or piece >= n_bytes else piece for piece, is_whole in zip(pieces, are_whole or [False] * len(pieces), strict=True)]


def n_ahead(n_bytes: int, depth: int, piece: int | None, bytes_per_s: float | None, *, is_alone: bool = False) -> int:
    """Return how many requests, or pieces, wait at a drive beyond those in flight, so that it does not idle while the engine is busy elsewhere.

    n_bytes   of a record
    is_alone  whether no other drive could take them
    """
    if is_alone:
        return _MOST_AHEAD * (1 if piece is None else -(-n_bytes // piece))
    least = 1 + depth // 4
    return least if piece is None else max(least, math.ceil((bytes_per_s or depth * _REQUEST_BYTES_PER_S) * _AHEAD_S / piece))


def drive_facts(
    prepared: Prepared,
    drives: Sequence[int],
    facts: Sequence[DirectoryFacts],
    servers: Sequence[int] | None,
    limits: Sequence[float | None] | None,
    depths: Sequence[int],
    pieces: Sequence[int | None],
) -> list[DriveFacts]:
    """Return what is known of the drives. Rates count only if all are known: a measured one is not to be compared with a guess."""
    numbers = group_by_device(facts) if servers is None else [servers[n] for n in drives]
    dense = {number: n for n, number in enumerate(dict.fromkeys(numbers))}
    profiles = [prepared.manifest.drives[n].profile for n in drives]
    rates = [profile.read_bytes_per_s if profile else limit for profile, limit in zip(profiles, limits or [None] * len(drives), strict=True)]
    return [
        DriveFacts(
            dense[number],
            prepared.manifest.drives[n].tier,
            depth + n_ahead(prepared.record.n_bytes, depth, piece, rate, is_alone=len(drives) == 1),
            rate if all(rates) else None,
            piece,
        )
        for n, number, depth, rate, piece in zip(drives, numbers, depths, rates, pieces, strict=True)
    ]


def _unmeasured_depth(facts: DirectoryFacts, limit: float | None) -> int:
    """Return how many requests saturate a drive that nobody measured. One that is slowed down needs no more than bring it to its limit."""
    if not facts.is_ram_backed:
        return DEFAULT_DEPTH
    return RAM_DEPTH if limit is None else min(RAM_DEPTH, max(DEFAULT_DEPTH, math.ceil(limit / _REQUEST_BYTES_PER_S)))
