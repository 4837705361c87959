"""place: measure, decide, and carry out. The given drives are the complete new set.

Deciding is apart from doing: `place` looks at what lies where, has the copies planned, says what it is about to do, and hands over to
prep/placement/carry_out.py. What was decided is kept in a journal until it is done, so that the same command goes on after a kill.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from layout.drives import RAM_FILE_SYSTEMS, default_reserve, describe_directory, free_bytes, group_by_device
from layout.hash_lists import HASH_LIST_NAME, xxh3_128_hex
from layout.makespan import MOST_SERVERS
from layout.memory import available_host_bytes
from layout.prepared import Prepared, open_prepared
from layout.sizes import format_rate, format_size
from manifests.errors import BadInputError, NoSpaceError, UsageError
from manifests.manifest import BASE_TIERS, Drive, Manifest, Profile, SharedLink
from prep.drive_facts import drive_text, manifest_drive
from prep.measuring.measure import Measurement, is_older_than_files, measure_drives
from prep.placement.carry_out import CarryOut, Progress, Remark
from prep.placement.heat import HeldOut, held_out, smoothed, split_by_lot
from prep.placement.journal import Decided, PlaceJournal
from prep.placement.plan import CopyPlan, PlanDrive, PlanScore, plan_copies, score_holds
from prep.placement.schedule import Directory, Schedule, Step, make_schedule
from prep.placement.sites import Site, check_none_lost, find_sites, is_root_instead
from prep.requests import DriveRequest, check_requests, check_writable, disk_bytes

# A line of a hash list and an entry of a directory, for each expert.
_LIST_BYTES_PER_EXPERT = 96
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asks for.

    reserve_bytes    room to leave free on each file system; None for the default
    measure_seconds  time of each step of measuring; None to measure nothing
    uploads_command  what uploads to the GPU meanwhile; None for nothing
    heat             how often each expert was read, int64 [n_layers, n_experts]; None for all alike
    is_removing      remove the experts' files that the plan does not name
    """

    requests: Sequence[DriveRequest]
    reserve_bytes: int | None = None
    measure_seconds: float | None = None
    uploads_command: Sequence[str] | None = None
    heat: np.ndarray | None = None
    seed: int = 0
    is_removing: bool = False

    def key(self, source_digest: str) -> str:
        """Return one text for all that decides what is done: equal for the same command."""
        drives = [(r.tier, str(r.directory.resolve()), r.limit_bytes) for r in self.requests]
        heat = None if self.heat is None else xxh3_128_hex(np.ascontiguousarray(self.heat))
        uploads = None if self.uploads_command is None else list(self.uploads_command)
        facts = [source_digest, drives, self.reserve_bytes, self.measure_seconds, uploads, heat, self.seed, self.is_removing]
        return xxh3_128_hex(json.dumps(facts).encode())


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What the planner is given: drives in the order of the requests, links between their servers, room in records for each of their pools."""

    drives: tuple[PlanDrive, ...]
    links: tuple[tuple[tuple[int, ...], float], ...]
    pool_free: tuple[int, ...]
    heat: np.ndarray | None
    seed: int
    is_removing: bool
    is_measured: bool


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A decided placement.

    sites     the requested directories, in their order, then the manifest's others
    drives    of the new manifest, one for each of the first sites
    plan      None where an interrupted placement goes on: its plan was made then
    held_out  what the heat is worth; None without heat
    schedule  the order of removals and copies
    """

    prepared: Prepared
    sites: tuple[Site, ...]
    drives: tuple[Drive, ...]
    links: tuple[SharedLink, ...]
    problem: Problem
    score: PlanScore
    plan: CopyPlan | None
    held_out: HeldOut | None
    measurement: Measurement | None
    schedule: Schedule
    remarks: tuple[str, ...]
    is_resumed: bool = False

    def to_copy(self, n: int) -> np.ndarray:
        """Return which files are not there and are to be made, bool [n_layers, n_experts]."""
        missing: np.ndarray = self.drives[n].holds & ~self.sites[n].there
        return missing

    def to_prove(self, n: int) -> np.ndarray:
        """Return which files are there but are vouched for by no manifest."""
        unproved: np.ndarray = self.drives[n].holds & self.sites[n].lying
        return unproved

    def unplanned(self, n: int) -> np.ndarray:
        """Return which files of the model's experts the plan does not name."""
        site, wanted = self.sites[n], self.drives[n].holds if n < len(self.drives) else np.zeros_like(self.sites[n].vouched)
        unplanned: np.ndarray = (site.vouched | site.lying | site.misfit) & ~wanted
        return unplanned


def place(
    path: Path, options: Options, *, is_dry_run: bool, on_decided: Callable[[Placement], None], on_progress: Progress, on_remark: Remark
) -> Manifest | None:
    """Decide a placement, tell it to on_decided, carry it out, and return the manifest that is true then; None for a dry run.

    Killed at any instant, the manifest that is there is true, and the same command goes on. Raises NoSpaceError before anything is changed if the
    work cannot end with the reserves kept, DamagedDataError if an expert has no intact copy left, KtierError if another command is at work.
    """
    check_requests(options.requests, home=path.parent)
    if len(options.requests) > MOST_SERVERS:
        raise UsageError(f"--tier: {len(options.requests)} drives; a placement is planned for {MOST_SERVERS} at most")
    if not os.access(path.parent, os.W_OK) and not is_dry_run:
        raise UsageError(f"{path.parent}: no file can be written there, and the new manifest must be; mount it writable, or change its mode")
    if is_dry_run:
        placement = _decide(open_prepared(path), options, on_remark)
        _check(placement)
        on_decided(placement)
        return None
    journal, is_done = PlaceJournal(path.parent), False
    try:
        prepared = open_prepared(path)
        placement = _resumed(prepared, options, journal, on_remark) or _decide(prepared, options, on_remark)
        _check(placement)
        on_decided(placement)
        journal.decide(options.key(prepared.manifest.source.digest), _decided(placement))
        manifest = _carry_out(placement, options, on_progress, on_remark)
        is_done = True
        return manifest
    finally:
        journal.close(is_done=is_done)


def _decided(placement: Placement) -> Decided:
    manifest = dataclasses.replace(placement.prepared.manifest, drives=placement.drives, links=placement.links)
    return Decided(manifest, [(site.tier, site.directory.resolve()) for site in placement.sites if site.request is None])


def _carry_out(placement: Placement, options: Options, on_progress: Progress, on_remark: Remark) -> Manifest:
    def make_steps(there: Sequence[np.ndarray]) -> list[Step]:
        made = _schedule(placement.prepared, placement.sites, placement.drives, there, options)
        _check_schedule(made, placement.sites, placement.prepared.record.n_bytes)
        return made.steps

    return CarryOut(
        placement.prepared,
        placement.sites,
        placement.drives,
        placement.links,
        make_steps=make_steps,
        reserve_bytes=options.reserve_bytes,
        is_removing=options.is_removing,
        is_resumed=placement.is_resumed,
        on_progress=on_progress,
        on_remark=on_remark,
    ).run()


def _resumed(prepared: Prepared, options: Options, journal: PlaceJournal, on_remark: Remark) -> Placement | None:
    """Return the placement that an interrupted command with the same flags had decided, if it can still end."""
    decided = journal.decided(options.key(prepared.manifest.source.digest))
    if decided is None:
        if not journal.is_empty():
            on_remark("an unfinished placement with other flags is given up; the files that it made count as there once they are proved")
        return None
    sites, remarks = find_sites(prepared, options.requests, left_out=decided.left_out)
    check_none_lost(prepared, sites)
    drives, links = decided.manifest.drives, decided.manifest.links
    for site, drive in zip(sites, drives, strict=False):
        if drive.holds.any() and not site.there.any() and is_root_instead(drive, site.directory):
            raise UsageError(
                f"--tier {site.tier}={site.directory}: when the interrupted placement was decided, it was a drive ({drive.file_system}); now it is "
                "empty and part of the root file system: mount the drive, or leave it out"
            )
    groups = _links_of([drive.directory for drive in drives], links, sites)
    problem = _problem(prepared, sites, options, [drive.profile for drive in drives], groups)
    score = _score(prepared, problem, [drive.holds for drive in drives])
    schedule = _schedule(prepared, sites, drives, [site.there for site in sites], options)
    if schedule.n_left:
        on_remark("an interrupted placement cannot go on for lack of room; it is decided anew")
        return None
    on_remark("going on with the placement that was interrupted, as it was decided then")
    return Placement(prepared, tuple(sites), drives, links, problem, score, None, None, None, schedule, tuple(remarks), is_resumed=True)


def _decide(prepared: Prepared, options: Options, on_remark: Remark) -> Placement:
    """Measure if that is asked for, and plan. Raises NoSpaceError if tiers A and B cannot hold all experts with the reserve kept."""
    sites, remarks = find_sites(prepared, options.requests)
    check_none_lost(prepared, sites)
    measurement = _measure(prepared, options, on_remark)
    profiles, of_profiles = _profiles(prepared, sites, options.requests, measurement)
    homes = [drive_text(request.directory, prepared.directory) for request in options.requests]
    links = measurement.manifest_links(homes) if measurement else _kept_links(prepared, sites, homes)
    problem = _problem(prepared, sites, options, profiles, _links_of(homes, links, sites))
    plan = plan_copies(
        prepared.geometry,
        prepared.record.n_bytes,
        problem.drives,
        pool_free=problem.pool_free,
        is_removing=options.is_removing,
        heat=problem.heat,
        links=problem.links,
        seed=options.seed,
    )
    drives = tuple(
        manifest_drive(request.tier, request.directory, prepared.directory, profile, holds)
        for request, profile, holds in zip(options.requests, profiles, plan.holds, strict=True)
    )
    schedule = _schedule(prepared, sites, drives, [site.there for site in sites], options)
    of_measurement = measurement.remarks if measurement else ()
    all_remarks = tuple(dict.fromkeys([*remarks, *of_profiles, *of_measurement, *_idle_remarks(sites, problem, drives)]))
    worth = _held_out(prepared, problem, options)
    return Placement(prepared, tuple(sites), drives, links, problem, plan.score, plan, worth, measurement, schedule, all_remarks)


def _held_out(prepared: Prepared, problem: Problem, options: Options) -> HeldOut | None:
    """Return what heat is worth for reads that no plan was made with."""
    if options.heat is None:
        return None
    return held_out(
        prepared.geometry,
        prepared.record.n_bytes,
        problem.drives,
        split_by_lot(options.heat, seed=options.seed),
        pool_free=problem.pool_free,
        is_removing=options.is_removing,
        links=problem.links,
        seed=options.seed,
    )


def _measure(prepared: Prepared, options: Options, on_remark: Remark) -> Measurement | None:
    if options.measure_seconds is None:
        return None
    return measure_drives(
        [request.directory for request in options.requests],
        record_bytes=prepared.record.n_bytes,
        seconds=options.measure_seconds,
        seed=options.seed,
        with_uploads=options.uploads_command,
        reserve_bytes=options.reserve_bytes,
        on_progress=on_remark,
    )


def _profiles(
    prepared: Prepared, sites: Sequence[Site], requests: Sequence[DriveRequest], measurement: Measurement | None
) -> tuple[list[Profile | None], list[str]]:
    """Return each drive's profile, as measured now or as the manifest has it, and remarks on those that are missing or old."""
    if measurement is not None:
        return list(measurement.profiles), []
    former = prepared.manifest.drives
    profiles = [former[site.former].profile if site.former is not None else None for site in sites[: len(requests)]]
    remarks = []
    for request, profile in zip(requests, profiles, strict=True):
        if profile is None:
            continue
        if profile.read_bytes_per_s <= 0 or profile.with_uploads_bytes_per_s == 0:
            raise BadInputError(f"{prepared.path}: the profile of {request.directory} has a rate of 0 B/s; measure it again with --measure-drives")
        if is_older_than_files(profile, request.directory):
            remarks.append(f"{request.directory}: its profile, of {profile.date}, is older than files there; --measure-drives makes a new one")
    unmeasured = [str(request.directory) for request, profile in zip(requests, profiles, strict=True) if profile is None]
    if unmeasured and len(unmeasured) < len(requests):
        mean = format_rate(float(np.mean([p.read_bytes_per_s for p in profiles if p is not None])))
        remarks.append(f"not measured, and taken for {mean}, the mean of the others: {', '.join(unmeasured)}; --measure-drives measures all")
    elif unmeasured:
        remarks.append("no drive has been measured: all count as equally fast; --measure-drives measures them")
    return profiles, remarks


def _idle_remarks(sites: Sequence[Site], problem: Problem, drives: Sequence[Drive]) -> list[str]:
    """Return a remark for each drive that gets nothing, though it has room."""
    servers, remarks = [drive.server for drive in problem.drives], []
    for n, drive in enumerate(drives):
        others = [sites[k].name for k in range(len(drives)) if k != n and servers[k] == servers[n]]
        if not drive.holds.any() and others and problem.pool_free[problem.drives[n].pool]:
            remarks.append(f"{sites[n].name}: gets nothing: it lies on one device with {', '.join(others)}, where a second copy brings nothing")
    return remarks


def _kept_links(prepared: Prepared, sites: Sequence[Site], homes: Sequence[str]) -> tuple[SharedLink, ...]:
    """Return the manifest's links all of whose drives are in the new set, with their directories as the new manifest names them."""
    former = prepared.manifest.drives
    home_of = {former[site.former].directory: home for site, home in zip(sites, homes, strict=False) if site.former is not None}
    known = [link for link in prepared.manifest.links if all(directory in home_of for directory in link.directories)]
    for link in known:
        if link.read_bytes_per_s <= 0:
            names = ", ".join(link.directories)
            raise BadInputError(f"{prepared.path}: the link that {names} share has a rate of 0 B/s; measure it again with --measure-drives")
    return tuple(SharedLink(tuple(home_of[directory] for directory in link.directories), link.read_bytes_per_s) for link in known)


def _servers(sites: Sequence[Site]) -> tuple[int, ...]:
    return group_by_device([describe_directory(site.directory) for site in sites if site.request is not None])


def _links_of(homes: Sequence[str], links: Sequence[SharedLink], sites: Sequence[Site]) -> list[tuple[tuple[int, ...], float]]:
    """Return links as groups of servers; `homes` are the directories of the first sites as the links name them."""
    server_of = dict(zip(homes, _servers(sites), strict=True))
    return [(tuple(sorted({server_of[directory] for directory in link.directories})), link.read_bytes_per_s) for link in links]


def _problem(
    prepared: Prepared,
    sites: Sequence[Site],
    options: Options,
    profiles: Sequence[Profile | None],
    links: Sequence[tuple[tuple[int, ...], float]],
) -> Problem:
    new = [site for site in sites if site.request is not None]
    rates = _rates(profiles)
    pools = {device: number for number, device in enumerate(dict.fromkeys(site.device for site in new))}
    size = disk_bytes(prepared.record.n_bytes)
    limits = [None if (limit := site.request.limit_bytes if site.request else None) is None else limit // size for site in new]
    drives = tuple(
        PlanDrive(site.tier, rate, server, pools[site.device], limit, site.there)
        for site, rate, server, limit in zip(new, rates, _servers(sites), limits, strict=True)
    )
    room = _room(prepared, new, options.reserve_bytes)
    # What a directory that is left out has on the same file system will go, too.
    going = {device: sum(int(s.there.sum()) for s in sites if s.request is None and s.device == device) for device in pools}
    pool_free = tuple(max(0, room[device] + options.is_removing * going[device]) for device in pools if device is not None)
    is_measured = any(profile is not None for profile in profiles)
    heat = None if options.heat is None else smoothed(options.heat)
    return Problem(drives, tuple(links), pool_free, heat, options.seed, options.is_removing, is_measured)


def _rates(profiles: Sequence[Profile | None]) -> list[float]:
    """Return the rates to plan with: beside uploads where all were measured so; an unmeasured drive counts as the mean of the others, or 1."""
    known = [profile for profile in profiles if profile is not None]
    beside = [profile.with_uploads_bytes_per_s for profile in known]
    is_beside = all(rate is not None for rate in beside)
    rate_of = {id(p): (b if is_beside and b is not None else p.read_bytes_per_s) for p, b in zip(known, beside, strict=True)}
    mean = float(np.mean(list(rate_of.values()))) if known else 1.0
    return [mean if profile is None else rate_of[id(profile)] for profile in profiles]


def _room(prepared: Prepared, sites: Sequence[Site], reserve_bytes: int | None) -> dict[int, int]:
    """Return how many more records each file system takes, the reserve and the lists of its drives kept free."""
    room: dict[int, int] = {}
    for site in sites:
        if site.device is None or site.device in room:
            continue
        reserve = default_reserve(site.directory) if reserve_bytes is None else reserve_bytes
        n_lists = sum(other.device == site.device and other.request is not None for other in sites)
        lists = disk_bytes(_LIST_BYTES_PER_EXPERT * prepared.geometry.n_routed_experts) * n_lists
        room[site.device] = (free_bytes(site.directory) - reserve - lists) // disk_bytes(prepared.record.n_bytes)
    return room


def _score(prepared: Prepared, problem: Problem, holds: Sequence[np.ndarray]) -> PlanScore:
    return score_holds(
        prepared.geometry, prepared.record.n_bytes, problem.drives, holds, heat=problem.heat, links=problem.links, seed=problem.seed
    )  # fmt: skip


def _schedule(prepared: Prepared, sites: Sequence[Site], drives: Sequence[Drive], there: Sequence[np.ndarray], options: Options) -> Schedule:
    """Order the work over the sites that are there. A step's arrays are those of all sites."""
    nothing = np.zeros_like(prepared.hashes.is_known)
    directories = [
        Directory(
            pool=-1 if site.device is None else site.device,
            is_base=n < len(drives) and drives[n].tier in BASE_TIERS,
            there=there[n],
            wanted=drives[n].holds if n < len(drives) else nothing,
        )
        for n, site in enumerate(sites)
    ]
    return make_schedule(directories, {-1: 0} | _room(prepared, sites, options.reserve_bytes), is_removing=options.is_removing)


def _check(placement: Placement) -> None:
    """Raise before anything is changed if the work cannot end: no room, no memory, or a directory that cannot be written."""
    prepared, n_bytes = placement.prepared, placement.prepared.record.n_bytes
    _check_schedule(placement.schedule, placement.sites, n_bytes)
    new = [int(placement.to_copy(n).sum()) for n in range(len(placement.drives))]
    in_memory = [n for n, drive in enumerate(placement.drives) if drive.file_system in RAM_FILE_SYSTEMS and new[n]]
    needed, available = sum(new[n] for n in in_memory) * disk_bytes(n_bytes), available_host_bytes()
    if needed > available:
        names = ", ".join(placement.sites[n].name for n in in_memory)
        raise NoSpaceError(
            f"{names}: in memory; {format_size(needed)} would be copied there, but only {format_size(available)} of memory are available; "
            "give it a --limit, or leave it out"
        )
    changed = [n for n, drive in enumerate(placement.drives) if new[n] or not _has_list(placement.sites[n], prepared, drive)]
    check_writable(request for n in changed if (request := placement.sites[n].request) is not None)


def _has_list(site: Site, prepared: Prepared, drive: Drive) -> bool:
    try:
        return (site.directory / HASH_LIST_NAME).read_bytes() == prepared.hashes.to_text(drive.holds).encode()
    except OSError:
        return False


def _check_schedule(schedule: Schedule, sites: Sequence[Site], n_bytes: int) -> None:
    if not schedule.n_left:
        return
    size = disk_bytes(n_bytes)
    where = next((s.name for s in sites if s.device in schedule.n_left), "a drive")
    lacking = "; ".join(
        f"{', '.join(s.name for s in sites if s.device == pool)}: {format_size(n * size)} more are needed" for pool, n in schedule.n_left.items()
    )
    raise NoSpaceError(
        f"the plan cannot be reached within the room that is free, {where} being full: {lacking}, beside the reserve; "
        "make room, lower --reserve, or give a --limit; nothing was changed"
    )
