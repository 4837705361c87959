"""One drive under measurement: how its files are read, what was dealt of them, what its devices say, and what the user should know of it."""

import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from layout.direct import ReadMode, probe_directory
from layout.drives import (
    RAM,
    BlockDevice,
    DirectoryFacts,
    Temperature,
    best_link_bytes_per_s,
    describe_directory,
    device_read_bytes,
    link_limit_bytes_per_s,
    temperature_of,
)
from layout.sizes import counted, format_rate, format_size
from manifests.errors import KtierError
from prep.measuring.timed_reads import Deck, Feed, Run, read_feeds
from prep.measuring.trial_files import record_files

# Devices that read less than this part of what was asked for have been helped by a cache.
LEAST_DEVICE_SHARE = 0.9
FRESH_S = 24 * 3600
_N_AGES = 64
_FRESH = "a drive may read fresh files faster than old ones"


@dataclass(frozen=True, slots=True)
class MeasuredDrive:
    """A directory with its record files ready to be dealt. `file_age_s` is the median age of its experts, None for trial files."""

    directory: Path
    facts: DirectoryFacts
    mode: ReadMode
    deck: Deck
    are_trials: bool
    file_age_s: float | None
    sys_root: Path

    def feed(self, depth: int) -> Feed:
        return Feed(self.deck.deal, self.mode, depth, ", ".join(map(_name_of, self.facts.physical)))

    def read(self, depth: int, seconds: float) -> tuple[Run, int | None]:
        """Read for a time; return what was done, and what the devices read meanwhile, None where the kernel does not count.

        Raises KtierError if the rate is more than the link can carry.
        """
        before = self.device_bytes()
        run = read_feeds([self.feed(depth)], seconds)[0]
        after = self.device_bytes()
        self._check_link(run.bytes_per_s)
        return run, None if before is None or after is None else max(0, after - before)

    def device_bytes(self) -> int | None:
        return device_read_bytes(self.facts, sys_root=self.sys_root)

    def _check_link(self, bytes_per_s: float) -> None:
        limits = [link_limit_bytes_per_s(device) for device in self.facts.physical]
        known = [limit for limit in limits if limit is not None]
        if known and len(known) == len(limits) and bytes_per_s > sum(known):
            raise KtierError(
                f"{self.directory}: measured {format_rate(bytes_per_s)}, but its link carries at most {format_rate(sum(known))}: "
                "a cache was measured, not the drive; free the host's memory of its files, or measure on more files"
            )

    def temperatures(self) -> list[tuple[BlockDevice, Temperature]]:
        found = [(device, temperature_of(device, sys_root=self.sys_root)) for device in self.facts.physical]
        return [(device, temperature) for device, temperature in found if temperature is not None]

    def remarks(self) -> Iterator[str]:
        """Yield what the user should know of the measurement, apart from its numbers."""
        if not self.mode.is_direct:
            yield f"{self.directory}: {self.mode}: read through the page cache, whose work is in the rate"
        yield from self._link_remarks()
        for device, temperature in self.temperatures():
            if temperature.most is not None and temperature.now >= temperature.most:
                hot = f"{temperature.now:.0f} °C, and warns at {temperature.most:.0f} °C"
                yield f"{self.directory}: {device.name} has {hot}: it reads slower to cool down; give it a heat sink or more air"
        if self.deck.n_with_holes:
            holes = f"{counted(self.deck.n_with_holes, 'file')} with holes, parts never written, left out"
            yield f"{self.directory}: {holes}; kprep verify-hashes names them"
        if RAM not in self.facts.physical_names:
            yield from self._file_remarks()

    def _link_remarks(self) -> Iterator[str]:
        for device in self.facts.physical:
            now, best = link_limit_bytes_per_s(device), best_link_bytes_per_s(device)
            if now is not None and best is not None and now < best:
                yield (
                    f"{self.directory}: {device.name} is linked at {device.link_speed} x{device.link_width} ({format_rate(now)}), "
                    f"but can do {device.max_link_speed} x{device.max_link_width} ({format_rate(best)}); seat it anew, or give it a faster slot"
                )

    def _file_remarks(self) -> Iterator[str]:
        deck = self.deck
        n_bytes, n_read = deck.n_files * deck.record_bytes, deck.n_dealt * deck.record_bytes
        again = f"each was read {deck.n_dealt / deck.n_files:.1f} times ({format_size(n_read)} in all), and a cache below may have kept some"
        if self.are_trials:
            made = f"measured on {counted(deck.n_files, 'file')} made for it ({format_size(n_bytes)}), for it has too few experts"
            repeats = f"; {again}" if deck.n_dealt > deck.n_files else ""
            yield f"{self.directory}: {made}; {_FRESH}{repeats}; measure again when its experts are a day old"
            return
        if deck.n_dealt > deck.n_files:
            yield f"{self.directory}: its {deck.n_files} files ({format_size(n_bytes)}) are fewer than were read: {again}"
        if self.file_age_s is not None and self.file_age_s < FRESH_S:
            hours = max(1, math.ceil(self.file_age_s / 3600))
            yield f"{self.directory}: half of its files are younger than {hours} h; {_FRESH}; measure again in a day"


@contextmanager
def measured_drive(directory: Path, *, record_bytes: int, reserve_bytes: int | None, rng: random.Random, sys_root: Path) -> Iterator[MeasuredDrive]:
    """Make a directory ready to be measured; trial files, where it needs some, vanish at the end.

    Raises BadInputError if the directory is not there, and what `record_files` raises.
    """
    facts = describe_directory(directory, sys_root=sys_root)
    mode = probe_directory(directory)
    with record_files(directory, record_bytes=record_bytes, mode=mode, reserve_bytes=reserve_bytes) as files:
        age = None if files.are_trials else _median_age_s(rng.sample(files.paths, min(_N_AGES, len(files.paths))))
        yield MeasuredDrive(directory, facts, mode, Deck(files.paths, record_bytes, mode, rng), files.are_trials, age, sys_root)


def looks_cached(n_bytes: int, device_bytes: int | None) -> bool:
    """Say whether devices read far less than was asked for."""
    return device_bytes is not None and device_bytes < LEAST_DEVICE_SHARE * n_bytes


def _median_age_s(paths: list[Path]) -> float:
    return time.time() - statistics.median(path.stat().st_mtime for path in paths)


def _name_of(device: BlockDevice) -> str:
    facts = [device.model, f"serial {device.serial}" if device.serial else None]
    return f"{device.name}{''.join(f', {fact}' for fact in facts if fact)}"
