"""Which records a verification shall read."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from layout.prepared import Prepared
from manifests.errors import UsageError


@dataclass(frozen=True, slots=True)
class Selection:
    """Records to read: the drives by number, and for each of them bool [n_layers, n_experts]."""

    drives: list[int]
    records: dict[int, np.ndarray]

    @property
    def n_records(self) -> int:
        return sum(int(records.sum()) for records in self.records.values())


def select_records(prepared: Prepared, *, drive: str | None, layers: list[int], n_sample: int | None, seed: int) -> Selection:
    """Return the records of one drive or all, of some layers or all, or a sample of these. Raises UsageError for what is not there."""
    drives = _drives_named(prepared, drive)
    strays = [layer for layer in layers if layer not in prepared.geometry.moe_layers]
    if strays:
        moe = prepared.geometry.moe_layers
        raise UsageError(f"--layer {strays[0]}: the layers with experts are {moe.start} to {moe.stop - 1}")
    is_wanted = np.isin(np.arange(prepared.geometry.n_layers), layers) if layers else np.ones(prepared.geometry.n_layers, np.bool_)
    records = {n: prepared.manifest.drives[n].holds & is_wanted[:, None] for n in drives}
    return Selection(drives, records if n_sample is None else _sample(records, n_sample, seed))


def _drives_named(prepared: Prepared, name: str | None) -> list[int]:
    """Return the drives that `--drive` means: a tier letter or a directory; all without one."""
    if name is None:
        return list(range(len(prepared.manifest.drives)))
    found = [
        n
        for n, (drive, directory) in enumerate(zip(prepared.manifest.drives, prepared.drive_directories, strict=True))
        if name == drive.tier or Path(name).resolve() == directory.resolve()
    ]
    if not found:
        known = ", ".join(prepared.drive_name(n) for n in range(len(prepared.manifest.drives)))
        raise UsageError(f"--drive {name}: no such drive in the manifest; it has {known}")
    return found


def _sample(records: dict[int, np.ndarray], n_sample: int, seed: int) -> dict[int, np.ndarray]:
    """Choose n_sample records at random, as evenly as possible over all pairs of drive and layer."""
    rng = np.random.default_rng(seed)
    strata = [(n, layer, rng.permutation(np.flatnonzero(held[layer]))) for n, held in records.items() for layer in range(len(held))]
    # The first of each pair come before the second of any; within a round the order is by lot.
    queue = [(turn, rng.random(), n, layer, int(expert)) for n, layer, experts in strata for turn, expert in enumerate(experts)]
    chosen = {n: np.zeros_like(held) for n, held in records.items()}
    for _, _, n, layer, expert in sorted(queue)[:n_sample]:
        chosen[n][layer, expert] = True
    return chosen
