"""Files that appear whole or not at all, to the byte, whatever goes wrong on the way; a full disk is a real one."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from layout.direct import BUFFERED, PAGE, ReadMode, aligned_buffer, probe_directory, round_up
from layout.writer import PARTIAL_SUFFIX, replaced_file, write_bytes, write_record
from manifests.errors import DamagedDataError, KtierError, NoSpaceError

N_DISK = 8 << 20
N_TOO_MUCH = 16 << 20
OLD = b"what was there before"

Write = Callable[[Path, bytes], None]


def filled_buffer(content: bytes, alignment: int) -> memoryview:
    """Return an aligned buffer of the content and, behind it, bytes that must not reach the file."""
    buffer = aligned_buffer(round_up(max(1, len(content)), alignment))
    values = np.frombuffer(buffer, np.uint8)
    values[:] = 0xEE
    buffer[: len(content)] = content
    return buffer


@pytest.fixture(params=["direct", "buffered"])
def mode(request: pytest.FixtureRequest, tmp_path: Path) -> ReadMode:
    if request.param == "buffered":
        return BUFFERED
    found = probe_directory(tmp_path)
    if not found.is_direct:
        pytest.skip(f"the temporary directory is read {found}")
    return found


def write_as_record(mode: ReadMode) -> Write:
    return lambda path, content: write_record(path, filled_buffer(content, mode.alignment), len(content), mode)


def write_replaced(path: Path, content: bytes) -> None:
    with replaced_file(path) as partial:
        partial.write_bytes(content)


WRITES = [
    pytest.param(write_as_record(ReadMode(is_direct=True)), id="record-direct"),
    pytest.param(write_as_record(BUFFERED), id="record-buffered"),
    pytest.param(write_bytes, id="bytes"),
    pytest.param(write_replaced, id="replaced"),
]


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


@pytest.mark.parametrize("n_bytes", [0, 1, 511, 4095, 4096, 4097, 9792, (2 << 20) + 3])
def test_a_record_is_its_bytes_and_no_more(tmp_path: Path, n_bytes: int, mode: ReadMode) -> None:
    content = np.random.default_rng(n_bytes).bytes(n_bytes)
    write_as_record(mode)(tmp_path / "L1-E0.bin", content)
    assert (tmp_path / "L1-E0.bin").read_bytes() == content
    assert names(tmp_path) == ["L1-E0.bin"]


@pytest.mark.parametrize("write", WRITES)
def test_a_longer_old_file_and_a_longer_partial_one_leave_nothing_in_the_new(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 20_000)
    path.with_name("file" + PARTIAL_SUFFIX).write_bytes(b"y" * 30_000)
    write(path, b"short")
    assert path.read_bytes() == b"short"
    assert names(tmp_path) == ["file"]


def pwrite_that_takes(n_at_once: int, *, n_in_all: int = 1 << 30) -> Callable[[int, memoryview, int], int]:
    """Make a pwrite that takes so many bytes at once and in all; whole pages are written, as direct writes need, but not owned up to."""
    real, n_calls = os.pwrite, count()

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        assert next(n_calls) < 200, "no end of writing"
        n = min(n_at_once, n_in_all - offset, len(data))
        if n == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return min(real(fd, data[: round_up(n, PAGE)], offset), n)

    return pwrite


@pytest.mark.parametrize(("limit", "is_direct"), [(4096, True), (12288, True), (5000, True), (1000, False), (5000, False)])
def test_a_write_that_the_kernel_cuts_short_goes_on(tmp_path: Path, limit: int, is_direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = probe_directory(tmp_path) if is_direct else BUFFERED
    content = np.random.default_rng(5).bytes(9792)
    monkeypatch.setattr("layout.writer.os.pwrite", pwrite_that_takes(limit))
    write_as_record(mode)(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == content


def test_a_disk_that_is_full_within_a_page_is_full(tmp_path: Path, mode: ReadMode, monkeypatch: pytest.MonkeyPatch) -> None:
    # So it is where blocks are smaller than a page: a write that goes on from an aligned place gains nothing, again and again.
    monkeypatch.setattr("layout.writer.os.pwrite", pwrite_that_takes(1 << 20, n_in_all=5120))
    with pytest.raises(NoSpaceError):
        write_as_record(mode)(tmp_path / "file", bytes(9792))
    assert names(tmp_path) == []


def test_the_check_sees_the_whole_partial_file_before_the_name_is_there(tmp_path: Path, mode: ReadMode) -> None:
    path, content, seen = tmp_path / "file", os.urandom(9792), []

    def check(partial: Path) -> None:
        seen.append((partial.name, partial.read_bytes() == content, path.exists()))

    write_record(path, filled_buffer(content, mode.alignment), len(content), mode, check=check)
    assert seen == [("file.partial", True, False)]
    assert path.read_bytes() == content


@pytest.mark.parametrize("error", [DamagedDataError("other bytes"), ValueError("a bug"), KeyboardInterrupt()])
def test_what_the_check_raises_keeps_the_old_file(tmp_path: Path, error: BaseException, mode: ReadMode) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)

    def check(_: Path) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        write_record(path, filled_buffer(b"new", mode.alignment), 3, mode, check=check)
    assert caught.value is error
    assert path.read_bytes() == OLD and names(tmp_path) == ["file"]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
        (RuntimeError("a bug"), RuntimeError, "a bug"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), KtierError, "file: cannot be written: Input/output error"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), NoSpaceError, "file: no room left on the file system; make room"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), NoSpaceError, "file: no room left on the file system; make room"),
    ],
)
def test_an_error_leaves_the_old_file_and_no_partial_one(
    tmp_path: Path, write: Write, call: str, error: BaseException, kind: type[BaseException], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(f"layout.writer.os.{call}", fail)
        with pytest.raises(kind) as caught:
            write(path, b"new" * 1000)
    assert type(caught.value) is kind and message in str(caught.value)
    assert path.read_bytes() == OLD and names(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, DamagedDataError])
def test_an_error_while_a_file_is_being_replaced_keeps_the_old_one(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with pytest.raises(error), replaced_file(path) as partial:
        partial.write_bytes(b"half of the new")
        raise error
    assert path.read_bytes() == OLD and names(tmp_path) == ["file"]


def test_a_replaced_file_is_the_old_one_until_it_is_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with path.open("rb") as held_open:
        with replaced_file(path) as partial:
            partial.write_bytes(b"new")
            assert path.read_bytes() == OLD
        assert path.read_bytes() == b"new"
        assert held_open.read() == OLD
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("write", WRITES)
def test_a_directory_that_is_not_there_is_named(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "absent" / "file"
    with pytest.raises(KtierError, match=f"{path}: cannot be written: No such file or directory"):
        write(path, b"new")


@pytest.mark.parametrize("write", WRITES)
def test_the_bytes_are_on_the_disk_before_the_name_is(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(fd: int) -> None:
        events.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def recording_replace(source: Path, target: Path) -> None:
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr("layout.writer.os.fsync", recording_fsync)
    monkeypatch.setattr("layout.writer.os.replace", recording_replace)
    write(tmp_path / "file", b"content")
    # The directory of many records is synced once, by their writer.
    assert events[:2] == ["sync file.partial", "rename"]
    assert events[2:] in ([], [f"sync {tmp_path.name}"])
    assert bool(events[2:]) == (write in (write_bytes, write_replaced))


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 8 MiB of its own, mounted."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("losetup", "mkfs.ext4", "mount"))):
        pytest.skip("a small disk needs root, losetup and mkfs.ext4")
    image, mounted = tmp_path_factory.mktemp("disk") / "image", tmp_path_factory.mktemp("mounted")
    image.write_bytes(bytes(N_DISK))
    device = ""
    try:
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", image)
        device = _run("losetup", "--find", "--show", "--direct-io=on", image)
        _run("mount", device, mounted)
    except subprocess.CalledProcessError as error:
        if device:
            _run("losetup", "--detach", device)
        pytest.skip(f"no small disk can be mounted here: {error.cmd[0]}: {error.stderr.strip()}")
    try:
        yield mounted
    finally:
        _run("umount", mounted)
        _run("losetup", "--detach", device)
        image.unlink()


def _run(*arguments: object) -> str:
    return subprocess.run([*map(str, arguments)], check=True, capture_output=True, text=True).stdout.strip()


def free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("is_reserved", [True, False])
def test_a_full_disk_is_told_and_keeps_only_what_it_held(small_disk: Path, write: Write, is_reserved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    if not is_reserved:
        # The room then runs out under the write itself.
        monkeypatch.setattr("layout.writer.os.posix_fallocate", refuse)
    write(small_disk / "old", OLD)
    write(small_disk / "large", bytes(5 << 20))
    before, n_free = names(small_disk), free_bytes(small_disk)
    for name in ("old", "new"):
        with pytest.raises(NoSpaceError, match=f"{small_disk / name}: no room left on the file system"):
            write(small_disk / name, bytes(N_TOO_MUCH))
    assert names(small_disk) == before and free_bytes(small_disk) == n_free
    assert (small_disk / "old").read_bytes() == OLD
    write(small_disk / "new", b"x" * 9792)
    assert (small_disk / "new").read_bytes() == b"x" * 9792
    for name in ("old", "large", "new"):
        (small_disk / name).unlink()
