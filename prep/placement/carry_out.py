"""Carrying a placement out: proofs, copies, the new manifest, removals. Killed at any instant, the manifest that is there stays true.

Whatever is to be relied on is read again first: files that no manifest names, and one planned copy of each expert whose unplanned files shall go.
"""

import dataclasses
import datetime
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from layout.direct import aligned_buffer, probe_directory, span_bytes
from layout.hash_lists import HASH_LIST_NAME
from layout.parallel import run_parallel
from layout.prepared import Prepared
from layout.record import expert_file_name
from layout.sizes import counted, format_size
from layout.writer import PARTIAL_SUFFIX, replaced_file, sync_directory
from manifests.errors import DamagedDataError, KtierError, NoSpaceError
from manifests.load import load_manifest
from manifests.manifest import BASE_TIERS, Drive, Manifest, SharedLink
from manifests.store import manifest_text, next_generation, write_manifest
from prep.copying import Sources, copy_expert, prove_file
from prep.drive_facts import manifest_drive
from prep.extraction.room import Reserves, device
from prep.placement.publish import publish_with_lists
from prep.placement.schedule import Step
from prep.placement.sites import Site, expert_files
from prep.requests import disk_bytes

WORKERS_PER_DRIVE = 4
# The widest alignment that a direct read or write may need.
_MOST_ALIGNMENT = 65536
_MOST_NAMED = 5
Progress = Callable[[str, int, int], None]
Remark = Callable[[str], None]
Work = Callable[[int, int, int, memoryview], Any]


class CarryOut:
    """One placement at work.

    drives        the new manifest's, in the order of the first sites; `drives[n].holds` is what sites[n] shall hold
    links         the new manifest's
    make_steps    orders copies and removals, given what is there, per site bool [n_layers, n_experts]
    is_removing   remove files of the model's experts that the plan does not name
    is_resumed    an interrupted placement goes on: what it published already is not published twice
    """

    def __init__(
        self,
        prepared: Prepared,
        sites: Sequence[Site],
        drives: Sequence[Drive],
        links: Sequence[SharedLink],
        *,
        make_steps: Callable[[Sequence[np.ndarray]], list[Step]],
        reserve_bytes: int | None,
        is_removing: bool,
        is_resumed: bool,
        on_progress: Progress,
        on_remark: Remark,
    ) -> None:
        self.prepared, self.sites, self.drives, self.links = prepared, sites, drives, links
        self.make_steps, self.is_removing, self.is_resumed = make_steps, is_removing, is_resumed
        self.on_progress, self.on_remark = on_progress, on_remark
        self.n_bytes = prepared.record.n_bytes
        nothing = np.zeros_like(prepared.hashes.is_known)
        self.wanted = [drives[n].holds if n < len(drives) else nothing for n in range(len(sites))]
        self.there = [site.there.copy() for site in sites]
        self.named = [site.vouched.copy() for site in sites]
        self.proved = [nothing.copy() for _ in sites]
        self.modes = [probe_directory(site.directory) if site.device is not None else None for site in sites]
        self.sources = Sources(prepared, self.there, directories=[s.directory for s in sites], names=[s.name for s in sites])
        self.reserves = Reserves([s.directory for s in sites if s.device is not None], reserve_bytes)

    def run(self) -> Manifest:
        """Do all of it and return the manifest that is published at the end."""
        try:
            self._sweep()
            self._prove()
            for step in self.make_steps(self.there):
                self._remove(step.removals, is_early=True)
                self._copy(step.copies)
            self._replace_bad_copies()
            manifest = self._publish(dict(enumerate(self.drives)))
            if self.is_removing:
                self._remove([self._unplanned(n) for n in range(len(self.sites))], is_early=False)
            return manifest
        finally:
            self._say_bad_copies()

    def _sweep(self) -> None:
        """Remove half-written experts that a killed command has left in the drives."""
        for site in self.sites[: len(self.drives)]:
            for path in site.directory.glob(f"L*-E*.bin{PARTIAL_SUFFIX}"):
                path.unlink(missing_ok=True)

    # Proofs

    def _prove(self) -> None:
        """Read again what is to be relied on; a file that is not what it must be counts as absent from then on."""
        to_prove = [wanted & site.lying for wanted, site in zip(self.wanted, self.sites, strict=True)]
        if self.is_removing:
            for n, experts in enumerate(self._witnesses(to_prove)):
                to_prove[n] = to_prove[n] | experts

        def prove(n: int, layer: int, expert: int, buffer: memoryview) -> None:
            path, mode = self._path(n, layer, expert), self.modes[n]
            assert mode is not None
            try:
                prove_file(path, self.prepared.hashes.get(layer, expert), n_bytes=self.n_bytes, mode=mode, buffer=buffer)
            except (OSError, DamagedDataError) as error:
                self.there[n][layer, expert] = False
                self.sources.bad[n, layer, expert] = f"layer {layer} expert {expert} on {self.sites[n].name}: {error}"
            else:
                self.proved[n][layer, expert] = True

        self._for_each(to_prove, prove, "proving")

    def _witnesses(self, others: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return one copy to prove of each expert that has unplanned files: planned, on a base drive, and there. None where one of `others` is."""
        chosen = [np.zeros_like(experts) for experts in others]
        going = np.any([self._unplanned(n) for n in range(len(self.sites))], axis=0)
        base = [n for n in range(len(self.sites)) if self._is_base(n)]
        for layer, expert in np.argwhere(going & ~np.any([others[n] for n in base], axis=0)).tolist():
            holders = [n for n in base if self.wanted[n][layer, expert] and self.there[n][layer, expert]]
            if holders:
                chosen[holders[expert % len(holders)]][layer, expert] = True
        return chosen

    def _is_base(self, n: int) -> bool:
        return n < len(self.drives) and self.drives[n].tier in BASE_TIERS

    def _unplanned(self, n: int) -> np.ndarray:
        site = self.sites[n]
        unplanned: np.ndarray = (self.there[n] | site.vouched | site.lying | site.misfit) & ~self.wanted[n]
        return unplanned

    # Copies

    def _copy(self, copies: Sequence[np.ndarray]) -> None:
        def copy(n: int, layer: int, expert: int, buffer: memoryview) -> None:
            directory, mode = self.sites[n].directory, self.modes[n]
            assert mode is not None
            try:
                with self.reserves.taking(directory, disk_bytes(self.n_bytes)):
                    copy_expert(self.sources, layer, expert, directory=directory, mode=mode, buffer=buffer)
            finally:
                # A drive may go between any two steps; what was then written below its mount point must not stay there.
                if not self._is_mounted(n):
                    self._path(n, layer, expert).unlink(missing_ok=True)
                self._check_mounted(n)
            self.there[n][layer, expert] = self.proved[n][layer, expert] = True

        self._for_each(copies, copy, "copies")
        for n, experts in enumerate(copies):
            if experts.any():
                sync_directory(self.sites[n].directory)

    def _replace_bad_copies(self) -> None:
        """Write anew the planned copies that turned out bad while they were read for others."""
        again = [np.zeros_like(wanted) for wanted in self.wanted]
        for n, layer, expert in self.sources.bad:
            again[n][layer, expert] = self.wanted[n][layer, expert] and not self.proved[n][layer, expert]
        self._copy(again)

    def _say_bad_copies(self) -> None:
        by_site: dict[int, list[str]] = {}
        for (n, layer, expert), what in sorted(self.sources.bad.items()):
            end = "written anew from another copy" if self.proved[n][layer, expert] else "it was not copied"
            by_site.setdefault(n, []).append(f"{what}; {end}")
        for n, lines in by_site.items():
            for line in lines[:_MOST_NAMED]:
                self.on_remark(f"bad copy: {line}")
            if len(lines) > _MOST_NAMED:
                self.on_remark(f"bad copy: {len(lines) - _MOST_NAMED} more on {self.sites[n].name}; kprep verify-hashes names every one")

    def _for_each(self, experts: Sequence[np.ndarray], work: Work, phase: str) -> None:
        """Do something for experts, per site bool [n_layers, n_experts]: all sites at once, each with threads of its own."""
        lanes = _Lanes({n: _places(e) for n, e in enumerate(experts) if e.any()})
        done, total = dict.fromkeys(lanes.n_waiting, 0), lanes.n_waiting.copy()

        def make_worker() -> Callable[[tuple[int, int, int]], int]:
            lanes.join()
            buffer = aligned_buffer(span_bytes(self.n_bytes, _MOST_ALIGNMENT))

            def one(item: tuple[int, int, int]) -> int:
                work(*item, buffer)
                return item[0]

            return one

        def tell(n: int) -> None:
            self.on_progress(f"{phase}, {self.sites[n].name}", done[n] * self.n_bytes, total[n] * self.n_bytes)

        for n in total:
            tell(n)
        for n in run_parallel(lanes, make_worker, n_workers=WORKERS_PER_DRIVE * len(total)):
            done[n] += 1
            tell(n)

    # Manifests

    def _publish(self, drives: Mapping[int, Drive]) -> Manifest:
        """Publish a manifest with these drives, by number of their site, and with it the drives' hash lists."""
        self._check_files(drives)
        former = load_manifest(self.prepared.path)
        known = {drive.directory for drive in drives.values()}
        links = tuple(link for link in self.links if known.issuperset(link.directories))
        manifest = dataclasses.replace(former, drives=tuple(drives.values()), links=links)
        if not (self.is_resumed and manifest_text(manifest) == manifest_text(former)):
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            manifest = dataclasses.replace(manifest, generation=next_generation(self.prepared.path), created=now)

        def write() -> None:
            if manifest.generation != former.generation:
                write_manifest(self.prepared.path, manifest)

        publish_with_lists(self.prepared, manifest.drives, write)
        self.named = [drives[n].holds if n in drives else np.zeros_like(named) for n, named in enumerate(self.named)]
        return manifest

    def _check_files(self, drives: Mapping[int, Drive]) -> None:
        """Raise KtierError unless every file that is about to be named is there: a drive may have gone since it was written."""
        for n, drive in drives.items():
            site = self.sites[n]
            self._check_mounted(n)
            gone = np.argwhere(drive.holds & ~expert_files(self.prepared, site.directory)[0]).tolist()
            if gone:
                raise KtierError(
                    f"{site.name}: layer {gone[0][0]} expert {gone[0][1]} and {len(gone) - 1} more have gone meanwhile; no manifest was written"
                )

    def _is_mounted(self, n: int) -> bool:
        site = self.sites[n]
        return site.directory.is_dir() and device(site.directory) == site.device

    def _check_mounted(self, n: int) -> None:
        if not self._is_mounted(n):
            raise KtierError(
                f"{self.sites[n].name}: the directory shows another file system than at the start; has the drive gone? No manifest was written"
            )

    # Removals

    def _remove(self, removals: Sequence[np.ndarray], *, is_early: bool) -> None:
        """Remove files of experts that are proved on a planned base drive; those that the manifest names leave it first."""
        if not any(experts.any() for experts in removals):
            return
        is_proved = np.any([self.proved[n] & self.wanted[n] for n in range(len(self.sites)) if self._is_base(n)], axis=0)
        going = [experts & is_proved for experts in removals]
        if is_early and any((experts & named).any() for experts, named in zip(going, self.named, strict=True)):
            self._publish_without(going)
        for n, experts in enumerate(going):
            if experts.any():
                self._remove_from(n, experts)

    def _remove_from(self, n: int, experts: np.ndarray) -> None:
        site, n_removed = self.sites[n], 0
        for layer, expert in np.argwhere(experts).tolist():
            self._path(n, layer, expert).unlink(missing_ok=True)
            self.there[n][layer, expert] = False
            n_removed += 1
        sync_directory(site.directory)
        if site.request is None:
            self._tidy_list(n)
        self.on_remark(f"removed from {site.name}: {counted(n_removed, 'file')}, {format_size(n_removed * self.n_bytes)}")

    def _tidy_list(self, n: int) -> None:
        """Let the hash list of a directory that no manifest names any more say what is left there."""
        path, left = self.sites[n].directory / HASH_LIST_NAME, self.sites[n].vouched & self.there[n]
        if not path.exists():
            return
        if not left.any():
            path.unlink()
            return
        with replaced_file(path) as partial:
            partial.write_text(self.prepared.hashes.to_text(left))

    def _publish_without(self, going: Sequence[np.ndarray]) -> None:
        """Publish what is true once some files are gone: all that is named now and all that was made so far, less those."""
        drives = dict[int, Drive]()
        for n, site in enumerate(self.sites):
            claims = ((self.named[n] & self.there[n]) | (self.proved[n] & self.wanted[n])) & ~going[n]
            if not claims.any():
                continue
            former = self.prepared.manifest.drives[site.former] if site.former is not None else None
            tier = former.tier if former is not None and former.tier in BASE_TIERS else site.tier
            profile = self.drives[n].profile if n < len(self.drives) else former.profile if former is not None else None
            drives[n] = manifest_drive(tier, site.directory, self.prepared.directory, profile, claims)
        base = np.any([drive.holds for drive in drives.values() if drive.tier in BASE_TIERS], axis=0)
        if (self.prepared.manifest.base_holds() & ~base).any():
            raise NoSpaceError(
                "room is to be made by removing files, but the base is not complete without what is still to be copied; "
                "give the command without --remove-unplanned first, or make room; nothing was removed"
            )
        self._publish(drives)

    def _path(self, n: int, layer: int, expert: int) -> Path:
        return self.sites[n].directory / expert_file_name(layer, expert)


class _Lanes:
    """Work of several sites, (site, layer, expert) by (site), handed out so that each thread serves one site only."""

    def __init__(self, experts: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        self.n_waiting = {n: len(places) for n, places in experts.items()}
        self._waiting = {n: iter(places) for n, places in experts.items()}
        self._turns, self._mine = cycle(experts), threading.local()

    def join(self) -> None:
        """Bind the calling thread to a site: each has its turn."""
        self._mine.site = next(self._turns)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return self

    def __next__(self) -> tuple[int, int, int]:
        """Return the next work of the calling thread's site."""
        layer, expert = next(self._waiting[self._mine.site])
        return self._mine.site, layer, expert


def _places(experts: np.ndarray) -> list[tuple[int, int]]:
    return [(layer, expert) for layer, expert in np.argwhere(experts).tolist()]
