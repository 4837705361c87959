"""krun doctor: what each fact of a machine, a GPU and a model means, with its cure, and what the exit code says."""

import dataclasses
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CUDA, command, succeed
from placing import add_copies

from layout.findings import Finding, finding_line
from layout.prepared import Copies, open_prepared
from manifests.errors import DeviceError
from runtime.doctor import (
    Room,
    capability_finding,
    copies_finding,
    examine,
    fit_findings,
    for_device,
    gpu_findings,
    has_code,
    kernel_set_finding,
    kernel_test_finding,
    link_finding,
    memory_finding,
    no_gpu_finding,
    numa_finding,
    pinning_finding,
    upload_finding,
    upload_lines,
)
from runtime.gpu_facts import CudaFacts, GpuFacts, GpuProcess, KernelFacts, KernelTest, Link, Registration, UploadRate, parse_processes
from runtime.numa import numa_nodes
from runtime.start import check_capability

GB = 10**9
CUDA_THERE = CudaFacts("2.11.0", "13.0", "580.1", (13, 0), None, "")
H200 = GpuFacts(
    name="NVIDIA H200",
    capability=(9, 0),
    built_for=("sm_80", "sm_90", "compute_120"),
    total_bytes=150 * GB,
    free_bytes=149 * GB,
    processes=(),
    pci_address="0000:00:06.0",
    link=Link("2.5 GT/s PCIe", "16", "32.0 GT/s PCIe", "16"),
    numa_node=None,
)
ONE_NODE = {0: frozenset(range(16))}
NEEDS_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def gpu(**changes: Any) -> GpuFacts:
    return dataclasses.replace(H200, **changes)


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.level for finding in findings}


@NEEDS_NO_GPU
def test_without_a_gpu_everything_else_is_examined_and_the_exit_code_is_that_of_the_device(extractions: dict[str, Path]) -> None:
    done = command("krun", "doctor", "-m", extractions["tiny-k3.1"])
    assert done.code == 6, done
    lines = done.out.splitlines()
    bad = next(n for n, line in enumerate(lines) if line.startswith("bad"))
    assert lines[bad].startswith("bad   GPU: device: ") and lines[bad + 1].startswith("      to do: ")
    assert sum(line.startswith("bad") for line in lines) == 1
    for what in (
        "versions",
        "memory",
        "cgroup limit",
        "huge pages",
        "locked memory",
        "manifest",
        "kernel set",
        "kernel test",
        "host pool for the model",
    ):
        assert any(f": {what}: " in line for line in lines), what
    assert "a run with --device cuda would not work" in done.err


@NEEDS_NO_GPU
def test_on_the_cpu_a_missing_gpu_is_a_note_and_the_exit_code_good(extractions: dict[str, Path]) -> None:
    document = json.loads(succeed("krun", "doctor", "-m", extractions["tiny-k3.1"], "--device", "cpu", "--json").out)
    found = {f["what"]: f for f in document["findings"]}
    assert document["would_work"] and found["device"]["level"] == "note" and found["device"]["cure"].startswith("for a run on the GPU: ")
    assert found["memory for the model"]["level"] == "good"
    assert {k["name"] for k in document["kernels"]} >= {"Q8_0 product", "grouped MXFP4 experts"} and all(k["is_right"] for k in document["kernels"])


def test_a_device_of_another_name_is_refused() -> None:
    done = command("krun", "doctor", "--device", "tpu")
    assert done.code == 2 and "--device tpu: expected cpu or cuda" in done.err


def test_a_damaged_model_is_a_finding_and_its_own_exit_code_and_the_rest_is_still_examined(prepared_copy: Path) -> None:
    (prepared_copy / "experts/L1-E3.bin").unlink()
    result = examine(prepared_copy, "cpu")
    found = {f.what: f for f in result.findings}
    assert found["manifest"].level == "bad" and "L1-E3.bin" in found["manifest"].text and "kernel set" in found
    assert result.error is not None and result.error.exit_code == 4
    assert examine(prepared_copy / "absent", "cpu").error.exit_code == 3  # type: ignore[union-attr]


def test_copies_that_are_left_out_are_a_note(extractions: dict[str, Path]) -> None:
    prepared = open_prepared(extractions["tiny-k3.1"])
    holds = prepared.manifest.drives[0].holds
    assert copies_finding(prepared, "m", Copies((holds,), [])).text == "generation 1, 144 experts of 9.79KB on 1 drive"
    found = holds.copy()
    found[1, :2] = False
    noted = copies_finding(prepared, "m", Copies((found,), ["L1-E0.bin is missing", "another"]))
    assert noted.level == "note" and "2 copies are left out, the first: L1-E0.bin is missing" in noted.text
    assert noted.cure == "kprep verify-hashes --repair"
    found[1, 1] = True
    assert copies_finding(prepared, "m", Copies((found,), ["L1-E0.bin is missing"])).text.endswith("; 1 copy is left out, L1-E0.bin is missing")


def test_a_drive_that_is_gone_counts_by_its_copies_and_is_to_be_mounted(prepared_copy: Path, tmp_path: Path) -> None:
    gone = tmp_path / "c"
    add_copies(prepared_copy, gone)
    shutil.rmtree(gone)
    finding = next(f for f in examine(prepared_copy, "cpu").findings if f.what == "manifest")
    assert "on 2 drives; 144 copies are left out, the first: " in finding.text and "no such directory" in finding.text
    assert finding.cure == f"mount {gone}, or kprep place with the drives that are left"


@pytest.mark.parametrize(
    ("facts", "text", "cure"),
    [
        (
            {"torch_cuda": None, "driver_cuda": None, "driver": None},
            "built without CUDA; no NVIDIA driver is loaded",
            "download.pytorch.org(.*)NVIDIA's driver",
        ),
        ({"torch_cuda": None}, "torch 2.11.0 is built without CUDA; driver 580.1", "download.pytorch.org/whl/cu130 torch; without"),
        ({"driver_cuda": None, "driver": None}, "no NVIDIA driver is loaded", "install NVIDIA's driver(.*)docker run --gpus all"),
        ({"driver_cuda": None}, "driver 580.1 is loaded, but its library libcuda.so.1", "docker run --gpus all"),
        (
            {"driver": "535.2", "driver_cuda": (12, 2)},
            "driver 535.2 serves CUDA 12.2, but torch 2.11.0 is built with 13.0",
            "newer driver, or a torch that is built with CUDA 12",
        ),
        ({"visible": ""}, "CUDA_VISIBLE_DEVICES='' hides every GPU", "unset CUDA_VISIBLE_DEVICES"),
        ({"visible": "-1"}, "CUDA_VISIBLE_DEVICES='-1' hides", "unset CUDA_VISIBLE_DEVICES"),
        ({}, "torch 2.11.0 says: no such thing", "nvidia-smi must list the GPU"),
    ],
)
def test_why_there_is_no_gpu_is_told_apart(facts: dict[str, Any], text: str, cure: str) -> None:
    finding = no_gpu_finding(dataclasses.replace(CUDA_THERE, fault="no such thing", **facts))
    assert finding.level == "bad" and text in finding.text and "krun generate --device cpu" in finding.cure
    assert re.search(cure, finding.cure), finding.cure


def test_a_good_gpu_gives_good_findings_only() -> None:
    found = list(gpu_findings(CUDA_THERE, H200, nodes=ONE_NODE, cores={0, 1}))
    assert levels(found) == dict.fromkeys(("device", "compute capability", "GPU memory", "link", "NUMA"), "good")
    assert found[0].text == "NVIDIA H200, driver 580.1 (CUDA up to 13.0), torch 2.11.0 with CUDA 13.0"


@pytest.mark.parametrize(
    ("capability", "level"), [((7, 5), "bad"), ((8, 0), "good"), ((8, 6), "good"), ((9, 0), "good"), ((12, 0), "good"), ((10, 0), "bad")]
)
def test_a_gpu_needs_tensor_cores_for_bf16_and_code_in_this_torch(capability: tuple[int, int], level: str) -> None:
    card = gpu(capability=capability)
    finding = capability_finding(card.capability, card.built_for)
    assert finding.level == level
    # A run looks at the same, before anything is compiled.
    with pytest.raises(DeviceError, match="compute capability") if level == "bad" else nullcontext():
        check_capability(card.capability, card.built_for)
    assert capability != (7, 5) or "7.5; 8.0 is needed, for bf16" in finding.text
    assert capability != (10, 0) or "torch carries code for sm_80, sm_90, compute_120" in finding.text


@pytest.mark.parametrize(
    ("built_for", "capability", "runs"),
    [
        (["sm_80"], (8, 0), True),
        (["sm_80"], (8, 9), True),
        (["sm_86"], (8, 0), False),
        (["sm_80"], (9, 0), False),
        (["compute_80"], (12, 0), True),
        (["compute_90"], (8, 6), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_100f"], (10, 0), True),
        (["sm_120"], (12, 1), True),
        ([], (9, 0), True),
    ],
)
def test_code_runs_on_its_generation_upwards_and_its_text_form_on_all_later_ones(
    built_for: list[str], capability: tuple[int, int], runs: bool
) -> None:
    assert has_code(built_for, capability) == runs


def test_what_a_second_run_gets_is_told_with_who_has_the_rest() -> None:
    other = GpuProcess(540, "python3", 33 * GB)
    found = memory_finding(gpu(free_bytes=117 * GB, processes=(other, GpuProcess(7, "x", None))))
    assert found.level == "note" and found.text == "117GB free of 150GB; also there: python3 (process 540, 33GB), x (process 7, size not told)"
    assert "--vram-cache" in found.cure
    unseen = memory_finding(gpu(free_bytes=100 * GB))
    assert unseen.level == "note" and "50GB belong to programs that cannot be seen from here" in unseen.text
    assert memory_finding(H200).level == "good" and "nvidia-smi was not there" in memory_finding(gpu(processes=None)).text


def test_programs_are_read_from_nvidia_smi_s_lines() -> None:
    text = "GPU-aa-1, 540, python3, 31000\nGPU-aa-1, 541, a, b, 2\nGPU-bb-2, 9, else, 5\nGPU-aa-1, 99, self, 1\nGPU-aa-1, 5, x, [N/A]\nNo devices were found\n"
    mib = 1 << 20
    expected = (GpuProcess(540, "python3", 31000 * mib), GpuProcess(541, "a,b", 2 * mib), GpuProcess(5, "x", None))
    assert parse_processes(text, uuid="aa-1", own_pid=99) == expected
    assert parse_processes("", uuid="aa-1", own_pid=99) == ()


def test_a_narrow_link_is_a_note_and_an_idle_one_is_not() -> None:
    assert link_finding(H200).level == "good", "an idle link is slow, and that says nothing"
    narrow = link_finding(gpu(link=Link("32.0 GT/s PCIe", "8", "32.0 GT/s PCIe", "16")))
    assert narrow.level == "note" and "x8 of x16" in narrow.text


def test_a_process_that_may_not_run_on_the_gpu_s_node_is_told_the_command(tmp_path: Path) -> None:
    for number, spans in ((0, "0-3,8"), (1, "4-7"), (2, "")):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(spans + "\n")
    nodes = numa_nodes(tmp_path)
    assert nodes == {0: frozenset({0, 1, 2, 3, 8}), 1: frozenset({4, 5, 6, 7})}
    assert numa_finding(gpu(numa_node=1), nodes, {4, 5}).level == "good"
    assert numa_finding(gpu(numa_node=1), nodes, {3, 4}).level == "good"
    away = numa_finding(gpu(numa_node=1), nodes, {2, 3})
    assert away.level == "note" and "numactl --cpunodebind=1" in away.cure and "node 0: cores 0-3,8, node 1: cores 4-7" in away.text
    assert numa_finding(gpu(numa_node=None), nodes, {3}).level == "note"
    assert numa_finding(gpu(numa_node=None), ONE_NODE, {3}).level == "good"


def test_what_cannot_be_pinned_names_host_memory_and_its_limit() -> None:
    whole = Registration(2 * GB, 2 * GB, 1.0, 0.5, 0.05, "")
    assert pinning_finding(whole) == Finding("pinned memory", "GPU", "good", "2GB registered at 40GB/s, filled in 0.50 s, 100% in huge pages")
    part = pinning_finding(whole._replace(pinned_bytes=GB, fault="1 of 2 slots could be had"))
    none = pinning_finding(whole._replace(pinned_bytes=0, fault="out of memory"))
    for finding in (part, none):
        assert finding.level == "note" and "host memory, not the GPU's" in finding.cure and "ulimit -l unlimited" in finding.cure
    assert "1 of 2 slots could be had" in part.text and "out of memory" in none.text
    small_pages = pinning_finding(whole._replace(huge_page_share=0.2))
    assert small_pages.level == "note" and "compact_memory" in small_pages.cure


def uploads(rate: float) -> list[UploadRate]:
    return [UploadRate(size, n, rate * (0.5 if size < 10**6 else 1)) for size in (1000, 17_547_264) for n in (1, 8)]


def test_uploads_are_a_table_and_slow_ones_a_note() -> None:
    assert upload_lines(uploads(50e9)) == [
        "     piece    1 stream   8 streams",
        "       1KB      25GB/s      25GB/s",
        "    17.5MB      50GB/s      50GB/s",
    ]
    good = upload_finding(uploads(50e9), H200, record_bytes=17_547_264)
    assert good.level == "good" and good.text.startswith("50GB/s at best, 50GB/s in pieces of 17.5MB\n      ")
    slow = upload_finding(uploads(20e9), H200, record_bytes=17_547_264)
    assert slow.level == "note" and slow.text.startswith("the link promises 63GB/s; 20GB/s at best")
    assert upload_finding(uploads(20e9), gpu(link=None), record_bytes=17_547_264).level == "good"


LIBRARY = Path("/home/a/.cache/products.so")


@pytest.mark.parametrize(
    ("facts", "level", "text"),
    [
        (KernelFacts("cuda", True, None, LIBRARY), "good", f"CUDA C++ for the products ({LIBRARY}), Triton for the rest"),
        (KernelFacts("cuda", False, None, LIBRARY), "good", "plain torch (Triton is not installed) for the rest"),
        (KernelFacts("cuda", True, "nvcc is not on the PATH", None), "note", "Triton; the CUDA C++ kernels do not run: nvcc is not on the PATH"),
        (KernelFacts("cuda", False, "too old", None), "note", "plain torch, slow: Triton is not installed"),
        (KernelFacts("cpu", True, "they are for a GPU", None), "good", "plain torch"),
    ],
)
def test_which_kernels_run_and_why(facts: KernelFacts, level: str, text: str) -> None:
    finding = kernel_set_finding(facts)
    assert finding.level == level and text in finding.text


def test_one_wrong_kernel_is_bad() -> None:
    right, wrong = KernelTest("a", True, 0.5), KernelTest("b", False, 0.25)
    assert kernel_test_finding([right], "GPU").level == "good"
    finding = kernel_test_finding([right, wrong], "GPU")
    assert finding.level == "bad" and finding.text.startswith("a right, b WRONG; 0.75 s")


def test_a_wrong_kernel_and_one_that_does_not_end_keep_a_run_from_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.kernels.products_check.self_test", lambda device: [KernelTest("Q8_0 product", False, 0.1)])
    result = examine(None, "cpu")
    assert result.error is not None and result.error.exit_code == 6 and "kernel test" in str(result.error)

    def fail(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    monkeypatch.setattr("runtime.kernels.products_check.self_test", fail)
    (finding,) = (f for f in examine(None, "cpu").findings if f.what == "kernel test")
    assert finding.level == "bad" and finding.text == "it did not end: CUDA error: an illegal memory access was encountered"


def test_the_spine_and_the_smallest_budgets_are_weighed_with_their_numbers(extractions: dict[str, Path]) -> None:
    prepared = open_prepared(extractions["tiny-k3.1"])
    spine, slots = prepared.manifest.spine.n_bytes, 4 * 9792
    needed, host = spine + slots + 4 * GB, slots + 4 * GB
    assert [f.level for f in fit_findings(prepared, "m", Room("cuda", needed, 20 * GB))] == ["good", "good"]
    # Of little memory a quarter is left alone.
    assert [f.level for f in fit_findings(prepared, "m", Room("cuda", needed, 4 * slots // 3))] == ["good", "good"]
    short = list(fit_findings(prepared, "m", Room("cuda", needed - 1000, 4 * slots // 3 - 12)))
    assert [f.level for f in short] == ["bad", "bad"] and "; 1KB are missing" in short[0].text and "; 9B are missing" in short[1].text
    assert "96 GB" in short[0].cure and short[0].where == "m"
    assert next(f for f in fit_findings(prepared, "m", Room("cuda", needed, 20 * GB)) if f.what.startswith("host")).text.endswith(
        "16GB are left for larger caches"
    )
    (on_cpu,) = fit_findings(prepared, "m", Room("cpu", None, spine + slots + host))
    (too_little,) = fit_findings(prepared, "m", Room("cpu", None, spine + 2 * slots))
    assert (on_cpu.level, too_little.level) == ("good", "bad")
    without = list(fit_findings(prepared, "m", Room("cuda", None, 20 * GB)))
    assert without[0].level == "note" and "there is no GPU to compare with" in without[0].text


def test_on_the_cpu_no_finding_of_the_gpu_is_bad() -> None:
    bad, good = Finding("a", "GPU", "bad", "x", "y"), Finding("b", "GPU", "good", "x")
    assert for_device([bad, good], "cuda") == [bad, good]
    assert for_device([bad, good], "cpu") == [Finding("a", "GPU", "note", "x", "for a run on the GPU: y"), good]


def test_a_line_shows_level_place_and_cure() -> None:
    assert finding_line(Finding("link", "GPU", "good", "fast")) == "good  GPU: link: fast"
    assert finding_line(Finding("link", "GPU", "bad", "slow", "seat it anew")) == "bad   GPU: link: slow\n      to do: seat it anew"


@pytest.mark.parametrize("on", [CUDA])
def test_a_real_gpu_is_timed_and_works(on: str) -> None:
    result = examine(None, on)
    assert result.error is None, result.findings
    assert result.registration is not None and result.registration.pinned_bytes > 0
    assert len(result.uploads) == 16 and min(u.bytes_per_s for u in result.uploads) > 0
