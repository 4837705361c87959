"""Reading ranges: the file's own bytes at every size and place, however the kernel serves them; and how a directory is probed."""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout.direct import (
    BUFFERED,
    PAGE,
    Extent,
    ReadMode,
    ShortReadError,
    aligned_buffer,
    file_blocks,
    probe_directory,
    read_extent,
    span_bytes,
)
from manifests.errors import BadInputError, DamagedDataError

DIRECT = ReadMode(is_direct=True)
WIDE = ReadMode(is_direct=True, alignment=65536)
MODES = [pytest.param(DIRECT, id="direct"), pytest.param(WIDE, id="direct-64K"), pytest.param(BUFFERED, id="buffered")]
BOTH = [pytest.param(DIRECT, id="direct"), pytest.param(BUFFERED, id="buffered")]
# No multiple of a page: the last block is a tail.
N_FILE = 3 * (1 << 20) + 1234
SIZES = (1, 511, 4095, 4096, 4097, 9792, (2 << 20) + 17)
OFFSETS = (0, 1, 8, 4095, 4096, 4097, 16624, 65536, 700_001)
CONTENT = np.random.default_rng(1).bytes(N_FILE)

PreadV = Callable[[int, Sequence[memoryview], int], int]


@pytest.fixture(scope="module")
def file() -> Iterator[Path]:
    """A file where direct reads work."""
    for place in (None, "/dev/shm"):
        with tempfile.TemporaryDirectory(dir=place) as directory:
            path = Path(directory) / "content"
            path.write_bytes(CONTENT)
            if probe_directory(path.parent).is_direct:
                yield path
                return
    pytest.skip("neither the temporary directory nor /dev/shm takes direct reads")


def read(path: Path, offset: int, n_bytes: int, mode: ReadMode) -> bytes:
    buffer = aligned_buffer(span_bytes(n_bytes, mode.alignment))
    return bytes(read_extent(Extent(path, offset, n_bytes), buffer, mode))


def preadv_that_gives(limits: Sequence[int]) -> PreadV:
    """Make a preadv whose answers are cut to the limits in turn, and that writes nothing beyond what it answers."""
    real, limit = os.preadv, cycle(limits)

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        whole = aligned_buffer(max(1, len(buffers[0])))
        n = min(real(fd, [whole], offset), len(buffers[0]), next(limit))
        buffers[0][:n] = whole[:n]
        return n

    return preadv


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_bytes", SIZES)
@pytest.mark.parametrize("offset", OFFSETS)
def test_a_range_is_the_files_bytes(file: Path, offset: int, n_bytes: int, mode: ReadMode) -> None:
    assert read(file, offset, n_bytes, mode) == CONTENT[offset : offset + n_bytes]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n_bytes", SIZES)
def test_a_range_may_end_with_the_file(file: Path, n_bytes: int, mode: ReadMode) -> None:
    assert read(file, N_FILE - n_bytes, n_bytes, mode) == CONTENT[-n_bytes:]


@settings(deadline=None, max_examples=150)
@given(data=st.data(), mode=st.sampled_from([DIRECT, WIDE, BUFFERED]))
def test_any_range_is_the_files_bytes(file: Path, data: st.DataObject, mode: ReadMode) -> None:
    offset = data.draw(st.integers(0, N_FILE))
    n_bytes = data.draw(st.integers(0, min(N_FILE - offset, 300_000)))
    assert read(file, offset, n_bytes, mode) == CONTENT[offset : offset + n_bytes]


@pytest.mark.parametrize(("mode", "is_expected"), [(DIRECT, True), (BUFFERED, False)])
def test_only_a_direct_read_opens_the_file_with_o_direct(file: Path, mode: ReadMode, is_expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], os.open

    def recording_open(path: Path, flags: int) -> int:
        seen.append(bool(flags & os.O_DIRECT))
        return real(path, flags)

    monkeypatch.setattr("layout.direct.os.open", recording_open)
    read(file, 0, 100, mode)
    assert seen == [is_expected]


@pytest.mark.parametrize("mode", BOTH)
def test_no_read_leaves_a_file_open(file: Path, mode: ReadMode) -> None:
    before = os.listdir("/proc/self/fd")
    read(file, 5, 10, mode)
    with pytest.raises(ShortReadError):
        read(file, N_FILE, 1, mode)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("limits", "mode"),
    [
        *[(limits, BUFFERED) for limits in ([1000], [4096], [5000, 1, 70_001], [1 << 16])],
        *[(limits, DIRECT) for limits in ([4096], [8192, 4096], [1 << 20])],
        # Not a whole number of blocks: the read must go on from an aligned place.
        *[(limits, DIRECT) for limits in ([4097], [5000], [70_001, 8191], [511, 1 << 22])],
        *[(limits, WIDE) for limits in ([65536], [65537], [200_003])],
    ],
)
def test_a_read_that_the_kernel_cuts_short_goes_on(file: Path, limits: list[int], mode: ReadMode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layout.direct.os.preadv", preadv_that_gives(limits))
    for offset, n_bytes in ((0, 8192), (16624, 9792), (4095, 300_000), (N_FILE - 200_001, 200_001)):
        assert read(file, offset, n_bytes, mode) == CONTENT[offset : offset + n_bytes]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("n_file", "offset", "n_bytes"), [(0, 0, 1), (1, 0, 2), (4096, 0, 4097), (5000, 4500, 501), (9791, 0, 9792), (100_000, 0, 2 << 20)]
)
def test_a_short_file_is_told_with_its_size_and_the_expected_one(tmp_path: Path, n_file: int, offset: int, n_bytes: int, mode: ReadMode) -> None:
    path = tmp_path / "L1-E0.bin"
    path.write_bytes(bytes(n_file))
    with pytest.raises(ShortReadError) as caught:
        read(path, offset, n_bytes, mode)
    assert str(caught.value) == f"{path}: ends at {n_file} bytes, expected at least {offset + n_bytes}"
    assert isinstance(caught.value, DamagedDataError)


@pytest.mark.parametrize("mode", MODES)
def test_a_range_that_begins_behind_the_end_is_told_with_the_files_size(tmp_path: Path, mode: ReadMode) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(100))
    with pytest.raises(ShortReadError, match=r"ends at 100 bytes, expected at least 200001$"):
        read(path, 200_000, 1, mode)


@pytest.mark.parametrize("mode", BOTH)
def test_a_failing_device_is_no_short_file(file: Path, mode: ReadMode, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("layout.direct.os.preadv", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        read(file, 0, 1, mode)
    # The kernel does not say which file it was.
    assert caught.value.filename == str(file)


@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize(
    ("begin", "end", "block_bytes"), [(0, N_FILE, 1 << 20), (4097, 50_000, 5000), (8, 8 + 8192, 4096), (7, 7, 4096), (3, 9, 1 << 20)]
)
def test_blocks_follow_each_other_without_a_gap(file: Path, begin: int, end: int, block_bytes: int, mode: ReadMode) -> None:
    blocks = [bytes(block) for block in file_blocks(file, begin, end, mode, block_bytes=block_bytes)]
    assert b"".join(blocks) == CONTENT[begin:end]
    assert all(len(block) == block_bytes for block in blocks[:-1])


@pytest.mark.parametrize("n_bytes", [0, 1, 4095, 4096, 4097, 2 << 20, (3 << 20) + 1])
def test_an_aligned_buffer_begins_at_a_page_and_holds_zeros(n_bytes: int) -> None:
    buffer = aligned_buffer(n_bytes)
    values = np.frombuffer(buffer, np.uint8)
    assert values.ctypes.data % PAGE == 0
    assert n_bytes <= len(buffer) < n_bytes + PAGE + (n_bytes == 0)
    assert not buffer.readonly and not values.any()


@pytest.mark.parametrize("is_supported", [True, False])
def test_an_aligned_buffer_is_really_there(is_supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    if not is_supported:
        # No advice that any kernel knows.
        monkeypatch.setattr("layout.direct._MADV_POPULATE_WRITE", 9999)
    before, n_pages = resident_pages(), 16_384
    buffer = aligned_buffer(n_pages * PAGE)
    assert resident_pages() - before > 0.9 * n_pages
    assert not np.frombuffer(buffer, np.uint8).any()


def test_a_span_holds_a_range_wherever_it_begins() -> None:
    for n_bytes, alignment in ((1, 4096), (4096, 4096), (4097, 4096), (9792, 65536)):
        for lead in (0, 1, alignment - 1):
            n_blocks = -(-(lead + n_bytes) // alignment)
            assert span_bytes(n_bytes, alignment) >= n_blocks * alignment


@pytest.fixture(params=["disk", "shm"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on the temporary file system, and one in memory."""
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield Path(memory)


# What the probe finds is what a transfer by hand finds.
def takes_direct_reads(directory: Path) -> bool:
    path = directory / "by-hand"
    path.write_bytes(bytes(PAGE))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(fd, [aligned_buffer(PAGE)], 0) == PAGE
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        path.unlink()


@pytest.mark.parametrize("files", [{}, {"small": 100}, {"small": 4095, "L1-E0.bin": 9792}])
def test_a_probe_finds_the_mode_and_leaves_nothing_behind(directory: Path, files: dict[str, int]) -> None:
    for name, n_bytes in files.items():
        (directory / name).write_bytes(bytes(n_bytes))
    mode = probe_directory(directory)
    assert mode.is_direct == takes_direct_reads(directory)
    assert mode.alignment % PAGE == 0
    assert str(mode) == f"direct, {mode.alignment} B aligned" if mode.is_direct else mode.reason
    assert sorted(p.name for p in directory.iterdir()) == sorted(files)


def test_a_probe_of_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, reason in (("absent", "No such file or directory"), ("file", "Not a directory")):
        with pytest.raises(BadInputError, match=f"{tmp_path / name}: cannot be opened as a directory: {reason}"):
            probe_directory(tmp_path / name)


@pytest.mark.parametrize("target", ["loop", "absent", "."])
def test_a_link_that_leads_to_no_file_is_passed_over(directory: Path, target: str) -> None:
    (directory / "loop").symlink_to(target)
    (directory / "L1-E0.bin").write_bytes(bytes(9792))
    assert probe_directory(directory).is_direct == takes_direct_reads(directory)


def test_a_directory_that_takes_no_file_is_read_buffered() -> None:
    # A directory of small files in which even root can make none.
    mode = probe_directory(Path("/proc/sys/kernel/random"))
    assert not mode.is_direct and mode.reason.startswith("no file to try, and none can be made: ")


@pytest.mark.parametrize("files", [(), ("large",)])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_where_o_direct_is_refused_the_mode_is_buffered_and_says_why(
    tmp_path: Path, files: tuple[str, ...], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(bytes(9792))
    real = os.open

    def refusing_open(path: Path, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *mode)

    monkeypatch.setattr("layout.direct.os.open", refusing_open)
    mode = probe_directory(tmp_path)
    assert mode == ReadMode(is_direct=False, reason=f"the file system refuses O_DIRECT: {os.strerror(number)}")
    assert str(mode) == f"buffered (the file system refuses O_DIRECT: {os.strerror(number)})"
    assert sorted(p.name for p in tmp_path.iterdir()) == list(files)


def test_a_failing_device_is_no_refusal(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for call in ("open", "preadv"):
        with monkeypatch.context() as patch:
            patch.setattr(f"layout.direct.os.{call}", fail)
            with pytest.raises(OSError, match="Input/output error"):
                probe_directory(file.parent)


@pytest.mark.parametrize(("least", "found"), [(4096, 4096), (4097, 16384), (65536, 65536), (65537, None)])
def test_the_smallest_alignment_that_reads_is_taken(file: Path, least: int, found: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def coarse_preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if len(buffers[0]) < least:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr("layout.direct.os.preadv", coarse_preadv)
    mode = probe_directory(file.parent)
    assert (mode.alignment if mode.is_direct else None) == found
    assert mode.is_direct or mode.reason == "direct reads are refused at every alignment up to 65536 B"


def test_a_direct_read_that_gives_other_bytes_is_not_believed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def lying_preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        n = real(fd, buffers, offset)
        buffers[0][n - 1] ^= 1
        return n

    monkeypatch.setattr("layout.direct.os.preadv", lying_preadv)
    mode = probe_directory(file.parent)
    assert not mode.is_direct and mode.reason == "a direct read of content gave other bytes than a plain one"
