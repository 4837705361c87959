"""Timed reads: what is dealt, how many are in flight, and what a failed read says."""

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from layout.direct import BUFFERED, Extent, ReadMode, probe_directory
from manifests.errors import BadInputError, DamagedDataError, KtierError
from prep.measuring.timed_reads import Deck, Feed, Run, n_requests, read_feeds, read_for

RECORD = 9792


def make_files(directory: Path, n_files: int, n_bytes: int = RECORD) -> list[Path]:
    directory.mkdir(exist_ok=True)
    paths = [directory / f"L1-E{n}.bin" for n in range(n_files)]
    for n, path in enumerate(paths):
        path.write_bytes(np.random.default_rng(n).bytes(n_bytes))
    return paths


def deck(paths: Sequence[Path], *, seed: int = 0, mode: ReadMode = BUFFERED, n_bytes: int = RECORD) -> Deck:
    return Deck(paths, n_bytes, mode, random.Random(seed))


def replace_preadv(monkeypatch: pytest.MonkeyPatch, before: Callable[[int, Sequence[memoryview]], None]) -> None:
    """Call `before` with the path's descriptor and the buffers ahead of each read."""
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        before(fd, buffers)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


def test_no_file_is_dealt_again_while_another_has_not_been(tmp_path: Path) -> None:
    paths = make_files(tmp_path, 7)
    dealer = deck(paths)
    rounds = [[dealer.deal().path for _ in paths] for _ in range(5)]
    assert all(Counter(one) == Counter(paths) for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    assert (dealer.n_dealt, dealer.n_files) == (35, 7)


def test_the_same_seed_deals_the_same_order_and_another_seed_another(tmp_path: Path) -> None:
    paths = make_files(tmp_path, 30)
    orders = [[dealer.deal() for _ in range(60)] for dealer in (deck(paths), deck(paths), deck(paths, seed=1))]
    assert orders[0] == orders[1] != orders[2]


def test_files_that_were_never_written_are_left_out_and_counted(tmp_path: Path) -> None:
    paths = make_files(tmp_path, 4, 1 << 20)
    for path in paths[:2]:
        os.truncate(path, 0)
        os.truncate(path, 1 << 20)
    dealer = deck(paths, n_bytes=1 << 20)
    assert {dealer.deal().path for _ in range(9)} == set(paths[2:])
    assert dealer.n_with_holes == 2
    with pytest.raises(BadInputError, match="^2 files, none without holes"):
        deck(paths[:2], n_bytes=1 << 20).deal()


def test_a_file_that_has_gone_is_named(tmp_path: Path) -> None:
    paths = make_files(tmp_path, 1)
    dealer = deck(paths)
    paths[0].unlink()
    with pytest.raises(KtierError, match=r"L1-E0\.bin: cannot be opened to measure its drive: No such file"):
        dealer.deal()


def test_each_drive_is_counted_for_itself(tmp_path: Path) -> None:
    decks = [deck(make_files(tmp_path / name, n), n_bytes=RECORD) for name, n in (("a", 3), ("b", 5))]
    runs = read_feeds([Feed(decks[0].deal, BUFFERED, 1), Feed(decks[1].deal, probe_directory(tmp_path / "b"), 4)], 0.1)
    for run, dealer in zip(runs, decks, strict=True):
        assert len(run.times) == len(run.ends) == dealer.n_dealt
        assert run.n_bytes == dealer.n_dealt * RECORD and run.ends == sorted(run.ends) and run.seconds == run.ends[-1] > 0
        assert run.bytes_per_s == pytest.approx(run.n_bytes / run.seconds)


def test_the_rate_of_a_part_counts_the_reads_that_ended_in_it() -> None:
    run = Run(10, [1.0] * 4, [0.5, 1.0, 1.5, 4.0])
    assert run.bytes_per_s_between(0, 1) == 20
    assert run.bytes_per_s_between(1, 3) == 5
    assert run.bytes_per_s == 10


@pytest.mark.usefixtures("python_reads")
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_depth_reads_are_in_flight_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    dealer, lock, now, most = deck(make_files(tmp_path, 20)), threading.Lock(), [0], [0]
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    read_feeds([Feed(dealer.deal, BUFFERED, depth)], 0.2)
    assert most[0] == depth


@pytest.mark.usefixtures("python_reads")
def test_large_buffers_begin_on_huge_pages_and_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_bytes, seen = 3 << 20, set[int]()
    dealer = deck(make_files(tmp_path, 6, n_bytes), n_bytes=n_bytes)
    replace_preadv(monkeypatch, lambda fd, buffers: seen.add(np.frombuffer(buffers[0], np.uint8).ctypes.data))
    read_feeds([Feed(dealer.deal, BUFFERED, 4)], 0.2)
    starts = sorted(seen)
    assert 4 <= len(starts) <= n_requests(4)
    assert all(start % (2 << 20) == 0 for start in starts)
    assert all(b - a >= n_bytes for a, b in pairwise(starts))


@pytest.mark.usefixtures("python_reads")
def test_a_read_error_in_the_middle_names_file_and_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make_files(tmp_path, 20)
    dealer = deck(paths)

    def fail_at_7(fd: int, buffers: Sequence[memoryview]) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(paths[7]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    replace_preadv(monkeypatch, fail_at_7)
    with pytest.raises(KtierError) as error:
        read_feeds([Feed(dealer.deal, BUFFERED, 2, "nvme0n1, Fast 0, serial S0")], 30)
    assert str(error.value).startswith(f"{paths[7]}: a read failed while its drive (nvme0n1, Fast 0, serial S0) was measured: Input/output error;")
    assert "kprep verify-hashes" in str(error.value) and "Errno" not in str(error.value)
    assert not [t for t in threading.enumerate() if t.name.startswith("reader-")]


def test_a_file_that_has_become_short_is_damaged_data(tmp_path: Path) -> None:
    paths = make_files(tmp_path, 3)
    os.truncate(paths[1], 5000)
    with pytest.raises(DamagedDataError, match=r"L1-E1\.bin: ends at 5000 bytes, expected at least 9792; found while its drive was measured"):
        read_feeds([Feed(deck(paths).deal, BUFFERED, 1)], 30)


def test_ranges_of_larger_files_can_be_read_for_a_time(tmp_path: Path) -> None:
    (path,) = make_files(tmp_path, 1, 100_000)
    extents = [Extent(path, offset, 4000) for offset in (1, 5000, 96_000)]
    times, seconds = read_for(extents, probe_directory(tmp_path), 2, 0.05, random.Random(0))
    assert len(times) >= 3 and seconds >= 0.05 and max(times) <= seconds


def test_pages_in_the_cache_are_dropped_before_a_buffered_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, dropped = make_files(tmp_path, 2), list[str]()
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *_: dropped.append(os.readlink(f"/proc/self/fd/{fd}")))
    for mode, expected in ((ReadMode(is_direct=True), []), (BUFFERED, sorted(map(str, paths)))):
        dealer = deck(paths, mode=mode)
        for _ in range(5):
            dealer.deal()
        assert sorted(dropped) == expected
