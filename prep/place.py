"""place: carry a plan out. Copies are proved before they count, and the new manifest is published last.

The given drives are the complete new set. Nothing is deleted: files that the plan no longer names stay where they are.
"""

import dataclasses
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from layout.direct import aligned_buffer, probe_directory, span_bytes
from layout.drives import default_reserve, free_bytes
from layout.hash_lists import HASH_LIST_NAME
from layout.parallel import run_parallel
from layout.prepared import Copies, Prepared, find_copies
from layout.record import parse_expert_file_name
from layout.writer import sync_directory, write_bytes
from manifests.manifest import Manifest, Profile
from manifests.store import next_generation, write_manifest
from prep.copying import Sources, copy_expert
from prep.drive_facts import manifest_drive
from prep.measure import measure_drive
from prep.placement_plan import Candidate, plan_placement
from prep.requests import DriveRequest, check_requests, disk_bytes

N_WORKERS = 4
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class PlannedDrive:
    """What one drive shall hold, and what of it is new there, to be copied or proved; both bool [n_layers, n_experts]."""

    request: DriveRequest
    profile: Profile | None
    holds: np.ndarray
    to_copy: np.ndarray


@dataclass(frozen=True, slots=True)
class Placement:
    """A decided placement. `present` are the copies that can be read now; `remarks` are for the user."""

    drives: tuple[PlannedDrive, ...]
    present: Copies
    remarks: tuple[str, ...]

    @property
    def n_copies_to_make(self) -> int:
        return sum(int(drive.to_copy.sum()) for drive in self.drives)


def decide(prepared: Prepared, requests: Sequence[DriveRequest], *, reserve_bytes: int | None, measure_seconds: float | None) -> Placement:
    """Plan a placement over the requested drives, measuring them first if measure_seconds is given.

    The directories must exist. Raises NoSpaceError if tiers A and B cannot hold all experts with the reserve kept.
    """
    check_requests(requests)
    present = find_copies(prepared)
    n_bytes = prepared.record.n_bytes
    profiles = [measure_drive(r.directory, record_bytes=n_bytes, seconds=measure_seconds) if measure_seconds else None for r in requests]
    known = {_same(path): number for number, path in enumerate(prepared.drive_directories)}
    candidates, here, pools = [], list[np.ndarray](), dict[int, int]()
    for request, profile in zip(requests, profiles, strict=True):
        number = known.get(_same(request.directory))
        here.append(present.holds[number] if number is not None else np.zeros_like(present.holds[0]))
        pool = pools.setdefault(os.stat(request.directory).st_dev, len(pools))
        weight = profile.read_bytes_per_s if profile is not None else 1.0
        limit = None if request.limit_bytes is None else request.limit_bytes // disk_bytes(n_bytes)
        candidates.append(Candidate(request.tier, weight, pool, limit, here[-1] | _lying(prepared, request.directory)))
    room = [_pool_room(n_bytes, pool, requests, candidates, reserve_bytes) for pool in range(len(pools))]
    holds = plan_placement(prepared.geometry, candidates, pool_room=room)
    drives = tuple(
        PlannedDrive(request, profile, planned, planned & ~held)
        for request, profile, planned, held in zip(requests, profiles, holds, here, strict=True)
    )
    return Placement(drives, present, tuple(present.faults))


def _lying(prepared: Prepared, directory: Path) -> np.ndarray:
    """Return which expert files of the right size are in a directory, named by the manifest or not: they need no more room, only proof."""
    found = np.zeros_like(prepared.hashes.is_known)
    with os.scandir(directory) as entries:
        for entry in entries:
            place = parse_expert_file_name(entry.name)
            if place is None or not (place[0] < len(found) and place[1] < found.shape[1] and prepared.hashes.is_known[place]):
                continue
            found[place] = entry.stat().st_size == prepared.record.n_bytes
    return found


def _same(directory: Path) -> Path:
    return directory.resolve()


def _pool_room(n_bytes: int, pool: int, requests: Sequence[DriveRequest], candidates: Sequence[Candidate], reserve_bytes: int | None) -> int:
    """Return how many experts a file system can hold: what is free beyond the reserve, and what lies there already."""
    members = [n for n, candidate in enumerate(candidates) if candidate.pool == pool]
    directory = requests[members[0]].directory
    reserve = default_reserve(directory) if reserve_bytes is None else reserve_bytes
    n_free = max(0, free_bytes(directory) - reserve) // disk_bytes(n_bytes)
    return n_free + sum(int(candidates[n].present.sum()) for n in members)


def carry_out(prepared: Prepared, placement: Placement, *, on_progress: Progress) -> Manifest:
    """Make the copies, each proved by its hash after an uncached read, write the drives' hash lists and publish the new manifest.

    Interrupted at any instant, the former manifest stays true. A file that is already there with the right bytes is taken as it is.
    """
    n_bytes = prepared.record.n_bytes
    done, total = 0, placement.n_copies_to_make * n_bytes
    sources = Sources(prepared, placement.present.holds)
    for drive in placement.drives:
        for _ in _copy_to(sources, drive):
            done += n_bytes
            on_progress("copies", done, total)
        sync_directory(drive.request.directory)
        write_bytes(drive.request.directory / HASH_LIST_NAME, prepared.hashes.to_text(drive.holds).encode())
    manifest = dataclasses.replace(
        prepared.manifest,
        generation=next_generation(prepared.path),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        drives=tuple(manifest_drive(d.request.tier, d.request.directory, prepared.directory, d.profile, d.holds) for d in placement.drives),
    )
    write_manifest(prepared.path, manifest)
    return manifest


def _copy_to(sources: Sources, drive: PlannedDrive) -> Iterator[None]:
    directory, mode = drive.request.directory, probe_directory(drive.request.directory)
    alignment = max(mode.alignment, sources.alignment)

    def make_worker() -> Callable[[list[int]], None]:
        buffer = aligned_buffer(span_bytes(sources.prepared.record.n_bytes, alignment))
        return lambda place: copy_expert(sources, place[0], place[1], directory=directory, mode=mode, buffer=buffer)

    return run_parallel(np.argwhere(drive.to_copy).tolist(), make_worker, n_workers=N_WORKERS)
