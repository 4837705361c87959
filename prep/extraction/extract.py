"""extract: from a checkpoint's shards to a spine, one file per expert, the tokenizer's files, hashes and a manifest.

The experts' bytes pass through unchanged, each written once, straight to the drive where it will live. Everything appears under a partial name
first, the journal vouches for what is durable, and the manifest comes last: without it nothing counts. Killed at any instant, the same command
goes on and ends with the same bytes.
"""

import dataclasses
import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from layout.checkpoint import Checkpoint, read_json
from layout.config import end_ids_of
from layout.direct import Extent, aligned_buffer, probe_directory, read_extent, round_up, span_bytes
from layout.gather import gather_record
from layout.hash_lists import HASH_LIST_NAME, xxh3_128_hex, xxh3_128_of_file
from layout.holes import file_fault, find_holes, size_fault
from layout.parallel import run_parallel
from layout.record import LAYOUT_NAME, NIBBLE_ORDER, SCALE_KIND, expert_file_name, parse_expert_file_name
from layout.sizes import counted
from layout.tensors import expert_tensor_names
from layout.writer import sync_directory, write_bytes, write_record
from manifests.errors import BadInputError, DamagedDataError, UsageError, listed
from manifests.load import load_manifest
from manifests.manifest import BASE_TIERS, CarriedFile, HashList, Manifest, Record, Source, SourceFile, Spine, Tokenizer
from manifests.ranges import format_ranges
from manifests.store import next_generation, write_manifest
from prep.drive_facts import drive_text, manifest_drive
from prep.extraction.journal import JOURNAL_NAME, Journal, JournalDrive, SpineEntry
from prep.extraction.release import Releaser
from prep.extraction.room import Room
from prep.extraction.small_files import small_files
from prep.extraction.spine import write_spine
from prep.requests import DriveRequest, check_requests

MANIFEST_NAME = "manifest.yaml"
SPINE_NAME = "spine.gguf"
EXPERTS_DIRECTORY = "experts"
TOKENIZER_DIRECTORY = "tokenizer"
WORKERS_PER_DRIVE = 4
# The journal is synced after this many experts or seconds; a kill costs at most so much work.
JOURNAL_EVERY = 64
BATCH_SECONDS = 2.0
Progress = Callable[[str, int, int], None]
Remark = Callable[[str], None]
Place = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to extract. Without drives, all experts go to OUT/experts as tier A.

    reserve_bytes       room to leave free on each file system; None for the default
    is_releasing        remove each shard once its contents are proved on the drives
    is_journal_trusted  count what the journal names without reading it again
    is_adopting         files that are there already are compared with the checkpoint and kept
    journal_every       experts between two syncs of the journal
    """

    drives: Sequence[DriveRequest] = ()
    reserve_bytes: int | None = None
    is_releasing: bool = False
    is_journal_trusted: bool = False
    is_adopting: bool = False
    journal_every: int = JOURNAL_EVERY


def extract(checkpoint: Checkpoint, out: Path, settings: Settings, *, on_progress: Progress, on_remark: Remark) -> Manifest:
    """Write everything that a checkpoint becomes and return the manifest, which is written last.

    A finished output of the same checkpoint is returned, its spine and small files restored if they are damaged. An unfinished one is completed.
    Raises BadInputError on a directory that holds anything else, NoSpaceError where the work cannot end (or go on) with the reserve kept.
    """
    if (finished := finished_manifest(checkpoint, out)) is not None:
        _check_still_there(finished, out, settings)
        return _restored(checkpoint, out, finished, on_progress, on_remark)
    if holes := find_holes(checkpoint):
        raise BadInputError(listed(holes, f"{checkpoint.directory}: holes are no data; the download is incomplete:"))
    end_ids = end_ids_of(checkpoint.config, read_json(checkpoint.directory / "generation_config.json", default={}))
    if strays := [i for i in end_ids if not 0 <= i < checkpoint.geometry.vocab_size]:
        most = checkpoint.geometry.vocab_size - 1
        raise BadInputError(
            f"{checkpoint.directory}: eos_token_id in generation_config.json or config.json is token {strays[0]}, expected 0 to {most}"
        )
    carried = small_files(checkpoint.directory)
    _check_new_or_ours(out)
    requests = _requests(settings, out)
    if not settings.is_adopting and not (out / JOURNAL_NAME).exists():
        _check_vacant(settings.drives)
    room = Room(checkpoint, out, requests, settings.reserve_bytes)
    # What cannot fit is refused before anything appears.
    holds = None if (out / JOURNAL_NAME).exists() else room.plan_base(is_releasing=settings.is_releasing)
    out.mkdir(parents=True, exist_ok=True)
    journal = Journal(out, checkpoint.digest, checkpoint.geometry)
    try:
        work = _Extraction(checkpoint, out, settings, requests, room, holds, journal, on_progress, on_remark)
        work.run(carried)
        manifest = work.publish(end_ids)
        journal.remove()
        work.releaser.forget()
    finally:
        journal.close()
    return manifest


def finished_manifest(checkpoint: Checkpoint, out: Path) -> Manifest | None:
    """Return the manifest of a finished output of this checkpoint, None if there is none. Raises BadInputError if it is another's."""
    if not (out / MANIFEST_NAME).exists():
        return None
    manifest = load_manifest(out / MANIFEST_NAME)
    if manifest.source.digest != checkpoint.digest:
        raise BadInputError(f"{out}: holds the output of another checkpoint ({manifest.source.digest}); name a new or empty directory")
    return manifest


def _check_still_there(manifest: Manifest, out: Path, settings: Settings) -> None:
    """Raise UsageError if drives are asked for that a finished output does not have, or shards are to go that nothing proves any more."""
    if settings.is_releasing:
        raise UsageError(f"--release-shards: {out} is finished; kprep verify-hashes {out} proves it, then remove the shards by hand")
    found = [(d.tier, Manifest.drive_directory(d, out / MANIFEST_NAME).resolve()) for d in manifest.drives]
    if settings.drives and [(r.tier, r.directory.resolve()) for r in settings.drives] != found:
        raise UsageError(f"{out}: is extracted already, onto other drives; kprep place {out / MANIFEST_NAME} with these --tier flags moves it")


def _restored(checkpoint: Checkpoint, out: Path, manifest: Manifest, on_progress: Progress, on_remark: Remark) -> Manifest:
    """Write a finished output's spine and small files anew where they are not what the manifest says, and return the manifest that is true then."""
    carried = _carry_files(small_files(checkpoint.directory), out / manifest.tokenizer.directory)
    spine, path = manifest.spine, out / manifest.spine.path
    if not _is_spine(path, spine):
        on_remark(f"{path}: not what the manifest says; it is written anew")
        directories = [drive.directory for drive in manifest.drives]
        made = write_spine(checkpoint, path, expert_directories=directories, on_progress=on_progress)
        spine = Spine(manifest.spine.path, made.n_bytes, made.xxh3_128)
    tokenizer = Tokenizer(manifest.tokenizer.directory, carried)
    if (spine, tokenizer) == (manifest.spine, manifest.tokenizer):
        return manifest
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    manifest = dataclasses.replace(manifest, spine=spine, tokenizer=tokenizer, generation=next_generation(out / MANIFEST_NAME), created=now)
    write_manifest(out / MANIFEST_NAME, manifest)
    return manifest


def _is_spine(path: Path, spine: Spine) -> bool:
    try:
        return file_fault(path, spine.n_bytes) is None and xxh3_128_of_file(path, spine.n_bytes) == spine.xxh3_128
    except (OSError, DamagedDataError):
        return False


def is_finished_and_gone(checkpoint: Path, out: Path) -> bool:
    """Return whether `out` is the finished output of a checkpoint, by its config.json, whose shards with experts are no longer all there."""
    config = checkpoint / "config.json"
    if not (out / MANIFEST_NAME).exists() or not config.is_file():
        return False
    manifest = load_manifest(out / MANIFEST_NAME)
    is_ours = CarriedFile("config.json", config.stat().st_size, xxh3_128_hex(config.read_bytes())) in manifest.tokenizer.files
    return is_ours and any(not (checkpoint / file.name).exists() for file in manifest.source.files if file.expert_layers)


def _check_new_or_ours(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise BadInputError(f"{out}: is no directory; name a new or empty one")
    if out.is_dir() and any(out.iterdir()) and not (out / JOURNAL_NAME).exists():
        raise BadInputError(f"{out}: is not empty and holds no output of this checkpoint; name a new or empty directory")


def _check_vacant(requests: Sequence[DriveRequest]) -> None:
    """Raise UsageError for a directory with experts' files: they may be the only ones of another model, and have the names of ours."""
    for request in requests:
        names = sorted(path.name for path in request.directory.iterdir() if parse_expert_file_name(path.name))
        files = counted(len(names), "file")
        if names:
            raise UsageError(
                f"--tier {request.tier}={request.directory}: holds {files} of experts already, the first {names[0]}, which would "
                "be written over; name an empty directory, or remove them if no model needs them (kprep adopt takes over those of this model)"
            )


def _requests(settings: Settings, out: Path) -> list[DriveRequest]:
    if not settings.drives:
        return [DriveRequest("A", out / EXPERTS_DIRECTORY)]
    check_requests(settings.drives, home=out)
    for request in settings.drives:
        if request.tier not in BASE_TIERS:
            raise UsageError(f"--tier {request.tier}={request.directory}: extract writes tiers A and B only; kprep place adds copies on C and D")
    return list(settings.drives)


class _Extraction:
    """One run over a locked journal."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        out: Path,
        settings: Settings,
        requests: list[DriveRequest],
        room: Room,
        holds: list[np.ndarray] | None,
        journal: Journal,
        on_progress: Progress,
        on_remark: Remark,
    ) -> None:
        self.checkpoint, self.out, self.settings, self.journal = checkpoint, out, settings, journal
        self.on_progress, self.on_remark = on_progress, on_remark
        self.room = room
        if not settings.drives:
            (out / EXPERTS_DIRECTORY).mkdir(exist_ok=True)
        if not journal.done.drives:
            holds = holds or room.plan_base(is_releasing=settings.is_releasing)
            journal.add_drives(JournalDrive(r.tier, drive_text(r.directory, out), h) for r, h in zip(requests, holds, strict=True))
        self._check_same_drives(requests)
        self.directories = [out / drive.directory for drive in journal.done.drives]
        self.modes = [probe_directory(directory) for directory in self.directories]
        g = checkpoint.geometry
        self.home = np.full((g.n_layers, g.n_experts), -1, np.int16)
        for number, drive in enumerate(journal.done.drives):
            self.home[drive.holds] = number
        self.releaser = Releaser(
            checkpoint, out, journal, self.record_path, spine_path=out / SPINE_NAME, is_releasing=settings.is_releasing, on_remark=on_remark
        )

    def _check_same_drives(self, requests: list[DriveRequest]) -> None:
        found = [(d.tier, (self.out / d.directory).resolve()) for d in self.journal.done.drives]
        if found != [(r.tier, r.directory.resolve()) for r in requests]:
            began = " ".join(f"--tier {tier}={directory}" for tier, directory in found)
            raise UsageError(f"{self.out}: this extraction began with {began}; go on with the same, or remove the output and start again")

    def _check_mounted(self) -> None:
        """Raise UsageError if nothing is left of what a drive had: below a mount point that is empty lies another file system."""
        for number, directory in enumerate(self.directories if self.settings.drives else ()):
            known = np.argwhere(self.journal.done.hashes.is_known & (self.home == number)).tolist()
            if known and not any(self.record_path(*place).exists() for place in known):
                raise UsageError(
                    f"{directory}: none of the {counted(len(known), 'expert')} that {JOURNAL_NAME} names is there: mount the drive; "
                    "if they were removed, remove the output and start again"
                )

    def record_path(self, layer: int, expert: int) -> Path:
        return self.directories[self.home[layer, expert]] / expert_file_name(layer, expert)

    def run(self, carried: list[Path]) -> None:
        """Do what is left to do."""
        self._check_mounted()
        done = self._present_experts()
        places = [(layer, expert) for layer in self.checkpoint.geometry.moe_layers for expert in range(self.checkpoint.geometry.n_experts)]
        missing = [place for place in places if not done[place]]
        is_spine_there = self._has_spine()
        self._check_sources(missing, needs_spine=not is_spine_there)
        self.room.check(missing, self.home, needs_spine=not is_spine_there, is_releasing=self.settings.is_releasing)
        if self.settings.is_adopting:
            missing = self._adopt(missing)
        self.journal.add_carried(_carry_files(carried, self.out / TOKENIZER_DIRECTORY))
        if not is_spine_there:
            self._write_spine()
        self.releaser.begin(missing)
        self._write_experts(missing)

    def _check_sources(self, missing: list[Place], *, needs_spine: bool) -> None:
        """Raise DamagedDataError if something must be read again from a shard that was released."""
        names = {expert_tensor_names(*place)[0] for place in missing}
        if needs_spine:
            names |= {source.name for tensor in self.checkpoint.spine_tensors() for source in tensor.sources}
        shards = {self.checkpoint.shards[self.checkpoint.tensors[name].shard].name for name in names}
        gone = sorted(shards & set(self.journal.done.released))
        if gone:
            what = f"{counted(len(missing), 'expert')}{' and the spine' if needs_spine else ''}"
            raise DamagedDataError(listed(gone, f"{self.out}: {what} must be read again; fetch these shards:"))

    def _write_spine(self) -> None:
        # The spine goes to the output's own file system, whose reserve counts as well.
        directories = [drive.directory for drive in self.journal.done.drives]
        with self.room.taking(self.out, self.room.spine_bytes):
            spine = write_spine(self.checkpoint, self.out / SPINE_NAME, expert_directories=directories, on_progress=self.on_progress)
        self.journal.add_spine(SpineEntry(spine.n_bytes, spine.xxh3_128, spine.tensors))

    def _has_spine(self) -> bool:
        entry, path = self.journal.done.spine, self.out / SPINE_NAME
        if entry is None or file_fault(path, entry.n_bytes) is not None:
            return False
        if self.settings.is_journal_trusted:
            return True
        return xxh3_128_of_file(path, entry.n_bytes) == entry.xxh3_128

    def _present_experts(self) -> np.ndarray:
        """Return which experts are there, bool [n_layers, n_experts]: in the journal, of the right size, without a hole, of the right hash."""
        known = self.journal.done.hashes.is_known.copy()
        n_bytes, total = self.checkpoint.record.n_bytes, int(known.sum())
        for n, (place, is_good) in enumerate(self._checked(np.argwhere(known).tolist(), self._is_intact), start=1):
            known[place] = is_good
            self.on_progress("resume: proving what is there", n * n_bytes, total * n_bytes)
        return known

    def _is_intact(self, place: Place, buffer: memoryview, _: memoryview) -> bool:
        if file_fault(self.record_path(*place), self.checkpoint.record.n_bytes) is not None:
            return False
        return self.settings.is_journal_trusted or xxh3_128_hex(self._read_back(place, buffer)) == self.journal.done.hashes.get(*place)

    def _read_back(self, place: Place, buffer: memoryview) -> memoryview:
        extent = Extent(self.record_path(*place), 0, self.checkpoint.record.n_bytes)
        return read_extent(extent, buffer, self.modes[self.home[place]])

    def _checked(self, places: Iterable[Sequence[int]], test: Callable[[Place, memoryview, memoryview], bool]) -> Iterator[tuple[Place, bool]]:
        """Apply a test to many experts in parallel; it is given two buffers that a record fits into wherever it begins."""
        alignment = max(self.checkpoint.read_mode.alignment, *(mode.alignment for mode in self.modes))

        def make_worker() -> Callable[[Sequence[int]], tuple[Place, bool]]:
            buffers = [aligned_buffer(span_bytes(self.checkpoint.record.n_bytes, alignment)) for _ in range(2)]

            def work(place: Sequence[int]) -> tuple[Place, bool]:
                layer, expert = place
                return (layer, expert), test((layer, expert), *buffers)

            return work

        return run_parallel(places, make_worker, n_workers=WORKERS_PER_DRIVE * len(self.directories))

    def _adopt(self, missing: list[Place]) -> list[Place]:
        """Take over the files that are there, if all of them hold the checkpoint's bytes; return what is still missing.

        Raises DamagedDataError naming those that differ; nothing is taken over then, and no file is touched.
        """
        found = [place for place in missing if self.record_path(*place).exists()]
        hashes, wrong, n_bytes = [], [], self.checkpoint.record.n_bytes

        def test(place: Place, incoming: memoryview, outgoing: memoryview) -> bool:
            gather_record(self.checkpoint, *place, incoming=incoming, outgoing=outgoing)
            path = self.record_path(*place)
            is_same = size_fault(path, n_bytes) is None and self._read_back(place, incoming) == outgoing[:n_bytes]
            if is_same:
                hashes.append((*place, xxh3_128_hex(outgoing[:n_bytes])))
            return is_same

        for n, (place, is_same) in enumerate(self._checked(found, test), start=1):
            self.on_progress("adopt: comparing with the checkpoint", n * n_bytes, len(found) * n_bytes)
            if not is_same:
                wrong.append(f"{self.record_path(*place)}: does not hold the checkpoint's bytes of layer {place[0]} expert {place[1]}")
        if wrong:
            what = f"not this checkpoint's: {len(wrong)} of {counted(len(found), 'file')}"
            raise DamagedDataError(listed(sorted(wrong), f"{what}; move away what is wrong, then run the same command again:"))
        self.journal.add_experts(sorted(hashes))
        self.on_remark(f"adopted {counted(len(found), 'expert file')} unchanged; still to be extracted: {len(missing) - len(found)}")
        return [place for place in missing if not self.journal.done.hashes.is_known[place]]

    def _write_experts(self, missing: list[Place]) -> None:
        n_bytes = self.checkpoint.record.n_bytes
        alignment = max(mode.alignment for mode in self.modes)

        def make_worker() -> Callable[[Place], tuple[int, int, str]]:
            incoming = aligned_buffer(span_bytes(n_bytes, self.checkpoint.read_mode.alignment))
            outgoing = aligned_buffer(round_up(n_bytes, alignment))

            def work(place: Place) -> tuple[int, int, str]:
                number = self.home[place]
                gather_record(self.checkpoint, *place, incoming=incoming, outgoing=outgoing)
                with self.room.taking(self.directories[number], self.room.record_bytes):
                    write_record(self.record_path(*place), outgoing, n_bytes, self.modes[number])
                return *place, xxh3_128_hex(outgoing[:n_bytes])

            return work

        batch = _Batch(self.journal, self.directories, self.settings.journal_every)
        n_all = self.checkpoint.geometry.n_routed_experts
        n_done = n_all - len(missing)
        try:
            for expert in run_parallel(missing, make_worker, n_workers=WORKERS_PER_DRIVE * len(self.directories)):
                batch.add(expert)
                n_done += 1
                self.on_progress("experts", n_done * n_bytes, n_all * n_bytes)
                if self.settings.is_releasing:
                    self.releaser.finished(expert[0], expert[1], before_release=batch.write)
        finally:
            # What was finished before an error counts, too.
            batch.write()

    def publish(self, end_ids: tuple[int, ...]) -> Manifest:
        """Write the hash lists and the manifest."""
        checkpoint, done = self.checkpoint, self.journal.done
        assert done.spine is not None
        hash_list = done.hashes.to_text().encode()
        write_bytes(self.out / HASH_LIST_NAME, hash_list)
        for directory, drive in zip(self.directories, done.drives, strict=True):
            write_bytes(directory / HASH_LIST_NAME, done.hashes.to_text(drive.holds).encode())
        manifest = Manifest(
            generation=1,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            geometry=checkpoint.geometry,
            end_ids=end_ids,
            source=_source(checkpoint),
            record=Record(LAYOUT_NAME, NIBBLE_ORDER, SCALE_KIND, checkpoint.record.n_bytes),
            spine=Spine(SPINE_NAME, done.spine.n_bytes, done.spine.xxh3_128),
            tokenizer=Tokenizer(TOKENIZER_DIRECTORY, tuple(done.carried)),
            experts=HashList(HASH_LIST_NAME, xxh3_128_hex(hash_list)),
            drives=tuple(
                manifest_drive(drive.tier, directory, self.out, None, drive.holds)
                for drive, directory in zip(done.drives, self.directories, strict=True)
            ),
        )
        write_manifest(self.out / MANIFEST_NAME, manifest)
        return manifest


class _Batch:
    """Experts that are written but not yet in the journal."""

    def __init__(self, journal: Journal, directories: list[Path], every: int) -> None:
        self._journal, self._directories, self._every = journal, directories, every
        self._experts: list[tuple[int, int, str]] = []
        self._began = time.monotonic()

    def add(self, expert: tuple[int, int, str]) -> None:
        self._experts.append(expert)
        if len(self._experts) >= self._every or time.monotonic() - self._began > BATCH_SECONDS:
            self.write()

    def write(self) -> None:
        """Make the names durable, then vouch for them."""
        if self._experts:
            for directory in self._directories:
                sync_directory(directory)
            self._journal.add_experts(self._experts)
        self._experts, self._began = [], time.monotonic()


def _carry_files(paths: list[Path], target: Path) -> tuple[CarriedFile, ...]:
    target.mkdir(exist_ok=True)
    carried = []
    for path in paths:
        data = path.read_bytes()
        write_bytes(target / path.name, data)
        carried.append(CarriedFile(path.name, len(data), xxh3_128_hex(data)))
    return tuple(carried)


def _source(checkpoint: Checkpoint) -> Source:
    layers = checkpoint.expert_layers_of_shards()
    files = tuple(
        SourceFile(s.name, s.n_bytes, s.header_xxh3_128, format_ranges(held) or None) for s, held in zip(checkpoint.shards, layers, strict=True)
    )
    return Source(checkpoint.facts.architecture, checkpoint.facts.model_type, checkpoint.digest, files)
