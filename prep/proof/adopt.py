"""adopt: register expert files that the user already has as a drive of a manifest, after every one was compared with its hash."""

import dataclasses
import datetime
from collections.abc import Callable
from pathlib import Path

import numpy as np

from layout.direct import Extent, aligned_buffer, probe_directory, read_extent, span_bytes
from layout.hash_lists import HASH_LIST_NAME
from layout.holes import file_fault
from layout.parallel import run_parallel
from layout.prepared import Prepared
from layout.reader import check_hash
from layout.record import parse_expert_file_name
from layout.sizes import counted
from layout.writer import write_bytes
from manifests.errors import BadInputError, DamagedDataError, UsageError, listed
from manifests.manifest import Manifest
from manifests.store import next_generation, write_manifest
from prep.drive_facts import manifest_drive

N_WORKERS = 4
Progress = Callable[[str, int, int], None]


def adopt_into_manifest(prepared: Prepared, directory: Path, *, tier: str, on_progress: Progress) -> Manifest:
    """Add a directory to a manifest as a drive and return the new manifest.

    Raises DamagedDataError naming the files that differ; nothing is registered then.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory}: no such directory")
    if directory.resolve() == prepared.directory.resolve():
        raise UsageError(f"{directory}: is the model's own directory, whose {HASH_LIST_NAME} lists all experts; move the files to one of their own")
    if directory.resolve() in [d.resolve() for d in prepared.drive_directories]:
        raise UsageError(f"{directory}: is a drive of {prepared.path} already")
    holds = _expert_files(prepared, directory)
    faults = _faults(prepared, directory, holds, on_progress)
    if faults:
        what = f"not this model's: {len(faults)} of {counted(int(holds.sum()), 'file')}"
        raise DamagedDataError(listed(sorted(faults), f"{what}; nothing was registered:"))
    write_bytes(directory / HASH_LIST_NAME, prepared.hashes.to_text(holds).encode())
    manifest = dataclasses.replace(
        prepared.manifest,
        generation=next_generation(prepared.path),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        drives=(*prepared.manifest.drives, manifest_drive(tier, directory, prepared.directory, None, holds)),
    )
    write_manifest(prepared.path, manifest)
    return manifest


def _expert_files(prepared: Prepared, directory: Path) -> np.ndarray:
    """Return which experts have a file in the directory, bool [n_layers, n_experts]. Raises BadInputError if there are none, or foreign ones."""
    g = prepared.geometry
    holds, strays = np.zeros((g.n_layers, g.n_experts), np.bool_), []
    for path in directory.iterdir():
        place = parse_expert_file_name(path.name)
        if place is None:
            continue
        if place[0] in g.moe_layers and place[1] < g.n_experts:
            holds[place] = True
        else:
            strays.append(path.name)
    if strays:
        raise BadInputError(f"{directory}: {counted(len(strays), 'file')} of experts that this model does not have, the first {min(strays)}")
    if not holds.any():
        raise BadInputError(f"{directory}: holds no expert files; expected names like L1-E0.bin")
    return holds


def _faults(prepared: Prepared, directory: Path, holds: np.ndarray, on_progress: Progress) -> list[str]:
    mode, n_bytes, total = probe_directory(directory), prepared.record.n_bytes, int(holds.sum())

    def make_worker() -> Callable[[list[int]], str | None]:
        buffer = aligned_buffer(span_bytes(n_bytes, mode.alignment))

        def work(place: list[int]) -> str | None:
            layer, expert = place
            extent = Extent(directory / f"L{layer}-E{expert}.bin", 0, n_bytes)
            try:
                if (fault := file_fault(extent.path, n_bytes)) is not None:
                    return f"{extent.path}: {fault}"
                check_hash(extent, read_extent(extent, buffer, mode), prepared.hashes.get(layer, expert))
            except (OSError, DamagedDataError) as error:
                return str(error)
            return None

        return work

    faults = []
    for n, fault in enumerate(run_parallel(np.argwhere(holds).tolist(), make_worker, n_workers=N_WORKERS), start=1):
        on_progress("adopt: hashing", n * n_bytes, total * n_bytes)
        faults += [fault] if fault else []
    return faults
