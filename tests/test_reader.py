"""The reader: each request ends once, with its own bytes or with its error, and closing does not wait for what was not begun."""

import contextlib
import errno
import gc
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import pytest
import xxhash

from layout.direct import BUFFERED, PAGE, Extent, ReadMode, ShortReadError, aligned_buffer, file_blocks, probe_directory, span_bytes
from layout.read_backends import NativeThreads, PythonThreads, native_library
from layout.reader import Completion, Reader, ReadRequest, check_hash
from manifests.errors import DamagedDataError
from runtime.storage.flat_out import Source, flat_out_bytes_per_s

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


@pytest.fixture(params=[False, True], ids=["python", "native"])
def is_native(request: pytest.FixtureRequest) -> bool:
    """Which threads read."""
    library, why = native_library()
    if request.param and library is None:
        pytest.skip(why)
    return bool(request.param)


def reader_threads() -> set[int]:
    """Return the kernel's numbers of the threads that read or hash: C's carry their name in the kernel, Python's in Python."""
    native = set()
    for task in Path("/proc/self/task").iterdir():
        # One may end in between.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().startswith("reader-"):
                native.add(int(task.name))
    return native | {t.native_id for t in threading.enumerate() if t.name.startswith("reader-") and t.native_id}


def assert_ended_since(before: set[int]) -> None:
    """A thread is in the kernel's list for a moment after its last act."""
    until = time.monotonic() + 5
    while not reader_threads() <= before:
        assert time.monotonic() < until, reader_threads() - before
        time.sleep(0.01)


def fifos(directory: Path, n: int) -> list[Extent]:
    """Return files that keep whoever opens them waiting until somebody writes, and then cannot be read at a place."""
    for number in range(n):
        os.mkfifo(directory / f"fifo-{number}")
    return [Extent(directory / f"fifo-{number}", 0, 100) for number in range(n)]


def let_go(fifo: Extent) -> bool:
    """Return whether somebody waits for a fifo, and end that."""
    try:
        os.close(os.open(fifo.path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        assert error.errno == errno.ENXIO
        return False
    return True


def let_go_soon(fifo: Extent) -> None:
    until = time.monotonic() + 10
    while not let_go(fifo):
        assert time.monotonic() < until
        time.sleep(0.002)


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


def test_each_of_many_requests_ends_once_with_its_bytes_and_leaves_its_neighbours_buffers_alone(drives: Drives, is_native: bool) -> None:
    rng, modes, n_requests = np.random.default_rng(3), drives.modes, 300
    window = span_bytes(200_000, max(mode.alignment for mode in modes))
    arena = aligned_buffer((window + PAGE) * n_requests)
    np.frombuffer(arena, np.uint8)[:] = GUARD
    expected = {}
    with Reader(modes, [3, 2], is_native=is_native) as reader:
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


def test_a_bad_read_ends_with_its_error_and_the_reader_goes_on(drives: Drives, is_native: bool) -> None:
    size = len(drives.contents[0, 0])
    good = xxhash.xxh3_128_hexdigest(drives.contents[0, 0])
    with Reader(drives.modes, [2, 1], is_native=is_native) as reader:
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


def test_even_an_error_that_no_device_makes_ends_the_request(drives: Drives, is_native: bool) -> None:
    # A thread that dies of it would leave its caller waiting for ever.
    request = whole_file(drives)._replace(buffer=memoryview(bytes(1 << 20)))
    done: list[Completion] = []
    with Reader(drives.modes, [1, 1], is_native=is_native) as reader:
        reader.submit(request)
        waiting = threading.Thread(target=lambda: done.append(reader.wait()), daemon=True)
        waiting.start()
        assert end_within(5, waiting)
    assert isinstance(done[0].error, BufferError | TypeError)


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
    with Reader([BUFFERED], [depth], is_native=False) as reader:
        for tag in range(12):
            reader.submit(whole_file(drives, tag, expected_hash=expected))
        assert [reader.wait().error for _ in range(12)] == [None] * 12
    assert most == [depth]


def test_the_next_reads_go_on_while_a_hash_is_checked(drives: Drives, monkeypatch: pytest.MonkeyPatch, is_native: bool) -> None:
    is_open = threading.Event()
    monkeypatch.setattr("layout.reader.check_hash", lambda *_: is_open.wait(10))
    with Reader([BUFFERED], [1], is_native=is_native) as reader:
        reader.submit(whole_file(drives, "hashed", expected_hash="0" * 32))
        for tag in range(3):
            reader.submit(whole_file(drives, tag))
        assert [reader.wait().request.tag for _ in range(3)] == [0, 1, 2]
        is_open.set()
        assert reader.wait().request.tag == "hashed"


def test_closing_drops_hashes_that_were_not_begun(drives: Drives, monkeypatch: pytest.MonkeyPatch, is_native: bool) -> None:
    before, is_closing = reader_threads(), threading.Event()
    n_hashed = count(1)

    def check(*_: object) -> None:
        next(n_hashed)
        assert is_closing.wait(10)

    monkeypatch.setattr("layout.reader.check_hash", check)
    reader = Reader([BUFFERED], [1], is_native=is_native)
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
    assert_ended_since(before)


def test_closing_leaves_a_read_behind_that_does_not_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_native: bool) -> None:
    monkeypatch.setattr("layout.reader.CLOSE_S", 0.2)
    (fifo,) = fifos(tmp_path, 1)
    reader = Reader([BUFFERED], [1], is_native=is_native)
    reader.submit(ReadRequest("late", 0, fifo, aligned_buffer(100)))
    # Time for its thread to be in the read; one that is not yet is told to end and leaves nothing behind.
    time.sleep(0.3)
    closing = threading.Thread(target=reader.close)
    closing.start()
    assert end_within(5, closing)
    let_go(fifo)


def test_a_drive_that_does_not_answer_has_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layout.reader.CLOSE_S", 0.2)
    monkeypatch.setattr("runtime.storage.flat_out.PATIENCE_S", 0.3)
    (fifo,) = fifos(tmp_path, 1)
    assert flat_out_bytes_per_s([Source(BUFFERED, 1, lambda _: fifo)], seconds=0.1) is None
    let_go(fifo)


def test_closing_drops_what_was_not_begun_and_ends_the_threads(drives: Drives, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, _ = slow_preadv(0.05)
    monkeypatch.setattr("layout.direct.os.preadv", preadv)
    before = reader_threads()
    reader = Reader([BUFFERED, BUFFERED], [2, 1], is_native=False)
    assert len(reader_threads() - before) == 4
    request = whole_file(drives)
    for tag in range(1000):
        reader.submit(request._replace(tag=tag, drive=tag % 2))
    start = time.monotonic()
    reader.close()
    # All of them would have taken 25 seconds.
    assert time.monotonic() - start < 5
    assert_ended_since(before)


@pytest.mark.parametrize("n_lines", range(1, 10))
def test_closing_does_not_hang_when_a_thread_takes_a_request_between_two_of_its_lines(
    drives: Drives, n_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_open, lines = os.preadv, threading.Event(), count(1)

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert is_open.wait(10)
        return real(fd, buffers, offset)

    def let_the_threads_run(frame: FrameType, event: str, _: object) -> object:
        if frame.f_code is PythonThreads.close.__code__ and event == "line" and next(lines) == n_lines:
            is_open.set()
            time.sleep(0.05)
        return let_the_threads_run

    def close() -> None:
        sys.settrace(let_the_threads_run)  # type: ignore[arg-type]
        reader.close()

    monkeypatch.setattr("layout.direct.os.preadv", preadv)
    reader = Reader([BUFFERED], [1], is_native=False)
    for tag in range(4):
        reader.submit(whole_file(drives, tag))
    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    has_ended = end_within(0.2, closing)
    is_open.set()
    assert has_ended or end_within(5, closing)


def test_leaving_the_block_by_an_exception_ends_the_threads(drives: Drives, is_native: bool) -> None:
    before = reader_threads()
    with pytest.raises(KeyboardInterrupt), Reader(drives.modes, [2, 2], is_native=is_native) as reader:
        reader.submit(whole_file(drives))
        raise KeyboardInterrupt
    assert_ended_since(before)


def test_completions_come_in_the_order_in_which_the_reads_end(drives: Drives, tmp_path: Path, is_native: bool) -> None:
    (fifo,) = fifos(tmp_path, 1)
    with Reader([BUFFERED], [2], is_native=is_native) as reader:
        reader.submit(ReadRequest("late", 0, fifo, aligned_buffer(100)), whole_file(drives, "early"))
        early = reader.wait()
        assert early.request.tag == "early"
        let_go_soon(fifo)
        late = reader.wait()
    assert late.request.tag == "late" and late.ended >= early.ended
    assert isinstance(late.error, OSError) and late.error.errno == errno.ESPIPE and late.error.filename == str(fifo.path)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_drive_begins_as_many_reads_as_its_depth_says_and_no_more(tmp_path: Path, depth: int, is_native: bool) -> None:
    waiting = fifos(tmp_path, depth + 2)
    with Reader([BUFFERED], [depth], is_native=is_native) as reader:
        reader.submit(*(ReadRequest(n, 0, fifo, aligned_buffer(100)) for n, fifo in enumerate(waiting)))
        until = time.monotonic() + 10
        while not let_go(waiting[depth - 1]):
            assert not let_go(waiting[depth]) and time.monotonic() < until
        assert reader.wait().request.tag == depth - 1
        # One has ended: the next begins.
        let_go_soon(waiting[depth])
        for fifo in [*waiting[: depth - 1], waiting[-1]]:
            let_go_soon(fifo)
        assert {reader.wait().request.tag for _ in range(depth + 1)} == set(range(depth + 2)) - {depth - 1}


def test_closing_waits_for_what_was_begun_and_drops_the_rest(drives: Drives, tmp_path: Path, is_native: bool) -> None:
    before, (first, fifo) = reader_threads(), fifos(tmp_path, 2)
    reader = Reader([BUFFERED, BUFFERED], [1, 1], is_native=is_native)
    reader.submit(*(ReadRequest(tag, 0, pipe, aligned_buffer(100)) for tag, pipe in (("first", first), ("begun", fifo))))
    reader.submit(*(whole_file(drives, tag) for tag in range(100)))
    let_go_soon(first)
    assert reader.wait().request.tag == "first"
    # The thread that read it takes the next at once.
    time.sleep(0.2)
    closing = threading.Thread(target=reader.close, daemon=True)
    closing.start()
    assert not end_within(0.3, closing)
    let_go_soon(fifo)
    assert end_within(5, closing)
    assert [done.request.tag for done in reader.take() if done.request.tag == 99] == []
    assert_ended_since(before)
    reader.close()


def test_a_read_that_would_run_over_its_buffer_is_not_begun(drives: Drives, is_native: bool) -> None:
    request = whole_file(drives)
    with Reader([BUFFERED], [1], is_native=is_native) as reader:
        reader.submit(request._replace(buffer=request.buffer[: request.extent.n_bytes - 1]))
        done = reader.wait()
    assert done.payload is None and isinstance(done.error, ValueError | ShortReadError)


def test_without_a_compiler_python_reads_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    library, why = native_library.__wrapped__()
    assert library is None and why == "there is no C compiler (cc) on the PATH"
    (tmp_path / "cc").write_text("#!/bin/sh\necho cannot find -lc >&2\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    assert native_library.__wrapped__() == (None, "read_pool.c could not be compiled: cannot find -lc")


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


def test_a_limited_drive_delivers_the_same_bytes_no_faster_than_its_limit(tmp_path: Path, is_native: bool) -> None:
    content = os.urandom(1 << 16)
    (tmp_path / "record").write_bytes(content)
    mode = probe_directory(tmp_path)
    buffers = [aligned_buffer(1 << 16) for _ in range(4)]
    with Reader([mode], [4], limits=[1 << 20], is_native=is_native) as reader:
        start = time.perf_counter()
        for buffer in buffers:
            reader.submit(ReadRequest(None, 0, Extent(tmp_path / "record", 0, 1 << 16), buffer))
        done = [reader.wait() for _ in buffers]
    # A lower bound is no matter of speed: four records at 16 a second take a quarter of one.
    assert time.perf_counter() - start >= 0.25
    assert all(completion.payload == content for completion in done)


def test_threads_that_nobody_closed_keep_the_buffers_that_they_write_into(tmp_path: Path) -> None:
    library, why = native_library()
    if library is None:
        pytest.skip(why)
    (fifo,) = fifos(tmp_path, 1)
    before, memory = reader_threads(), mmap.mmap(-1, PAGE)
    threads = NativeThreads(library, [BUFFERED], [1], [None])
    threads.submit([ReadRequest("forgotten", 0, fifo, memoryview(memory)[:100])])
    known = weakref.ref(threads)
    del threads
    gc.collect()
    # While something refers to it, it cannot be unmapped.
    with pytest.raises(BufferError):
        memory.close()
    let_go_soon(fifo)
    again = known()
    assert again is not None
    again.close(5)
    del again
    gc.collect()
    assert known() is None
    assert_ended_since(before)
