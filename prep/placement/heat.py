"""Heat: how often each expert is read, from krun's counters or anybody's JSON, and whether a plan made with it holds for other reads."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from layout.record import parse_expert_file_name
from manifests.errors import BadInputError, listed
from manifests.geometry import Geometry
from prep.placement.plan import CopyPlan, PlanDrive, PlanScore, plan_copies, score_holds

# More reads than any run makes; their sums still fit an int64.
_MOST_READS = 1 << 40


def read_heat(path: Path, geometry: Geometry) -> np.ndarray:
    """Return how often each expert was read, int64 [n_layers, n_experts]; one that the file does not name was not.

    The file is a JSON object {"L17-E413": 12, ...}, or one with other keys beside that object under "experts".
    Raises BadInputError with all its faults: keys twice, experts that do not exist, what is no count, no reads at all.
    """
    faults = list[str]()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            faults.extend(f"{name!r} is there {names.count(name)} times" for name in found if names.count(name) > 1)
        return found

    try:
        values = json.loads(path.read_text(), object_pairs_hook=unique)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"heat {path}: cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"heat {path}: not JSON: {error}") from None
    if isinstance(values, dict) and "experts" in values:
        values = values["experts"]
    if not isinstance(values, dict):
        raise BadInputError(f'heat {path}: expected an object {{"L17-E413": 12, ...}}, by itself or under "experts"')
    if values and not any(map(_named, values)):
        known = 'an object {"L17-E413": 12, ...}, by itself or under "experts"'
        raise BadInputError(f"heat {path}: is no file of krun generate --heat-out: expected {known}, found the key {next(iter(values))!r:.80}")
    counts = np.zeros((geometry.n_layers, geometry.n_experts), np.int64)
    for name, count in values.items():
        place, fault = _place(name, geometry), _fault_of(count)
        if place is None:
            faults.append(
                f"{name!r} is no expert of this model; expected L{geometry.n_dense_layers}-E0 to L{geometry.n_layers - 1}-E{geometry.n_experts - 1}"
            )
        elif fault:
            faults.append(f"{name}: {fault}")
        else:
            counts[place] = count
    if not faults and not counts.any():
        faults.append("no reads in it")
    if faults:
        raise BadInputError(listed(faults, f"heat {path}:"))
    return counts


def _named(name: str) -> tuple[int, int] | None:
    """Return the layer and the expert that a name such as L17-E413 means, of whatever model."""
    return parse_expert_file_name(f"{name}.bin")


def _place(name: str, geometry: Geometry) -> tuple[int, int] | None:
    place = _named(name)
    return place if place is not None and place[0] in geometry.moe_layers and place[1] < geometry.n_experts else None


def _fault_of(count: object) -> str:
    if isinstance(count, int) and not isinstance(count, bool):
        return "" if 0 <= count <= _MOST_READS else f"{count} reads; expected 0 to {_MOST_READS}"
    return f"{count!r} is not a whole number"


def smoothed(counts: np.ndarray) -> np.ndarray:
    """Return counts as weights for the planner, float of the same shape: half a read more for each expert, since one never seen may be read yet."""
    return counts + 0.5


def split_by_lot(counts: np.ndarray, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return two halves of counts, each read in one or the other by lot. They differ by chance alone: what changes with time does not show."""
    first = np.random.default_rng(seed).binomial(counts, 0.5)
    return first, counts - first


def split_by_time(periods: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the reads of the earlier and the later periods, cut where the halves come out most alike in number. Raises BadInputError below two."""
    if len(periods) < 2:
        raise BadInputError(f"{len(periods)} period of reads; two halves by time need at least two")
    totals = np.cumsum([int(counts.sum()) for counts in periods])
    cut = int(np.abs(2 * totals[:-1] - totals[-1]).argmin()) + 1
    return np.sum(periods[:cut], axis=0), np.sum(periods[cut:], axis=0)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What heat is worth. All three on the same plan's room and drives.

    in_sample     the plan made with one half, met by that half
    held_out      the same plan, met by the other half
    without_heat  a plan made without heat, met by the other half
    """

    in_sample: PlanScore
    held_out: PlanScore
    without_heat: PlanScore


def held_out(
    geometry: Geometry,
    record_bytes: int,
    drives: Sequence[PlanDrive],
    halves: tuple[np.ndarray, np.ndarray],
    *,
    pool_free: Sequence[int],
    is_removing: bool,
    links: Sequence[tuple[tuple[int, ...], float]] = (),
    n_misses: float | None = None,
    seed: int = 0,
    is_moving_little: bool = True,
) -> HeldOut:
    """Plan with the first half of the counts and score with each; the other arguments and errors as for `plan_copies`."""
    seen, unseen = (smoothed(half) for half in halves)

    def plan(heat: np.ndarray | None) -> CopyPlan:
        return plan_copies(
            geometry,
            record_bytes,
            drives,
            pool_free=pool_free,
            is_removing=is_removing,
            heat=heat,
            links=links,
            n_misses=n_misses,
            seed=seed,
            is_moving_little=is_moving_little,
            is_comparing=False,
        )

    def score(plan: CopyPlan) -> PlanScore:
        return score_holds(geometry, record_bytes, drives, plan.holds, heat=unseen, links=links, n_misses=n_misses, seed=seed)

    planned = plan(seen)
    return HeldOut(planned.score, score(planned), score(plan(None)))
