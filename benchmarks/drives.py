"""Compare the measurement of a drive with fio, the printed command, in turns on the same files.

usage: python benchmarks/drives.py DIRECTORY [ROUNDS]

DIRECTORY holds experts; where it has none, 128 of K3's size are made there and removed afterwards (2.2 GB). The drive is measured once for its
depth. Then each round reads about as much with our reader, with fio, with fio and with our reader again (ABBA), so that a drive that drifts
drifts for both. Root is needed for the huge pages that fio's command asks for. All rounds are printed, as one JSON document.
"""

import contextlib
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from layout.direct import probe_directory
from layout.record import expert_file_name, parse_expert_file_name, record_layout
from manifests.geometry import load_geometry
from prep.measuring.fio import MOST_FILES, fio_command
from prep.measuring.measure import measure_drives
from prep.measuring.timed_reads import Deck, Feed, read_feeds

N_FILES = 128


@contextmanager
def experts(directory: Path, record_bytes: int) -> Iterator[list[Path]]:
    """Give the directory's experts, or make some for the time."""
    own = sorted(path for path in directory.iterdir() if parse_expert_file_name(path.name) and path.stat().st_size == record_bytes)
    if own:
        yield own
        return
    rng = np.random.default_rng(1)
    made = [directory / expert_file_name(1 + n // 64, n % 64) for n in range(N_FILES)]
    try:
        for path in made:
            with path.open("wb") as file:
                file.write(rng.bytes(record_bytes))
                os.fsync(file.fileno())
        yield made
    finally:
        for path in made:
            path.unlink(missing_ok=True)


@contextmanager
def huge_pages() -> Iterator[None]:
    """Put the number of huge pages back afterwards."""
    setting = Path("/proc/sys/vm/nr_hugepages")
    former = setting.read_text()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            setting.write_text(former)


def fio_rate(command: str) -> float:
    """Run the printed lines as they are, but for sudo where there is none; return bytes per second of what fio says it read."""
    lines = command if shutil.which("sudo") else command.replace("sudo ", "")
    done = subprocess.run(["bash", "-ec", lines], capture_output=True, text=True)
    found = re.search(r"io=\d+MiB \((\d+)MB\), run=(\d+)-\d+msec", done.stdout)
    if found is None:
        raise SystemExit(f"fio failed: {done.stdout[-500:]}{done.stderr[-500:]}")
    return float(found[1]) * 1e6 / (float(found[2]) / 1e3)


def our_rate(paths: list[Path], directory: Path, *, depth: int, record_bytes: int, seconds: float, seed: int) -> float:
    mode = probe_directory(directory)
    deck = Deck(paths, record_bytes, mode, random.Random(seed))
    return read_feeds([Feed(deck.deal, mode, depth)], seconds)[0].bytes_per_s


def main() -> None:
    directory, n_rounds = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 7
    record_bytes = record_layout(load_geometry("k3.1")).n_bytes
    with huge_pages(), experts(directory, record_bytes) as paths:
        measured = measure_drives([directory], record_bytes=record_bytes, seconds=1.0)
        (profile,) = measured.profiles
        n_files = min(len(paths), MOST_FILES)
        command = fio_command(directory, depth=profile.depth, record_bytes=record_bytes, n_files=n_files, is_direct=profile.is_direct)
        # As long as fio takes to read its files once.
        seconds = n_files * record_bytes / fio_rate(command)
        rounds = []
        for n in range(n_rounds):
            ours = [our_rate(paths, directory, depth=profile.depth, record_bytes=record_bytes, seconds=seconds, seed=2 * n)]
            theirs = [fio_rate(command), fio_rate(command)]
            ours.append(our_rate(paths, directory, depth=profile.depth, record_bytes=record_bytes, seconds=seconds, seed=2 * n + 1))
            rounds.append({"ours": ours, "fio": theirs, "ratio": sum(ours) / sum(theirs)})
            print(f"round {n}: ours {[round(r / 1e9, 3) for r in ours]} GB/s, fio {[round(r / 1e9, 3) for r in theirs]} GB/s", file=sys.stderr)
    medians = {who: statistics.median(rate for one in rounds for rate in one[who]) for who in ("ours", "fio")}
    report = {
        "fio_command": command,
        "depth": profile.depth,
        "curve": {point.depth: point.read_bytes_per_s for point in profile.curve},
        "profile_bytes_per_s": profile.read_bytes_per_s,
        "profile_bytes": profile.n_bytes,
        "profile_device_bytes": profile.device_bytes,
        "seconds_each": seconds,
        "rounds": rounds,
        "median_ours": medians["ours"],
        "median_fio": medians["fio"],
        "ratio_of_medians": medians["ours"] / medians["fio"],
        "median_of_ratios": statistics.median(one["ratio"] for one in rounds),
        "remarks": measured.remarks,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
