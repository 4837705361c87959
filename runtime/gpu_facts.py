"""What the machine says of its GPU, its driver, and the way from host memory to it: readings and transfers, no judgement.

Every number is read or timed here; what it means is said in doctor.py.
"""

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runtime.bench.document import driver_version
from runtime.kernels import cuda_library, launch, products_check
from runtime.kernels.products_check import KernelTest
from runtime.storage.arena import Arena, CudaRegistrar

N_STREAMS = (1, 2, 4, 8)
BLOCK_BYTES = 256 << 20
MOST_PIECES = 2048
_MIB = 1 << 20


class GpuProcess(NamedTuple):
    """Another program on the GPU; its memory is None where the driver does not tell."""

    pid: int
    name: str
    n_bytes: int | None


class Link(NamedTuple):
    """A PCIe link in the kernel's words; an idle GPU may lower the speed, never the width."""

    speed: str
    width: str
    max_speed: str
    max_width: str


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """The software between this program and a GPU; None is what is not there.

    torch_cuda    the CUDA that torch was built with
    driver        version of the driver that the kernel has loaded
    driver_cuda   the newest CUDA that the driver's library serves, as (13, 0)
    visible       CUDA_VISIBLE_DEVICES, if it is set
    fault         why torch finds no device; empty if it finds one
    """

    torch_version: str
    torch_cuda: str | None
    driver: str | None
    driver_cuda: tuple[int, int] | None
    visible: str | None
    fault: str


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU.

    processes    of other programs; None if they could not be asked for
    built_for    what torch carries kernels for, such as sm_90 or compute_120
    numa_node    None where the kernel does not tell
    """

    name: str
    capability: tuple[int, int]
    built_for: tuple[str, ...]
    total_bytes: int
    free_bytes: int
    processes: tuple[GpuProcess, ...] | None
    pci_address: str
    link: Link | None
    numa_node: int | None


class Registration(NamedTuple):
    """What became of `asked_bytes` of host memory that was to be pinned; `fault` says why it is less, with a cure, or is empty."""

    asked_bytes: int
    pinned_bytes: int
    huge_page_share: float
    populate_s: float
    register_s: float
    fault: str


class UploadRate(NamedTuple):
    """What was reached with pieces of one size over a number of streams."""

    piece_bytes: int
    n_streams: int
    bytes_per_s: float


class KernelFacts(NamedTuple):
    """What there is to compute with on a device.

    why_not_compiled  why the CUDA C++ kernels do not run; None if they do
    compiled_kernels  where their compiled form lies; None if they do not run
    """

    device: str
    has_triton: bool
    why_not_compiled: str | None
    compiled_kernels: Path | None


def read_cuda_facts() -> CudaFacts:
    return CudaFacts(
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda,
        driver=driver_version(),
        driver_cuda=_driver_cuda(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        fault=_fault_of_cuda(),
    )


def _driver_cuda() -> tuple[int, int] | None:
    """Source: cuDriverGetVersion of the driver's library; 13000 is 13.0."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int(0)
    return divmod(number.value // 10, 100) if library.cuDriverGetVersion(ctypes.byref(number)) == 0 else None


def _fault_of_cuda() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "" if torch.cuda.device_count() else "no device is visible"


def read_gpu_facts(device: torch.device, *, sys_root: Path = Path("/sys")) -> GpuFacts:
    """Read what one GPU is and who uses it. The device must be there."""
    properties: Any = torch.cuda.get_device_properties(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    folder = _pci_folder(device, sys_root)
    return GpuFacts(
        name=properties.name,
        capability=(properties.major, properties.minor),
        built_for=tuple(torch.cuda.get_arch_list()),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        processes=_other_processes(str(properties.uuid)),
        pci_address=folder.name,
        link=_link_of(folder),
        numa_node=numa_node(device, sys_root=sys_root),
    )


def numa_node(device: torch.device, *, sys_root: Path = Path("/sys")) -> int | None:
    """Return the NUMA node that a GPU is on, None where the kernel does not tell."""
    node = _text_of(_pci_folder(device, sys_root) / "numa_node")
    return int(node) if node is not None and node.isdecimal() else None


def _pci_folder(device: torch.device, sys_root: Path) -> Path:
    properties: Any = torch.cuda.get_device_properties(device)
    return sys_root / "bus/pci/devices" / f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _link_of(folder: Path) -> Link | None:
    now = (_text_of(folder / "current_link_speed"), _text_of(folder / "current_link_width"))
    most = (_text_of(folder / "max_link_speed"), _text_of(folder / "max_link_width"))
    return Link(*now, *most) if all((*now, *most)) else None  # type: ignore[arg-type]


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _other_processes(uuid: str) -> tuple[GpuProcess, ...] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_gpu_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    return parse_processes(done.stdout, uuid=uuid, own_pid=os.getpid()) if done.returncode == 0 else None


def parse_processes(text: str, *, uuid: str, own_pid: int) -> tuple[GpuProcess, ...]:
    """Return the programs on one GPU but ourselves, from nvidia-smi's lines `uuid, pid, name, MiB`."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        # A name may hold commas; the three others do not.
        if len(fields) < 4 or uuid not in fields[0] or not fields[1].isdecimal() or int(fields[1]) == own_pid:
            continue
        used = int(fields[-1]) * _MIB if fields[-1].isdecimal() else None
        found.append(GpuProcess(int(fields[1]), ",".join(fields[2:-1]), used))
    return tuple(found)


@contextmanager
def pinned_memory(n_bytes: int, device: torch.device) -> Iterator[tuple[list[torch.Tensor], Registration]]:
    """Give host memory as krun's pool has it, in tensors of BLOCK_BYTES, at least one; what could not be pinned is left out."""
    remarks: list[str] = []
    arena = Arena(max(1, n_bytes // BLOCK_BYTES), BLOCK_BYTES, registrar=CudaRegistrar(device), on_remark=remarks.append)
    try:
        pinned = arena.n_slots * BLOCK_BYTES if arena.is_pinned else 0
        facts = Registration(n_bytes, pinned, arena.huge_page_share(), arena.populate_s, arena.register_s, "; ".join(remarks))
        yield [arena.tensor(n) for n in range(arena.n_slots)] if arena.is_pinned else [], facts
    finally:
        torch.cuda.synchronize(device)
        arena.close()


def measure_uploads(blocks: Sequence[torch.Tensor], device: torch.device, *, record_bytes: int) -> list[UploadRate]:
    """Time uploads from pinned memory: small pieces, a third of a record, a record and whole blocks, each over several streams."""
    sizes = sorted({size for size in (_MIB, -(-record_bytes // 3), record_bytes, BLOCK_BYTES) if size <= BLOCK_BYTES})
    target = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(max(N_STREAMS))]
    return [UploadRate(size, n, _upload_rate(blocks, target, size, streams[:n])) for size in sizes for n in N_STREAMS]


def _upload_rate(blocks: Sequence[torch.Tensor], target: torch.Tensor, piece_bytes: int, streams: Sequence[torch.cuda.Stream]) -> float:
    """Return bytes per second, the better of two turns: the first one may have to wake the link."""
    places = range(0, BLOCK_BYTES - piece_bytes + 1, piece_bytes)
    # Small pieces cost time per piece, not per byte: some thousands are enough.
    pieces = [(block[at : at + piece_bytes], target[at : at + piece_bytes]) for block in blocks for at in places][:MOST_PIECES]
    best = 0.0
    for _ in range(2):
        torch.cuda.synchronize(target.device)
        began = time.perf_counter()
        for n, (source, place) in enumerate(pieces):
            with torch.cuda.stream(streams[n % len(streams)]):
                place.copy_(source, non_blocking=True)
        torch.cuda.synchronize(target.device)
        best = max(best, len(pieces) * piece_bytes / (time.perf_counter() - began))
    return best


def read_kernel_facts(device: torch.device) -> KernelFacts:
    """Read which kernels run on a device; the CUDA C++ ones are compiled for it if they never were."""
    if device.type != "cuda":
        return KernelFacts("cpu", launch.HAS_TRITON, "they are for a GPU", None)
    if (reason := cuda_library.why_not(device)) is not None:
        return KernelFacts("cuda", launch.HAS_TRITON, reason, None)
    if cuda_library.find_library(device) is None:
        return KernelFacts("cuda", launch.HAS_TRITON, "nvcc did not compile them; the warning says why", None)
    return KernelFacts("cuda", launch.HAS_TRITON, None, cuda_library.path_on(device))


def run_kernel_tests(device: torch.device) -> list[KernelTest]:
    """Run every kernel's self-test on a device."""
    return products_check.self_test(device)
