"""What a placement is about to do and what it promises, as lines for people and as JSON values."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from layout.sizes import counted, format_rate, format_size, word_for
from manifests.errors import UsageError
from manifests.manifest import Profile
from prep.measuring.fio import MOST_FILES, fio_command
from prep.placement.heat import HeldOut
from prep.placement.place import Placement
from prep.placement.plan import (
    CopyPlan,
    PlanDrive,
    PlanScore,
    TokenRate,
    plan_copies,
    predict_tok_per_s,
    with_one_more_copy_set,
    with_one_more_drive,
)
from prep.requests import disk_bytes

# Records of tiny geometries: a GPU spends its time on other things than these, so that a prediction says nothing.
_LEAST_PREDICTED_BYTES = 1_000_000


def moves_from(placement: Placement, n: int) -> dict[str, int]:
    """Return how many of a drive's new files come from where, where several could give one shared evenly among them."""
    sites = [site for site in placement.sites if site.there.any()]
    new = placement.to_copy(n)
    codes = np.sum([site.there[new].astype(np.int64) << k for k, site in enumerate(sites)], axis=0)
    moves: dict[str, int] = {}
    for code, count in zip(*np.unique(codes, return_counts=True), strict=True):
        givers = [site.name for k, site in enumerate(sites) if int(code) >> k & 1]
        for k, name in enumerate(givers):
            moves[name] = moves.get(name, 0) + int(count) // len(givers) + (k < int(count) % len(givers))
    return {name: count for name, count in moves.items() if count}


def peak_bytes(placement: Placement) -> dict[str, int]:
    """Return the most that the work takes at a time beyond what is there, for each file system by the names of its drives."""
    size, sites = disk_bytes(placement.prepared.record.n_bytes), placement.sites
    pools = {site.device: ", ".join(s.name for s in sites if s.device == site.device) for site in sites}
    return {pools[pool]: n * size for pool, n in placement.schedule.n_peak.items() if n}


def tokens(placement: Placement) -> TokenRate | None:
    """Return the predicted rate; None where nothing was measured, and for tiny records."""
    problem = placement.problem
    if not problem.is_measured or placement.prepared.record.n_bytes < _LEAST_PREDICTED_BYTES:
        return None
    holds = [drive.holds for drive in placement.drives]
    return predict_tok_per_s(
        placement.prepared.geometry,
        placement.prepared.record.n_bytes,
        problem.drives,
        holds,
        heat=problem.heat,
        links=problem.links,
        seed=problem.seed,
    )


def place_lines(placement: Placement, rate: TokenRate | None) -> Iterator[str]:
    for n in range(len(placement.drives)):
        yield from _drive_lines(placement, n)
    for n in range(len(placement.drives), len(placement.sites)):
        yield _left_out_line(placement, n)
    yield _layer_line(placement, placement.score)
    yield from _plan_lines(placement)
    yield _heat_line(placement)
    if placement.prepared.record.n_bytes >= _LEAST_PREDICTED_BYTES:
        yield token_line(rate)
    peaks = [f"{format_size(n_bytes)} on {names}" for names, n_bytes in peak_bytes(placement).items()]
    yield f"room     at the peak, beyond what is there now: {'; '.join(peaks) or 'none'}"


def _drive_lines(placement: Placement, n: int) -> Iterator[str]:
    drive, site, n_bytes = placement.drives[n], placement.sites[n], placement.prepared.record.n_bytes
    held, new = int(drive.holds.sum()), int(placement.to_copy(n).sum())
    yield (
        f"tier {drive.tier}   {site.directory}: {_profile_text(drive.profile)}; holds {counted(held, 'expert')}, {format_size(held * n_bytes)}; "
        f"{placement.score.read_share[n]:.0%} of reads, last in {placement.score.last_share[n]:.0%} of layers"
    )
    moves = ", ".join(f"{count} from {name}" for name, count in moves_from(placement, n).items())
    parts = [f"{new} to copy, {format_size(new * n_bytes)}" + (f" ({moves})" if moves else "")]
    if n_unproved := int(placement.to_prove(n).sum()):
        parts.append(f"{n_unproved} that are there to prove")
    yield f"         {'; '.join([*parts, *_unplanned_text(placement, n)])}"


def _left_out_line(placement: Placement, n: int) -> str:
    text = "; ".join(_unplanned_text(placement, n, is_left_out=True)) or "nothing is there"
    return f"left out {placement.sites[n].name}: {text}"


def _unplanned_text(placement: Placement, n: int, *, is_left_out: bool = False) -> list[str]:
    count = int(placement.unplanned(n).sum())
    if not count:
        return []
    what = f"{counted(count, 'unplanned file')}, {format_size(count * placement.prepared.record.n_bytes)},"
    if placement.problem.is_removing:
        return [f"{what} will be removed once another copy is proved"]
    stay = word_for(count, "stays", "stay")
    if is_left_out:
        # The new manifest has no such drive.
        return [f"{what} {stay}; from now on no command knows of them: --remove-unplanned with this very command removes them, later rm does"]
    return [f"{what} {stay} (--remove-unplanned)"]


def _profile_text(profile: Profile | None) -> str:
    if profile is None:
        return "not measured"
    mode = "direct" if profile.is_direct else "buffered"
    beside = f", {format_rate(b)} beside uploads" if (b := profile.with_uploads_bytes_per_s) is not None else ""
    times = f"p50 {profile.p50_us:.0f} us, p99 {profile.p99_us:.0f} us"
    return f"{format_rate(profile.read_bytes_per_s)} at depth {profile.depth} ({mode}){beside}, {times}, of {profile.date}"


def _layer_line(placement: Placement, score: PlanScore) -> str:
    binding = ", ".join(placement.sites[n].name for n in score.binding)
    ideal = f" ({score.ideal_s * 1e3:.3g} ms)" if placement.problem.is_measured else ""
    return (
        f"layers   a layer's {counted(_misses(placement), 'read')} take {score.mean_ratio:.3f} times (p95 {score.p95_ratio:.3f}) what they would "
        f"with every drive busy to the end{ideal}; bound by {binding} in {score.binding_share:.0%} of layers"
    )


def _misses(placement: Placement) -> int:
    g = placement.prepared.geometry
    return min(g.n_experts_per_token, g.n_experts)


def _plan_lines(placement: Placement) -> Iterator[str]:
    plan = placement.plan
    if plan is None:
        return
    others = ", ".join(f"{name} {ratio:.3f}" for name, ratio in plan.alternatives)
    yield f"plan     from '{plan.rule}', improved by exchanges; before them: {others}"
    if plan.freest is not None:
        free = plan.freest
        yield (
            f"moves    {counted(plan.n_moves, 'copy', 'copies')} to make for a mean of {plan.score.mean_ratio:.3f}; "
            f"regarding nothing that is there: {free.n_moves} for {free.score.mean_ratio:.3f}"
        )


def _heat_line(placement: Placement) -> str:
    if (worth := placement.held_out) is None:
        return "heat     none given: all experts count alike" if placement.problem.heat is None else "heat     as it was given"
    return (
        f"heat     planned with one half of the reads: {worth.in_sample.mean_ratio:.3f} on that half, {worth.held_out.mean_ratio:.3f} on the other; "
        f"planned without heat: {worth.without_heat.mean_ratio:.3f} there"
    )


def token_line(rate: TokenRate | None) -> str:
    """Return the prediction with all that it assumes."""
    if rate is None:
        return "tokens   not predicted: no drive has been measured"
    a = rate.assumptions
    caches = f"{a.hit_rates[0]:.0%} to {a.hit_rates[1]:.0%} of experts in caches, {a.device_share:.0%} of these in device memory"
    rest = f"uploads at {format_rate(a.link_bytes_per_s)}, {a.dense_s * 1e3:g} ms a layer for the rest"
    return f"tokens   {rate.low:.3g} to {rate.high:.3g} tok/s predicted on a GPU such as an H200, for one text: {caches}, {rest}"


def fio_lines(placement: Placement) -> Iterator[str]:
    """Yield for each drive that holds something the command by which fio measures the same."""
    for drive, site in zip(placement.drives, placement.sites, strict=False):
        if drive.profile is None or not drive.holds.any():
            continue
        n_files = min(MOST_FILES, int(drive.holds.sum()))
        yield f"to check {site.name} with fio:"
        yield fio_command(
            site.directory,
            depth=drive.profile.depth,
            record_bytes=placement.prepared.record.n_bytes,
            n_files=n_files,
            is_direct=drive.profile.is_direct,
        )


def what_if_plans(placement: Placement, *, rate_bytes_per_s: float, capacity_bytes: int) -> dict[str, CopyPlan]:
    """Return the plans with one more drive of a rate and a capacity, and with room for one more copy of every expert on the same drives.

    Raises UsageError where no drive has been measured.
    """
    if not placement.problem.is_measured:
        raise UsageError("--what-if: no drive has been measured, so a rate says nothing; give --measure-drives, too")
    problem, geometry, n_bytes = placement.problem, placement.prepared.geometry, placement.prepared.record.n_bytes

    def planned(drives: Sequence[PlanDrive], pool_free: Sequence[int]) -> CopyPlan:
        return plan_copies(
            geometry, n_bytes, drives, pool_free=pool_free, is_removing=problem.is_removing, heat=problem.heat, links=problem.links,
            seed=problem.seed, is_comparing=False,
        )  # fmt: skip

    now, capacity = (geometry, problem.drives, problem.pool_free), min(capacity_bytes // disk_bytes(n_bytes), geometry.n_routed_experts)
    return {
        f"one more drive of {format_rate(rate_bytes_per_s)} with {format_size(capacity_bytes)}": planned(
            *with_one_more_drive(*now, read_bytes_per_s=rate_bytes_per_s, capacity=capacity)
        ),
        "room for one more copy of every expert on these drives": planned(*with_one_more_copy_set(*now)),
    }


def what_if_lines(placement: Placement, plans: dict[str, CopyPlan]) -> Iterator[str]:
    now = placement.score
    for name, plan in plans.items():
        yield (
            f"what if  {name}: a layer's reads in {plan.score.mean_s / now.mean_s:.3f} of the time ({plan.score.mean_ratio:.3f} times what they "
            f"would take with every drive busy to the end, now {now.mean_ratio:.3f})"
        )


def to_dict(placement: Placement, rate: TokenRate | None, plans: dict[str, CopyPlan]) -> dict[str, Any]:
    """Return the same as JSON values."""
    n_bytes, is_measured = placement.prepared.record.n_bytes, placement.problem.is_measured
    return {
        "drives": [_drive_dict(placement, n) for n in range(len(placement.drives))],
        "left_out": [
            {"directory": str(site.directory), "tier": site.tier, "n_unplanned": int(placement.unplanned(n).sum())}
            for n, site in enumerate(placement.sites)
            if site.request is None
        ],
        "record_bytes": n_bytes,
        "score": _score_dict(placement.score, is_measured=is_measured),
        "plan": None if placement.plan is None else _plan_dict(placement.plan, is_measured=is_measured),
        "held_out": None if placement.held_out is None else _held_out_dict(placement.held_out, is_measured=is_measured),
        "tok_per_s": None if rate is None else dataclasses.asdict(rate),
        "peak_bytes": peak_bytes(placement),
        "together_bytes_per_s": placement.measurement.together_bytes_per_s if placement.measurement else None,
        "links": [dataclasses.asdict(link) for link in placement.links],
        "what_if": {name: _score_dict(plan.score, is_measured=is_measured) for name, plan in plans.items()},
        "is_resumed": placement.is_resumed,
        "is_heat_given": placement.problem.heat is not None,
        "remarks": list(placement.remarks),
    }


def _drive_dict(placement: Placement, n: int) -> dict[str, Any]:
    drive, score = placement.drives[n], placement.score
    return {
        "tier": drive.tier,
        "directory": str(placement.sites[n].directory),
        "profile": None if drive.profile is None else dataclasses.asdict(drive.profile),
        "n_files": int(drive.holds.sum()),
        "n_to_copy": int(placement.to_copy(n).sum()),
        "n_to_prove": int(placement.to_prove(n).sum()),
        "n_unplanned": int(placement.unplanned(n).sum()),
        "from": moves_from(placement, n),
        "read_share": score.read_share[n],
        "last_share": score.last_share[n],
    }


def _score_dict(score: PlanScore, *, is_measured: bool) -> dict[str, Any]:
    """Return a score; without measured drives its seconds mean nothing."""
    values = dataclasses.asdict(score) | {"mean_ratio": score.mean_ratio, "p95_ratio": score.p95_ratio}
    return {name: None if name.endswith("_s") and not is_measured else value for name, value in values.items()}


def _held_out_dict(worth: HeldOut, *, is_measured: bool) -> dict[str, Any]:
    return {name: _score_dict(getattr(worth, name), is_measured=is_measured) for name in ("in_sample", "held_out", "without_heat")}


def _plan_dict(plan: CopyPlan, *, is_measured: bool) -> dict[str, Any]:
    freest = None
    if plan.freest is not None:
        freest = {"n_moves": plan.freest.n_moves, "score": _score_dict(plan.freest.score, is_measured=is_measured)}
    return {"rule": plan.rule, "alternatives": dict(plan.alternatives), "n_moves": plan.n_moves, "freest": freest}
