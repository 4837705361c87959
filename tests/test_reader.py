"""The reader: each request ends once, with its own bytes or with its error, and closing does not wait for what was not begun."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import pytest
import xxhash

from layout.direct import BUFFERED, PAGE, Extent, ReadMode, ShortReadError, aligned_buffer, file_blocks, probe_directory, span_bytes
from layout.reader import Completion, Reader, ReadRequest, check_hash
from manifests.errors import DamagedDataError

GUARD = 0xA5
N_FILES = 8


class Drives(NamedTuple):
    """Two directories of files of odd sizes, and what the files hold."""

    directories: tuple[Path, Path]
    contents: dict[tuple[int, int], bytes]

    def path(self, drive: int, n: int) -> Path:
        return self.directories[drive] / f"file-{n}"

    @property
    def modes(self) -> list[ReadMode]:
        """The first as the probe finds it, the second through the page cache: both ways are taken wherever direct reads work."""
        return [probe_directory(self.directories[0]), BUFFERED]


@pytest.fixture(scope="module")
def drives(tmp_path_factory: pytest.TempPathFactory) -> Drives:
    rng = np.random.default_rng(2)
    drives = Drives((tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")), {})
    for drive in (0, 1):
        for n in range(N_FILES):
            drives.contents[drive, n] = rng.bytes(int(rng.integers(PAGE, 200_000)))
            drives.path(drive, n).write_bytes(drives.contents[drive, n])
    return drives


def whole_file(drives: Drives, tag: object = 0, *, expected_hash: str | None = None, name: str = "file-0", n_bytes: int = 0) -> ReadRequest:
    n_bytes = n_bytes or len(drives.contents[0, 0])
    extent = Extent(drives.directories[0] / name, 0, n_bytes)
    return ReadRequest(tag, 0, extent, aligned_buffer(span_bytes(n_bytes, 65536)), expected_hash)


def end_within(seconds: float, thread: threading.Thread) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


def reader_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("reader-")}


def slow_preadv(seconds: float) -> tuple[object, list[int]]:
    """Return a preadv that takes its time, and the most calls that were in it at once, per place in the list."""
    real, lock, now, most = os.preadv, threading.Lock(), [0], [0]

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(seconds)
        with lock:
            now[0] -= 1
        return real(fd, buffers, offset)

    return preadv, most


def test_each_of_many_requests_ends_once_with_its_bytes_and_leaves_its_neighbours_buffers_alone(drives: Drives) -> None:
    rng, modes, n_requests = np.random.default_rng(3), drives.modes, 300
    window = span_bytes(200_000, max(mode.alignment for mode in modes))
    arena = aligned_buffer((window + PAGE) * n_requests)
    np.frombuffer(arena, np.uint8)[:] = GUARD
    expected = {}
    with Reader(modes, [3, 2]) as reader:
        for tag in range(n_requests):
            drive, n = int(rng.integers(2)), int(rng.integers(N_FILES))
            content = drives.contents[drive, n]
            begin, end = sorted(rng.integers(0, len(content) + 1, 2).tolist())
            expected[tag] = content[begin:end]
            place = tag * (window + PAGE)
            digest = xxhash.xxh3_128_hexdigest(expected[tag]) if tag % 3 else None
            reader.submit(ReadRequest(tag, drive, Extent(drives.path(drive, n), begin, end - begin), arena[place : place + window], digest))
        done = [reader.wait() for _ in range(n_requests)]
    assert [c.error for c in done if c.error] == []
    assert sorted(c.request.tag for c in done) == list(range(n_requests))
    for completion in done:
        assert completion.payload is not None and bytes(completion.payload) == expected[completion.request.tag]
        assert completion.seconds >= 0
    guards = np.frombuffer(arena, np.uint8)[: (window + PAGE) * n_requests].reshape(n_requests, window + PAGE)[:, window:]
    assert (guards == GUARD).all()


def test_a_bad_read_ends_with_its_error_and_the_reader_goes_on(drives: Drives) -> None:
    size = len(drives.contents[0, 0])
    good = xxhash.xxh3_128_hexdigest(drives.contents[0, 0])
    with Reader(drives.modes, [2, 1]) as reader:
        requests = [
            whole_file(drives, "missing", name="file-x"),
            whole_file(drives, "short", n_bytes=size + 1),
            whole_file(drives, "other hash", expected_hash="0" * 32),
            whole_file(drives, "good", expected_hash=good),
            whole_file(drives, "not checked"),
        ]
        for request in requests:
            reader.submit(request)
        done = {completion.request.tag: completion for completion in (reader.wait() for _ in requests)}
    path = drives.path(0, 0)
    assert isinstance(done["missing"].error, FileNotFoundError) and done["missing"].error.filename == str(drives.directories[0] / "file-x")
    assert isinstance(done["short"].error, ShortReadError)
    assert str(done["short"].error) == f"{path}: ends at {size} bytes, expected at least {size + 1}"
    assert isinstance(done["other hash"].error, DamagedDataError)
    assert str(done["other hash"].error) == f"{path}: xxh3-128 {good} differs from the expected {'0' * 32}"
    assert all(done[tag].payload is None for tag in ("missing", "short", "other hash"))
    assert all(done[tag].error is None and bytes(done[tag].payload or b"") == drives.contents[0, 0] for tag in ("good", "not checked"))


def test_even_an_error_that_no_device_makes_ends_the_request(drives: Drives) -> None:
    # A thread that dies of it would leave its caller waiting for ever.
    request = whole_file(drives)._replace(buffer=memoryview(bytes(1 << 20)))
    done: list[Completion] = []
    with Reader(drives.modes, [1, 1]) as reader:
        reader.submit(request)
        waiting = threading.Thread(target=lambda: done.append(reader.wait()), daemon=True)
        waiting.start()
        assert end_within(5, waiting)
    assert isinstance(done[0].error, BufferError)


def test_a_flipped_bit_is_damage(drives: Drives, tmp_path: Path) -> None:
    content = bytearray(drives.contents[0, 0])
    digest = xxhash.xxh3_128_hexdigest(content)
    extent = Extent(tmp_path / "L1-E0.bin", 0, len(content))
    check_hash(extent, memoryview(content), digest)
    check_hash(extent, memoryview(content), None)
    content[-1] ^= 0x80
    with pytest.raises(DamagedDataError, match=f"L1-E0.bin: xxh3-128 [0-9a-f]{{32}} differs from the expected {digest}"):
        check_hash(extent, memoryview(content), digest)


@pytest.mark.parametrize("is_hashed", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_as_many_reads_are_in_flight_as_the_depth_says(drives: Drives, depth: int, is_hashed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, most = slow_preadv(0.01)
    monkeypatch.setattr("layout.direct.os.preadv", preadv)
    expected = xxhash.xxh3_128_hexdigest(drives.contents[0, 0]) if is_hashed else None
    with Reader([BUFFERED], [depth]) as reader:
        for tag in range(12):
            reader.submit(whole_file(drives, tag, expected_hash=expected))
        assert [reader.wait().error for _ in range(12)] == [None] * 12
    assert most == [depth]


def test_the_next_reads_go_on_while_a_hash_is_checked(drives: Drives, monkeypatch: pytest.MonkeyPatch) -> None:
    is_open = threading.Event()
    monkeypatch.setattr("layout.reader.check_hash", lambda *_: is_open.wait(10))
    with Reader([BUFFERED], [1]) as reader:
        reader.submit(whole_file(drives, "hashed", expected_hash="0" * 32))
        for tag in range(3):
            reader.submit(whole_file(drives, tag))
        assert [reader.wait().request.tag for _ in range(3)] == [0, 1, 2]
        is_open.set()
        assert reader.wait().request.tag == "hashed"


def test_closing_drops_hashes_that_were_not_begun(drives: Drives, monkeypatch: pytest.MonkeyPatch) -> None:
    before, is_closing = reader_threads(), threading.Event()
    n_hashed = count(1)

    def check(*_: object) -> None:
        next(n_hashed)
        assert is_closing.wait(10)

    monkeypatch.setattr("layout.reader.check_hash", check)
    reader = Reader([BUFFERED], [1])
    for tag in range(20):
        reader.submit(whole_file(drives, tag, expected_hash="0" * 32))
    # The thread that reads comes to this last: all hashes wait behind the first.
    reader.submit(whole_file(drives, "last"))
    assert reader.wait().request.tag == "last"
    closing = threading.Thread(target=reader.close, daemon=True)
    closing.start()
    assert not end_within(0.1, closing)
    is_closing.set()
    assert end_within(5, closing)
    assert next(n_hashed) == 2
    assert reader_threads() <= before


def test_closing_drops_what_was_not_begun_and_ends_the_threads(drives: Drives, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, _ = slow_preadv(0.05)
    monkeypatch.setattr("layout.direct.os.preadv", preadv)
    before = reader_threads()
    reader = Reader([BUFFERED, BUFFERED], [2, 1])
    assert len(reader_threads() - before) == 4
    request = whole_file(drives)
    for tag in range(1000):
        reader.submit(request._replace(tag=tag, drive=tag % 2))
    start = time.monotonic()
    reader.close()
    # All of them would have taken 25 seconds.
    assert time.monotonic() - start < 5
    assert reader_threads() <= before


@pytest.mark.parametrize("n_lines", range(1, 13))
def test_closing_does_not_hang_when_a_thread_takes_a_request_between_two_of_its_lines(
    drives: Drives, n_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_open, lines = os.preadv, threading.Event(), count(1)

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert is_open.wait(10)
        return real(fd, buffers, offset)

    def let_the_threads_run(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code is Reader.close.__code__ and event == "line" and next(lines) == n_lines:
            is_open.set()
            time.sleep(0.05)
        return let_the_threads_run

    def close() -> None:
        sys.settrace(let_the_threads_run)  # type: ignore[arg-type]
        reader.close()

    monkeypatch.setattr("layout.direct.os.preadv", preadv)
    reader = Reader([BUFFERED], [1])
    for tag in range(4):
        reader.submit(whole_file(drives, tag))
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    has_ended = end_within(0.2, closing)
    is_open.set()
    assert has_ended or end_within(5, closing)


def test_leaving_the_block_by_an_exception_ends_the_threads(drives: Drives) -> None:
    before = reader_threads()
    with pytest.raises(KeyboardInterrupt), Reader(drives.modes, [2, 2]) as reader:
        reader.submit(whole_file(drives))
        raise KeyboardInterrupt
    assert reader_threads() <= before


def test_completions_come_in_the_order_in_which_the_reads_end(drives: Drives, monkeypatch: pytest.MonkeyPatch) -> None:
    real, is_open = os.preadv, threading.Event()

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if len(buffers[0]) == 100:
            assert is_open.wait(10)
        return real(fd, buffers, offset)

    monkeypatch.setattr("layout.direct.os.preadv", preadv)
    with Reader([BUFFERED], [2]) as reader:
        reader.submit(whole_file(drives, "late", n_bytes=100))
        reader.submit(whole_file(drives, "early", n_bytes=200))
        assert reader.wait().request.tag == "early"
        is_open.set()
        assert reader.wait().request.tag == "late"


def test_the_next_blocks_are_read_while_one_is_used_and_never_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, n_begun, n_blocks, n_ahead = os.preadv, threading.Semaphore(0), 12, 3

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = real(fd, buffers, offset)
        n_begun.release()
        return got

    content = np.random.default_rng(6).bytes(n_blocks * PAGE)
    (tmp_path / "long").write_bytes(content)
    monkeypatch.setattr("layout.direct.os.preadv", preadv)
    blocks = file_blocks(tmp_path / "long", 0, len(content), BUFFERED, block_bytes=PAGE, n_ahead=n_ahead)
    for number, block in enumerate(blocks):
        for _ in range(1 + n_ahead if number == 0 else number + n_ahead < n_blocks):
            assert n_begun.acquire(timeout=10)
        assert bytes(block) == content[number * PAGE : (number + 1) * PAGE]


def test_a_limited_drive_delivers_the_same_bytes_no_faster_than_its_limit(tmp_path: Path) -> None:
    content = os.urandom(1 << 16)
    (tmp_path / "record").write_bytes(content)
    mode = probe_directory(tmp_path)
    buffers = [aligned_buffer(1 << 16) for _ in range(4)]
    with Reader([mode], [4], limits=[1 << 20]) as reader:
        start = time.perf_counter()
        for buffer in buffers:
            reader.submit(ReadRequest(None, 0, Extent(tmp_path / "record", 0, 1 << 16), buffer))
        done = [reader.wait() for _ in buffers]
    # A lower bound is no matter of speed: four records at 16 a second take a quarter of one.
    assert time.perf_counter() - start >= 0.25
    assert all(completion.payload == content for completion in done)
