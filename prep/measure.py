"""Measuring a drive with the reader that the runtime uses: whole records, direct, in random order, at rising depth."""

import datetime
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from layout.direct import Extent, ReadMode, aligned_buffer, probe_directory, round_up, span_bytes
from layout.drives import describe_directory, link_limit_bytes_per_s
from layout.reader import NAME, Completion, Reader, ReadRequest
from layout.record import parse_expert_file_name
from layout.sizes import format_rate
from layout.writer import PARTIAL_SUFFIX, write_record
from manifests.errors import KtierError
from manifests.manifest import Profile

DEPTHS = (1, 2, 4, 8, 16, 32)
# Another step in depth must bring at least this much.
LEAST_GAIN = 1.05
N_TRIAL_FILES = 16
DEFAULT_SECONDS = 1.0


def measure_drive(directory: Path, *, record_bytes: int, seconds: float, seed: int = 0) -> Profile:
    """Return a drive's profile: depth is raised until the gain falls below 5 %, `seconds` long at each depth.

    A drive without expert files gets trial files for the time of the measurement. Fresh files may be read faster than old ones, from the
    drive's own cache. Raises KtierError if a read fails or the rate is above what the device's link can carry.
    """
    mode = probe_directory(directory)
    with _record_files(directory, record_bytes, mode) as paths:
        runs = _sweep([Extent(path, 0, record_bytes) for path in paths], mode, seconds, random.Random(seed))
    depth, completions, elapsed = runs
    n_bytes = record_bytes * len(completions)
    _check_link(directory, n_bytes / elapsed)
    times = np.array([c.seconds for c in completions]) * 1e6
    p50, p95, p99 = (float(np.percentile(times, q)) for q in (50, 95, 99))
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Profile(date, NAME, mode.is_direct, depth, n_bytes / elapsed, p50, p95, p99, float(times.max()), n_bytes, elapsed)


def _sweep(extents: list[Extent], mode: ReadMode, seconds: float, rng: random.Random) -> tuple[int, list[Completion], float]:
    best: tuple[int, list[Completion], float] | None = None
    for depth in DEPTHS:
        completions, elapsed = read_for(extents, mode, depth, seconds, rng)
        if best is not None and len(completions) / elapsed < LEAST_GAIN * len(best[1]) / best[2]:
            break
        best = depth, completions, elapsed
    assert best is not None
    return best


def read_for(extents: list[Extent], mode: ReadMode, depth: int, seconds: float, rng: random.Random) -> tuple[list[Completion], float]:
    """Keep `depth` reads in flight for a time; return them and the seconds from the first request to the last completion."""
    buffers = [aligned_buffer(span_bytes(extents[0].n_bytes, mode.alignment)) for _ in range(depth)]
    completions: list[Completion] = []
    with Reader([mode], [depth]) as reader:
        start = time.perf_counter()
        for buffer in buffers:
            reader.submit(ReadRequest(None, 0, rng.choice(extents), buffer))
        n_in_flight = depth
        while n_in_flight:
            done = reader.wait()
            n_in_flight -= 1
            if done.error is not None:
                raise KtierError(f"measuring {done.request.extent.path}: {done.error}")
            completions.append(done)
            if time.perf_counter() - start < seconds:
                reader.submit(ReadRequest(None, 0, rng.choice(extents), done.request.buffer))
                n_in_flight += 1
        return completions, time.perf_counter() - start


def _check_link(directory: Path, bytes_per_s: float) -> None:
    limits = [limit for device in describe_directory(directory).physical if (limit := link_limit_bytes_per_s(device)) is not None]
    if limits and bytes_per_s > sum(limits):
        raise KtierError(
            f"{directory}: measured {format_rate(bytes_per_s)}, but its link carries at most {format_rate(sum(limits))}: "
            "a cache was measured, not the drive"
        )


@contextmanager
def _record_files(directory: Path, record_bytes: int, mode: ReadMode) -> Iterator[list[Path]]:
    """Give the drive's own expert files, or trial files that vanish afterwards."""
    with os.scandir(directory) as entries:
        paths = [Path(e.path) for e in entries if parse_expert_file_name(e.name) and e.stat().st_size == record_bytes]
    if len(paths) >= N_TRIAL_FILES:
        yield sorted(paths)
        return
    trials = [directory / f".measure-{os.getpid()}-{n}{PARTIAL_SUFFIX}" for n in range(N_TRIAL_FILES)]
    try:
        buffer = aligned_buffer(round_up(record_bytes, mode.alignment))
        for trial in trials:
            np.frombuffer(buffer, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, len(buffer), np.uint8)
            write_record(trial, buffer, record_bytes, mode)
        yield trials
    finally:
        for trial in trials:
            trial.unlink(missing_ok=True)
