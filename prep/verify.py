"""verify-hashes: read everything again, past the page cache, and name whatever is not what the manifest says."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from layout.direct import ReadMode, aligned_buffer, probe_directory, span_bytes
from layout.hash_lists import HASH_LIST_NAME, xxh3_128_of_file
from layout.holes import first_hole
from layout.prepared import Prepared
from layout.reader import Completion, Reader, ReadRequest
from manifests.errors import DamagedDataError
from manifests.seal import has_seal
from prep.receipts import Receipts
from prep.selection import Selection

DEPTH = 4
CURE = "kprep extract with the same checkpoint and output restores it"
Progress = Callable[[str, int, int], None]


class BadRecord(NamedTuple):
    """An expert file that is missing, short or different."""

    drive: int
    layer: int
    expert: int
    what: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What a verification found.

    drives     whose records were read; n_records of them, and n_trusted were not read again because of their receipts
    bad_files  one message for every other bad file
    """

    drives: list[int]
    n_records: int
    n_trusted: int
    n_bytes: int
    bad_records: list[BadRecord]
    bad_files: list[str]

    @property
    def is_clean(self) -> bool:
        return not self.bad_records and not self.bad_files


def verify(prepared: Prepared, selection: Selection, *, receipts: Receipts, is_trusting: bool, on_progress: Progress) -> Findings:
    """Read the selected records, the spine and the tokenizer's files, and compare their hashes.

    receipts     gets a receipt for each record that was found intact
    is_trusting  do not read a record again whose file has not changed since its receipt
    """
    bad_files: list[str] = []
    # The spine is one long file, hashed in order: meanwhile the records keep the drives busy. An interrupted run does not wait for it.
    others = threading.Thread(target=lambda: bad_files.extend([*_verify_spine(prepared), *_verify_tokenizer(prepared)]), daemon=True)
    others.start()
    if not has_seal(prepared.path.read_text()):
        bad_files.append(
            f"{prepared.path}: its last line, the hash of the others, is missing or damaged; kprep place with the same drives writes it anew"
        )
    drive_lists = [fault for n in selection.drives for fault in _verify_drive_list(prepared, n)]
    n_bytes, records, n_records = prepared.record.n_bytes, [], 0
    trusted = {n: receipts.unchanged(n, selection.records[n]) if is_trusting else np.zeros_like(selection.records[n]) for n in selection.drives}
    wanted = {n: selection.records[n] & ~trusted[n] for n in selection.drives}
    total = sum(int(records.sum()) for records in wanted.values())
    for done in _read_records(prepared, wanted):
        n_records += 1
        on_progress("records", n_records * n_bytes, total * n_bytes)
        # A read does not notice what lies behind the record.
        if done.error is not None or _size(done.request.extent.path) != n_bytes:
            records.append(_bad_record(prepared, done))
            receipts.forget(*done.request.tag)
        else:
            receipts.add(*done.request.tag)
    others.join()
    bad_files += drive_lists
    n_trusted = sum(int(records.sum()) for records in trusted.values())
    return Findings(selection.drives, n_records, n_trusted, n_records * n_bytes, sorted(records), bad_files)


def _read_records(prepared: Prepared, wanted: dict[int, np.ndarray]) -> Iterator[Completion]:
    """Yield the completion of every wanted record (per drive, bool [n_layers, n_experts]), all drives at once, each at its own pace."""
    drives = list(wanted)
    modes = [_mode_of(prepared.drive_directories[n]) for n in drives]
    depths = [max(DEPTH, profile.depth) if (profile := prepared.manifest.drives[n].profile) else DEPTH for n in drives]
    pending = [iter(np.argwhere(wanted[n]).tolist()) for n in drives]
    with Reader(modes, depths) as reader:

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
            for _ in range(depths[place])
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
    elif first_hole(done.request.extent.path) is not None:
        what = f"{done.request.extent.path.name} has a hole: a part of it was never written"
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
        found = xxh3_128_of_file(prepared.spine_path, spine.n_bytes)
    except OSError as error:
        yield f"{prepared.spine_path}: cannot be read: {error.strerror}; {CURE}"
        return
    except DamagedDataError as error:
        yield f"{prepared.spine_path}: {error}; {CURE}"
        return
    if found != spine.xxh3_128:
        yield f"{prepared.spine_path}: xxh3-128 {found} differs from the manifest's {spine.xxh3_128}; {CURE}"


def _verify_tokenizer(prepared: Prepared) -> Iterator[str]:
    for file in prepared.manifest.tokenizer.files:
        path = prepared.tokenizer_directory / file.name
        try:
            found = xxhash.xxh3_128_hexdigest(path.read_bytes())
        except OSError as error:
            yield f"{path}: cannot be read: {error.strerror}; {CURE}"
            continue
        if found != file.xxh3_128:
            yield f"{path}: xxh3-128 {found} differs from the manifest's {file.xxh3_128}; {CURE}"
