"""Time extraction and verification against what this machine's drive gives the same reader and writer, in one run.

usage: python benchmarks/extract.py CHECKPOINT SCRATCH

The plain rates read records from the checkpoint's shards and write them to SCRATCH with the extraction's own threads and buffers, but with nothing
between: no hash, no gathering, no journal. They are measured before and after, since a shared drive drifts.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from layout.checkpoint import Checkpoint, open_checkpoint
from layout.direct import aligned_buffer, probe_directory, read_extent, round_up, span_bytes
from layout.parallel import run_parallel
from layout.record import expert_file_name
from layout.writer import write_record
from prep.extract import WORKERS_PER_DRIVE

N_RECORDS = 160


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
    start = time.perf_counter()
    process = subprocess.Popen([Path(sys.executable).with_name("kprep"), *map(str, command)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def flat_out(out: Path) -> float:
    """Return the reader's best over some depths on the experts that were written."""
    from manifests.load import load_manifest
    from prep.measure import measure_drive

    manifest = load_manifest(out / "manifest.yaml")
    return measure_drive(out / "experts", record_bytes=manifest.record.n_bytes, seconds=3.0).read_bytes_per_s


def main() -> None:
    checkpoint, scratch = open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2])
    scratch.mkdir(parents=True, exist_ok=True)
    out = scratch / "out"
    before = plain_rates(checkpoint, scratch)
    extract_s, extract_mib = timed("extract", checkpoint.directory, out)
    after = plain_rates(checkpoint, scratch)
    expert_bytes = checkpoint.geometry.n_routed_experts * checkpoint.record.n_bytes
    spine_source = sum(checkpoint.tensors[s.name].n_bytes for t in checkpoint.spine_tensors() for s in t.sources)
    spine_file = (out / "spine.gguf").stat().st_size
    flat = flat_out(out)
    verify_s, verify_mib = timed("verify-hashes", out)
    flat_after = flat_out(out)
    together = (before["read_and_write"] + after["read_and_write"]) / 2
    # The spine reads more than it writes: it is charged with its larger side at the rate of reading and writing together.
    ideal_s = (expert_bytes + max(spine_source, spine_file)) / together
    verified = expert_bytes + spine_file
    report = {
        "expert_bytes": expert_bytes,
        "spine_source_bytes": spine_source,
        "spine_bytes": spine_file,
        "plain_before": before,
        "plain_after": after,
        "extract_s": extract_s,
        "extract_peak_mib": extract_mib,
        "extract_share_of_plain": ideal_s / extract_s,
        "verify_s": verify_s,
        "verify_peak_mib": verify_mib,
        "flat_out_bytes_per_s": [flat, flat_after],
        "verify_share_of_flat_out": verified / verify_s / ((flat + flat_after) / 2),
        "own_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
