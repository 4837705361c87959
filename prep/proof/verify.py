"""verify-hashes: read everything again, past the page cache, and name whatever is not what the manifest says.

All drives are read at once, each through a queue of its own and at its own pace. The spine is read through the queue of the drive that it shares a
device with, since two queues on one device take from each other; else it has one of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from layout.direct import BUFFERED, Extent, ReadMode, aligned_buffer, probe_directory, span_bytes
from layout.drives import shares_device
from layout.hash_lists import HASH_LIST_NAME
from layout.holes import file_fault, size_fault
from layout.prepared import Prepared
from layout.reader import Completion, Reader, ReadRequest, spare_requests
from layout.sizes import counted
from manifests.errors import BadInputError
from manifests.seal import has_seal
from prep.proof.receipts import Receipts
from prep.proof.selection import Selection

DEPTH = 4
# What the buffers of all streams may take together, as long as each has two.
BUFFER_BYTES = 1 << 30
SPINE_BLOCK_BYTES = 16 << 20
CURE = "kprep extract with the same checkpoint and output restores it"
Progress = Callable[[str, int, int], None]


class RecordTag(NamedTuple):
    """Which record a read is of."""

    drive: int
    layer: int
    expert: int


class BlockTag(NamedTuple):
    """Which block of the spine a read is of."""

    number: int


class Wanted(NamedTuple):
    """A read that has no buffer yet."""

    tag: RecordTag | BlockTag
    extent: Extent
    expected_hash: str | None


@dataclass(slots=True)
class Stream:
    """What is read through one queue, in this order, `depth` at a time; no read is longer than most_bytes."""

    mode: ReadMode
    depth: int
    wanted: Iterator[Wanted]
    most_bytes: int


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
    gone       drives whose directory is not there, with how many selected copies they hold
    bad_files  one message for every other bad file
    """

    drives: list[int]
    gone: dict[int, int]
    n_records: int
    n_trusted: int
    n_bytes: int
    bad_records: list[BadRecord]
    bad_files: list[str]

    @property
    def is_clean(self) -> bool:
        return not self.bad_records and not self.bad_files and not self.gone


def verify(prepared: Prepared, selection: Selection, *, receipts: Receipts, is_trusting: bool, on_progress: Progress) -> Findings:
    """Read the selected records, the spine and the tokenizer's files, and compare their hashes.

    receipts     gets a receipt for each record that was found intact
    is_trusting  do not read a record again whose file has not changed since its receipt
    """
    spine = Spine(prepared)
    bad_files = list(_verify_tokenizer(prepared))
    if not has_seal(prepared.path.read_text()):
        bad_files.append(
            f"{prepared.path}: its last line, the hash of the others, is missing or damaged; kprep place with the same drives writes it anew"
        )
    # 100,000 lines would say no more of such a drive than one.
    gone = {n: int(selection.records[n].sum()) for n in selection.drives if not prepared.drive_directories[n].is_dir()}
    drives = [n for n in selection.drives if n not in gone]
    bad_files += [fault for n in drives for fault in _verify_drive_list(prepared, n)]
    trusted = {n: receipts.unchanged(n, selection.records[n]) if is_trusting else np.zeros_like(selection.records[n]) for n in drives}
    wanted = {n: selection.records[n] & ~trusted[n] for n in drives}
    bad_records = [bad for n in drives for bad in _misfits(prepared, n, wanted[n])]
    for bad in bad_records:
        wanted[bad.drive][bad.layer, bad.expert] = False
        receipts.forget(bad.drive, bad.layer, bad.expert)
    n_bytes, n_records, n_done = prepared.record.n_bytes, 0, 0
    total = sum(int(records.sum()) for records in wanted.values()) * n_bytes + spine.n_bytes
    for done in read_streams(with_spine(prepared, list(wanted), record_streams(prepared, wanted), spine)):
        n_done += done.request.extent.n_bytes
        on_progress("read", n_done, total)
        tag = done.request.tag
        if isinstance(tag, BlockTag):
            spine.take(done)
            continue
        n_records += 1
        if done.error is not None:
            bad_records.append(_bad_record(prepared, done))
            receipts.forget(*tag)
        else:
            receipts.add(*tag)
    n_trusted = sum(int(records.sum()) for records in trusted.values())
    return Findings(drives, gone, n_records, n_trusted, n_records * n_bytes, sorted(bad_records), [*spine.faults(), *bad_files])


def _misfits(prepared: Prepared, drive: int, wanted: np.ndarray) -> Iterator[BadRecord]:
    """Yield the wanted records in whose place there is no file of their size: a read does not notice what follows, and one of a FIFO never ends."""
    for layer, expert in np.argwhere(wanted).tolist():
        path = prepared.expert_extent(drive, layer, expert).path
        if (fault := size_fault(path, prepared.record.n_bytes)) is not None:
            yield BadRecord(drive, layer, expert, f"{path.name} {fault}")


def record_streams(prepared: Prepared, wanted: dict[int, np.ndarray]) -> list[Stream]:
    """Return one stream for each drive with the records that are wanted of it, bool [n_layers, n_experts]."""

    def of_drive(n: int) -> Iterator[Wanted]:
        for layer, expert in np.argwhere(wanted[n]).tolist():
            yield Wanted(RecordTag(n, layer, expert), prepared.expert_extent(n, layer, expert), prepared.hashes.get(layer, expert))

    depths = [max(DEPTH, profile.depth) if (profile := prepared.manifest.drives[n].profile) else DEPTH for n in wanted]
    modes = [_mode_of(prepared.drive_directories[n]) for n in wanted]
    return [Stream(mode, depth, of_drive(n), prepared.record.n_bytes) for n, mode, depth in zip(wanted, modes, depths, strict=True)]


def with_spine(prepared: Prepared, drives: Sequence[int], streams: Sequence[Stream], spine: "Spine") -> list[Stream]:
    """Return the drives' streams, the spine's blocks first in one that shares its device, or else in a stream of their own."""
    for n, stream in zip(drives, streams, strict=True):
        directory = prepared.drive_directories[n]
        if stream.mode == spine.mode and directory.is_dir() and shares_device(directory, prepared.spine_path.parent):
            stream.wanted = chain(spine.wanted(), stream.wanted)
            stream.most_bytes = max(stream.most_bytes, spine.block_bytes)
            return list(streams)
    return [*streams, Stream(spine.mode, DEPTH, spine.wanted(), spine.block_bytes)]


def read_streams(streams: Sequence[Stream]) -> Iterator[Completion]:
    """Yield every read of all streams when it has ended, each stream at its own pace; blocks of the spine come in their order.

    What was read is valid until the next is asked for.
    """
    turns = _Turns()
    with Reader([stream.mode for stream in streams], [stream.depth for stream in streams]) as reader:

        def submit_next(place: int, buffer: memoryview | None = None) -> bool:
            stream = streams[place]
            following = next(stream.wanted, None)
            if following is None:
                return False
            buffer = aligned_buffer(_span(stream)) if buffer is None else buffer
            reader.submit(ReadRequest(following.tag, place, following.extent, buffer, following.expected_hash))
            return True

        n_in_flight = sum(submit_next(place) for place, stream in enumerate(streams) for _ in range(n_buffers(stream, len(streams))))
        while n_in_flight:
            for done in turns.take(reader.wait()):
                yield done
                n_in_flight -= not submit_next(done.request.drive, done.request.buffer)


def _span(stream: Stream) -> int:
    return span_bytes(stream.most_bytes, stream.mode.alignment)


def n_buffers(stream: Stream, n_streams: int) -> int:
    """Return how many buffers a stream gets, so that all of them stay within BUFFER_BYTES."""
    return min(stream.depth + spare_requests(stream.depth), max(2, BUFFER_BYTES // n_streams // _span(stream)))


class _Turns:
    """Holds a block of the spine back until those before it have come."""

    def __init__(self) -> None:
        self._held: dict[int, Completion] = {}
        self._next = 0

    def take(self, done: Completion) -> Iterator[Completion]:
        """Yield what has its turn now that this read has ended; a record always has."""
        if not isinstance(done.request.tag, BlockTag):
            yield done
            return
        self._held[done.request.tag.number] = done
        while self._next in self._held:
            self._next += 1
            yield self._held.pop(self._next - 1)


class Spine:
    """The spine, read in blocks and hashed in their order. Raises nothing: what is wrong with it is a fault to be told."""

    def __init__(self, prepared: Prepared) -> None:
        self._path, self._expected = prepared.spine_path, prepared.manifest.spine
        self._state, self._error = xxhash.xxh3_128(), ""
        self.mode = BUFFERED
        try:
            self.mode = probe_directory(self._path.parent)
        except (OSError, BadInputError) as error:
            self._note(error)
        else:
            self._error = size_fault(self._path, self._expected.n_bytes) or ""

    @property
    def n_bytes(self) -> int:
        """The bytes that there are to read."""
        return 0 if self._error else self._expected.n_bytes

    @property
    def block_bytes(self) -> int:
        return min(SPINE_BLOCK_BYTES, self.n_bytes)

    def wanted(self) -> Iterator[Wanted]:
        """Yield all blocks in order, up to the first error."""
        for number, offset in enumerate(range(0, self.n_bytes, SPINE_BLOCK_BYTES)):
            if self._error:
                return
            yield Wanted(BlockTag(number), Extent(self._path, offset, min(SPINE_BLOCK_BYTES, self._expected.n_bytes - offset)), None)

    def take(self, done: Completion) -> None:
        """Hash the next block."""
        if done.error is not None:
            self._note(done.error)
        else:
            assert done.payload is not None
            self._state.update(done.payload)

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the spine, once all blocks were taken."""
        found = self._state.hexdigest()
        if self._error:
            yield f"{self._path}: {self._error}; {CURE}"
        elif found != self._expected.xxh3_128:
            yield f"{self._path}: xxh3-128 {found} differs from the manifest's {self._expected.xxh3_128}; {CURE}"

    def _note(self, error: Exception) -> None:
        what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error).removeprefix(f"{self._path}: ")
        self._error = self._error or what


def _mode_of(directory: Path) -> ReadMode:
    # One that goes while it is read is found file by file, with the name of each expert.
    return probe_directory(directory) if directory.is_dir() else ReadMode(is_direct=False, reason="the directory is gone")


def _bad_record(prepared: Prepared, done: Completion) -> BadRecord:
    drive, layer, expert = done.request.tag
    path = done.request.extent.path
    if (fault := file_fault(path, prepared.record.n_bytes)) is not None:
        what = f"{path.name} {fault}"
    elif isinstance(done.error, OSError):
        what = f"{path.name} cannot be read: {done.error.strerror}"
    else:
        what = str(done.error).removeprefix(f"{path}: ")
    return BadRecord(drive, layer, expert, what)


def _verify_drive_list(prepared: Prepared, drive: int) -> Iterator[str]:
    path = prepared.drive_directories[drive] / HASH_LIST_NAME
    expected = prepared.hashes.to_text(prepared.manifest.drives[drive].holds).encode()
    try:
        found = path.read_bytes()
    except OSError as error:
        yield f"{path}: cannot be read: {error.strerror}; kprep place with the same drives writes it anew"
        return
    if found != expected:
        held = counted(int(prepared.manifest.drives[drive].holds.sum()), "expert")
        yield f"{path}: does not list the {held} of this drive by hash; kprep place with the same drives writes it anew"


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
