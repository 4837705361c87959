"""verify-hashes: read everything again, past the page cache, and name whatever is not what the manifest says."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from layout.direct import ReadMode, aligned_buffer, file_blocks, probe_directory, span_bytes
from layout.hash_lists import HASH_LIST_NAME
from layout.prepared import Prepared
from layout.reader import Completion, Reader, ReadRequest
from layout.writer import sync_directory
from manifests.errors import DamagedDataError, UsageError
from prep.copying import Sources, copy_expert

DEPTH = 4
Progress = Callable[[str, int, int], None]


class BadRecord(NamedTuple):
    """An expert file that is missing, short or different."""

    drive: int
    layer: int
    expert: int
    what: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What a verification found: the drives that were read, counts, bad records, and one message for every other bad file."""

    drives: list[int]
    n_records: int
    n_bytes: int
    bad_records: list[BadRecord]
    bad_files: list[str]

    @property
    def is_clean(self) -> bool:
        return not self.bad_records and not self.bad_files


def verify(prepared: Prepared, *, drives: list[int], on_progress: Progress) -> Findings:
    """Read every record on the given drives, the spine and the tokenizer's files, and compare their hashes."""
    bad_files = [*_verify_spine(prepared), *_verify_tokenizer(prepared)]
    records, n_records = [], 0
    total = sum(int(prepared.manifest.drives[n].holds.sum()) for n in drives)
    bad_files += [fault for n in drives for fault in _verify_drive_list(prepared, n)]
    for done in _read_records(prepared, drives):
        n_records += 1
        on_progress("records", n_records * prepared.record.n_bytes, total * prepared.record.n_bytes)
        # A read does not notice what lies behind the record.
        if done.error is not None or _size(done.request.extent.path) != prepared.record.n_bytes:
            records.append(_bad_record(prepared, done))
    return Findings(drives, n_records, n_records * prepared.record.n_bytes, sorted(records), bad_files)


def drives_named(prepared: Prepared, name: str | None) -> list[int]:
    """Return the drives that `--drive` means: a tier letter or a directory; all without one."""
    if name is None:
        return list(range(len(prepared.manifest.drives)))
    found = [
        n
        for n, (drive, directory) in enumerate(zip(prepared.manifest.drives, prepared.drive_directories, strict=True))
        if name == drive.tier or Path(name).resolve() == directory.resolve()
    ]
    if not found:
        known = ", ".join(prepared.drive_name(n) for n in range(len(prepared.manifest.drives)))
        raise UsageError(f"--drive {name}: no such drive in the manifest; it has {known}")
    return found


def describe_bad_record(prepared: Prepared, bad: BadRecord, findings: Findings) -> str:
    """Return the message for a bad record, with where an intact copy is."""
    spoilt = {(b.drive, b.layer, b.expert) for b in findings.bad_records}
    others = [n for n in prepared.drives_holding(bad.layer, bad.expert) if (n, bad.layer, bad.expert) not in spoilt]
    intact, unread = ([n for n in others if (n in findings.drives) is was_read] for was_read in (True, False))
    if not prepared.drive_directories[bad.drive].is_dir():
        cure = "the directory is gone: is the drive mounted?"
    elif intact:
        cure = f"another copy is intact on {', '.join(map(prepared.drive_name, intact))}; kprep verify-hashes --repair restores it"
    elif unread:
        cure = f"a copy that was not read now is on {', '.join(map(prepared.drive_name, unread))}; kprep verify-hashes --repair tries it"
    else:
        cure = f"no other copy is intact; fetch the shard that holds layer {bad.layer} again and extract anew"
    return f"layer {bad.layer} expert {bad.expert} on {prepared.drive_name(bad.drive)}: {bad.what}\n    {cure}"


def repair(prepared: Prepared, findings: Findings) -> tuple[list[BadRecord], list[BadRecord]]:
    """Restore bad records from intact copies; return those restored and those for which no copy is intact."""
    holds = [drive.holds.copy() for drive in prepared.manifest.drives]
    for bad in findings.bad_records:
        holds[bad.drive][bad.layer, bad.expert] = False
    sources = Sources(prepared, holds)
    restored, lost = [], []
    for bad in findings.bad_records:
        directory = prepared.drive_directories[bad.drive]
        if not directory.is_dir() or not any(h[bad.layer, bad.expert] for h in holds):
            lost.append(bad)
            continue
        mode = probe_directory(directory)
        buffer = aligned_buffer(span_bytes(prepared.record.n_bytes, max(mode.alignment, sources.alignment)))
        try:
            copy_expert(sources, bad.layer, bad.expert, directory=directory, mode=mode, buffer=buffer)
        except DamagedDataError:
            # The copies on drives that were not verified just now may be bad too.
            lost.append(bad)
            continue
        sync_directory(directory)
        restored.append(bad)
    return restored, lost


def _read_records(prepared: Prepared, drives: list[int]) -> Iterator[Completion]:
    """Yield the completion of every record on the drives, all drives at once, each at its own pace."""
    modes = [_mode_of(prepared.drive_directories[n]) for n in drives]
    pending = [iter(np.argwhere(prepared.manifest.drives[n].holds).tolist()) for n in drives]
    with Reader(modes, [DEPTH] * len(drives)) as reader:

        def submit_next(place: int, buffer: memoryview) -> bool:
            following = next(pending[place], None)
            if following is None:
                return False
            layer, expert = following
            tag = (drives[place], layer, expert)
            extent = prepared.expert_extent(drives[place], layer, expert)
            reader.submit(ReadRequest(tag, place, extent, buffer, prepared.hashes.get(layer, expert)))
            return True

        n_in_flight = sum(
            submit_next(place, aligned_buffer(span_bytes(prepared.record.n_bytes, mode.alignment)))
            for place, mode in enumerate(modes)
            for _ in range(DEPTH)
        )
        while n_in_flight:
            done = reader.wait()
            yield done
            n_in_flight -= not submit_next(done.request.drive, done.request.buffer)


def _mode_of(directory: Path) -> ReadMode:
    # A directory that is gone is found file by file, with the name of each expert.
    return probe_directory(directory) if directory.is_dir() else ReadMode(is_direct=False, reason="the directory is gone")


def _bad_record(prepared: Prepared, done: Completion) -> BadRecord:
    drive, layer, expert = done.request.tag
    size = _size(done.request.extent.path)
    if size is None:
        what = f"{done.request.extent.path.name} is missing or cannot be opened: {getattr(done.error, 'strerror', done.error)}"
    elif size != prepared.record.n_bytes:
        what = f"{done.request.extent.path.name} has {size} bytes, expected {prepared.record.n_bytes}"
    elif isinstance(done.error, OSError):
        what = f"{done.request.extent.path.name} cannot be read: {done.error.strerror}"
    else:
        what = str(done.error).removeprefix(f"{done.request.extent.path}: ")
    return BadRecord(drive, layer, expert, what)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _verify_drive_list(prepared: Prepared, drive: int) -> Iterator[str]:
    path = prepared.drive_directories[drive] / HASH_LIST_NAME
    expected = prepared.hashes.to_text(prepared.manifest.drives[drive].holds).encode()
    try:
        found = path.read_bytes()
    except OSError as error:
        yield f"{path}: cannot be read: {error.strerror}; kprep place with the same drives writes it anew"
        return
    if found != expected:
        n_held = int(prepared.manifest.drives[drive].holds.sum())
        yield f"{path}: does not list the {n_held} experts of this drive with their hashes; kprep place with the same drives writes it anew"


def _verify_spine(prepared: Prepared) -> Iterator[str]:
    spine = prepared.manifest.spine
    try:
        found = hash_file(prepared.spine_path, spine.n_bytes)
    except OSError as error:
        yield f"{prepared.spine_path}: cannot be read: {error.strerror}; extract anew"
        return
    except DamagedDataError as error:
        yield f"{prepared.spine_path}: {error}; extract anew"
        return
    if found != spine.xxh3_128:
        yield f"{prepared.spine_path}: xxh3-128 {found} differs from the manifest's {spine.xxh3_128}; extract anew"


def _verify_tokenizer(prepared: Prepared) -> Iterator[str]:
    for file in prepared.manifest.tokenizer.files:
        path = prepared.tokenizer_directory / file.name
        try:
            found = xxhash.xxh3_128_hexdigest(path.read_bytes())
        except OSError as error:
            yield f"{path}: cannot be read: {error.strerror}; copy it from the checkpoint"
            continue
        if found != file.xxh3_128:
            yield f"{path}: xxh3-128 {found} differs from the manifest's {file.xxh3_128}; copy it from the checkpoint"


def hash_file(path: Path, n_bytes: int) -> str:
    """Return the xxh3-128 of a large file, read past the page cache. Raises DamagedDataError if it has another size."""
    found = path.stat().st_size
    if found != n_bytes:
        raise DamagedDataError(f"has {found} bytes, expected {n_bytes}")
    state = xxhash.xxh3_128()
    for block in file_blocks(path, 0, n_bytes, probe_directory(path.parent)):
        state.update(block)
    return str(state.hexdigest())
