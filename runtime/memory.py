"""What a budget that was asked for becomes, and how much memory a device has for it."""

from dataclasses import dataclass

import torch

# Shown from here too: what the host has and what a device has are asked for together.
from layout.memory import available_host_bytes as available_host_bytes
from layout.sizes import counted, format_size, parse_size
from manifests.errors import DeviceError, UsageError

AUTO = "auto"
# Left free on a GPU for activations and expanded matrices, and in host memory for everything else; of little memory, a quarter.
GPU_RESERVE_BYTES = 4_000_000_000
HOST_RESERVE_BYTES = 4_000_000_000


@dataclass(frozen=True, slots=True)
class Budget:
    """Slots for records: what was asked for, and how many it became; `reserve_bytes` of the memory were left alone."""

    flag: str
    asked: str
    n_slots: int
    record_bytes: int
    n_all: int
    reserve_bytes: int = 0

    def __str__(self) -> str:
        whole = " (all experts)" if self.n_slots == self.n_all else ""
        reserve = f", at least {format_size(self.reserve_bytes)} of memory stay free" if self.reserve_bytes else ""
        return f"{self.flag} {self.asked}: {counted(self.n_slots, 'slot')}, {format_size(self.n_slots * self.record_bytes)}{whole}{reserve}"


def budget_of(asked: str, *, flag: str, record_bytes: int, n_all: int, available_bytes: int, auto_bytes: int, reserve_bytes: int = 0) -> Budget:
    """Turn a budget's text into slots, never more than there are experts.

    available_bytes  the memory that there is; reserve_bytes of it are not given away
    auto_bytes       what `auto` takes

    Raises UsageError if it is no size or holds no record, DeviceError if there is not that much memory.
    """
    free_bytes = max(0, available_bytes - reserve_bytes)
    n_bytes = min(auto_bytes, free_bytes) if asked == AUTO else parse_size(asked, flag=flag, record_bytes=record_bytes)
    n_slots = min(n_bytes // record_bytes, n_all)
    if asked != AUTO and n_slots < 1:
        raise UsageError(f"{flag} {asked}: holds no expert; one needs {format_size(record_bytes)} (1slots)")
    if max(1, n_slots) * record_bytes > free_bytes:
        kept = f", and {format_size(reserve_bytes)} of {format_size(available_bytes)} stay free" if reserve_bytes else ""
        wanted = format_size(max(1, n_slots) * record_bytes)
        raise DeviceError(f"{flag} {asked}: {wanted} asked for, but {format_size(free_bytes)} are to be had{kept}")
    return Budget(flag, asked, max(1, n_slots), record_bytes, n_all, reserve_bytes)


def host_reserve_bytes(available_bytes: int) -> int:
    """Return how much of the host's memory is left alone."""
    return min(HOST_RESERVE_BYTES, available_bytes // 4)


def available_device_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return available_host_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, free - GPU_RESERVE_BYTES)
