"""The directories in play when copies are placed: the manifest's drives and those asked for, and what lies in each.

A copy that the manifest names and that is there with its size counts as there; a file that no manifest names is to be proved first.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from layout.drives import describe_directory
from layout.hash_lists import HASH_LIST_NAME, parse_hash_list
from layout.prepared import Prepared
from layout.record import parse_expert_file_name
from layout.sizes import counted
from manifests.errors import BadInputError, DamagedDataError, UsageError, listed
from manifests.manifest import Drive
from manifests.ranges import format_ranges, parse_ranges
from prep.drive_facts import manifest_devices
from prep.requests import DriveRequest, identity

_MOST_NAMED = 3
# A command line that people can still copy.
_MOST_ONLY_CHARS = 400
MISSING = "missing"


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A directory in play; the arrays are bool [n_layers, n_experts].

    former   number of the manifest's drive, None if it is new
    request  None if the new set leaves it out
    device   number of the file system, None where the directory is gone
    vouched  named by the manifest and there with the right size
    lying    there with the right size, but not named by the manifest
    misfit   there with another size
    """

    tier: str
    directory: Path
    former: int | None
    request: DriveRequest | None
    device: int | None
    vouched: np.ndarray
    lying: np.ndarray
    misfit: np.ndarray

    @property
    def name(self) -> str:
        return f"{self.directory} (tier {self.tier})"

    @property
    def there(self) -> np.ndarray:
        """What is there with the right size."""
        return self.vouched | self.lying


def find_sites(prepared: Prepared, requests: Sequence[DriveRequest], *, left_out: Sequence[tuple[str, Path]] = ()) -> tuple[list[Site], list[str]]:
    """Return the requested directories, in their order, then the manifest's others and those left out; and remarks on copies that are gone.

    left_out  tier and directory of drives that the manifest had when a placement began

    Raises UsageError for a directory that was a drive of the manifest and now shows what lies below its mount point, or that holds another model's.
    """
    former = {identity(path): number for number, path in enumerate(prepared.drive_directories) if path.is_dir()}
    sites = [_site(prepared, request.tier, request.directory, former.get(identity(request.directory)), request) for request in requests]
    known = {site.former for site in sites}
    sites += [site for site in drive_sites(prepared) if site.former not in known]
    seen = {identity(site.directory) for site in sites if site.device is not None}
    sites += [_site(prepared, tier, directory, None, None) for tier, directory in left_out if directory.is_dir() and identity(directory) not in seen]
    for site in sites:
        _check_mounted(prepared, site)
        _check_ours(prepared, site)
    return sites, [remark for site in sites if (remark := _remark(prepared, site))]


def _site(prepared: Prepared, tier: str, directory: Path, former: int | None, request: DriveRequest | None) -> Site:
    is_there = directory.is_dir()
    named = prepared.manifest.drives[former].holds if former is not None else np.zeros_like(prepared.hashes.is_known)
    right, wrong = expert_files(prepared, directory) if is_there else (np.zeros_like(named), np.zeros_like(named))
    device = os.stat(directory).st_dev if is_there else None
    return Site(tier, directory, former, request, device, right & named, right & ~named, wrong)


def expert_files(prepared: Prepared, directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the model's experts have a file in a directory, of the right size and of another."""
    right, wrong = np.zeros_like(prepared.hashes.is_known), np.zeros_like(prepared.hashes.is_known)
    n_layers, n_experts = right.shape
    with os.scandir(directory) as entries:
        for entry in entries:
            place = parse_expert_file_name(entry.name)
            if place is None or place[0] >= n_layers or place[1] >= n_experts or not prepared.hashes.is_known[place]:
                continue
            try:
                found = right if entry.is_file() and entry.stat().st_size == prepared.record.n_bytes else wrong
            except OSError:
                found = wrong
            found[place] = True
    return right, wrong


def _check_mounted(prepared: Prepared, site: Site) -> None:
    """Refuse to fill the root file system in place of a drive that is not mounted."""
    if site.request is None or site.former is None:
        return
    drive = prepared.manifest.drives[site.former]
    if not is_mounted(prepared, site):
        was = ", ".join(device.name for device in drive.devices if device.name) or "no device that is known"
        held = counted(int(drive.holds.sum()), "expert")
        raise UsageError(
            f"--tier {site.tier}={site.directory}: the manifest has {held} there, on {was} ({drive.file_system}); "
            f"now it is empty and part of the root file system: mount the drive, leave it out, or name another directory"
        )


def drive_sites(prepared: Prepared) -> list[Site]:
    """Return the manifest's drives, none of them asked for."""
    pairs = zip(prepared.manifest.drives, prepared.drive_directories, strict=True)
    return [_site(prepared, drive.tier, directory, number, None) for number, (drive, directory) in enumerate(pairs)]


def is_mounted(prepared: Prepared, site: Site) -> bool:
    """Say whether a drive of the manifest is there, and not only the directory on the root file system that its mount point is without it."""
    if site.device is None or site.former is None:
        return site.device is not None
    drive = prepared.manifest.drives[site.former]
    return not drive.holds.any() or bool(site.vouched.any()) or not is_root_instead(drive, site.directory)


def is_root_instead(drive: Drive, directory: Path) -> bool:
    """Say whether a directory is part of the root file system, unlike what its drive was in a manifest."""
    facts = describe_directory(directory)
    return facts.mount_point == Path("/") and (facts.file_system, manifest_devices(facts)) != (drive.file_system, drive.devices)


def _check_ours(prepared: Prepared, site: Site) -> None:
    """Refuse to write over another model's experts, which have the names of ours: its hash list tells, of which not one line is ours."""
    if site.request is None:
        return
    path = site.directory / HASH_LIST_NAME
    try:
        theirs = parse_hash_list(path.read_bytes(), where=str(path))
    except (OSError, BadInputError):
        # None, or a damaged one, which is written anew.
        return
    n_layers, n_experts = prepared.hashes.is_known.shape
    if theirs and not any(
        layer < n_layers and expert < n_experts and prepared.hashes.get(layer, expert) == digest for (layer, expert), digest in theirs.items()
    ):
        raise UsageError(
            f"--tier {site.tier}={site.directory}: by its {HASH_LIST_NAME} it holds {counted(len(theirs), 'expert')} of another model, which would "
            "be written over; name a directory of this model's own there, or remove that list and its experts if nothing needs them"
        )


def _remark(prepared: Prepared, site: Site) -> str:
    if site.former is None:
        return ""
    named = prepared.manifest.drives[site.former].holds
    gone = np.argwhere(named & ~site.vouched).tolist()
    if site.device is None:
        return f"{site.name}: no such directory; is the drive mounted? Its {counted(len(gone), 'copy is', 'copies are')} left out"
    if not gone:
        return ""
    names = ", ".join(f"layer {layer} expert {expert}" for layer, expert in gone[:_MOST_NAMED])
    more = f" and {len(gone) - _MOST_NAMED} more" if len(gone) > _MOST_NAMED else ""
    return f"{site.name}: missing or of the wrong size, and left out: {len(gone)} of {counted(int(named.sum()), 'file')}: {names}{more}"


def lost_experts(prepared: Prepared, sites: Sequence[Site]) -> np.ndarray:
    """Return which experts are in no directory any more, bool [n_layers, n_experts]."""
    return prepared.manifest.base_holds() & ~np.any([site.there for site in sites], axis=0)


def check_none_lost(prepared: Prepared, sites: Sequence[Site]) -> None:
    """Raise DamagedDataError, with the shards to fetch and the command that extracts them again, if an expert is in no directory any more."""
    lost = lost_experts(prepared, sites)
    if not lost.any():
        return
    faults = [f"layer {layer}: experts {format_ranges(lost[layer])}; in {' or '.join(shards_of(prepared, layer))}" for layer in _layers(lost)]
    home = next((site.request for site in sites if site.request is not None and site.tier in "AB"), None)
    flag = "" if all(_has_home(prepared, sites, lost)) or home is None else f" --tier {home.tier}={home.directory}"
    heading = (
        f"{prepared.path}: {counted(int(lost.sum()), 'expert has', 'experts have')} no copy left. With those shards in CHECKPOINT, run\n"
        f"  kprep extract CHECKPOINT {prepared.directory} --only {only_text(lost)}{flag}\n  and then this command again. Gone are:"
    )
    raise DamagedDataError(listed(faults, heading))


def _has_home(prepared: Prepared, sites: Sequence[Site], lost: np.ndarray) -> list[bool]:
    """Say for each lost expert whether a directory that the manifest wants it in is there."""
    there = [prepared.manifest.drives[site.former].holds for site in sites if site.former is not None and is_mounted(prepared, site)]
    return [any(holds[layer, expert] for holds in there) for layer, expert in np.argwhere(lost).tolist()]


def _layers(experts: np.ndarray) -> list[int]:
    layers: list[int] = np.flatnonzero(experts.any(axis=1)).tolist()
    return layers


def only_text(experts: np.ndarray) -> str:
    """Return experts, bool [n_layers, n_experts], as `--only` takes them: `17:413,17:420-430`, or `missing` where that would be too long."""
    parts = [f"{layer}:{part}" for layer in _layers(experts) for part in format_ranges(experts[layer]).split(",")]
    text = ",".join(parts)
    return text if len(text) <= _MOST_ONLY_CHARS else MISSING


def shards_of(prepared: Prepared, layer: int) -> list[str]:
    """Return the checkpoint's files that hold experts of a layer."""
    files = prepared.manifest.source.files
    return [f.name for f in files if f.expert_layers and parse_ranges(f.expert_layers, prepared.geometry.n_layers, where=f.name)[layer]]
