"""The manifest: what one prepared model is, where its parts lie, and which drive holds which experts.

Types and what must be true of them together. It opens no file; digests are text, made and compared elsewhere.
"""

from collections import Counter
from dataclasses import dataclass, field, fields
from os.path import normpath
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from manifests.errors import BadInputError, listed
from manifests.geometry import Geometry
from manifests.ranges import format_ranges

SCHEMA = 1
TIERS = "ABCD"
BASE_TIERS = "AB"
_MAY_BE_ABSENT = "may be absent"


def _later(default: Any) -> Any:
    """Return a field that manifests written before it existed lack: it then has its default."""
    return field(default=default, metadata={_MAY_BE_ABSENT: True})


def may_be_absent(facts: Any) -> frozenset[str]:
    """Return the names of a dataclass's fields that a manifest need not have."""
    return frozenset(f.name for f in fields(facts) if _MAY_BE_ABSENT in f.metadata)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One shard of the checkpoint; the digest is of its safetensors header.

    expert_layers  the layers that have experts in it, as ranges; None if there are none
    """

    name: str
    n_bytes: int
    header_xxh3_128: str
    expert_layers: str | None


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint that was extracted."""

    architecture: str
    model_type: str
    digest: str
    files: tuple[SourceFile, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """How the bytes of an expert file are to be read; the three texts are names that the layout package knows."""

    layout: str
    nibbles: str
    scale: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Spine:
    """The GGUF file of everything that every token needs; `path` starts from the manifest's directory."""

    path: str
    n_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """A file taken over from the checkpoint unchanged."""

    name: str
    n_bytes: int
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The tokenizer's files; `directory` starts from the manifest's directory."""

    directory: str
    files: tuple[CarriedFile, ...]


@dataclass(frozen=True, slots=True)
class HashList:
    """The list of all expert hashes (xxhsum's format) and the digest of that list; `path` starts from the manifest's directory."""

    path: str
    xxh3_128: str


@dataclass(frozen=True, slots=True)
class Device:
    """A block device under a drive, as the kernel describes it; None is unknown."""

    name: str | None = None
    model: str | None = None
    serial: str | None = None
    kind: str | None = None
    pci_address: str | None = None
    link_speed: str | None = None
    link_width: str | None = None
    max_link_speed: str | None = None
    max_link_width: str | None = None
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class DepthRate:
    """What a drive gave with `depth` reads in flight."""

    depth: int
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What a drive did when it was measured: whole records read at random, `depth` of them in flight.

    n_bytes, seconds          what was read at that depth, and in what time
    curve                     the rate at each depth that was tried
    device_bytes              what the kernel saw the devices read meanwhile, for whomever; None where it does not count
    is_cache_suspected        the devices read far less than was asked for: something in between has the bytes
    is_on_trial_files         measured on files made for it; fresh files may be read faster than old ones
    with_uploads_bytes_per_s  the rate with uploads to the GPU running beside; None if that was not measured
    """

    date: str
    reader: str
    is_direct: bool
    depth: int
    read_bytes_per_s: float
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float
    n_bytes: int
    seconds: float
    curve: tuple[DepthRate, ...] = _later(())
    device_bytes: int | None = _later(None)
    is_cache_suspected: bool = _later(False)
    is_on_trial_files: bool = _later(False)
    with_uploads_bytes_per_s: float | None = _later(None)


@dataclass(frozen=True, slots=True)
class SharedLink:
    """Drives that give less together than the sum of what each gives alone, or that lie on one device; named by their directories."""

    directories: tuple[str, ...]
    read_bytes_per_s: float


# Drives are compared by identity: `==` of an array is no truth value.
@dataclass(frozen=True, slots=True, eq=False)
class Drive:
    """One directory with expert files.

    directory  absolute, or starting from the manifest's directory
    devices    empty where none is known, several for a RAID
    profile    None until measured
    holds      bool [n_layers, n_experts], true where the expert's file is here
    """

    tier: str
    directory: str
    file_system: str
    devices: tuple[Device, ...]
    profile: Profile | None
    holds: npt.NDArray[np.bool_]

    def holds_expert(self, layer: int, expert: int) -> bool:
        return bool(self.holds[layer, expert])


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One prepared model. Raises BadInputError if its drives contradict each other or the geometry; a gap is for `check_base` to see."""

    schema: int = SCHEMA
    generation: int
    created: str
    geometry: Geometry
    end_ids: tuple[int, ...]
    source: Source
    record: Record
    spine: Spine
    tokenizer: Tokenizer
    experts: HashList
    # Before the drives: a file that was cut short must not read as one without links.
    links: tuple[SharedLink, ...] = _later(())
    drives: tuple[Drive, ...]

    def __post_init__(self) -> None:
        faults = _faults_of(self)
        if faults:
            raise BadInputError("; ".join(faults))

    @staticmethod
    def drive_directory(drive: Drive, manifest_path: Path) -> Path:
        """Return where a drive's files lie, for a manifest read from `manifest_path`."""
        return manifest_path.parent / drive.directory

    def base_holds(self) -> npt.NDArray[np.bool_]:
        """Return bool [n_layers, n_experts], true where a drive of tier A or B holds the expert."""
        held = np.zeros((self.geometry.n_layers, self.geometry.n_experts), dtype=np.bool_)
        for drive in self.drives:
            if drive.tier in BASE_TIERS:
                held |= drive.holds
        return held


def check_base(manifest: Manifest) -> None:
    """Raise BadInputError, with the missing experts of each layer, unless tiers A and B together hold every expert of every MoE layer."""
    missing = ~manifest.base_holds()
    faults = [
        f"layer {layer}: experts {format_ranges(missing[layer])} are on no drive of tiers A and B"
        for layer in manifest.geometry.moe_layers
        if missing[layer].any()
    ]
    if faults:
        raise BadInputError(listed(faults, "tiers A and B must together hold every expert (former placements are in manifest.history):"))


def _faults_of(m: Manifest) -> list[str]:
    faults = [f"end_ids has {n}, but the vocabulary ends at {m.geometry.vocab_size - 1}" for n in m.end_ids if n >= m.geometry.vocab_size]
    faults += [f"drives[{i}]: {fault}" for i, drive in enumerate(m.drives) for fault in _drive_faults(drive, m.geometry)]
    n_times = Counter(normpath(drive.directory) for drive in m.drives)
    faults += [f"drives: {directory} is there {n} times, expected once" for directory, n in n_times.items() if n > 1]
    known = [drive.directory for drive in m.drives]
    return faults + [f"links[{i}]: {fault}" for i, link in enumerate(m.links) for fault in _link_faults(link, known)]


def _link_faults(link: SharedLink, known: list[str]) -> list[str]:
    faults = [f"{directory} is the directory of no drive" for directory in link.directories if directory not in known]
    if len(set(link.directories)) < max(2, len(link.directories)):
        faults.append(f"names {', '.join(link.directories) or 'no directory'}, expected two drives or more, each once")
    return faults


def _drive_faults(drive: Drive, geometry: Geometry) -> list[str]:
    shape = (geometry.n_layers, geometry.n_experts)
    assert drive.holds.shape == shape and drive.holds.dtype == np.bool_, f"{drive.holds.dtype} {drive.holds.shape} for bool {shape}"
    faults = []
    if len(drive.tier) != 1 or drive.tier not in TIERS:
        faults.append(f"tier is {drive.tier!r}, expected one of {', '.join(TIERS)}")
    if drive.holds[: geometry.n_dense_layers].any():
        faults.append(f"holds experts of a layer below {geometry.n_dense_layers}, but these layers are dense")
    return faults
