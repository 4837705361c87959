"""In which order copies are made and unplanned files removed, so that room suffices at every moment. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

# Each step that removes something publishes a manifest of its own.
MOST_STEPS = 100


class Directory(NamedTuple):
    """What a directory holds and shall hold, bool [n_layers, n_experts]; `pool` is its file system, `is_base` says tier A or B."""

    pool: int
    is_base: bool
    there: np.ndarray
    wanted: np.ndarray


class Step(NamedTuple):
    """Per directory, bool [n_layers, n_experts]: files to remove first, and then copies to make."""

    removals: list[np.ndarray]
    copies: list[np.ndarray]


class Schedule(NamedTuple):
    """The steps, and in records per file system: copies that find no room in any order (or in MOST_STEPS), and the most that is there at a time."""

    steps: list[Step]
    n_left: dict[int, int]
    n_peak: dict[int, int]


def make_schedule(directories: Sequence[Directory], room: Mapping[int, int], *, is_removing: bool) -> Schedule:
    """Order the work. `room` is how many records each file system can still take.

    A file is removed early only where room is short and only once a planned copy of its expert is there on a base drive.
    The other unplanned files go at the end, and are no part of the steps.
    """
    there = [d.there.copy() for d in directories]
    free, used, peak, steps = dict(room), dict.fromkeys(room, 0), dict.fromkeys(room, 0), list[Step]()
    while len(steps) < MOST_STEPS and (missing := [d.wanted & ~t for d, t in zip(directories, there, strict=True)]) and any(m.any() for m in missing):
        removals = _removals(directories, there, missing, free) if is_removing else [np.zeros_like(t) for t in there]
        for n, removed in enumerate(removals):
            there[n] &= ~removed
            free[directories[n].pool] += int(removed.sum())
            used[directories[n].pool] -= int(removed.sum())
        copies = []
        for n, d in enumerate(directories):
            copies.append(_first(missing[n], free[d.pool]))
            n_copies = int(copies[n].sum())
            free[d.pool] -= n_copies
            used[d.pool] += n_copies
            peak[d.pool] = max(peak[d.pool], used[d.pool])
            there[n] |= copies[n]
        if not any(c.any() for c in (*removals, *copies)):
            break
        steps.append(Step(removals, copies))
    n_left = dict.fromkeys(room, 0)
    for d, t in zip(directories, there, strict=True):
        n_left[d.pool] += int((d.wanted & ~t).sum())
    return Schedule(steps, {pool: n for pool, n in n_left.items() if n}, peak)


def _removals(
    directories: Sequence[Directory], there: Sequence[np.ndarray], missing: Sequence[np.ndarray], free: Mapping[int, int]
) -> list[np.ndarray]:
    """Return what may go now: on file systems where the copies to be made do not fit, files with a planned copy on a base drive."""
    is_safe = np.any([d.wanted & t for d, t in zip(directories, there, strict=True) if d.is_base], axis=0)
    needed = dict.fromkeys(free, 0)
    for d, m in zip(directories, missing, strict=True):
        needed[d.pool] += int(m.sum())
    return [t & ~d.wanted & is_safe if needed[d.pool] > free[d.pool] else np.zeros_like(t) for d, t in zip(directories, there, strict=True)]


def _first(experts: np.ndarray, n: int) -> np.ndarray:
    """Return the first n of a set of experts, layer by layer."""
    flat = experts.ravel()
    chosen = np.zeros_like(flat)
    chosen[np.flatnonzero(flat)[: max(n, 0)]] = True
    return chosen.reshape(experts.shape)
