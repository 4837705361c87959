"""extract --only: some experts of a finished output written again from the checkpoint's shards, as many of which must be there as hold them."""

import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from layout.checkpoint import DTYPE_BYTES, Checkpoint, Shard, Tensor, header_bytes
from layout.config import ConfigFacts
from layout.direct import ReadMode, aligned_buffer, probe_directory, span_bytes
from layout.gather import gather_record
from layout.hash_lists import xxh3_128_hex
from layout.holes import size_fault
from layout.parallel import run_parallel
from layout.prepared import Prepared
from layout.record import expert_file_name
from layout.sizes import counted, word_for
from layout.tensors import expert_tensor_names
from layout.writer import sync_directory, write_record
from manifests.errors import BadInputError, DamagedDataError, UsageError, listed
from manifests.manifest import BASE_TIERS, Drive, Manifest
from manifests.ranges import parse_ranges
from manifests.store import next_generation, write_manifest
from prep.copying import prove_file
from prep.drive_facts import manifest_drive
from prep.extraction.room import Reserves
from prep.placement.journal import PlaceJournal
from prep.placement.publish import publish_with_lists
from prep.placement.sites import MISSING, Site, find_sites, is_mounted, lost_experts, shards_of
from prep.requests import DriveRequest, check_requests, check_writable, disk_bytes

_PART = re.compile(r"([0-9]{1,9}):([0-9]{1,9}(?:-[0-9]{1,9})?)")
_N_WORKERS = 4
_MOST_ALIGNMENT = 65536
Progress = Callable[[str, int, int], None]


class Rewritten(NamedTuple):
    """What became of the experts asked for, and the manifest that is true now."""

    manifest: Manifest
    n_written: int
    n_intact: int


def parse_only(text: str, prepared: Prepared) -> np.ndarray:
    """Return the experts that `--only` names, bool [n_layers, n_experts]: `17:413,17:420-430`, or `missing` for those with no copy left.

    Raises UsageError for what is no expert of this model.
    """
    g = prepared.geometry
    chosen = np.zeros((g.n_layers, g.n_experts), np.bool_)
    if text == MISSING:
        return lost_experts(prepared, find_sites(prepared, [])[0])
    for part in text.split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise UsageError(f"--only: {part!r} is no layer with an expert or a range of them, expected such as 17:413,17:420-430, or {MISSING}")
        layer = int(match[1])
        if layer not in g.moe_layers:
            raise UsageError(f"--only {part}: the layers with experts are {g.moe_layers.start} to {g.moe_layers.stop - 1}")
        try:
            chosen[layer] |= parse_ranges(match[2], g.n_experts, where=f"--only {part}")
        except BadInputError as error:
            raise UsageError(str(error)) from None
    return chosen


def extract_only(
    checkpoint: Path, prepared: Prepared, experts: np.ndarray, request: DriveRequest | None, *, reserve_bytes: int | None, on_progress: Progress
) -> Rewritten:
    """Write experts, bool [n_layers, n_experts], again: to the directories where the manifest wants them, or to the one given.

    Only shards that hold them are opened; each must be the one that was extracted, by size and by the digest of its header. A file that is there
    with the right bytes is left as it is. Raises BadInputError for a missing or other shard, DamagedDataError for other bytes than those extracted.
    """
    if request is not None:
        if request.tier not in BASE_TIERS:
            raise UsageError(f"--tier {request.tier}={request.directory}: extract writes tiers A and B only; kprep place adds copies on C and D")
        check_requests([request], home=prepared.directory)
        check_writable([request])
    journal = PlaceJournal(prepared.directory)
    try:
        sites = find_sites(prepared, [] if request is None else [request])[0]
        _check_tier(prepared, sites[0])
        targets = _targets(prepared, sites, experts, request)
        source = _open_shards(checkpoint, prepared, experts)
        n_written = _write(source, prepared, sites, targets, reserve_bytes, on_progress)
        manifest = _publish(prepared, sites, targets, experts)
    finally:
        journal.close(is_done=False)
    return Rewritten(manifest, n_written, sum(int(t.sum()) for t in targets) - n_written)


def _check_tier(prepared: Prepared, site: Site) -> None:
    if site.request is not None and site.former is not None and (tier := prepared.manifest.drives[site.former].tier) != site.tier:
        raise UsageError(f"--tier {site.tier}={site.directory}: the manifest has it as tier {tier}; say so, or let kprep place change it")


def _targets(prepared: Prepared, sites: Sequence[Site], experts: np.ndarray, request: DriveRequest | None) -> list[np.ndarray]:
    """Return what shall be written where, per site bool [n_layers, n_experts]."""
    if request is not None:
        return [experts if site.request is not None else np.zeros_like(experts) for site in sites]
    holds = [prepared.manifest.drives[site.former].holds if site.former is not None and is_mounted(prepared, site) else None for site in sites]
    targets = [experts & held if held is not None else np.zeros_like(experts) for held in holds]
    homeless = np.argwhere(experts & ~np.any(targets, axis=0)).tolist()
    if homeless:
        layer, expert = homeless[0]
        raise UsageError(
            f"--only: {counted(len(homeless), 'expert')}, the first layer {layer} expert {expert}, "
            f"{word_for(len(homeless), 'belongs', 'belong')} on drives that are gone; name one with --tier B=DIR"
        )
    return targets


def _open_shards(directory: Path, prepared: Prepared, experts: np.ndarray) -> Checkpoint:
    """Open those shards that hold the experts, as a checkpoint of these alone."""
    known = {file.name: file for file in prepared.manifest.source.files}
    names = {name for layer in np.flatnonzero(experts.any(axis=1)).tolist() for name in shards_of(prepared, layer)}
    shards, tensors, faults = list[Shard](), dict[str, Tensor](), list[str]()
    for name in sorted(names):
        path, expected = directory / name, known[name]
        if not path.is_file():
            continue
        raw = header_bytes(path) if path.stat().st_size == expected.n_bytes else b""
        if xxh3_128_hex(raw) != expected.header_xxh3_128:
            faults.append(f"{path}: is not the shard that was extracted: size or header differ; fetch it again, from the same revision")
            continue
        tensors |= _tensors_of(raw, len(shards))
        shards.append(Shard(name, expected.n_bytes, expected.header_xxh3_128))
    for layer, expert in np.argwhere(experts).tolist():
        if any(name not in tensors for name in expert_tensor_names(layer, expert)):
            faults.append(f"layer {layer} expert {expert}: is in no shard here; fetch {' or '.join(shards_of(prepared, layer))}")
    if faults:
        raise BadInputError(listed(faults, f"{directory}: not all of these experts can be extracted from it:"))
    source = prepared.manifest.source
    facts = ConfigFacts(source.architecture, source.model_type, prepared.geometry, [])
    return Checkpoint(directory, {}, facts, tuple(shards), tensors, source.digest, probe_directory(directory))


def _tensors_of(raw: bytes, number: int) -> dict[str, Tensor]:
    """Return where a shard's tensors lie. Its header was checked when it was extracted, and is the same by its digest."""
    header = json.loads(raw[8:])
    header.pop("__metadata__", None)
    assert all(entry["dtype"] in DTYPE_BYTES for entry in header.values())
    return {
        name: Tensor(number, e["dtype"], tuple(e["shape"]), len(raw) + e["data_offsets"][0], e["data_offsets"][1] - e["data_offsets"][0])
        for name, e in header.items()
    }


def _write(
    source: Checkpoint, prepared: Prepared, sites: Sequence[Site], targets: Sequence[np.ndarray], reserve_bytes: int | None, on_progress: Progress
) -> int:
    """Write what is not there with the right bytes; return how many files were written."""
    n_bytes, modes = prepared.record.n_bytes, {n: probe_directory(sites[n].directory) for n, experts in enumerate(targets) if experts.any()}
    reserves = Reserves([sites[n].directory for n in modes], reserve_bytes)
    work = [(n, layer, expert) for layer, expert in np.argwhere(np.any(targets, axis=0)).tolist() for n in modes if targets[n][layer, expert]]

    def make_worker() -> Callable[[tuple[int, int, int]], bool]:
        incoming, outgoing = (aligned_buffer(span_bytes(n_bytes, _MOST_ALIGNMENT)) for _ in range(2))

        def one(item: tuple[int, int, int]) -> bool:
            n, layer, expert = item
            path, expected = sites[n].directory / expert_file_name(layer, expert), prepared.hashes.get(layer, expert)
            assert expected is not None
            if _is_intact(path, expected, n_bytes, modes[n], incoming):
                return False
            gather_record(source, layer, expert, incoming=incoming, outgoing=outgoing)
            if (found := xxh3_128_hex(outgoing[:n_bytes])) != expected:
                shard = source.extent(expert_tensor_names(layer, expert)[0]).path
                raise DamagedDataError(
                    f"{shard}: layer {layer} expert {expert} has xxh3-128 {found}, when it was extracted {expected}; fetch it again"
                )
            with reserves.taking(sites[n].directory, disk_bytes(n_bytes)):
                write_record(
                    path, outgoing, n_bytes, modes[n], check=lambda p: prove_file(p, expected, n_bytes=n_bytes, mode=modes[n], buffer=incoming)
                )
            return True

        return one

    n_written = 0
    for done, is_new in enumerate(run_parallel(work, make_worker, n_workers=_N_WORKERS * len(modes)), start=1):
        n_written += is_new
        on_progress("experts", done * n_bytes, len(work) * n_bytes)
    for n in modes:
        sync_directory(sites[n].directory)
    return n_written


def _is_intact(path: Path, expected: str, n_bytes: int, mode: ReadMode, buffer: memoryview) -> bool:
    try:
        if size_fault(path, n_bytes) is not None:
            return False
        prove_file(path, expected, n_bytes=n_bytes, mode=mode, buffer=buffer)
    except (OSError, DamagedDataError):
        return False
    return True


def _publish(prepared: Prepared, sites: Sequence[Site], targets: Sequence[np.ndarray], experts: np.ndarray) -> Manifest:
    """Publish a manifest that names these experts where they are, and nowhere else; drives that hold nothing then leave it if they are gone."""
    drives = list[Drive]()
    for n in sorted(range(len(sites)), key=lambda n: len(sites) if (former := sites[n].former) is None else former):
        site, written = sites[n], targets[n]
        if site.former is None:
            drives.append(manifest_drive(site.tier, site.directory, prepared.directory, None, written))
            continue
        drive = prepared.manifest.drives[site.former]
        holds = (drive.holds & (site.vouched | ~experts)) | written
        if holds.any() or site.device is not None:
            drives.append(dataclasses.replace(drive, holds=holds))
    is_same = len(drives) == len(prepared.manifest.drives) and all(
        a.directory == b.directory and np.array_equal(a.holds, b.holds) for a, b in zip(drives, prepared.manifest.drives, strict=True)
    )
    # Nothing is written below the mount point of a drive that is not mounted.
    absent = {prepared.manifest.drives[site.former].directory for site in sites if site.former is not None and not is_mounted(prepared, site)}
    with_lists = [drive for drive in drives if drive.directory not in absent]
    if is_same:
        publish_with_lists(prepared, with_lists, lambda: None)
        return prepared.manifest
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    links = tuple(link for link in prepared.manifest.links if set(link.directories) <= {drive.directory for drive in drives})
    manifest = dataclasses.replace(prepared.manifest, generation=next_generation(prepared.path), created=now, drives=tuple(drives), links=links)
    publish_with_lists(prepared, with_lists, lambda: write_manifest(prepared.path, manifest))
    return manifest
