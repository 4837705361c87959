"""Whether krun would work on this machine, and how fast its GPU can be fed: findings, each with its cure.

Decisions are functions of facts; `examine` alone looks at the machine, through gpu_facts.py. Drives are kprep doctor's.
"""

import dataclasses
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from layout.drives import pcie_bytes_per_s
from layout.findings import MACHINE, MEMLOCK_CURE, Finding, cgroup_finding, huge_pages_finding, locked_memory_finding
from layout.memory import available_host_bytes, meminfo_bytes
from layout.prepared import Copies, Prepared, find_copies, open_prepared
from layout.record import record_layout
from layout.sizes import counted, format_rate, format_size
from manifests.errors import DeviceError, Interrupted, KtierError
from manifests.geometry import load_geometry
from runtime.bench.document import version_facts
from runtime.gpu_facts import (
    CudaFacts,
    GpuFacts,
    KernelFacts,
    Registration,
    UploadRate,
    measure_uploads,
    pinned_memory,
    read_cuda_facts,
    read_gpu_facts,
    read_kernel_facts,
    run_kernel_tests,
)
from runtime.kernels.products_check import KernelTest
from runtime.memory import GPU_RESERVE_BYTES, host_reserve_bytes
from runtime.numa import nodes_text, numa_nodes

GPU = "GPU"
# bf16 on tensor cores, which the kernels' products are made of.
LEAST_CAPABILITY = (8, 0)
# Enough to time it; the rest of a pool goes the same way.
TRIAL_BYTES = 2 << 30
LEAST_FREE_BYTES = 1 << 30
# In use without a program to be seen: more than our own context takes.
_UNSEEN_BYTES = 2_000_000_000
# A link that gives less than this part of what its width promises is worth a look.
_GOOD_PART_OF_LINK = 0.7
# Whose records are uploaded where no model is given.
_USUAL_MODEL = "k3.1"
# The driver's own words speak of the GPU's memory.
_PINNING_CURE = f"what is short is host memory, not the GPU's: {MEMLOCK_CURE}"


@dataclass(slots=True)
class Examination:
    """All findings, what was timed for them, and the error that a run would end with, None if it would work."""

    findings: list[Finding] = field(default_factory=list)
    registration: Registration | None = None
    uploads: list[UploadRate] = field(default_factory=list)
    kernels: list[KernelTest] = field(default_factory=list)
    error: KtierError | None = None


def examine(manifest: Path | None, device: str, *, sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> Examination:
    """Look at the machine, its GPU and, if one is given, a prepared model, for a run on a device: "cuda" or "cpu".

    What is wrong is a finding, not an exception; `error` is what a run would end with.
    """
    result = Examination([*machine_findings(sys_root=sys_root, proc_root=proc_root)])
    prepared = _opened(manifest, result)
    cuda = read_cuda_facts()
    gpu = None
    if cuda.fault:
        result.findings += for_device([no_gpu_finding(cuda)], device)
    else:
        record = prepared.record if prepared else record_layout(load_geometry(_USUAL_MODEL))
        gpu = _gpu(result, cuda, device, record_bytes=record.n_bytes, sys_root=sys_root)
    _kernels(result, device if gpu is not None else "cpu")
    if prepared is not None:
        room = Room(device, gpu.free_bytes if gpu is not None else None, available_host_bytes(proc_root=proc_root, sys_root=sys_root))
        result.findings += fit_findings(prepared, str(manifest), room)
    bad = [f"{finding.where}: {finding.what}" for finding in result.findings if finding.level == "bad"]
    if result.error is None and bad:
        result.error = DeviceError(f"a run with --device {device} would not work; see above: {', '.join(bad)}")
    return result


def _gpu(result: Examination, cuda: CudaFacts, device: str, *, record_bytes: int, sys_root: Path) -> GpuFacts | None:
    """Add what is found of the GPU; None if it does not even answer."""
    gpu = None
    try:
        gpu = read_gpu_facts(torch.device("cuda"), sys_root=sys_root)
        result.findings += for_device([*gpu_findings(cuda, gpu, nodes=numa_nodes(sys_root), cores=os.sched_getaffinity(0))], device)
        if gpu.capability >= LEAST_CAPABILITY:
            result.findings += for_device(_feed(result, gpu, record_bytes), device)
    except (RuntimeError, DeviceError) as error:
        cure = "nvidia-smi shows who holds its memory; dmesg, under NVRM, what went wrong"
        result.findings += for_device([Finding("transfers", GPU, "bad", str(error).strip().splitlines()[0], cure)], device)
    return gpu


def _opened(manifest: Path | None, result: Examination) -> Prepared | None:
    """Return the prepared model; what is wrong with it becomes a finding, and the error of the whole."""
    if manifest is None:
        return None
    try:
        prepared = open_prepared(manifest)
        copies = find_copies(prepared)
    except Interrupted:
        raise
    except (KtierError, OSError) as error:
        result.error = error if isinstance(error, KtierError) else KtierError(f"{error.filename}: {error.strerror}")
        cure = "follow what it says; kprep verify-hashes looks at every file"
        result.findings.append(Finding("manifest", str(manifest), "bad", str(result.error), cure))
        return None
    result.findings.append(copies_finding(prepared, str(manifest), copies))
    return prepared


def copies_finding(prepared: Prepared, where: str, copies: Copies) -> Finding:
    """Judge by the copies that are not there with their size; the base is complete."""
    text = f"generation {prepared.manifest.generation}, {prepared.geometry.n_routed_experts} experts of {format_size(prepared.record.n_bytes)}"
    text += f" on {counted(len(prepared.manifest.drives), 'drive')}"
    if not copies.faults:
        return Finding("manifest", where, "good", text)
    n_left_out = sum(int((drive.holds & ~found).sum()) for drive, found in zip(prepared.manifest.drives, copies.holds, strict=True))
    gone = [str(directory) for directory in prepared.drive_directories if not directory.is_dir()]
    cure = "kprep verify-hashes --repair"
    if gone:
        cure = f"mount {', '.join(gone)}, or kprep place with the drives that are left"
        if len(copies.faults) > len(gone):
            cure += "; for the others kprep verify-hashes --repair"
    left_out = f"{counted(n_left_out, 'copy is', 'copies are')} left out, {'the first: ' * (n_left_out > 1)}{copies.faults[0]}"
    return Finding("manifest", where, "note", f"{text}; {left_out}", cure)


def for_device(findings: Sequence[Finding], device: str) -> list[Finding]:
    """Return findings of a GPU as they matter to a run on a device: on the CPU none of them is bad."""
    if device == "cuda":
        return list(findings)
    return [dataclasses.replace(f, level="note", cure=f"for a run on the GPU: {f.cure}") if f.level == "bad" else f for f in findings]


def machine_findings(*, sys_root: Path, proc_root: Path) -> Iterator[Finding]:
    """Look at what the host gives: versions, memory, limits."""
    versions = version_facts()
    text = f"Linux {platform.release()}, Python {versions['python']}, torch {versions['torch']}, Triton {versions['triton'] or 'not installed'}"
    yield Finding("versions", MACHINE, "good", text)
    available = available_host_bytes(proc_root=proc_root, sys_root=sys_root)
    total = meminfo_bytes("MemTotal", proc_root=proc_root)
    yield Finding("memory", MACHINE, "good", f"{format_size(available)} to be had of {format_size(total)}; the host pool comes out of it")
    yield cgroup_finding(sys_root=sys_root, proc_root=proc_root)
    yield huge_pages_finding(sys_root=sys_root)
    yield locked_memory_finding()


def no_gpu_finding(cuda: CudaFacts) -> Finding:
    """Say why there is no GPU, and what brings one."""
    text, cure = _why_no_gpu(cuda)
    return Finding("device", GPU, "bad", text, f"{cure}; without one: krun generate --device cpu")


def _why_no_gpu(cuda: CudaFacts) -> tuple[str, str]:
    driver = f"driver {cuda.driver}" if cuda.driver else "no NVIDIA driver is loaded"
    into_container = "in a container: docker run --gpus all"
    if cuda.torch_cuda is None:
        cure = "install torch with CUDA: pip install --index-url https://download.pytorch.org/whl/cu130 torch"
        return (
            f"torch {cuda.torch_version} is built without CUDA; {driver}",
            cure if cuda.driver else f"{cure}; and NVIDIA's driver, if there is a card",
        )
    if cuda.driver_cuda is None and cuda.driver is None:
        return driver, f"install NVIDIA's driver, until nvidia-smi lists the GPU; {into_container}"
    if cuda.driver_cuda is None:
        return f"{driver} is loaded, but its library libcuda.so.1 is not to be found", f"install the libraries of that driver; {into_container}"
    served = ".".join(map(str, cuda.driver_cuda))
    if cuda.driver_cuda[0] < int(cuda.torch_cuda.split(".")[0]):
        cure = f"a newer driver, or a torch that is built with CUDA {cuda.driver_cuda[0]}"
        return f"{driver} serves CUDA {served}, but torch {cuda.torch_version} is built with {cuda.torch_cuda}", cure
    if cuda.visible is not None and cuda.visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={cuda.visible!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES"
    return f"{driver}, CUDA {served}; torch {cuda.torch_version} says: {cuda.fault}", "nvidia-smi must list the GPU; else ask dmesg for NVRM lines"


def gpu_findings(cuda: CudaFacts, gpu: GpuFacts, *, nodes: dict[int, frozenset[int]], cores: set[int]) -> Iterator[Finding]:
    """Judge a GPU.

    nodes  the cores of each NUMA node
    cores  those that this process may run on
    """
    served = ".".join(map(str, cuda.driver_cuda or ("?",)))
    text = f"{gpu.name}, driver {cuda.driver or 'unknown'} (CUDA up to {served}), torch {cuda.torch_version} with CUDA {cuda.torch_cuda}"
    yield Finding("device", GPU, "good", text)
    yield capability_finding(gpu.capability, gpu.built_for)
    yield memory_finding(gpu)
    if gpu.link is not None:
        yield link_finding(gpu)
    yield numa_finding(gpu, nodes, cores)


def capability_finding(capability: tuple[int, int], built_for: Sequence[str]) -> Finding:
    """Judge by what the GPU can do, and whether this torch, built for such architectures, has code for it."""
    has, least = (".".join(map(str, version)) for version in (capability, LEAST_CAPABILITY))
    if capability < LEAST_CAPABILITY:
        text = f"{has}; {least} is needed, for bf16 products on tensor cores"
        return Finding("compute capability", GPU, "bad", text, "a card of the A100 or RTX 30 generation or a later one")
    if not has_code(built_for, capability):
        text = f"{has}; torch carries code for {', '.join(built_for)}"
        return Finding("compute capability", GPU, "bad", text, "a torch that is built for this generation: the newest release, or a nightly build")
    return Finding("compute capability", GPU, "good", f"{has} ({least} or more is needed)")


def has_code(built_for: Sequence[str], capability: tuple[int, int]) -> bool:
    """Say whether code for some targets runs here: sm_XY on its own generation from Y upwards, compute_XY on all from XY upwards."""
    for target in built_for:
        kind, _, digits = target.rstrip("af").partition("_")
        if not digits.isdecimal():
            continue
        made_for = divmod(int(digits), 10)
        if kind == "compute" and made_for <= capability:
            return True
        # Those that end in a letter run on no other GPU than their own.
        if kind == "sm" and made_for[0] == capability[0] and (made_for == capability or (made_for < capability and target[-1].isdecimal())):
            return True
    return not built_for


def memory_finding(gpu: GpuFacts) -> Finding:
    """Say what is left of the GPU's memory, and who has the rest."""
    used = gpu.total_bytes - gpu.free_bytes
    text = f"{format_size(gpu.free_bytes)} free of {format_size(gpu.total_bytes)}"
    shared = "a second run gets what is left: give it a --vram-cache that fits, or wait for the first"
    if gpu.processes:
        users = ", ".join(f"{p.name} (process {p.pid}, {'size not told' if p.n_bytes is None else format_size(p.n_bytes)})" for p in gpu.processes)
        return Finding("GPU memory", GPU, "note", f"{text}; also there: {users}", shared)
    if used > _UNSEEN_BYTES:
        return Finding("GPU memory", GPU, "note", f"{text}; {format_size(used)} belong to programs that cannot be seen from here", shared)
    others = "no other program on it" if gpu.processes is not None else "nvidia-smi was not there to ask who else uses it"
    return Finding("GPU memory", GPU, "good", f"{text}; {others}")


def link_finding(gpu: GpuFacts) -> Finding:
    """Judge by the link's width; an idle link's speed says nothing."""
    assert gpu.link is not None
    text = f"{gpu.pci_address}: x{gpu.link.width} of x{gpu.link.max_width}, up to {gpu.link.max_speed}"
    if gpu.link.width == gpu.link.max_width:
        return Finding("link", GPU, "good", text)
    cure = "seat the card anew or move it; look at the slot's lanes (bifurcation) in the firmware's settings"
    return Finding("link", GPU, "note", f"{text}: experts come through it, so its width limits the tokens per second", cure)


def numa_finding(gpu: GpuFacts, nodes: dict[int, frozenset[int]], cores: set[int]) -> Finding:
    """Judge whether krun, which stays on the GPU's node, can."""
    where = nodes_text(nodes)
    if len(nodes) < 2:
        return Finding("NUMA", GPU, "good", "one node")
    if gpu.numa_node is None or gpu.numa_node not in nodes:
        return Finding(
            "NUMA", GPU, "note", f"the kernel does not say on which node the GPU is; {where}", "try numactl --cpunodebind=N --membind=N krun"
        )
    if cores & nodes[gpu.numa_node]:
        return Finding("NUMA", GPU, "good", f"the GPU is on node {gpu.numa_node}, where krun keeps its threads and its pool; {where}")
    text = f"the GPU is on node {gpu.numa_node}, where this process may not run; {where}"
    return Finding("NUMA", GPU, "note", text, f"let it: numactl --cpunodebind={gpu.numa_node} krun ..., or a wider taskset or cpuset")


def _feed(result: Examination, gpu: GpuFacts, record_bytes: int) -> list[Finding]:
    """Pin memory as krun's pool is, and upload it; keep what was timed."""
    device, n_bytes = torch.device("cuda"), min(TRIAL_BYTES, available_host_bytes() // 4)
    with pinned_memory(n_bytes, device) as (blocks, registration):
        if blocks and gpu.free_bytes > LEAST_FREE_BYTES:
            result.uploads = measure_uploads(blocks, device, record_bytes=record_bytes)
    result.registration = registration
    findings = [pinning_finding(registration)]
    return [*findings, upload_finding(result.uploads, gpu, record_bytes=record_bytes)] if result.uploads else findings


def pinning_finding(registration: Registration) -> Finding:
    """Judge by how much of what was asked for could be pinned."""
    pinned, huge, fault = registration.pinned_bytes, registration.huge_page_share, registration.fault
    if not pinned:
        return Finding("pinned memory", GPU, "note", f"none can be pinned, so that uploads are slow: {fault}", _PINNING_CURE)
    text = f"{format_size(pinned)} registered at {format_rate(pinned / max(registration.register_s, 1e-9))}"
    text += f", filled in {registration.populate_s:.2f} s, {huge:.0%} in huge pages"
    if fault:
        text += f"; {format_size(registration.asked_bytes)} were asked for: {fault}"
        return Finding("pinned memory", GPU, "note", text, _PINNING_CURE)
    if huge < 0.5:
        cure = "echo 1 | sudo tee /proc/sys/vm/compact_memory gathers free memory; see also the finding on huge pages"
        return Finding("pinned memory", GPU, "note", f"{text}: a large pool takes long to pin in small pages", cure)
    return Finding("pinned memory", GPU, "good", text)


def upload_finding(uploads: Sequence[UploadRate], gpu: GpuFacts, *, record_bytes: int) -> Finding:
    """Judge the best rate by the link's width, and show the whole table."""
    best = max(uploads, key=lambda upload: upload.bytes_per_s)
    of_record = max((u for u in uploads if u.piece_bytes == record_bytes), key=lambda u: u.bytes_per_s, default=best)
    text = f"{format_rate(best.bytes_per_s)} at best, {format_rate(of_record.bytes_per_s)} in pieces of {format_size(of_record.piece_bytes)}"
    text += "".join(f"\n      {line}" for line in upload_lines(uploads))
    promised = link_bytes_per_s(gpu)
    if promised is not None and best.bytes_per_s < _GOOD_PART_OF_LINK * promised:
        cure = "look at the NUMA finding, at other traffic on the link, and at the link's speed under load: nvidia-smi -q -d PCI"
        return Finding("uploads", GPU, "note", f"the link promises {format_rate(promised)}; {text}", cure)
    return Finding("uploads", GPU, "good", text)


def link_bytes_per_s(gpu: GpuFacts) -> float | None:
    """Return what the GPU's link carries at its present width and its greatest speed, before packet headers; None if the kernel does not tell."""
    return None if gpu.link is None else pcie_bytes_per_s(gpu.link.max_speed, gpu.link.width)


def upload_lines(uploads: Sequence[UploadRate]) -> list[str]:
    """Return the rates as a small table, a row for each size and a column for each number of streams."""
    counts = sorted({u.n_streams for u in uploads})
    rates = {(u.piece_bytes, u.n_streams): format_rate(u.bytes_per_s) for u in uploads}
    rows = [f"{'piece':>10}" + "".join(f"{f'{n} stream' + 's' * (n > 1):>12}" for n in counts)]
    for size in sorted({u.piece_bytes for u in uploads}):
        rows.append(f"{format_size(size):>10}" + "".join(f"{rates[size, n]:>12}" for n in counts))
    return rows


def _kernels(result: Examination, device: str) -> None:
    """Say which kernels run on a device, and run each against its plain form."""
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    place = GPU if device == "cuda" else MACHINE
    try:
        # The tests may change which kernels run.
        result.kernels = run_kernel_tests(where)
        result.findings.append(kernel_set_finding(read_kernel_facts(where)))
        result.findings.append(kernel_test_finding(result.kernels, place))
    except (RuntimeError, DeviceError) as error:
        cure = "if it says that memory is short, end the other programs on the GPU; else report it with the versions above"
        result.findings.append(Finding("kernel test", place, "bad", f"it did not end: {str(error).strip().splitlines()[0]}", cure))


def kernel_test_finding(tests: Sequence[KernelTest], where: str) -> Finding:
    """Judge the kernels by their agreement with their plain forms."""
    text = ", ".join(map(str, tests))
    text += f"; {sum(test.seconds for test in tests):.2f} s" + (", a first compilation included" if where == GPU else "")
    if all(test.is_right for test in tests):
        return Finding("kernel test", where, "good", text)
    if all(test.is_right or test.is_usable for test in tests):
        return Finding("kernel test", where, "note", text, "results are less exact than on other GPUs, or prompts run in plain torch; worth a report")
    cure = "do not run on this GPU: its results would be wrong; report it with the versions above, and try another driver or torch"
    return Finding("kernel test", where, "bad", text, cure)


def kernel_set_finding(facts: KernelFacts) -> Finding:
    """Say which kernel set will run, and why."""
    if facts.device == "cpu":
        return Finding("kernel set", MACHINE, "good", "plain torch, float32: the CPU's only one")
    if facts.why_not_compiled is None:
        rest = "Triton" if facts.has_triton else "plain torch (Triton is not installed)"
        return Finding("kernel set", GPU, "good", f"CUDA C++ for the products ({facts.compiled_kernels}), {rest} for the rest")
    if facts.has_triton:
        cure = "it is slower, no more; nvcc comes with CUDA's toolkit, a GPU's generation is what it is, and wrong results are worth a report"
        return Finding("kernel set", GPU, "note", f"Triton; the CUDA C++ kernels do not run: {facts.why_not_compiled}", cure)
    text = f"plain torch, slow: Triton is not installed, and the CUDA C++ kernels do not run: {facts.why_not_compiled}"
    return Finding("kernel set", GPU, "note", text, "pip install triton")


class Room(NamedTuple):
    """Memory that is free for a run on a device; gpu_bytes is None without a GPU."""

    device: str
    gpu_bytes: int | None
    host_bytes: int


def fit_findings(prepared: Prepared, where: str, room: Room) -> Iterator[Finding]:
    """Judge whether the spine and the smallest budgets fit: a cache and a pool for the experts of one token in one layer."""
    spine, k = prepared.manifest.spine.n_bytes, prepared.geometry.n_experts_per_token
    slots = k * prepared.record.n_bytes
    needs = f"spine {format_size(spine)}, {k} slots {format_size(slots)}"
    more_host, host_reserve = "end other programs, or raise the cgroup limit", host_reserve_bytes(room.host_bytes)
    and_free = f"reserve {format_size(host_reserve)}"
    if room.device == "cpu":
        n_bytes = spine + 2 * slots + host_reserve
        yield _fit("memory for the model", where, f"{needs}, and as many in the host pool, {and_free}", n_bytes, room.host_bytes, more_host)
        return
    needs += f", reserve {format_size(GPU_RESERVE_BYTES)}"
    n_bytes = spine + slots + GPU_RESERVE_BYTES
    larger = "a card with more memory (96 GB hold the Q8_0 spine of K3 and K3.1), or end the other programs on it"
    if room.gpu_bytes is None:
        text = f"{needs}: {format_size(n_bytes)} are needed; there is no GPU to compare with"
        yield Finding("GPU memory for the model", where, "note", text, f"a card with at least {format_size(n_bytes)} free")
    else:
        yield _fit("GPU memory for the model", where, needs, n_bytes, room.gpu_bytes, larger)
    yield _fit("host pool for the model", where, f"{k} slots {format_size(slots)}, {and_free}", slots + host_reserve, room.host_bytes, more_host)


def _fit(what: str, where: str, needs: str, n_needed: int, n_there: int, cure: str) -> Finding:
    text = f"{needs}: {format_size(n_needed)} of {format_size(n_there)}"
    if n_needed > n_there:
        return Finding(what, where, "bad", f"{text}; {format_size(n_needed - n_there)} are missing", cure)
    return Finding(what, where, "good", f"{text}; {format_size(n_there - n_needed)} are left for larger caches")
