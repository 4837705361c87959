"""Experts' records, brought from drives through host slots into slots on the device.

What is on the device already comes first, then what the host pool holds, then what the drives deliver, as it arrives. A read that fails goes
to another copy; without one the run ends. It never sees a hidden state.
"""

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from layout.direct import aligned_buffer, probe_directory, span_bytes
from layout.prepared import Copies, Prepared
from layout.reader import Completion, Reader, ReadRequest
from manifests.errors import DamagedDataError
from runtime.cache import ExpertKey, SlotCache
from runtime.stats import DriveCounts, ExpertCounts

# Requests in flight on a drive that was not measured.
DEFAULT_DEPTH = 4
MOST_DEPTH = 16


class Store:
    """Fetches records. `counts` is where it counts; the caller replaces it at a change of phase."""

    def __init__(
        self,
        prepared: Prepared,
        copies: Copies,
        *,
        device: torch.device,
        n_device_slots: int,
        n_host_slots: int,
        verify_every: int,
        counts: ExpertCounts,
        on_remark: Callable[[str], None],
    ) -> None:
        n_bytes = prepared.record.n_bytes
        profiles = [drive.profile for drive in prepared.manifest.drives]
        modes = [probe_directory(d) if h.any() else None for d, h in zip(prepared.drive_directories, copies.holds, strict=True)]
        self.modes = [mode for mode in modes if mode is not None]
        # Drives without a usable file are not read from, and have no threads.
        self.drives = [n for n, mode in enumerate(modes) if mode is not None]
        self.depths = [min(MOST_DEPTH, p.depth) if (p := profiles[n]) else DEFAULT_DEPTH for n in self.drives]
        is_measured = all(profiles[n] is not None for n in self.drives)
        self._rates = [p.read_bytes_per_s if is_measured and (p := profiles[n]) else 1.0 for n in self.drives]
        self._prepared, self._copies, self._verify_every, self.counts, self._on_remark = prepared, copies, verify_every, counts, on_remark
        self._device_cache, self._host_cache = SlotCache(n_device_slots), SlotCache(n_host_slots)
        self._device_slots = torch.empty((n_device_slots, n_bytes), dtype=torch.uint8, device=device)
        self._stride = span_bytes(n_bytes, max(mode.alignment for mode in self.modes))
        self._arena = aligned_buffer(n_host_slots * self._stride)
        self._reader = Reader(self.modes, self.depths)
        self._in_flight = [0] * len(self.drives)
        self._spoilt: set[tuple[int, ExpertKey]] = set()
        self._n_submitted = 0

    @property
    def n_device_slots(self) -> int:
        return self._device_cache.n_slots

    @property
    def n_host_slots(self) -> int:
        return self._host_cache.n_slots

    def close(self) -> None:
        self._reader.close()

    def forget(self) -> None:
        """Empty both caches."""
        self._device_cache.clear()
        self._host_cache.clear()

    def fetch(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (expert, record on the device, uint8 [n_bytes]) for each of a layer's experts, in the order of their arrival.

        A record is valid until the next is asked for. Raises DamagedDataError if an expert cannot be read from any copy.
        """
        keys = [ExpertKey(layer, expert) for expert in experts]
        self.counts.needed.update(keys)
        here = [key for key in keys if self._device_cache.find(key) is not None]
        for key in here:
            self._device_cache.pin(key)
        for key in here:
            self.counts.n_device_hits += 1
            yield self._lend(key)
        absent = [key for key in keys if key not in set(here)]
        in_host = [key for key in absent if self._host_cache.find(key) is not None]
        for key in in_host:
            self._host_cache.pin(key)
        for key in in_host:
            self.counts.n_host_hits += 1
            self._upload(key, self._host_record(key))
            self._host_cache.unpin(key)
            yield self._lend(key)
        yield from self._read([key for key in absent if key not in set(in_host)])

    def _lend(self, key: ExpertKey) -> tuple[int, Tensor]:
        slot = self._device_cache.find(key)
        assert slot is not None
        # The next upload into this slot queues behind the work that uses it, on the same stream.
        self._device_cache.unpin(key)
        return key.expert, self._device_slots[slot]

    def _host_record(self, key: ExpertKey) -> memoryview:
        slot = self._host_cache.find(key)
        assert slot is not None
        # An expert's file begins with its record, so the record begins with its slot.
        return self._arena[slot * self._stride : slot * self._stride + self._prepared.record.n_bytes]

    def _upload(self, key: ExpertKey, record: memoryview) -> None:
        slot = self._device_cache.take(key)
        assert slot is not None
        self._device_slots[slot].copy_(torch.frombuffer(record, dtype=torch.uint8))
        self.counts.uploaded_bytes += len(record)

    def _read(self, keys: list[ExpertKey]) -> Iterator[tuple[int, Tensor]]:
        # Those with the fewest copies have the least choice, so they choose first.
        waiting = sorted(keys, key=lambda key: len(self._sources(key)))
        n_reading = 0
        while waiting or n_reading:
            n_reading += self._submit(waiting)
            start = time.perf_counter()
            done = self._reader.wait()
            self.counts.wait_s += time.perf_counter() - start
            n_reading -= 1
            key = self._finish(done)
            if done.error is not None:
                waiting.insert(0, key)
                continue
            assert done.payload is not None
            if not waiting and not n_reading:
                self._counts_of(done.request.drive).n_last += 1
            self._upload(key, done.payload)
            self._host_cache.unpin(key)
            yield self._lend(key)

    def _submit(self, waiting: list[ExpertKey]) -> int:
        """Start what the drives and host slots have room for; return how many reads were started."""
        n_started = 0
        for key in list(waiting):
            drive = self._choose(key)
            if self._in_flight[drive] >= self.depths[drive]:
                continue
            slot = self._host_cache.take(key)
            if slot is None:
                break
            waiting.remove(key)
            buffer = self._arena[slot * self._stride : (slot + 1) * self._stride]
            extent = self._prepared.expert_extent(self.drives[drive], *key)
            self._n_submitted += 1
            is_verified = self._verify_every > 0 and self._n_submitted % self._verify_every == 0
            expected = self._prepared.hashes.get(*key) if is_verified else None
            self._in_flight[drive] += 1
            self._reader.submit(ReadRequest(key, drive, extent, buffer, expected))
            n_started += 1
        return n_started

    def _choose(self, key: ExpertKey) -> int:
        """Return the drive with the earliest expected completion of this read. Raises DamagedDataError if no copy is left."""
        sources = self._sources(key)
        if not sources:
            drives = ", ".join(map(self._prepared.drive_name, self._prepared.drives_holding(*key)))
            raise DamagedDataError(
                f"layer {key.layer} expert {key.expert}: no readable copy is left (tried {drives}); kprep verify-hashes --repair names and restores"
            )
        return min(sources, key=lambda drive: (self._in_flight[drive] + 1) / self._rates[drive])

    def _sources(self, key: ExpertKey) -> list[int]:
        return [i for i, n in enumerate(self.drives) if self._copies.holds[n][key] and (i, key) not in self._spoilt]

    def _counts_of(self, drive: int) -> DriveCounts:
        return self.counts.drives[self.drives[drive]]

    def _finish(self, done: Completion) -> ExpertKey:
        key, drive = done.request.tag, done.request.drive
        assert isinstance(key, ExpertKey)
        self._in_flight[drive] -= 1
        counts = self._counts_of(drive)
        counts.n_reads += 1
        counts.busy_s += done.seconds
        if done.error is None:
            counts.read_bytes += len(done.payload or b"")
            return key
        counts.n_failed += 1
        self._spoilt.add((drive, key))
        self._host_cache.drop(key)
        where = self._prepared.drive_name(self.drives[drive])
        self._on_remark(f"layer {key.layer} expert {key.expert} on {where}: {done.error}; trying another copy")
        return key
