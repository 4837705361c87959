"""Going back to a former placement: the very bytes of a manifest that was kept become the current one again."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from layout.hash_lists import ExpertHashes, xxh3_128_hex
from layout.prepared import Prepared
from layout.sizes import counted
from layout.writer import write_bytes
from manifests.errors import BadInputError, DamagedDataError, UsageError, listed
from manifests.load import load_manifest
from manifests.manifest import Manifest
from manifests.store import history
from prep.placement.journal import PlaceJournal
from prep.placement.publish import publish_with_lists
from prep.placement.sites import expert_files

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Former:
    """A kept manifest."""

    generation: int
    path: Path
    manifest: Manifest


def former_manifests(path: Path) -> list[Former]:
    """Return the kept manifests of the one at `path`, oldest first."""
    return [Former(generation, copy, load_manifest(copy)) for generation, copy in history(path)]


def roll_back(path: Path, generation: int) -> Manifest:
    """Put the manifest of a former generation back at `path`, byte by byte, the drives' hash lists with it; return it.

    The present one is kept in the history like every former one. Nothing is copied or removed. Raises UsageError if there is no such generation,
    DamagedDataError if copies that it names are gone.
    """
    journal = PlaceJournal(path.parent)
    is_done = False
    try:
        copy = _copy_of(path, generation)
        data, manifest = copy.read_bytes(), load_manifest(copy)
        prepared = _prepared(path, manifest)
        _check_copies(prepared)

        def put_back() -> None:
            _keep_present(path)
            write_bytes(path, data)

        publish_with_lists(prepared, manifest.drives, put_back)
        # What an interrupted placement had decided started from another manifest.
        is_done = True
        return manifest
    finally:
        journal.close(is_done=is_done)


def _copy_of(path: Path, generation: int) -> Path:
    kept = dict(history(path))
    if generation not in kept:
        numbers = ", ".join(map(str, kept)) or "none"
        raise UsageError(f"--rollback {generation}: no such generation is kept beside {path}; kept are: {numbers}")
    return kept[generation]


def _prepared(path: Path, manifest: Manifest) -> Prepared:
    """Return the manifest as if it lay at `path` already. Raises DamagedDataError if what it vouches for there is another."""
    list_path, spine_path = path.parent / manifest.experts.path, path.parent / manifest.spine.path
    for found, size in ((spine_path, manifest.spine.n_bytes), (list_path, None)):
        if not found.is_file() or (size is not None and found.stat().st_size != size):
            raise DamagedDataError(f"{found}: is missing, or not the one of generation {manifest.generation}; nothing was changed")
    data = list_path.read_bytes()
    if xxh3_128_hex(data) != manifest.experts.xxh3_128:
        raise DamagedDataError(f"{list_path}: differs from the list of generation {manifest.generation}; nothing was changed")
    g = manifest.geometry
    return Prepared(path, manifest, ExpertHashes.from_text(data, g.n_layers, g.n_experts, str(list_path)))


def _check_copies(prepared: Prepared) -> None:
    gone, faults = 0, list[str]()
    for n, (drive, directory) in enumerate(zip(prepared.manifest.drives, prepared.drive_directories, strict=True)):
        if not directory.is_dir():
            gone += int(drive.holds.sum())
            faults.append(f"{prepared.drive_name(n)}: no such directory; is the drive mounted?")
            continue
        missing = np.argwhere(drive.holds & ~expert_files(prepared, directory)[0]).tolist()
        gone += len(missing)
        faults += [f"layer {layer} expert {expert} on {prepared.drive_name(n)}" for layer, expert in missing]
    if faults:
        what = f"{counted(gone, 'of its copies is', 'of its copies are')} gone or of the wrong size"
        heading = f"generation {prepared.manifest.generation} cannot be put back: {what}; nothing was changed:"
        raise DamagedDataError(listed(faults, heading, most=_MOST_NAMED))


def _keep_present(path: Path) -> None:
    """Keep the manifest that is there, under its generation; one that cannot be read, under a name that says so."""
    if not path.exists():
        return
    data, folder = path.read_bytes(), path.with_suffix(".history")
    try:
        copy = folder / f"{load_manifest(path).generation:06d}.yaml"
    except BadInputError:
        copy = folder / f"unreadable-{xxh3_128_hex(data)[:8]}.yaml"
    if not copy.exists():
        write_bytes(copy, data)
    elif copy.read_bytes() != data:
        raise BadInputError(f"{copy}: differs from {path}, which has the same generation; move one of them away")
