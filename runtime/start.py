"""What is looked at before a run begins, so that what cannot be had is refused before anything large is read: memory, drives, kernels."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from layout.direct import ReadMode, probe_directory
from layout.memory import available_host_bytes
from layout.prepared import Copies, Prepared
from layout.record import RecordLayout, record_layout
from layout.sizes import format_size
from manifests.errors import DeviceError, UsageError
from manifests.geometry import Geometry
from runtime.doctor import capability_finding, kernel_set_finding, kernel_test_finding, memory_finding
from runtime.gpu_facts import GpuFacts, KernelFacts, read_gpu_facts, read_kernel_facts, run_kernel_tests
from runtime.kernels import expert
from runtime.kernels.cuda_library import tell_fall_back
from runtime.kernels.products_check import KernelTest
from runtime.memory import GPU_RESERVE_BYTES, Budget, available_device_bytes, budget_of, host_reserve_bytes

# Up to this width products are too small for several threads of a CPU.
_SMALL_HIDDEN_SIZE = 1024


class Room(NamedTuple):
    """Memory that may be given away: `available_bytes`, of which `reserve_bytes` stay free."""

    available_bytes: int
    reserve_bytes: int

    def less(self, n_bytes: int) -> "Room":
        return Room(max(0, self.available_bytes - n_bytes), self.reserve_bytes)


class Budgets(NamedTuple):
    """What --vram-cache and --host-pool became."""

    vram: Budget
    host: Budget


def host_room() -> Room:
    available = available_host_bytes()
    return Room(available, host_reserve_bytes(available))


def device_room(device: torch.device) -> Room:
    """Return what the device has now; for a CPU that is the host's memory."""
    return Room(available_device_bytes(device) + GPU_RESERVE_BYTES, GPU_RESERVE_BYTES) if device.type == "cuda" else host_room()


def planned_budgets(vram_cache: str, host_pool: str, geometry: Geometry, device: torch.device, *, spine_bytes: int) -> Budgets:
    """Turn both budgets into slots before the spine, which takes `spine_bytes` of the device, is there.

    Raises UsageError for what is no budget, DeviceError for more than there is; of a GPU it says who has the rest.
    """
    try:
        room = device_room(device)
        if spine_bytes > room.available_bytes - room.reserve_bytes:
            raise DeviceError(no_room_for_spine(room, spine_bytes, device))
        return budgets_of(vram_cache, host_pool, geometry, room.less(spine_bytes), host_room(), is_shared=device.type == "cpu")
    except DeviceError as error:
        if device.type != "cuda":
            raise
        raise DeviceError(f"{error}\n  {who_has_the_gpu(read_gpu_facts(device))}") from None


def spare_threads(geometry: Geometry, device: torch.device) -> None:
    """Have a small model computed by one thread, unless OMP_NUM_THREADS is set: several would wait for each other for longer than they compute."""
    if device.type == "cpu" and geometry.hidden_size <= _SMALL_HIDDEN_SIZE and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def who_has_the_gpu(gpu: GpuFacts) -> str:
    """Say how much of a GPU's memory is left and who has the rest, with the cure if it is another program."""
    finding = memory_finding(gpu)
    return f"{finding.where}: {finding.text}" + (f"; {finding.cure}" if finding.cure else "")


def no_room_for_spine(room: Room, spine_bytes: int, device: torch.device) -> str:
    needed, free, kept = (format_size(n) for n in (spine_bytes, room.available_bytes, room.reserve_bytes))
    cure = (
        "use a card with more memory, or end the other programs on it"
        if device.type == "cuda"
        else "use a machine with more memory, or a smaller geometry"
    )
    return f"the spine takes {needed} on {device}, but {free} are free, of which {kept} stay free; {cure}"


def present_budgets(vram_cache: str, host_pool: str, geometry: Geometry, device: torch.device, *, reserved_bytes: int = 0) -> Budgets:
    """Turn both budgets into slots of the memory that is there now, less what others shall have of the device. Raises as `planned_budgets`."""
    room = device_room(device).less(reserved_bytes)
    return budgets_of(vram_cache, host_pool, geometry, room, host_room(), is_shared=device.type == "cpu")


def budgets_of(vram_cache: str, host_pool: str, geometry: Geometry, on_device: Room, on_host: Room, *, is_shared: bool) -> Budgets:
    """Turn both budgets into slots.

    is_shared  whether device and host are one memory, so that what one budget takes the other cannot have

    Raises UsageError for what is no budget, DeviceError for more than there is.
    """
    facts: dict[str, Any] = {"record_bytes": record_layout(geometry).n_bytes, "n_all": geometry.n_routed_experts}
    vram = budget_of(vram_cache, flag="--vram-cache", **facts, **_given(on_device))
    if is_shared:
        on_host = on_device.less(vram.n_slots * vram.record_bytes)
    return Budgets(vram, budget_of(host_pool, flag="--host-pool", **facts, **_given(on_host)))


def _given(room: Room) -> dict[str, int]:
    return {**room._asdict(), "auto_bytes": room.available_bytes // 4}


def check_tier_caps(prepared: Prepared, caps: Mapping[str, int]) -> None:
    """Raise UsageError if a tier is to be held back that the model has no drive in."""
    tiers = sorted({drive.tier for drive in prepared.manifest.drives})
    if idle := sorted(set(caps) - set(tiers)):
        raise UsageError(f"--tier-cap {idle[0]}={caps[idle[0]]}: no drive of {prepared.path} is in tier {idle[0]}; it has {', '.join(tiers)}")


def check_direct(prepared: Prepared, copies: Copies) -> None:
    """Raise UsageError if the expert files of any drive cannot be read past the page cache."""
    used = [n for n, holds in enumerate(copies.holds) if holds.any()]
    refuse_buffered({prepared.drive_name(n): probe_directory(prepared.drive_directories[n]) for n in used})


def refuse_buffered(modes: Mapping[str, ReadMode]) -> None:
    """Raise UsageError if any of the drives, by name, is not read directly."""
    if buffered := [f"{name} would be read {mode}" for name, mode in modes.items() if not mode.is_direct]:
        cure = "leave the flag out, or move the files to a file system with direct reads (ext4, xfs)"
        raise UsageError(f"--require-direct: {'; '.join(buffered)}; {cure}")


def checked_kernels(device: torch.device, on_remark: Callable[[str], None], record: RecordLayout | None = None) -> str:
    """Return which kernels will run and why, once each has agreed with its plain form on this very GPU.

    record  of the experts to be computed: if the fast kernels do not take them, that is remarked

    A product in CUDA C++ that is wrong here is left to Triton, with a remark. Raises DeviceError if any other kernel is wrong, or if they cannot
    run on this GPU at all.
    """
    if device.type != "cuda":
        return kernels_text(read_kernel_facts(device), [])
    # With its number, as tensors name it: what is found out about a device is remembered under its name.
    numbered = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    check_capability(torch.cuda.get_device_capability(numbered), torch.cuda.get_arch_list())
    with _warnings_told(on_remark):
        # The tests may change which kernels run.
        tests = run_kernel_tests(numbered)
        facts = read_kernel_facts(numbered)
        if record is not None and facts.why_not_compiled is None and (reason := expert.why_not_compiled(record)) is not None:
            tell_fall_back(expert.WHAT, reason)
    for test in tests:
        if not test.is_right and test.is_usable:
            on_remark(f"kernel self-test: {test}")
    return kernels_text(facts, tests)


def check_capability(capability: tuple[int, int], built_for: Sequence[str]) -> None:
    """Raise DeviceError if the kernels cannot run on a GPU of this compute capability, or a torch built for such architectures not on it."""
    finding = capability_finding(capability, built_for)
    if finding.level == "bad":
        raise DeviceError(f"{finding.what} {finding.text}; {finding.cure}")


def kernels_text(facts: KernelFacts, tests: list[KernelTest]) -> str:
    """Return which kernels run, why, and how their self-test went. Raises DeviceError with the names of those that were wrong."""
    finding = kernel_test_finding(tests, "GPU")
    if finding.level == "bad":
        raise DeviceError(f"kernel self-test: {finding.text}; {finding.cure}")
    return kernel_set_finding(facts).text + (f"; self-test: {finding.text}" if tests else "")


@contextmanager
def _warnings_told(on_remark: Callable[[str], None]) -> Iterator[None]:
    """Pass warnings of the kernels' compilation on as remarks, as they come."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = lambda message, *_, **__: on_remark(str(message))
        yield
