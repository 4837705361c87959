"""Time extraction and verification against what this machine's drive gives the same reader and writer, in one run.

usage: python benchmarks/extract.py CHECKPOINT SCRATCH
       python benchmarks/extract.py PREPARED

The plain rates read records from the checkpoint's shards and write them to SCRATCH with the extraction's own threads and buffers, but with nothing
between: no hash, no gathering, no journal. They are measured before and after, since a shared drive drifts. Verification is measured against the
reader flat out at each depth, in turns; with one argument, that of a model which is there already and nothing else.
"""

import json
import os
import random
import select
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from layout.checkpoint import Checkpoint, open_checkpoint
from layout.direct import Extent, aligned_buffer, probe_directory, read_extent, round_up, span_bytes
from layout.parallel import run_parallel
from layout.prepared import open_prepared
from layout.record import expert_file_name
from layout.writer import write_record
from prep.extraction.extract import WORKERS_PER_DRIVE
from prep.measuring.measure import DEPTHS, read_for
from prep.proof.receipts import Receipts
from prep.proof.selection import select_records
from prep.proof.verify import read_streams, record_streams, verify

N_RECORDS = 160
N_ROUNDS = 4
SECONDS_PER_DEPTH = 0.7


def plain_rate(checkpoint: Checkpoint, scratch: Path, *, does_read: bool, does_write: bool) -> float:
    """Return bytes per second of moving N_RECORDS records; read and written bytes count once."""
    mode, n_bytes = probe_directory(scratch), checkpoint.record.n_bytes
    layers = list(checkpoint.geometry.moe_layers)
    places = [(layers[n % len(layers)], n * 5 % checkpoint.geometry.n_experts) for n in range(N_RECORDS)]

    def make_worker() -> Callable[[tuple[int, tuple[int, int]]], None]:
        incoming = aligned_buffer(span_bytes(n_bytes, checkpoint.read_mode.alignment))
        outgoing = aligned_buffer(round_up(n_bytes, mode.alignment))

        def work(item: tuple[int, tuple[int, int]]) -> None:
            number, place = item
            if does_read:
                for extent in checkpoint.expert_extents(*place):
                    read_extent(extent, incoming, checkpoint.read_mode)
            if does_write:
                write_record(scratch / expert_file_name(number, 0), outgoing, n_bytes, mode)

        return work

    start = time.perf_counter()
    for _ in run_parallel(enumerate(places), make_worker, n_workers=WORKERS_PER_DRIVE):
        pass
    return N_RECORDS * n_bytes / (time.perf_counter() - start)


def plain_rates(checkpoint: Checkpoint, scratch: Path) -> dict[str, float]:
    folder = scratch / "plain"
    folder.mkdir()
    rates = {
        "read": plain_rate(checkpoint, folder, does_read=True, does_write=False),
        "write": plain_rate(checkpoint, folder, does_read=False, does_write=True),
        "read_and_write": plain_rate(checkpoint, folder, does_read=True, does_write=True),
    }
    shutil.rmtree(folder)
    return rates


def timed(*command: object) -> tuple[float, float]:
    """Run kprep; return its seconds and its peak memory in MiB."""
    start, peak = time.perf_counter(), 0.0
    process = subprocess.Popen([Path(sys.executable).with_name("kprep"), *map(str, command)], stdout=subprocess.DEVNULL)
    # Not wait4: what it tells of a child's memory begins with this process's own.
    end = os.pidfd_open(process.pid)
    while not select.select([end], [], [], 0.05)[0]:
        peak = max(peak, peak_mib(process.pid))
    seconds = time.perf_counter() - start
    os.close(end)
    assert process.wait() == 0, command
    return seconds, peak


def peak_mib(pid: int) -> float:
    """Return a process's peak memory so far, 0 if it is ending."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:")), 0.0)


def time_verification(out: Path) -> dict[str, Any]:
    """Return rates in bytes per second: flat out per depth, the whole command, the library call within it, and the records without the spine.

    They take turns, forwards and backwards; the shares are of the best depth's median.
    """
    prepared, rng = open_prepared(out), random.Random(0)
    selection = select_records(prepared, drive=None, layers=[], n_sample=None, seed=0)
    extents = [
        prepared.expert_extent(n, *map(int, place)) for n, wanted in selection.records.items() for place in zip(*wanted.nonzero(), strict=True)
    ]
    record_bytes = sum(extent.n_bytes for extent in extents)
    all_bytes = record_bytes + prepared.manifest.spine.n_bytes
    flat: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    peaks = []

    def flat_out() -> None:
        for depth in rng.sample(DEPTHS, len(DEPTHS)):
            flat[depth].append(rate_at(extents, depth, rng))

    def command() -> float:
        seconds, peak = timed("verify-hashes", out)
        peaks.append(peak)
        return all_bytes / seconds

    def call() -> float:
        start = time.perf_counter()
        assert verify(prepared, selection, receipts=Receipts(prepared), is_trusting=False, on_progress=lambda *_: None).is_clean
        return all_bytes / (time.perf_counter() - start)

    def records() -> float:
        start = time.perf_counter()
        assert all(done.error is None for done in read_streams(record_streams(prepared, selection.records)))
        return record_bytes / (time.perf_counter() - start)

    measures: dict[str, tuple[Callable[[], float], list[float]]] = {"command": (command, []), "call": (call, []), "records": (records, [])}
    for n in range(N_ROUNDS):
        flat_out()
        for measure, found in list(measures.values())[:: 1 - n % 2 * 2]:
            found.append(measure())
    flat_out()
    best = max(map(statistics.median, flat.values()))
    shares = {name: statistics.median(found) / best for name, (_, found) in measures.items()}
    rates = {name: found for name, (_, found) in measures.items()}
    return {"flat_out_by_depth": flat, **rates, "share_of_flat_out": shares, "peak_mib": max(peaks)}


def rate_at(extents: list[Extent], depth: int, rng: random.Random) -> float:
    """Return the reader's rate on random records of one drive, nothing hashed."""
    completions, seconds = read_for(extents, probe_directory(extents[0].path.parent), depth, SECONDS_PER_DEPTH, rng)
    return len(completions) * extents[0].n_bytes / seconds


def time_extraction(checkpoint: Checkpoint, scratch: Path, out: Path) -> dict[str, Any]:
    """Extract; return what it took beside the plain rates."""
    before = plain_rates(checkpoint, scratch)
    seconds, peak = timed("extract", checkpoint.directory, out)
    after = plain_rates(checkpoint, scratch)
    expert_bytes = checkpoint.geometry.n_routed_experts * checkpoint.record.n_bytes
    spine_source = sum(checkpoint.tensors[s.name].n_bytes for t in checkpoint.spine_tensors() for s in t.sources)
    spine_file = (out / "spine.gguf").stat().st_size
    together = (before["read_and_write"] + after["read_and_write"]) / 2
    # The spine reads more than it writes: it is charged with its larger side at the rate of reading and writing together.
    ideal_s = (expert_bytes + max(spine_source, spine_file)) / together
    return {
        "expert_bytes": expert_bytes,
        "spine_source_bytes": spine_source,
        "spine_bytes": spine_file,
        "plain_before": before,
        "plain_after": after,
        "extract_s": seconds,
        "extract_peak_mib": peak,
        "extract_share_of_plain": ideal_s / seconds,
    }


def main() -> None:
    if len(sys.argv) == 2:
        print(json.dumps(time_verification(Path(sys.argv[1])), indent=1))
        return
    checkpoint, scratch = open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2])
    scratch.mkdir(parents=True, exist_ok=True)
    extraction = time_extraction(checkpoint, scratch, scratch / "out")
    print(json.dumps({**extraction, "verification": time_verification(scratch / "out")}, indent=1))


if __name__ == "__main__":
    main()
