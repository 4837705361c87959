"""The host memory that drives write into and the GPU uploads from: one mapping in huge pages, populated, and registered with CUDA in pieces.

Registered means that the GPU may fetch from it by itself. What cannot be registered is left out: the pool is smaller then, and that is said.
"""

import contextlib
import ctypes
import mmap
import os
import re
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from layout.direct import PAGE, round_up
from layout.memory import cgroup_limits
from layout.parallel import start_threads
from layout.sizes import format_size
from manifests.errors import DeviceError

_HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23
_N_POPULATING = 8
# One registration of half a terabyte fails; many small ones are slow.
_PIECE_BYTES = 2 << 30

_libc = ctypes.CDLL(None, use_errno=True)


class Registrar(Protocol):
    """Makes memory known to a device."""

    def register(self, address: int, n_bytes: int) -> str | None:
        """Return None when it is done, else why not."""
        ...

    def unregister(self, address: int) -> None: ...


class CudaRegistrar:
    """cudaHostRegister of torch's own runtime."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cudart = device, torch.cuda.cudart()

    def register(self, address: int, n_bytes: int) -> str | None:
        with torch.cuda.device(self._device):
            status = self._cudart.cudaHostRegister(address, n_bytes, 0)
            if int(status) == 0:
                return None
            # The error stays with the runtime and would be raised by the next kernel launch, which it has nothing to do with.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device).add_(1)
                torch.cuda.synchronize(self._device)
        return str(self._cudart.cudaGetErrorString(status))

    def unregister(self, address: int) -> None:
        self._cudart.cudaHostUnregister(address)


class Arena:
    """Slots of host memory of `slot_bytes` each, a multiple of a page, one behind the other.

    n_slots      may be fewer than were asked for
    is_pinned    whether a device may fetch from it
    populate_s, register_s  what the two took
    """

    def __init__(
        self, n_slots: int, slot_bytes: int, *, registrar: Registrar | None, on_remark: Callable[[str], None], piece_bytes: int = _PIECE_BYTES
    ) -> None:
        assert n_slots > 0 and slot_bytes % PAGE == 0
        self.slot_bytes, self.is_pinned = slot_bytes, registrar is not None
        self._registrar = registrar
        self.populate_s = self.register_s = 0.0
        self._registered: list[int] = []
        n_mapped = self._map(n_slots)
        self.n_slots = self._fill(n_mapped, max(1, piece_bytes // slot_bytes))
        if self.n_slots < n_slots:
            found = f"{self.n_slots} of {n_slots} slots, {format_size(self.n_slots * slot_bytes)}, could be had"
            on_remark(f"host pool: {found}: {self._why}; {_cure(slot_bytes)}")
        whole = memoryview(self._memory)[self._skip : self._skip + self.n_slots * slot_bytes]
        self._slots = [whole[n * slot_bytes : (n + 1) * slot_bytes] for n in range(self.n_slots)]
        self._tensors = list(torch.frombuffer(whole, dtype=torch.uint8).view(self.n_slots, slot_bytes).unbind())

    def slot(self, n: int) -> memoryview:
        return self._slots[n]

    def tensor(self, n: int) -> Tensor:
        """Return a slot as uint8 [slot_bytes]."""
        return self._tensors[n]

    def huge_page_share(self) -> float:
        """Return which part of the arena lies in huge pages, as the kernel says now."""
        n_bytes = self.n_slots * self.slot_bytes
        return min(1.0, _huge_bytes(self._address, self._address + n_bytes) / n_bytes)

    def close(self) -> None:
        """Take the memory back from the device; nothing may be under way any more."""
        while self._registered and self._registrar is not None:
            self._registrar.unregister(self._registered.pop())

    def _map(self, n_slots: int) -> int:
        """Map memory for as many slots as the kernel gives address space for."""
        self._why = ""
        while True:
            n_bytes = n_slots * self.slot_bytes
            try:
                self._memory = mmap.mmap(-1, n_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                break
            except OSError as error:
                self._why = f"mapping {format_size(n_bytes)}: {error.strerror}"
                if n_slots == 1:
                    raise DeviceError(f"host pool: {self._why}") from None
                n_slots //= 2
        # Without huge pages it works, slower; huge_page_share() tells.
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._address = round_up(start, _HUGE_PAGE)
        self._skip = self._address - start
        return n_slots

    def _fill(self, n_slots: int, piece_slots: int) -> int:
        """Populate and register piece by piece; return how many slots came out of it."""
        n_done = 0
        while n_done < n_slots:
            n = min(piece_slots, n_slots - n_done)
            address, n_bytes = self._address + n_done * self.slot_bytes, n * self.slot_bytes
            start = time.perf_counter()
            _populate(address, n_bytes)
            self.populate_s += time.perf_counter() - start
            why = self._register(address, n_bytes)
            if why is None:
                n_done += n
            elif n > 1:
                piece_slots = n // 2
                self._why = why
            else:
                self._why = why
                break
        if n_done == n_slots:
            return n_slots
        if n_done == 0:
            # Uploads from memory that is not registered work, and the copying thread waits for them.
            self.is_pinned, n_done = False, min(n_slots, 32)
            self._why = f"none can be pinned ({self._why}), so that uploads are slow"
        self._give_back(n_done, n_slots)
        return n_done

    def _register(self, address: int, n_bytes: int) -> str | None:
        if self._registrar is None:
            return None
        start = time.perf_counter()
        why = self._registrar.register(address, n_bytes)
        self.register_s += time.perf_counter() - start
        if why is None:
            self._registered.append(address)
        return why

    def _give_back(self, n_kept: int, n_slots: int) -> None:
        begin = round_up(self._skip + n_kept * self.slot_bytes, PAGE)
        end = self._skip + n_slots * self.slot_bytes
        if begin < end:
            self._memory.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _populate(address: int, n_bytes: int) -> None:
    """Make the pages be there, in several threads: memory that was never touched is faulted in by the first read otherwise."""
    n_threads = max(1, min(_N_POPULATING, len(os.sched_getaffinity(0)), n_bytes // _HUGE_PAGE))
    step = round_up(-(-n_bytes // n_threads), PAGE)
    parts = [(address + at, min(step, n_bytes - at)) for at in range(0, n_bytes, step)]
    threads = [threading.Thread(target=_populate_part, args=part, daemon=True) for part in parts]
    start_threads(threads)
    for thread in threads:
        thread.join()


def _populate_part(address: int, n_bytes: int) -> None:
    if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), _MADV_POPULATE_WRITE) != 0:
        # Before Linux 5.14. The memory is new: writing zeros changes nothing.
        ctypes.memset(address, 0, n_bytes)


def _huge_bytes(begin: int, end: int) -> int:
    """Return how many bytes of an address range lie in huge pages."""
    n_bytes, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(area[1], 16) < end and int(area[2], 16) > begin
        elif is_inside and line.startswith("AnonHugePages:"):
            n_bytes += int(line.split()[1]) * 1024
    return n_bytes


def _cure(slot_bytes: int) -> str:
    """Return the limit that most likely stood in the way, and what to do."""
    most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if most != resource.RLIM_INFINITY:
        raised = "ulimit -l unlimited, or LimitMEMLOCK=infinity"
        return f"the limit of locked memory is {format_size(most)}: raise it ({raised}), or ask for a smaller --host-pool"
    tight = [limit for limit in cgroup_limits() if limit.room_bytes < slot_bytes]
    if tight:
        return f"{tight[0].folder} allows {format_size(tight[0].limit_bytes)}: raise its memory.max, or ask for a smaller --host-pool"
    return "ask for a smaller --host-pool"
