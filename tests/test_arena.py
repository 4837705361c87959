"""The host arena: aligned slots that are really there, registered piece by piece, smaller and said where that fails; and the device's slots."""

import ctypes
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from layout.direct import PAGE
from manifests.errors import DeviceError, UsageError
from runtime.memory import budget_of, host_reserve_bytes
from runtime.storage.arena import Arena
from runtime.storage.device_slots import SLOT_STEP, Upload, open_device_slots

HUGE = 2 << 20


class Limited:
    """A device that may be told of so much memory and no more."""

    def __init__(self, n_bytes: int) -> None:
        self.left, self.known = n_bytes, dict[int, int]()

    def register(self, address: int, n_bytes: int) -> str | None:
        if n_bytes > self.left:
            return "out of memory"
        self.left -= n_bytes
        self.known[address] = n_bytes
        return None

    def unregister(self, address: int) -> None:
        self.left += self.known.pop(address)


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def arena_of(n_slots: int, slot_bytes: int, registrar: Limited | None = None, piece_bytes: int = 8 << 20) -> tuple[Arena, list[str]]:
    remarks: list[str] = []
    return Arena(n_slots, slot_bytes, registrar=registrar, on_remark=remarks.append, piece_bytes=piece_bytes), remarks


@pytest.mark.parametrize(("n_slots", "slot_bytes"), [(1, PAGE), (7, 3 * PAGE), (9, 1 << 20), (3, HUGE + PAGE)])
def test_slots_are_aligned_apart_and_writable(n_slots: int, slot_bytes: int) -> None:
    arena, remarks = arena_of(n_slots, slot_bytes)
    assert arena.n_slots == n_slots and not remarks and not arena.is_pinned
    for n in range(n_slots):
        assert address_of(arena.slot(n)) % PAGE == 0 and len(arena.slot(n)) == slot_bytes
        arena.slot(n)[:] = bytes([n + 1]) * slot_bytes
    for n in range(n_slots):
        assert arena.tensor(n).data_ptr() == address_of(arena.slot(n))
        assert arena.tensor(n).unique().tolist() == [n + 1]
    arena.close()


def test_the_memory_is_there_and_mostly_in_huge_pages() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    before = resident_bytes()
    arena, _ = arena_of(16, 4 << 20)
    assert resident_bytes() - before > 0.9 * (64 << 20)
    share = arena.huge_page_share()
    assert 0 <= share <= 1
    if "[never]" not in setting:
        assert share > 0.5
    assert arena.populate_s > 0 and arena.register_s == 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_everything_is_registered_in_pieces_of_whole_slots_and_taken_back() -> None:
    device = Limited(1 << 30)
    arena, remarks = arena_of(10, 3 << 20, device)
    assert arena.is_pinned and not remarks
    # 8 MiB hold two slots.
    assert [n // (3 << 20) for n in device.known.values()] == [2] * 5
    assert sorted(device.known) == [address_of(arena.slot(n)) for n in range(0, 10, 2)]
    arena.close()
    assert not device.known


@pytest.mark.parametrize(("room", "n_expected"), [(7, 7), (4, 4), (1, 1), (12, 12)])
def test_what_cannot_be_registered_is_left_out_and_said(room: int, n_expected: int) -> None:
    device = Limited(room << 20)
    arena, remarks = arena_of(16, 1 << 20, device)
    assert arena.n_slots == n_expected and arena.is_pinned
    assert sum(device.known.values()) == n_expected << 20
    (remark,) = remarks
    assert f"{n_expected} of 16 slots" in remark and "out of memory" in remark and "--host-pool" in remark
    arena.slot(n_expected - 1)[:] = bytes(1 << 20)


def test_where_nothing_can_be_registered_a_small_pool_remains_and_is_said_to_be_slow() -> None:
    arena, remarks = arena_of(100, PAGE, Limited(0))
    assert arena.n_slots == 32 and not arena.is_pinned
    assert "uploads are slow" in remarks[0] and "32 of 100 slots" in remarks[0]


def test_too_little_address_space_makes_the_pool_smaller_and_names_what_failed() -> None:
    """In a process of its own, since the limit is the whole process's."""
    script = """
import pathlib, resource
from runtime.storage.arena import Arena
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (100 << 20), used + (100 << 20)))
arena = Arena(256, 1 << 20, registrar=None, on_remark=print)
print(arena.n_slots)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    remark, n_slots = done.stdout.splitlines()
    assert n_slots == "64" and "64 of 256 slots" in remark and "Cannot allocate memory" in remark


# Slots on a device: on the CPU everywhere, on CUDA where there is one.


def test_device_slots_are_apart_and_aligned(device: str) -> None:
    slots = open_device_slots(5, 9792, torch.device(device))
    addresses = [slots.address(n) for n in range(5)]
    assert all(address == slots.record(n).data_ptr() and len(slots.record(n)) == 9792 for n, address in enumerate(addresses))
    steps = {b - a for a, b in pairwise(addresses)}
    assert len(steps) == 1 and (step := steps.pop()) >= 9792 and step % SLOT_STEP == 0


def test_uploads_arrive_in_pieces_and_wait_for_the_work_on_what_was_there(device: str) -> None:
    """One slot is used again and again; each time what was computed from it is of the record that was in it then."""
    target, n_bytes = torch.device(device), 1 << 20
    slots = open_device_slots(2, n_bytes, target)
    source = torch.empty((8, n_bytes), dtype=torch.uint8, pin_memory=target.type == "cuda")
    results, uploads = list[torch.Tensor](), dict[int, Upload]()
    for n in range(64):
        slot, row = n % 2, n % 8
        # A row of the source is filled anew only when its upload has ended.
        if row in uploads:
            uploads[row].wait()
        source[row] = n
        slots.begin(slot)
        for begin, end in ((0, 4096), (500_000, n_bytes), (4096, 500_000)):
            slots.copy(slot, source[row], begin, end)
        uploads[row] = slots.finish(slot)
        slots.make_ready([slot])
        record = slots.record(slot)
        results.append(torch.stack([record.min(), record.max()]))
        slots.used([slot])
    assert torch.stack(results).cpu().tolist() == [[n, n] for n in range(64)]


def test_more_device_memory_than_there_is_is_told_in_one_sentence(device: str) -> None:
    with pytest.raises(DeviceError, match="--vram-cache: .* cannot be had on"):
        open_device_slots(1 << 26, 1 << 30, torch.device(device))


# Budgets.


def test_a_budget_leaves_the_reserve_alone_and_says_so() -> None:
    facts = {"flag": "--host-pool", "record_bytes": 10**7, "n_all": 10**6, "available_bytes": 10**10, "reserve_bytes": 4 * 10**9}
    budget = budget_of("auto", auto_bytes=10**10, **facts)
    assert budget.n_slots == 600 and "at least 4GB of memory stay free" in str(budget)
    assert budget_of("6GB", auto_bytes=0, **facts).n_slots == 600
    with pytest.raises(DeviceError, match="are to be had, and 4GB of 10GB stay free"):
        budget_of("6.1GB", auto_bytes=0, **facts)


@pytest.mark.parametrize("asked", ["0", "0GB", "-1GB", "much", "", "nan", "1e99TB", "inf", "0slots"])
def test_no_sizes_are_usage_errors_or_too_much(asked: str) -> None:
    with pytest.raises((UsageError, DeviceError), match="--vram-cache"):
        budget_of(asked, flag="--vram-cache", record_bytes=10**7, n_all=10**6, available_bytes=10**10, auto_bytes=10**9)


def test_auto_without_room_for_one_expert_is_told() -> None:
    with pytest.raises(DeviceError, match="--vram-cache auto"):
        budget_of("auto", flag="--vram-cache", record_bytes=10**7, n_all=10**6, available_bytes=10**6, auto_bytes=10**6)


def test_the_reserve_of_little_memory_is_a_quarter() -> None:
    assert host_reserve_bytes(10**9) == 250_000_000
    assert host_reserve_bytes(10**12) == 4_000_000_000
