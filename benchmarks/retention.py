"""Blocks of several rows: reads from drives when an expert that few rows use leaves the caches first, beside plain recency.

usage: python benchmarks/retention.py [--rows 4,8,12,16] [--blocks N] [--routing KIND]

The real store with the slots of a 27.5 GB and a 30 GB budget runs all layers of K3.1 over small records, on the CPU; only bytes differ.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from layout.prepared import Copies
from layout.record import record_layout
from manifests.geometry import load_geometry
from runtime.bench.routing import make_routing
from runtime.bench.synthetic import EmulatedDrive, SyntheticModel, make_records, synthetic_model
from runtime.decode import LEAST_USES_TO_STAY
from runtime.stats import new_counts
from runtime.storage.incoming import Phase
from runtime.storage.store import Store

FULL = load_geometry("k3.1")
RECORD_BYTES = record_layout(FULL).n_bytes
SLOTS = int(27.5e9 / RECORD_BYTES), int(30e9 / RECORD_BYTES)
N_FILES = 16


@contextmanager
def small_model() -> Iterator[SyntheticModel]:
    geometry = replace(FULL, hidden_size=64, latent_size=64, expert_intermediate_size=64)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        drives = [EmulatedDrive(Path(folder), None, 1.0)]
        yield synthetic_model(geometry, drives, N_FILES, make_records(record_layout(geometry), [Path(folder)], N_FILES, seed=0), seed=0)


def reads(model: SyntheticModel, routing: np.ndarray, n_rows: int, *, n_warm: int, is_retaining: bool) -> tuple[float, float]:
    """Return the records read and the experts needed per block, after the first n_warm blocks: routing int64 [positions, layers, k]."""
    copies = Copies(tuple(drive.holds for drive in model.manifest.drives), [])
    store = Store(
        model, copies, device=torch.device("cpu"), n_device_slots=SLOTS[0], n_host_slots=SLOTS[1], verify_every=0,
        counts=new_counts(1), on_remark=lambda remark: None,
    )  # fmt: skip
    store.phase, n_blocks, n_needed = Phase.DECODE, len(routing) // n_rows, 0
    with closing(store):
        for block in range(n_blocks):
            if block == n_warm:
                store.counts, n_needed = new_counts(1), 0
            for number, layer in enumerate(FULL.moe_layers):
                experts, n_uses = np.unique(routing[block * n_rows : (block + 1) * n_rows, number], return_counts=True)
                n_needed += len(experts)
                passing = experts[n_uses < LEAST_USES_TO_STAY].tolist() if is_retaining else ()
                for _ in store.fetch_groups(layer, experts.tolist(), passing=passing):
                    pass
        return store.counts.n_records / (n_blocks - n_warm), n_needed / (n_blocks - n_warm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="4,8,12,16")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--routing", default="zipf")
    asked = parser.parse_args()
    found = {}
    with small_model() as model:
        for n_rows in map(int, asked.rows.split(",")):
            n_warm = asked.blocks // 3
            routing = make_routing(asked.routing, FULL, asked.blocks * n_rows, seed=0)
            (plain, needed), (retaining, _) = (reads(model, routing, n_rows, n_warm=n_warm, is_retaining=flag) for flag in (False, True))
            found[n_rows] = {"experts": needed, "recency": plain, "retention": retaining, "ratio": retaining / plain}
            shown = f"{plain:7.0f} read with recency, {retaining:7.0f} with retention, {retaining / plain:.3f}"
            print(f"{n_rows:2} rows: {needed:7.0f} experts a block, {shown}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
