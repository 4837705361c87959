"""Requests cut into pieces, and what was read copied on by the threads that read it."""

import ctypes
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from layout.direct import BUFFERED, PAGE, Extent, ReadMode, ShortReadError, aligned_buffer, probe_directory
from layout.read_backends import native_library
from layout.reader import Completion, Reader, ReadRequest, Target, Uploader

N_BYTES = 50 * PAGE + 123
GUARD = 0xA5
COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
ENTER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


@pytest.fixture(autouse=True)
def needs_native() -> None:
    library, why = native_library()
    if library is None:
        pytest.skip(why)


@pytest.fixture(params=["direct", "buffered"])
def mode(request: pytest.FixtureRequest, tmp_path: Path) -> ReadMode:
    return probe_directory(tmp_path) if request.param == "direct" else BUFFERED


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    content = np.random.default_rng(1).bytes(N_BYTES)
    (tmp_path / "file").write_bytes(content)
    return content


class Memory:
    """Memory that is a target, with a guard behind it."""

    def __init__(self, n_bytes: int) -> None:
        self._bytes = np.full(n_bytes + PAGE, GUARD, np.uint8)
        self.n_bytes = n_bytes

    @property
    def target(self) -> Target:
        return Target(self._bytes.ctypes.data, 0)

    @property
    def content(self) -> bytes:
        assert (self._bytes[self.n_bytes :] == GUARD).all()
        return self._bytes[: self.n_bytes].tobytes()


def read(reader: Reader, path: Path, begin: int, end: int, target: Target | None = None) -> Completion:
    # Guarded behind: a read may fill its room, and no more.
    room = -(-(end - begin + begin % PAGE) // PAGE) * PAGE
    buffer = aligned_buffer(room + PAGE)
    np.frombuffer(buffer, np.uint8)[:] = GUARD
    reader.submit(ReadRequest("it", 0, Extent(path, begin, end - begin), buffer[:room], target=target))
    done = reader.wait()
    assert (np.frombuffer(buffer, np.uint8)[room : room + PAGE] == GUARD).all()
    return done


@pytest.mark.parametrize("piece", [None, PAGE, 3 * PAGE, 64 * PAGE])
@pytest.mark.parametrize(("begin", "end"), [(0, N_BYTES), (PAGE, 20 * PAGE), (100, 4000), (7000, N_BYTES), (5 * PAGE + 1, 5 * PAGE + 2)])
def test_the_pieces_of_a_read_are_together_what_it_asked_for_and_so_is_what_they_copied(
    tmp_path: Path, content: bytes, mode: ReadMode, piece: int | None, begin: int, end: int
) -> None:
    memory = Memory(end - begin)
    with Reader([mode], [4], pieces=[piece]) as reader:
        done = read(reader, tmp_path / "file", begin, end, memory.target)
    assert done.error is None and done.payload is not None and bytes(done.payload) == content[begin:end]
    assert done.is_copied and not done.refused and memory.content == content[begin:end]


def test_without_a_target_nothing_is_copied(tmp_path: Path, content: bytes) -> None:
    with Reader([BUFFERED], [4], pieces=[PAGE]) as reader:
        assert not read(reader, tmp_path / "file", 0, N_BYTES).is_copied


@pytest.mark.parametrize("n_left", [0, 1, PAGE, 17 * PAGE + 5, N_BYTES - 1])
def test_a_file_that_ends_early_is_short_by_what_its_first_missing_piece_lacks(tmp_path: Path, content: bytes, mode: ReadMode, n_left: int) -> None:
    (tmp_path / "file").write_bytes(content[:n_left])
    memory = Memory(N_BYTES)
    with Reader([mode], [4], pieces=[PAGE]) as reader:
        done = read(reader, tmp_path / "file", 0, N_BYTES, memory.target)
    assert isinstance(done.error, ShortReadError) and done.payload is None and not done.is_copied
    assert f"{n_left}" in str(done.error)


def test_a_file_that_is_not_there_ends_with_its_error_once(tmp_path: Path) -> None:
    with Reader([BUFFERED], [4], pieces=[PAGE]) as reader:
        done = read(reader, tmp_path / "none", 0, N_BYTES)
        assert isinstance(done.error, FileNotFoundError)
        assert reader.take(0.05) == []


def test_reads_side_by_side_end_once_each_with_their_own_bytes(tmp_path: Path) -> None:
    contents, n = [np.random.default_rng(n).bytes(N_BYTES) for n in range(8)], 64
    for number, content in enumerate(contents):
        (tmp_path / f"{number}").write_bytes(content)
    memories = [Memory(N_BYTES) for _ in range(n)]
    with Reader([BUFFERED], [7], pieces=[2 * PAGE]) as reader:
        requests = [
            ReadRequest(k, 0, Extent(tmp_path / f"{k % 8}", 0, N_BYTES), aligned_buffer(N_BYTES), target=memory.target)
            for k, memory in enumerate(memories)
        ]
        numbers = reader.submit(*requests)
        done = {(completion := reader.wait()).request.tag: completion for _ in range(n)}
    assert len(set(numbers)) == n and sorted(done) == list(range(n))
    for k, completion in done.items():
        assert completion.is_copied and completion.payload is not None
        assert bytes(completion.payload) == contents[k % 8] == memories[k].content


def test_nothing_more_is_read_or_copied_once_a_read_was_given_up_and_it_ends(tmp_path: Path, content: bytes) -> None:
    memory = Memory(N_BYTES)
    # Half a minute for the file.
    with Reader([BUFFERED], [2], limits=[8000.0], pieces=[PAGE]) as reader:
        request = ReadRequest("it", 0, Extent(tmp_path / "file", 0, N_BYTES), aligned_buffer(N_BYTES), target=memory.target)
        (number,) = reader.submit(request)
        until = time.monotonic() + 10
        while memory.content == bytes([GUARD]) * N_BYTES:
            assert time.monotonic() < until
            time.sleep(0.001)
        reader.cancel(number)
        seen = memory.content
        done = reader.wait()
        assert time.monotonic() < until
    assert seen != content and memory.content == seen
    assert done.is_cancelled and done.payload is None and not done.is_copied
    pages = [slice(at, at + PAGE) for at in range(0, N_BYTES, PAGE)]
    assert all(seen[page] in (content[page], bytes([GUARD]) * len(content[page])) for page in pages)


def test_a_number_that_ended_can_be_cancelled(tmp_path: Path, content: bytes) -> None:
    with Reader([BUFFERED], [2], pieces=[PAGE]) as reader:
        (number,) = reader.submit(ReadRequest("it", 0, Extent(tmp_path / "file", 0, N_BYTES), aligned_buffer(N_BYTES)))
        reader.wait()
        reader.cancel(number)


@pytest.mark.parametrize("refusing", ["copy", "enter", "nothing"])
def test_each_thread_enters_once_and_what_the_uploader_refuses_is_told(tmp_path: Path, content: bytes, refusing: str) -> None:
    memory, log = Memory(N_BYTES), list[tuple[str, int]]()

    @COPY
    def copy(target: int, source: int, n: int, stream: int | None) -> int:
        log.append(("copy", threading.get_native_id()))
        assert stream == 77
        if refusing == "copy":
            return 700
        ctypes.memmove(target, source, n)
        return 0

    @ENTER
    def enter(context: int | None) -> int:
        log.append((f"enter {context}", threading.get_native_id()))
        return 201 if refusing == "enter" else 0

    copy_at, enter_at = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (copy, enter))
    with Reader([BUFFERED], [3], pieces=[PAGE], uploader=Uploader(copy_at, enter_at, 5)) as reader:
        done = read(reader, tmp_path / "file", 0, N_BYTES, memory.target._replace(stream=77))
    assert done.refused == {"copy": 700, "enter": 201, "nothing": 0}[refusing]
    assert done.is_copied == (refusing == "nothing") and done.payload is not None and bytes(done.payload) == content
    entered = [thread for what, thread in log if what == "enter 5"]
    assert entered and (
        refusing == "enter" or (len(entered) == len(set(entered)) and {thread for what, thread in log if what == "copy"} == set(entered))
    )
    if refusing == "nothing":
        assert memory.content == content


@pytest.mark.parametrize(
    ("begin", "n_threads", "least"), [(0, 1, 4 * PAGE), (0, 1, 4 * PAGE + 1), (77, 1, 3 * PAGE), (0, 6, 4 * PAGE), (5, 6, 1 << 30)]
)
def test_pieces_side_by_side_are_copied_together(tmp_path: Path, content: bytes, begin: int, n_threads: int, least: int) -> None:
    memory, sizes = Memory(N_BYTES - begin), list[int]()

    @COPY
    def copy(target: int, source: int, n: int, stream: int | None) -> int:
        sizes.append(n)
        ctypes.memmove(target, source, n)
        return 0

    uploader = Uploader(ctypes.cast(copy, ctypes.c_void_p).value or 0, 0, 0, least)
    with Reader([BUFFERED], [n_threads], pieces=[PAGE], uploader=uploader) as reader:
        done = read(reader, tmp_path / "file", begin, N_BYTES, memory.target)
    assert done.is_copied and memory.content == content[begin:] and sum(sizes) == N_BYTES - begin
    if n_threads == 1:
        step = -(-least // PAGE) * PAGE
        assert sizes == [min(step, N_BYTES - begin - at) for at in range(0, N_BYTES - begin, step)]
    # Once nothing more is to begin, what lies there is copied, in no more parts than there are threads, and then what each of the others ends with.
    assert len(sizes) <= N_BYTES // least + 2 * n_threads


def test_a_piece_that_is_not_there_keeps_what_waits_for_it_from_being_copied(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content[: 6 * PAGE])
    memory = Memory(N_BYTES)
    with Reader([BUFFERED], [1], pieces=[PAGE], uploader=Uploader(0, 0, 0, 4 * PAGE)) as reader:
        done = read(reader, tmp_path / "file", 0, N_BYTES, memory.target)
    assert isinstance(done.error, ShortReadError) and not done.is_copied
    assert memory.content == content[: 4 * PAGE] + bytes([GUARD]) * (N_BYTES - 4 * PAGE)
