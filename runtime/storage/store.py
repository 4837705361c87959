"""Experts' records, brought from drives through host slots into slots on the device.

What is on the device already comes first, then what the host pool holds, then what the drives deliver, as it arrives. A read that fails or takes
too long goes to another copy; without one the run ends. All state belongs to the thread that fetches. It never sees a hidden state.
"""

import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from layout.direct import PAGE, Extent, probe_directory, round_up
from layout.drives import describe_directory
from layout.prepared import Copies, Prepared
from layout.reader import Completion, Reader, ReadRequest, Target, why_slower
from layout.record import RecordLayout
from manifests.errors import DamagedDataError
from runtime.stats import DriveCounts, ExpertCounts
from runtime.storage.arena import Arena, CudaRegistrar
from runtime.storage.cache import ExpertKey, HostPool
from runtime.storage.device_cache import DeviceCache
from runtime.storage.drives import Holders, depths_of, drive_facts, pieces_of
from runtime.storage.incoming import Incoming, LayerFetch, Phase, Room, Ticket
from runtime.storage.schedule import Chunk, Job, NoCopyLeft, Read, Scheduler, chunks_in_order_of_need

# Host slots beside the pool, for records that are asked of another drive while a slow one may still write into theirs.
_N_SPARE = 2
# A layer's last records that several drives have are read in chunks, so that the drives end together; others whole, each one arrival to deal with.
_N_IN_CHUNKS = 8
# Arrivals that are taken in together while there is more to read.
_N_AT_ONCE = 2
_LINGER_S = 5e-4
_LONGEST_LINGER_S = 5e-3
_TICK_S = 0.1
_ALARM_S = 10.0


class Store:
    """Fetches records. `counts` is where it counts and `phase` what the engine does; the caller sets both at a change of phase.

    servers    a number for each of `copies`' drives; those with the same number share a device. None: as the kernel tells.
    tier_caps  the most requests in flight on a tier
    limits     bytes/s that each of `copies`' drives is slowed down to, None for as fast as it is
    """

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
        servers: Sequence[int] | None = None,
        tier_caps: Mapping[str, int] | None = None,
        limits: Sequence[float | None] | None = None,
    ) -> None:
        self._prepared, self._verify_every, self.counts, self._on_remark = prepared, verify_every, counts, on_remark
        self.phase = Phase.PROMPT
        # Drives without a usable file are not read from, and have no threads. Indices from here on are into this list.
        self.drives = [n for n, holds in enumerate(copies.holds) if holds.any()]
        self._holders = Holders([copies.holds[n] for n in self.drives])
        directories = [prepared.drive_directories[n] for n in self.drives]
        self._names = [prepared.drive_name(n) for n in self.drives]
        self._tiers = [prepared.manifest.drives[n].tier for n in self.drives]
        self.modes = [probe_directory(directory) for directory in directories]
        limited = None if limits is None else [limits[n] for n in self.drives]
        described = [describe_directory(directory) for directory in directories]
        self.depths = depths_of(prepared, self.drives, described, limited)
        n_bytes, step = prepared.record.n_bytes, max(PAGE, *(mode.alignment for mode in self.modes))
        # Where the requests in flight on a tier are limited, each must be one read.
        are_whole = [tier in (tier_caps or ()) for tier in self._tiers]
        pieces = pieces_of(n_bytes, self.depths, [max(PAGE, mode.alignment) for mode in self.modes], are_whole)
        facts = drive_facts(prepared, self.drives, described, servers, limited, self.depths, pieces)
        self._scheduler = Scheduler(facts, tier_caps=tier_caps)

        self._n_bytes, self._whole = n_bytes, (Chunk(0, n_bytes),)
        self._chunks = _chunks(prepared.record, step)
        shape = (prepared.geometry.n_layers, prepared.geometry.n_experts)
        self._device = DeviceCache(n_device_slots, n_bytes, device, shape=shape, on_evict=lambda key: self._host.off_device(key))
        registrar = CudaRegistrar(device) if device.type == "cuda" else None
        self.arena = Arena(n_host_slots + _N_SPARE, round_up(n_bytes, step), registrar=registrar, on_remark=on_remark)
        n_spare = min(_N_SPARE, self.arena.n_slots - 1)
        self._spares = list(range(self.arena.n_slots - n_spare, self.arena.n_slots))
        self._host = HostPool(self.arena.n_slots - n_spare, keep_share=_keep_share(prepared, n_device_slots))

        if (slower := why_slower()) is not None:
            on_remark(slower)
        self._reader = Reader(self.modes, self.depths, limits=limited, pieces=pieces, uploader=self._device.uploader)
        self._arrived: deque[Completion] = deque()
        # Of what was read so far, half a kilobyte each: to make one anew takes longer than to begin a read.
        self._paths: dict[tuple[int, ExpertKey], Path] = {}
        self._counted: tuple[ExpertCounts | None, list[tuple[DriveCounts, DriveCounts]]] = (None, [])
        self._incoming: dict[ExpertKey, Incoming] = {}
        # Dead, with a slot of the pool that a read may still write into.
        self._draining: dict[ExpertKey, Incoming] = {}
        # Whole records that found no slot on the device yet.
        self._whole_in_host: deque[Room] = deque()
        self._prefetched: set[ExpertKey] = set()
        self._spoilt: set[tuple[int, ExpertKey]] = set()
        self._layer: LayerFetch | None = None
        self._n_begun = 0
        self._looked_at = 0.0
        # From now on the interpreter's collector looks only at what comes: through all that is loaded it would take a tenth of a second.
        gc.freeze()

    @property
    def n_device_slots(self) -> int:
        return self._device.n_slots

    @property
    def n_host_slots(self) -> int:
        return self._host.n_slots

    def close(self) -> None:
        gc.unfreeze()
        self._reader.close()
        self._device.close()
        self.arena.close()

    def forget(self) -> None:
        """Empty both caches."""
        self._device.wait_for_uploads()
        self._drain()
        self._device.clear()
        self._host.clear()

    def address(self, slot: int) -> int:
        """Return where a device slot's record begins."""
        return self._device.address(slot)

    def addresses(self, layer: int) -> np.ndarray:
        """Return where each of a layer's experts lies on the device, int64 [n_experts], 0 where it does not; to be read, not kept.

        Work launched on the current stream may use these records until experts of this layer are fetched, and those fetched as long as the fetch.
        """
        return self._device.addresses(layer)

    def record(self, slot: int) -> Tensor:
        """Return the record in a device slot, uint8 [n_bytes]."""
        return self._device.record(slot)

    def fetch(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (expert, record on the device, uint8 [n_bytes]) for each of a layer's experts, in the order of their arrival.

        A record is valid until the next is asked for. Raises DamagedDataError if an expert cannot be read from any copy.
        """
        for group in self.fetch_groups(layer, experts):
            for expert, slot in group:
                yield expert, self._device.record(slot)

    def fetch_groups(
        self, layer: int, experts: Sequence[int], *, passing: Collection[int] = (), meanwhile: Callable[[], None] | None = None
    ) -> Iterator[list[tuple[int, int]]]:
        """Yield groups of (expert, device slot) until each of a layer's experts was there once.

        passing    those of them that no further use is expected of: both caches let go of them first
        meanwhile  called whenever all reads are under way and nothing is left but to wait for them; it may prefetch

        First what is on the device, then what was in host memory, then what has come from drives by the time it is asked for. Work that is launched
        on the current stream after a group is yielded finds the records there; they stay until the next group is asked for. A group is no larger
        than the device cache. Raises DamagedDataError if an expert cannot be read from any copy.
        """
        assert self._layer is None, "one layer at a time"
        began, idle_before = time.perf_counter(), self.counts.idle_s
        state = self._layer = LayerFetch(layer, frozenset(ExpertKey(layer, expert) for expert in passing), meanwhile=meanwhile, began=began)
        try:
            self._begin_layer(state, [ExpertKey(layer, expert) for expert in experts])
            while state.wanted:
                # Once nothing is left to start, what has arrived is handed out before anything is tidied up: the layer waits for it.
                group = [] if self._has_more(state) else state.next_group(is_pressed=False)
                if not group:
                    self._pump(state)
                    group = state.next_group(is_pressed=bool(self._whole_in_host))
                if not group:
                    self._wait(state)
                    continue
                self._device.hand_out(group)
                self.counts.host_s += time.perf_counter() - began - (self.counts.idle_s - idle_before)
                yield [(key.expert, slot) for key, slot in group]
                began, idle_before = time.perf_counter(), self.counts.idle_s
                self._device.take_back(group)
                for key, _ in group:
                    del state.wanted[key]
            self._count_last(state)
            self.counts.host_s += time.perf_counter() - began - (self.counts.idle_s - idle_before)
        finally:
            self._end_layer(state)

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Read experts into the host pool in what time the drives have to spare; what the layer then does not need is given up."""
        # Within a fetch that was done just now, and what comes meanwhile is what it waits for next.
        if self._layer is None:
            self._drain()
        for expert in experts:
            key = ExpertKey(layer, expert)
            if key in self._device or key in self._host or key in self._incoming:
                continue
            # As a prompt's fill: a guess may not evict what was used.
            room = self._host.take(key, is_prompt=True)
            if room is None:
                break
            self._expect(key, room, is_spare=False, is_wanted=False)
            self._prefetched.add(key)
            self.counts.n_prefetch_issued += 1
        self._start(time.perf_counter())

    def _begin_layer(self, state: LayerFetch, keys: list[ExpertKey]) -> None:
        """Sort what is needed by where it is; uploads and reads are under way afterwards, as far as there is room."""
        is_prompt, counts = self.phase is Phase.PROMPT, self.counts
        self._settle_prefetches(state.number, keys)
        state.wanted = dict.fromkeys(keys)
        # Where all of them find a host slot, the scheduler orders them, and a drive is set to work before the last is looked at.
        is_scarce = 2 * len(keys) > self._host.n_slots
        state.n_unseen, absent = len(keys), []
        # Work that is under way uses what is on the device of these: it stays whatever is read first.
        for key in keys:
            if key in self._device:
                self._device.pin(key)
        for key in keys:
            is_passing = key in state.passing
            slot = self._device.find(key, is_prompt=is_prompt, is_passing=is_passing)
            if slot is not None:
                state.hits.append((key, slot))
                continue
            if key in self._incoming:
                self._want(self._incoming[key])
            elif key in self._draining or (room := self._host.find(key, is_prompt=is_prompt, is_passing=is_passing)) is None:
                if is_scarce or state.first_read:
                    absent.append(key)
                else:
                    state.queue.append(key)
                    self._read_queued(state)
            else:
                self._host.pin(key)
                counts.n_host_hits += 1
                counts.host_hits_by_layer[state.number] += 1
                self._whole_in_host.append(Room(key, room, is_spare=False))
        state.n_unseen = 0
        state.queue.extend(_interleaved([(key, self._sources(key)) for key in absent]) if is_scarce else absent)
        self._read_queued(state)
        # What the pool holds is handed out before what the drives have brought by now.
        self._upload_waiting()
        self._pump(state)
        # Below here the drives are at work already.
        counts.needed.update(keys)
        counts.n_layers += 1
        counts.n_device_hits += len(state.hits)
        counts.device_hits_by_layer[state.number] += len(state.hits)
        if not is_prompt:
            hits = {key for key, _ in state.hits}
            for key in keys:
                if key not in hits and key not in state.passing:
                    self._host.lacked(key)

    def _pump(self, state: LayerFetch) -> None:
        """Do all that can be done without waiting. Reads start first, uploads follow: the drives should never be idle."""
        self._drain()
        self._read_queued(state)
        self._upload_waiting()

    def _has_more(self, state: LayerFetch) -> bool:
        """Return whether anything waits to be read or uploaded."""
        return bool(state.queue or self._whole_in_host or self._scheduler.has_waiting)

    def _upload_waiting(self) -> None:
        """Upload whole records that wait in host memory, as far as the device has slots for them."""
        while self._whole_in_host and self._upload_whole(self._whole_in_host[0]):
            self._whole_in_host.popleft()

    def _wait(self, state: LayerFetch) -> None:
        """Wait for an arrival, or a little; report what is late."""
        if state.queue and self._device.has_uploads:
            # A host slot is needed, and the next to be free is the one of the oldest upload.
            start = time.perf_counter()
            self._device.wait_for_room()
            self.counts.upload_wait_s += time.perf_counter() - start
            return
        assert self._scheduler.n_in_flight or any(i.n_out for i in self._incoming.values()) or self._draining, "nothing is under way"
        if self.phase is Phase.DECODE:
            self._host.make_room(min(self._prepared.geometry.n_experts_per_token, self._host.n_slots // 4))
        if state.meanwhile is not None and not state.queue and not self._scheduler.has_waiting:
            state.meanwhile()
        start = time.perf_counter()
        least, linger_s = self._how_many_to_await(state)
        self._arrived.extend(self._reader.take(_TICK_S, least=least, linger_s=linger_s))
        now = time.perf_counter()
        self.counts.wait_s += now - start
        self.counts.n_waits += 1
        state.waited_s += now - start
        self._take_arrived()
        if state.waited_s >= (state.n_alarms + 1) * _ALARM_S:
            state.n_alarms += 1
            self._on_remark(self._alarm(state))

    def _how_many_to_await(self, state: LayerFetch) -> tuple[int, float]:
        """Return how many ends to take in together, and how long to wait for them once the first is there."""
        if self._scheduler.has_waiting:
            # What waits at the drives lasts for longer.
            return min(_N_AT_ONCE, self._scheduler.n_in_flight), _LINGER_S
        if state.queue or self._whole_in_host:
            # What arrives makes room for these.
            return 1, 0.0
        if all(incoming.is_copying for incoming in self._incoming.values() if incoming.is_wanted):
            # There is time to take these in before a group can be handed out, but for the last of it.
            return max(1, state.n_until_group // 2), _LONGEST_LINGER_S
        return 1, 0.0

    def _drain(self) -> None:
        """Take in everything that has arrived, free what uploads have left, and look for reads that take too long."""
        for room in self._device.freed_rooms():
            self._free(room)
        self._arrived.extend(self._reader.take())
        self._take_arrived()
        now = time.perf_counter()
        if now - self._looked_at > _TICK_S:
            self._looked_at = now
            for read in self._scheduler.overdue(now):
                self._take_slow(read, now)

    # Reading.

    def _read_queued(self, state: LayerFetch) -> None:
        """Begin to read what is queued, as far as there is room: a few at first, then more, so that no drive waits for the last."""
        is_prompt, n_at_once = self.phase is Phase.PROMPT, len(self.drives)
        while True:
            n_left = n_at_once
            while n_left and state.queue and self._give_room(state.queue[0], is_prompt):
                state.queue.popleft()
                n_left -= 1
            self._start(time.perf_counter())
            if n_left or not state.queue:
                return
            n_at_once *= 4

    def _give_room(self, key: ExpertKey, is_prompt: bool) -> bool:
        """Begin to read a record; return False if there is no slot for it now."""
        if key in self._draining:
            if not self._spares:
                return False
            self._expect(key, self._spares.pop(), is_spare=True, is_wanted=True)
            return True
        room = self._host.take(key, is_prompt=is_prompt, is_passing=self._is_passing(key))
        if room is not None:
            self._expect(key, room, is_spare=False, is_wanted=True)
        return room is not None

    def _expect(self, key: ExpertKey, room: int, *, is_spare: bool, is_wanted: bool, without: Collection[int] = ()) -> None:
        """Ask for a record, of any drive but those `without`. Raises DamagedDataError if there is none."""
        self._n_begun += 1
        is_verified = self._verify_every > 0 and self._n_begun % self._verify_every == 0
        expected = self._prepared.hashes.get(*key) if is_verified else None
        incoming = Incoming(key=key, room=room, is_spare=is_spare, is_wanted=is_wanted, expected=expected)
        rival = self._incoming.get(key)
        if rival is None:
            self._incoming[key] = incoming
        else:
            incoming.rival, rival.rival = rival, incoming
        incoming.refused.update(without)
        is_late = self.phase is Phase.DECODE and (self._layer is None or self._layer.n_left <= _N_IN_CHUNKS)
        self._ask(incoming, self._chunks if is_late and len(self._holders[key]) > 1 else self._whole)

    def _ask(self, incoming: Incoming, chunks: tuple[Chunk, ...]) -> None:
        """Have a record read in these chunks. Raises DamagedDataError if it is needed and no drive is left to ask."""
        drives = tuple(drive for drive in self._sources(incoming.key) if drive not in incoming.refused)
        if not drives:
            self._give_up(incoming)
            return
        incoming.chunks = chunks
        incoming.job = Job(incoming, drives[:1] if incoming.is_single else drives, tuple(map(_size, chunks)), is_prefetch=not incoming.is_wanted)
        self._scheduler.add((incoming.job,))

    def _start(self, now: float) -> None:
        """Hand the reader what the drives have room for."""
        requests, counted = [], self._counted_by_drive()
        for read in self._scheduler.starts(now):
            incoming, drive = read.job.tag, read.drive
            assert isinstance(incoming, Incoming)
            chunk = incoming.chunks[read.chunk]
            ticket = Ticket(read, incoming, counted[drive])
            for count in ticket.counts:
                count.begin(now)
            incoming.n_out += 1
            path = self._paths.get((drive, incoming.key)) or self._path(drive, incoming.key)
            extent = Extent(path, chunk.begin, chunk.end - chunk.begin)
            buffer = self.arena.slot(incoming.room)[chunk.begin :]
            requests.append(ReadRequest(ticket, drive, extent, buffer, target=self._target(incoming, chunk)))
        if requests:
            for request, number in zip(requests, self._reader.submit(*requests), strict=True):
                incoming = request.tag.incoming
                incoming.numbers.append(number)
                incoming.is_copying |= request.target is not None
            if self._layer is not None and not self._layer.first_read:
                self._layer.first_read = time.perf_counter()

    def _path(self, drive: int, key: ExpertKey) -> Path:
        path = self._paths[drive, key] = self._prepared.expert_extent(self.drives[drive], *key).path
        return path

    def _counted_by_drive(self) -> list[tuple[DriveCounts, DriveCounts]]:
        """Return where each drive's reads are counted now: by drive and by tier."""
        if self._counted[0] is not self.counts:
            tiers = [self.counts.tiers.setdefault(tier, DriveCounts()) for tier in self._tiers]
            self._counted = self.counts, list(zip((self.counts.drives[n] for n in self.drives), tiers, strict=True))
        return self._counted[1]

    def _take_arrived(self) -> None:
        """Act on what the reader says; if that breaks the layer off, the rest is left for the next."""
        while self._arrived:
            done = self._arrived.popleft()
            tag = done.request.tag
            if isinstance(tag, Ticket):
                self._take_read(done, tag)
            else:
                assert isinstance(tag, Incoming)
                self._take_hash(done, tag)

    def _take_read(self, done: Completion, ticket: Ticket) -> None:
        if done.refused:
            raise self._device.refused(done.refused)
        read, incoming = ticket.read, ticket.incoming
        # A drive may say so of itself, too.
        ended, is_given_up = done.ended, done.is_cancelled and incoming.is_dead
        incoming.n_out -= 1
        for count in ticket.counts:
            count.end(ended)
            count.read_bytes += read.n_bytes if done.error is None else 0
            count.n_failed += done.error is not None and not is_given_up
        if is_given_up:
            self._scheduler.given_up(read, ended)
        elif done.error is not None:
            self._take_failure(done.error, ticket, ended)
        else:
            is_last = self._scheduler.succeeded(read, ended)
            if not incoming.is_dead:
                self._take_chunk(incoming, done, read, is_last)
        self._retire_if_over(incoming)

    def _take_chunk(self, incoming: Incoming, done: Completion, read: Read, is_last: bool) -> None:
        incoming.sources.add(read.drive)
        if not done.is_copied:
            incoming.arrived.append(read.chunk)
        if self._layer is not None and incoming.is_wanted:
            self._layer.last_by_drive[read.drive] = done.ended
        if incoming.expected is None:
            self._upload_arrived(incoming)
            if is_last:
                self._complete(incoming)
        elif is_last:
            incoming.n_out += 1
            self._check(incoming)

    def _check(self, incoming: Incoming) -> None:
        """Have a whole record's hash checked; it comes back among the arrivals."""
        drive = min(incoming.sources)
        extent = self._prepared.expert_extent(self.drives[drive], *incoming.key)
        record = self.arena.slot(incoming.room)[: self._n_bytes]
        self._reader.check(ReadRequest(incoming, drive, extent, record, incoming.expected))

    def _take_hash(self, done: Completion, incoming: Incoming) -> None:
        incoming.n_out -= 1
        self.counts.n_verified += 1
        if not incoming.is_dead:
            if done.error is None:
                self._complete(incoming)
            else:
                self._take_wrong_hash(incoming, done.error)
        self._retire_if_over(incoming)

    def _complete(self, incoming: Incoming) -> None:
        """A record is whole in its room, and what it was is right."""
        if incoming.rival is not None:
            self._kill(incoming.rival)
            incoming.rival = None
        del self._incoming[incoming.key]
        room = Room(incoming.key, incoming.room, incoming.is_spare)
        if not incoming.is_wanted:
            self._free(room)
            return
        self.counts.n_records += 1
        self.counts.records_by_layer[incoming.key.layer] += 1
        if not self._device.is_landing(incoming.key):
            self._whole_in_host.append(room)
        elif incoming.expected is None:
            self._landed(room)
        else:
            # It has its slot already: behind others that wait for one it would stand in their way.
            self._upload_whole(room)
        if not incoming.is_spare:
            self._host.passed_to_device(incoming.key)

    def _want(self, incoming: Incoming) -> None:
        """A prefetch that has not ended is needed."""
        incoming.is_wanted = True
        self._host.find(incoming.key)
        assert incoming.job is not None
        self._scheduler.promote(incoming.job)

    def _settle_prefetches(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """Count the guesses for a layer: those that were right, and the others, which are given up as far as they are not read yet."""
        if not self._prefetched:
            return
        # What has arrived by now is no longer to be given up.
        self._drain()
        needed = set(keys)
        for key in [key for key in self._prefetched if key in needed or key.layer == layer]:
            self._prefetched.discard(key)
            if key in needed:
                self.counts.n_prefetch_used += 1
            else:
                self._give_up_guess(key)

    def _give_up_guess(self, key: ExpertKey) -> None:
        if key in self._incoming:
            self.counts.n_prefetch_cancelled += 1
            self._kill(self._incoming[key])
        else:
            self.counts.n_prefetch_wasted += 1

    # Failures.

    def _take_failure(self, error: Exception, ticket: Ticket, ended: float) -> None:
        if not isinstance(error, OSError | DamagedDataError):
            raise error
        incoming, drive = ticket.incoming, ticket.read.drive
        incoming.refused.add(drive)
        try:
            pause_s = self._scheduler.failed(ticket.read, ended)
        except NoCopyLeft:
            for count in ticket.counts:
                count.n_pauses += 1
            self._remark(incoming.key, drive, f"{error}")
            self._try_again(incoming)
            return
        for count in ticket.counts:
            count.n_pauses += 1
        self._remark(incoming.key, drive, f"{error}; trying another copy, the drive is set aside for {pause_s:.0f} s")
        if ticket.read.job.is_cancelled and not incoming.is_dead:
            self._kill(incoming)

    def _take_wrong_hash(self, incoming: Incoming, error: Exception) -> None:
        if len(incoming.sources) > 1:
            names = ", ".join(self._names[drive] for drive in sorted(incoming.sources))
            key = incoming.key
            self._on_remark(f"layer {key.layer} expert {key.expert} in parts from {names}: {error}; reading it whole from one drive at a time")
            incoming.is_single = True
        else:
            (drive,) = incoming.sources
            # A copy with wrong bytes is not asked again in this run.
            self._spoilt.add((drive, incoming.key))
            self._scheduler.pause(drive, time.perf_counter())
            for count in self._counted_by_drive()[drive]:
                count.n_failed += 1
            self._remark(incoming.key, drive, f"{error}{'; trying another copy' if self._sources(incoming.key) else ''}")
        self._try_again(incoming)

    def _try_again(self, incoming: Incoming) -> None:
        """Read a record anew from the drives that have not failed it. Raises DamagedDataError if there are none and it is needed."""
        assert not incoming.n_out or not incoming.is_single
        incoming.arrived.clear()
        incoming.sources.clear()
        self._ask(incoming, self._whole if incoming.is_single else incoming.chunks)

    def _give_up(self, incoming: Incoming) -> None:
        """No drive can deliver this. Raises DamagedDataError if it is needed and no rival is on its way."""
        has_rival, is_wanted, key = incoming.rival is not None, incoming.is_wanted, incoming.key
        self._kill(incoming)
        if is_wanted and not has_rival:
            drives = ", ".join(map(self._prepared.drive_name, self._prepared.drives_holding(*key)))
            cure = "kprep verify-hashes OUT --repair restores it from a copy on another drive, with --checkpoint DIR from the checkpoint"
            raise DamagedDataError(f"layer {key.layer} expert {key.expert}: no readable copy is left (tried {drives}); {cure}")

    def _take_slow(self, read: Read, now: float) -> None:
        """Ask another copy for a record that a drive does not deliver; whichever is whole first is used."""
        incoming, drive = read.job.tag, read.drive
        assert isinstance(incoming, Incoming)
        if incoming.is_dead:
            return
        without = incoming.refused | {drive}
        has_other = any(other not in without for other in self._sources(incoming.key))
        if drive not in incoming.slow:
            incoming.slow.add(drive)
            for count in self._counted_by_drive()[drive]:
                count.n_slow += 1
            pause_s = self._scheduler.pause(drive, now)
            what = f"no answer for {now - read.began:.1f} s, {read.expected_s * 1e3:.0f} ms were expected"
            self._remark(incoming.key, drive, f"{what}; {f'the drive is set aside for {pause_s:.0f} s' if has_other else 'there is no other copy'}")
        if not has_other or not incoming.is_wanted or incoming.rival is not None:
            return
        if self._spares:
            self._expect(incoming.key, self._spares.pop(), is_spare=True, is_wanted=True, without=without)
        else:
            # There is no room to read it into: looked at again soon.
            read.is_reported = False

    def _kill(self, incoming: Incoming) -> None:
        """Nobody waits for this record any more: its room is free as soon as nothing writes into it."""
        if incoming.is_dead:
            return
        incoming.is_dead = True
        if incoming.job is not None:
            self._scheduler.cancel(incoming.job)
        self._stop_reading(incoming)
        rival, key = incoming.rival, incoming.key
        if rival is not None:
            rival.rival = incoming.rival = None
        if self._incoming.get(key) is incoming:
            if rival is not None and not rival.is_dead:
                self._incoming[key] = rival
            else:
                del self._incoming[key]
        if not incoming.is_spare:
            self._draining[key] = incoming
        self._retire_if_over(incoming)

    def _retire_if_over(self, incoming: Incoming) -> None:
        if not incoming.is_dead or incoming.n_out or incoming.is_retired:
            return
        incoming.is_retired = True
        if incoming.is_spare:
            self._spares.append(incoming.room)
        elif self._draining.pop(incoming.key, None) is not None:
            self._host.drop(incoming.key)

    def _remark(self, key: ExpertKey, drive: int, what: str) -> None:
        self._on_remark(f"layer {key.layer} expert {key.expert} on {self._names[drive]}: {what}")

    def _alarm(self, state: LayerFetch) -> str:
        """Say what a layer has been waiting for."""
        asked: dict[str, set[int]] = {}
        for read in self._scheduler.reads:
            incoming = read.job.tag
            assert isinstance(incoming, Incoming)
            if incoming.key in state.wanted and not incoming.is_dead:
                asked.setdefault(self._names[read.drive], set()).add(incoming.key.expert)
        others = sorted({key.expert for key in state.wanted}.difference(*asked.values()) - {key.expert for key, _ in (*state.hits, *state.ready)})
        parts = [f"{name} for experts {', '.join(map(str, sorted(experts)))}" for name, experts in sorted(asked.items())]
        parts += [f"not asked yet: experts {', '.join(map(str, others[:20]))}"] if others else []
        return f"layer {state.number}: waiting for {state.waited_s:.0f} s: {'; '.join(parts)}"

    def _sources(self, key: ExpertKey) -> tuple[int, ...]:
        drives = self._holders[key]
        return tuple(drive for drive in drives if (drive, key) not in self._spoilt) if self._spoilt else drives

    # Uploading.

    def _target(self, incoming: Incoming, chunk: Chunk) -> Target | None:
        """Return where the threads that read copy a chunk on to, None if it is not to go to the device unseen or finds no slot there now."""
        if not incoming.is_wanted or incoming.expected is not None or incoming.is_spare:
            return None
        # Slots are first for what waits for them already; of those that are not pinned, a prompt may not take each.
        n_waiting = len(self._whole_in_host)
        if n_waiting and (self.phase is Phase.PROMPT or n_waiting >= self._device.n_slots - self._device.n_pinned):
            return None
        slot = self._land(incoming.key)
        return None if slot is None else self._device.target(slot, chunk.begin)

    def _stop_reading(self, incoming: Incoming) -> None:
        """Have nothing more of a record copied on, and wait for what is on its way: both its room and the slot may be used anew."""
        for number in incoming.numbers:
            self._reader.cancel(number)
        if incoming.is_copying or incoming.is_uploading:
            self._device.settle(incoming.key)
        incoming.numbers.clear()

    def _is_passing(self, key: ExpertKey) -> bool:
        return self._layer is not None and key in self._layer.passing

    def _land(self, key: ExpertKey) -> int | None:
        """Return the slot on the device that a record goes into, None if all are in use."""
        return self._device.land(key, is_prompt=self.phase is Phase.PROMPT, is_passing=self._is_passing(key))

    def _upload_arrived(self, incoming: Incoming) -> None:
        """Upload the chunks that are there, if the record is needed and the device has a slot for it."""
        if not incoming.arrived or not incoming.is_wanted or (slot := self._land(incoming.key)) is None:
            return
        source = self.arena.tensor(incoming.room)
        for chunk in incoming.arrived:
            self._device.copy(slot, source, *incoming.chunks[chunk])
        incoming.arrived.clear()
        incoming.is_uploading = True

    def _upload_whole(self, room: Room) -> bool:
        slot = self._land(room.key)
        if slot is None:
            return False
        self._device.copy(slot, self.arena.tensor(room.slot), 0, self._n_bytes)
        self._landed(room)
        return True

    def _landed(self, room: Room) -> None:
        """All of a record is on its way to the device: it may be handed out."""
        assert self._layer is not None
        self._layer.ready.append((room.key, self._device.landed(room.key, room)))
        self.counts.uploaded_bytes += self._n_bytes

    def _free(self, room: Room) -> None:
        """Nothing needs a room any more; what lies in the pool stays there to be found."""
        if room.is_spare:
            self._spares.append(room.slot)
        else:
            self._host.unpin(room.key)

    def _count_last(self, state: LayerFetch) -> None:
        by_time = sorted(state.last_by_drive.items(), key=lambda item: item[1])
        if not by_time:
            return
        drive, ended = by_time[-1]
        self.counts.to_first_read_s += max(0.0, state.first_read - state.began)
        self.counts.after_last_read_s += max(0.0, time.perf_counter() - ended)
        self.counts.n_reading_layers += 1
        by_s = ended - by_time[-2][1] if len(by_time) > 1 else 0.0
        for count in self._counted_by_drive()[drive]:
            count.n_last += 1
            count.last_by_s += by_s

    def _end_layer(self, state: LayerFetch) -> None:
        """Leave nothing pinned, also if the layer was broken off."""
        self._layer = None
        if not state.wanted:
            return
        for key in state.wanted:
            for incoming in (self._incoming.get(key), (self._incoming[key].rival if key in self._incoming else None)):
                if incoming is not None:
                    self._kill(incoming)
            self._device.give_up(key)
        for room in self._whole_in_host:
            self._free(room)
        self._whole_in_host.clear()
        # The layers that these were guessed for do not come next.
        for key in self._prefetched:
            self._give_up_guess(key)
        self._prefetched.clear()


def _size(chunk: Chunk) -> int:
    return chunk.end - chunk.begin


def _chunks(record: RecordLayout, step: int) -> tuple[Chunk, ...]:
    w1_end, w2_end, w3_end = (record.segment(name).end for name in ("w1.scale", "w2.scale", "w3.scale"))
    return chunks_in_order_of_need(w1_end=w1_end, w2_end=w2_end, w3_end=w3_end, step=step)


def _keep_share(prepared: Prepared, n_device_slots: int) -> float:
    """Return which share of what is read keeps its copy in the pool: half, but all where the device cannot even hold what one token uses."""
    geometry = prepared.geometry
    return 0.5 if n_device_slots > len(geometry.moe_layers) * geometry.n_experts_per_token else 1.0


def _interleaved(keys: Sequence[tuple[ExpertKey, tuple[int, ...]]]) -> list[ExpertKey]:
    """Order keys so that any first part of them asks the drives in the proportions of the whole: host slots may be few, and no drive should idle."""
    n_of, seen = Counter(drives for _, drives in keys), Counter[tuple[int, ...]]()
    places = []
    for key, drives in keys:
        seen[drives] += 1
        places.append(((seen[drives] - 0.5) / n_of[drives], len(drives), key))
    return [key for _, _, key in sorted(places)]
