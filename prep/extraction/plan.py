"""plan: what an extraction would write and where, whether there is room, and how long reading takes.

Of the checkpoint only the headers are read, and for a second some of its bytes, to time them. Nothing is written anywhere.
"""

import dataclasses
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from layout.checkpoint import Checkpoint, open_checkpoint
from layout.direct import Extent
from layout.drives import default_reserve, free_bytes, shares_device
from layout.holes import find_holes
from layout.sizes import counted, format_rate, format_size, word_for
from manifests.errors import NoSpaceError, UsageError
from manifests.geometry import Geometry
from manifests.manifest import BASE_TIERS
from prep.extraction.base_split import Candidate, plan_base
from prep.extraction.small_files import small_files
from prep.extraction.spine import spine_bytes
from prep.measuring.measure import read_for
from prep.requests import FILE_SYSTEM_BLOCK, DriveRequest, check_requests, disk_bytes

# As many reads at a time as extraction has workers.
_DEPTH = 4
_N_PLACES = 4096
_MOST_HOLES = 5
# Two lines of hash lists and one of the journal for each expert; the manifests.
_LIST_BYTES_PER_EXPERT = 192
_MANIFEST_BYTES = 1 << 20


class _FileSystem(NamedTuple):
    free_bytes: int
    reserve_bytes: int

    @property
    def usable_bytes(self) -> int:
        return max(0, self.free_bytes - self.reserve_bytes)


@dataclass(frozen=True, slots=True)
class PlannedDirectory:
    """What one drive would get of the base.

    n_bytes         that its files take, in whole blocks of the file system
    limit_bytes     the most that they may take, None for no limit
    file_system     number of the file system; directories with the same number share its room
    free_bytes      there now, and reserve_bytes of it are kept free
    left_bytes      what stays beyond the reserve once all directories on this file system are filled; below zero is what is missing
    is_with_source  the checkpoint lies on the same device: reads and writes compete
    """

    tier: str
    directory: Path
    n_files: int
    n_bytes: int
    limit_bytes: int | None
    file_system: int
    free_bytes: int
    reserve_bytes: int
    left_bytes: int
    is_with_source: bool

    @property
    def beyond_limit_bytes(self) -> int:
        """What its files take beyond the limit."""
        return 0 if self.limit_bytes is None else max(0, self.n_bytes - self.limit_bytes)

    @property
    def fits(self) -> bool:
        return self.left_bytes >= 0 and not self.beyond_limit_bytes


@dataclass(frozen=True, slots=True)
class ReadRate:
    """What a short measurement read; `mode` says how."""

    bytes_per_s: float
    n_bytes: int
    seconds: float
    mode: str


@dataclass(frozen=True, slots=True)
class ExtractionPlan:
    """What an extraction would do. Sizes are exact but for `list_bytes`, which bounds the hash lists, the journal and the manifest.

    spine_bytes         of the GGUF file, header and padding included
    spine_source_bytes  of the tensors that it is made of, in the checkpoint
    holes               a message for each shard that has a hole; extraction refuses them
    read_rate           None if there are holes: reading them measures nothing
    reason              why it does not fit; empty if it does
    """

    checkpoint: Path
    architecture: str
    geometry: Geometry
    n_shards: int
    n_tensors: int
    record_bytes: int
    spine_bytes: int
    spine_source_bytes: int
    n_small_files: int
    small_file_bytes: int
    n_vision_tensors: int
    vision_bytes: int
    drives: tuple[PlannedDirectory, ...]
    holes: tuple[str, ...]
    read_rate: ReadRate | None
    reason: str
    remarks: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.reason

    @property
    def n_expert_files(self) -> int:
        return self.geometry.n_routed_experts

    @property
    def expert_bytes(self) -> int:
        return self.n_expert_files * self.record_bytes

    @property
    def list_bytes(self) -> int:
        return _MANIFEST_BYTES + self.n_expert_files * _LIST_BYTES_PER_EXPERT

    @property
    def out_bytes(self) -> int:
        """What the output directory takes beside the experts."""
        small = self.small_file_bytes + self.n_small_files * FILE_SYSTEM_BLOCK
        return self.spine_bytes + small + self.list_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that lies on the drives at any time beside the checkpoint: nothing is written twice, so it is all that stays."""
        return self.n_expert_files * disk_bytes(self.record_bytes) + self.out_bytes

    @property
    def read_bytes(self) -> int:
        return self.expert_bytes + self.spine_source_bytes

    @property
    def read_seconds(self) -> float | None:
        return None if self.read_rate is None else self.read_bytes / self.read_rate.bytes_per_s

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values: all fields, and what follows from them."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        derived = ("fits", "n_expert_files", "expert_bytes", "list_bytes", "out_bytes", "peak_bytes", "read_bytes", "read_seconds")
        drives = [dict(dataclasses.asdict(drive), directory=str(drive.directory), fits=drive.fits) for drive in self.drives]
        rate = None if self.read_rate is None else dataclasses.asdict(self.read_rate)
        values |= {"checkpoint": str(self.checkpoint), "geometry": self.geometry.to_dict(), "drives": drives, "read_rate": rate}
        return values | {name: getattr(self, name) for name in derived}

    def lines(self) -> list[str]:
        """Return the plan for people, a line for each fact."""
        return [
            f"checkpoint {self.checkpoint}: {self.architecture}, {self.n_tensors:,} tensors in {counted(self.n_shards, 'shard')}",
            *(f"remark     {remark}" for remark in self.remarks),
            f"model      {_in_words(self.geometry)}",
            f"experts    {_exactly(self.expert_bytes)}: {self.n_expert_files:,} files of {self.record_bytes:,} bytes",
            f"spine      {_exactly(self.spine_bytes)}",
            f"tokenizer  {_exactly(self.small_file_bytes)}: {counted(self.n_small_files, 'small file')}",
            f"left out   {_exactly(self.vision_bytes)}: {counted(self.n_vision_tensors, 'vision tensor')} (images are not supported)",
            *(_drive_line(drive, self._sharing(drive)) for drive in self.drives),
            *self._room_lines(),
            *self._time_lines(),
        ]

    def _sharing(self, drive: PlannedDirectory) -> list[PlannedDirectory]:
        """Return the drives on a drive's file system, itself among them, in their order."""
        return [other for other in self.drives if other.file_system == drive.file_system]

    def _room_lines(self) -> list[str]:
        peak = f"room       {_exactly(self.peak_bytes)} at the peak, beside the checkpoint"
        if not self.drives:
            return [peak + ", all in OUT; name drives with --tier to see whether they have it"]
        roomy = [drive for drive in self.drives if drive.left_bytes >= self.out_bytes]
        homes = dict.fromkeys(" and ".join(str(other.directory) for other in self._sharing(drive)) for drive in roomy)
        home = f"that of {' or '.join(homes)} has room for it too" if homes else "none has room for it too"
        return [
            peak,
            f"OUT        {format_size(self.out_bytes)} of that, for spine, tokenizer and lists, not in a tier; of the file systems, {home}",
            f"fits       {'yes' if self.fits else f'no: {self.reason}'}",
        ]

    def _time_lines(self) -> list[str]:
        reading = f"reading    {format_size(self.read_bytes)}"
        if self.read_rate is None or self.read_seconds is None:
            more = [f"           ... and {counted(len(self.holes) - _MOST_HOLES, 'more shard')}"] if len(self.holes) > _MOST_HOLES else []
            holes = [f"           {hole}" for hole in self.holes[:_MOST_HOLES]]
            return [f"{reading}; time not measured: the checkpoint is sparse, and extraction would refuse it:", *holes, *more]
        measured = f"{format_rate(self.read_rate.bytes_per_s)}, measured in {self.read_rate.seconds:.1f} s ({self.read_rate.mode})"
        return [f"{reading}, at least {_duration(self.read_seconds)} at {measured}; writing is not measured"]


def make_plan(checkpoint_dir: Path, requests: Sequence[DriveRequest], *, reserve_bytes: int | None, seconds: float = 1.0) -> ExtractionPlan:
    """Plan the extraction of a checkpoint onto drives of tiers A and B; without drives only totals are planned.

    reserve_bytes  to be left free on each file system; None for the default of each
    seconds        how long to read for the rate

    A plan that does not fit is returned, too, with the reason in it. Raises BadInputError with every fault of the checkpoint, UsageError if
    a directory is not there or a tier is not one that extraction fills.
    """
    _check_drives(requests)
    checkpoint = open_checkpoint(checkpoint_dir, most_faults=sys.maxsize)
    paths = small_files(checkpoint_dir)
    drives, reason = _plan_drives(checkpoint, requests, reserve_bytes) if requests else ([], "")
    holes = find_holes(checkpoint)
    vision = checkpoint.vision_tensors
    return ExtractionPlan(
        checkpoint=checkpoint_dir,
        architecture=checkpoint.facts.architecture,
        geometry=checkpoint.geometry,
        n_shards=len(checkpoint.shards),
        n_tensors=len(checkpoint.tensors),
        record_bytes=checkpoint.record.n_bytes,
        spine_bytes=spine_bytes(checkpoint, expert_directories=[str(r.directory) for r in requests] or ["experts"]),
        spine_source_bytes=sum(checkpoint.tensors[s.name].n_bytes for t in checkpoint.spine_tensors() for s in t.sources),
        n_small_files=len(paths),
        small_file_bytes=sum(path.stat().st_size for path in paths),
        n_vision_tensors=len(vision),
        vision_bytes=sum(checkpoint.tensors[name].n_bytes for name in vision),
        drives=tuple(drives),
        holes=tuple(holes),
        read_rate=None if holes else _measure(checkpoint, seconds),
        reason=reason,
        remarks=tuple(checkpoint.facts.remarks),
    )


def _check_drives(requests: Sequence[DriveRequest]) -> None:
    for request in requests:
        if request.tier not in BASE_TIERS:
            raise UsageError(
                f"--tier {request.tier}={request.directory}: extraction fills tiers A and B; "
                "further copies, on C and D, are made afterwards by kprep place"
            )
    if requests:
        check_requests(requests)


def _plan_drives(checkpoint: Checkpoint, requests: Sequence[DriveRequest], reserve_bytes: int | None) -> tuple[list[PlannedDirectory], str]:
    """Split the base over the drives; if it does not fit, as if there were room, with the reason."""
    n_bytes = disk_bytes(checkpoint.record.n_bytes)
    numbers, file_systems = _file_systems(requests, reserve_bytes)
    n_files, reason = _split_base(checkpoint.geometry, requests, numbers, [f.usable_bytes // n_bytes for f in file_systems], n_bytes)
    left = [f.free_bytes - f.reserve_bytes for f in file_systems]
    for number, n in zip(numbers, n_files, strict=True):
        left[number] -= n * n_bytes
    drives = [
        PlannedDirectory(
            tier=request.tier,
            directory=request.directory,
            n_files=n,
            n_bytes=n * n_bytes,
            limit_bytes=request.limit_bytes,
            file_system=number,
            free_bytes=file_systems[number].free_bytes,
            reserve_bytes=file_systems[number].reserve_bytes,
            left_bytes=left[number],
            is_with_source=shares_device(request.directory, checkpoint.directory),
        )
        for request, number, n in zip(requests, numbers, n_files, strict=True)
    ]
    return drives, reason


def _file_systems(requests: Sequence[DriveRequest], reserve_bytes: int | None) -> tuple[list[int], list[_FileSystem]]:
    """Return for each request the number of its file system, and the file systems by number."""
    number_of: dict[int, int] = {}
    numbers = [number_of.setdefault(os.stat(request.directory).st_dev, len(number_of)) for request in requests]
    directories = [requests[numbers.index(number)].directory for number in range(len(number_of))]
    return numbers, [_FileSystem(free_bytes(d), default_reserve(d) if reserve_bytes is None else reserve_bytes) for d in directories]


def _split_base(g: Geometry, requests: Sequence[DriveRequest], numbers: list[int], room: list[int], n_bytes: int) -> tuple[list[int], str]:
    """Return how many experts each drive gets. Where they do not fit: as if there were room, and the reason."""
    nothing = np.zeros((g.n_layers, g.n_experts), np.bool_)
    limits = [None if request.limit_bytes is None else request.limit_bytes // n_bytes for request in requests]
    candidates = [Candidate(r.tier, 1.0, number, limit, nothing) for r, number, limit in zip(requests, numbers, limits, strict=True)]
    try:
        return [int(held.sum()) for held in plan_base(g, candidates, pool_room=room)], ""
    except NoSpaceError as error:
        unlimited = [dataclasses.replace(candidate, limit=None) for candidate in candidates]
        return [int(held.sum()) for held in plan_base(g, unlimited, pool_room=[g.n_routed_experts] * len(room))], str(error)


def _measure(checkpoint: Checkpoint, seconds: float) -> ReadRate:
    """Read from the shards for a time, as many records at once as extraction does."""
    extents = _random_extents(checkpoint, random.Random(0))
    completions, elapsed = read_for(extents, checkpoint.read_mode, _DEPTH, seconds, random.Random(1))
    n_bytes = len(completions) * checkpoint.record.n_bytes
    return ReadRate(n_bytes / elapsed, n_bytes, elapsed, str(checkpoint.read_mode))


def _random_extents(checkpoint: Checkpoint, rng: random.Random) -> list[Extent]:
    """Return ranges of the size of a record at random places of the shards."""
    n_bytes = checkpoint.record.n_bytes
    large = [shard for shard in checkpoint.shards if shard.n_bytes >= n_bytes]
    chosen = rng.choices(large, weights=[shard.n_bytes for shard in large], k=_N_PLACES)
    return [Extent(checkpoint.directory / shard.name, rng.randrange(shard.n_bytes - n_bytes + 1), n_bytes) for shard in chosen]


def _in_words(g: Geometry) -> str:
    n_full = len(g.full_attention_layers)
    indexer = f"; indexer of {g.indexer.n_heads} heads of {g.indexer.head_dim}, top {g.indexer.top_k}" if g.indexer else ""
    return (
        f"{g.n_layers} layers, {n_full} with full attention and {g.n_layers - n_full} with KDA; {g.n_dense_layers} dense, "
        f"{len(g.moe_layers)} of {g.n_experts} experts, {g.n_experts_per_token} for each token; "
        f"hidden {g.hidden_size}, latent {g.latent_size}, expert {g.expert_intermediate_size}, vocabulary {g.vocab_size}{indexer}"
    )


def _drive_line(drive: PlannedDirectory, sharing: Sequence[PlannedDirectory]) -> str:
    """Return a drive's line. Room that several share is told with the first of them, and what is missing of it, too."""
    first, *others = sharing
    faults = []
    if drive is first and drive.left_bytes < 0:
        faults.append(f"{format_size(-drive.left_bytes)} are missing")
    if drive.limit_bytes is not None and drive.beyond_limit_bytes:
        faults.append(f"{format_size(drive.beyond_limit_bytes)} beyond its limit of {format_size(drive.limit_bytes)}")
    unfit = f"does not fit: {' and '.join(faults)}" if faults else ""
    if drive is first:
        shared = f", shared with {', '.join(str(other.directory) for other in others)}" if others else ""
        room = f"{format_size(drive.free_bytes)} free{shared}, {format_size(drive.reserve_bytes)} in reserve: {unfit or 'fits'}"
    else:
        room = f"no room of its own: on the file system of {first.directory}, counted there{': ' if unfit else ''}{unfit}"
    source = "; on the checkpoint's device" if drive.is_with_source else ""
    return f"tier {drive.tier}     {drive.directory}: {drive.n_files:,} {word_for(drive.n_files, 'file')}, {_exactly(drive.n_bytes)}; {room}{source}"


def _exactly(n_bytes: int) -> str:
    return f"{n_bytes:,} bytes ({format_size(n_bytes)})"


def _duration(seconds: float) -> str:
    """Return a time as people say it: `2 h 31 min`, `4 min`, `12 s`."""
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min" if seconds >= 120 else f"{max(1, round(seconds))} s"
