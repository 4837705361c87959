"""A prepared model on disk: its manifest, where its drives are, and which copies of the experts are really there."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from layout.direct import Extent
from layout.hash_lists import HASH_LIST_NAME, ExpertHashes
from layout.holes import size_fault
from layout.record import LAYOUT_NAME, NIBBLE_ORDER, SCALE_KIND, RecordLayout, expert_file_name, record_layout
from layout.sizes import counted
from manifests.errors import BadInputError, DamagedDataError, listed
from manifests.geometry import Geometry
from manifests.load import load_manifest
from manifests.manifest import BASE_TIERS, Drive, Manifest


@dataclass(frozen=True)
class Prepared:
    """A manifest whose record format this program reads, whose base is complete, and whose hash list is intact."""

    path: Path
    manifest: Manifest
    hashes: ExpertHashes

    @property
    def geometry(self) -> Geometry:
        return self.manifest.geometry

    @property
    def directory(self) -> Path:
        return self.path.parent

    @cached_property
    def record(self) -> RecordLayout:
        return record_layout(self.geometry)

    @cached_property
    def drive_directories(self) -> tuple[Path, ...]:
        return tuple(Manifest.drive_directory(drive, self.path) for drive in self.manifest.drives)

    @property
    def spine_path(self) -> Path:
        return self.directory / self.manifest.spine.path

    @property
    def tokenizer_directory(self) -> Path:
        return self.directory / self.manifest.tokenizer.directory

    def expert_extent(self, drive: int, layer: int, expert: int) -> Extent:
        return Extent(self.drive_directories[drive] / expert_file_name(layer, expert), 0, self.record.n_bytes)

    def drive_name(self, drive: int) -> str:
        return f"{self.drive_directories[drive]} (tier {self.manifest.drives[drive].tier})"

    def drives_holding(self, layer: int, expert: int) -> list[int]:
        return [n for n, drive in enumerate(self.manifest.drives) if drive.holds[layer, expert]]


def open_prepared(path: Path) -> Prepared:
    """Load a manifest, whose base is complete, and what it vouches for. Raises BadInputError or DamagedDataError, saying where."""
    path = path / "manifest.yaml" if path.is_dir() else path
    manifest = load_manifest(path)
    record = record_layout(manifest.geometry)
    for field, expected in (("layout", LAYOUT_NAME), ("nibbles", NIBBLE_ORDER), ("scale", SCALE_KIND), ("n_bytes", record.n_bytes)):
        if (found := getattr(manifest.record, field)) != expected:
            raise BadInputError(f"{path}: record.{field} is {found!r}; this program reads {expected!r} for this geometry")
    return Prepared(path, manifest, _load_hashes(path, manifest))


def _load_hashes(path: Path, manifest: Manifest) -> ExpertHashes:
    list_path = path.parent / manifest.experts.path
    try:
        data = list_path.read_bytes()
    except OSError as error:
        cure = _list_cure(path, list_path, manifest) if isinstance(error, FileNotFoundError) else ""
        raise DamagedDataError(f"{list_path}: cannot be read: {error.strerror}; without it no expert can be verified{cure}") from None
    found = xxhash.xxh3_128_hexdigest(data)
    if found != manifest.experts.xxh3_128:
        raise DamagedDataError(f"{list_path}: xxh3-128 {found} differs from the manifest's {manifest.experts.xxh3_128}; restore it from a copy")
    g = manifest.geometry
    hashes = ExpertHashes.from_text(data, g.n_layers, g.n_experts, str(list_path))
    unknown = manifest.base_holds() & ~hashes.is_known
    if unknown.any():
        layer, expert = np.argwhere(unknown)[0]
        raise DamagedDataError(f"{list_path}: no hash for {counted(int(unknown.sum()), 'expert')}, the first is {expert_file_name(layer, expert)}")
    return hashes


def _list_cure(path: Path, list_path: Path, manifest: Manifest) -> str:
    """Say how the master list is put together from those of the drives: tiers A and B list every expert."""
    lists = [str(Manifest.drive_directory(drive, path) / HASH_LIST_NAME) for drive in manifest.drives if drive.tier in BASE_TIERS]
    return f"; each drive has its part of it: {shlex.join(['sort', '-u', '-V', '-k2', *lists])} > {shlex.quote(str(list_path))}"


@dataclass(frozen=True)
class Copies:
    """The copies that are there with the right size.

    holds   per drive, bool [n_layers, n_experts]
    faults  one message for every copy that the manifest names and that is missing or of the wrong size; one for all of a directory that is gone
    """

    holds: tuple[np.ndarray, ...]
    faults: list[str]


def find_copies(prepared: Prepared) -> Copies:
    """Look at every expert file that the manifest names.

    A copy that is missing or of the wrong size is left out and reported. Raises DamagedDataError if tiers A and B no longer hold every expert.
    """
    holds, faults = [], []
    for number, drive in enumerate(prepared.manifest.drives):
        found, drive_faults = _present(prepared, number, drive)
        holds.append(found)
        faults += drive_faults
    base = np.zeros_like(prepared.manifest.base_holds())
    for drive, found in zip(prepared.manifest.drives, holds, strict=True):
        if drive.tier in BASE_TIERS:
            base |= found
    lost = np.argwhere(prepared.manifest.base_holds() & ~base)
    if len(lost):
        wanted = [_lost_line(prepared, holds, layer, expert) for layer, expert in lost[:10].tolist()]
        what = f"{prepared.path}: tiers A and B must hold every expert; {counted(len(lost), 'is', 'are')} gone"
        cure = (
            f"mount the drive if one is missing; else kprep verify-hashes {prepared.directory} --repair restores them from other copies, "
            "with --checkpoint CHECKPOINT from its shards"
        )
        raise DamagedDataError(listed([*wanted, *faults], f"{what}; {cure}:"))
    return Copies(tuple(holds), faults)


def _lost_line(prepared: Prepared, holds: Sequence[np.ndarray], layer: int, expert: int) -> str:
    """Say which drives of tiers A and B lack an expert, and on which others it is, given the copies that are there."""
    names = dict(enumerate(map(prepared.drive_name, range(len(holds)))))
    lacking = [names[n] for n in prepared.drives_holding(layer, expert) if prepared.manifest.drives[n].tier in BASE_TIERS]
    others = [name for n, name in names.items() if holds[n][layer, expert]]
    rest = f"; another copy is on {', '.join(others)}" if others else ""
    return f"layer {layer} expert {expert}: no usable copy on {', '.join(lacking)}{rest}"


def _present(prepared: Prepared, number: int, drive: Drive) -> tuple[np.ndarray, list[str]]:
    directory, n_bytes, faults = prepared.drive_directories[number], prepared.record.n_bytes, []
    found = drive.holds.copy()
    if not directory.is_dir():
        found[:] = False
        return found, [f"{prepared.drive_name(number)}: no such directory; is the drive mounted?"]
    prefix = f"{directory}{os.sep}"
    for layer, expert in np.argwhere(drive.holds).tolist():
        name = expert_file_name(layer, expert)
        if (fault := size_fault(prefix + name, n_bytes)) is not None:
            found[layer, expert] = False
            faults.append(f"layer {layer} expert {expert} on {prepared.drive_name(number)}: {name} {fault}")
    return found, faults
