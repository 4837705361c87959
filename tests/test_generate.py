"""krun generate as a user sees it: what it refuses and when, what it writes beside the text, and how it ends when the drives do."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import typer
from conftest import command, succeed
from inside import krun, ran, refused

from layout.direct import BUFFERED, ReadMode
from layout.terminal import run_command
from manifests.errors import DamagedDataError, DeviceError, UsageError
from manifests.geometry import load_geometry
from manifests.load import load_manifest
from prep.placement.heat import read_heat
from runtime.bench.document import ids_digest
from runtime.bench.routing import read_trace
from runtime.bench.runs import outputs_of, rate_series, read_bench, time_bar
from runtime.cli.faults import with_faults_told
from runtime.cli.live import LiveLine, can_show_live
from runtime.engine import Engine, Options
from runtime.gpu_facts import GpuFacts, GpuProcess, KernelFacts, KernelTest
from runtime.start import Room, budgets_of, checked_kernels, host_room, kernels_text, no_room_for_spine, refuse_buffered, who_has_the_gpu

PROMPT = "5,6,7,8"
N_TOKENS = 7
N_USES = (4 + N_TOKENS - 1) * 9 * 4
BUDGETS = ("--vram-cache", "20slots", "--host-pool", "40slots", "--device", "cpu")


class Written(NamedTuple):
    """What a run left beside its text."""

    err: str
    stats: dict[str, Any]
    path: Path
    heat: Path
    trace: Path


def generated(manifest: Path, root: Path, *flags: object) -> Written:
    paths = root / "s.json", root / "h.json", root / "t.safetensors"
    outputs = zip(("--stats-json", "--heat-out", "--trace-out"), paths, strict=True)
    given = [part for pair in outputs for part in pair]
    done = ran("generate", "-m", manifest, "--ids", PROMPT, "-n", N_TOKENS, *BUDGETS, *given, *flags)
    return Written(done.err, json.loads(paths[0].read_text()), *paths)


@pytest.fixture(scope="module")
def plain(extractions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Written:
    return generated(extractions["tiny-k3.1"], tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def tuned(extractions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Written:
    flags = ("--exact-prefill", "--prefetch", 2, "--tier-cap", "A=1", "--require-direct", "--verify-reads", 0, "--cold")
    return generated(extractions["tiny-k3.1"], tmp_path_factory.mktemp("tuned"), *flags)


def test_the_document_of_a_run_is_one_that_bench_compares_with(plain: Written, extractions: dict[str, Path]) -> None:
    document = read_bench(plain.path)
    (repeat,) = document["repeats"]
    assert repeat["ids_xxh3_128"] == ids_digest(repeat["ids"]) and len(repeat["ids"]) == N_TOKENS and repeat["prompt_ids"] == [5, 6, 7, 8]
    assert document["manifest"]["generation"] == load_manifest(extractions["tiny-k3.1"] / "manifest.yaml").generation
    assert document["device"]["kind"] == "cpu" and document["failure"] is None and document["command"][:2] == ["krun", "generate"]
    effective = document["configurations"]["A"]["effective"]
    assert all(line in plain.err.splitlines() for line in effective)
    assert "kernels: plain torch, float32: the CPU's only one" in effective
    assert outputs_of(document["repeats"])[0].ids == repeat["ids"]


def test_a_step_s_time_is_divided_without_gap_or_overlap(plain: Written) -> None:
    stats = plain.stats["repeats"][0]["stats"]
    parts = [stats["token_time"][name] for name in ("wait_s", "upload_wait_s", "gpu_s", "host_s")]
    assert sum(parts) == pytest.approx(1 / stats["steady_decode_tok_per_s"]) and min(parts) >= 0
    assert stats["token_time"]["store_host_s"] <= stats["token_time"]["host_s"]
    kinds = [kind for kind, _ in time_bar(plain.stats["repeats"][0]).parts]
    assert kinds == ["waiting for drives", "uploads", "GPU", "host", "rest"]


def test_samples_follow_the_drives_token_by_token(plain: Written) -> None:
    stats = plain.stats["repeats"][0]["stats"]
    samples = stats["samples"]
    assert len(samples) == N_TOKENS and samples[0] == {"t_s": 0.0, "read_bytes": [0]}
    assert samples[-1]["read_bytes"] == [stats["expert_read_bytes"]["decode"]] and samples[-1]["read_bytes"][0] > 0
    (series,) = rate_series(plain.stats["repeats"][0])
    assert sum((end - begin) * rate for begin, end, rate in series.intervals) == pytest.approx(stats["expert_read_bytes"]["decode"])


def test_tiers_drives_and_layers_add_up_to_the_phase(plain: Written) -> None:
    stats = plain.stats["repeats"][0]["stats"]
    for name, phase in stats["phases"].items():
        for group in (stats["tiers"].values(), stats["drives"]):
            assert sum(of[name]["read_bytes"] for of in group) == phase["read_bytes"] > 0
            assert sum(of[name]["n_reads"] for of in group) == phase["n_reads"]
            assert sum(of[name]["share_of_being_last"] for of in group) == pytest.approx(1)
        layers = phase["by_layer"]
        assert list(layers) == [str(n) for n in range(1, 10)]
        assert sum(of["device_hits"] for of in layers.values()) == phase["n_device_hits"]
        assert sum(sum(of.values()) for of in layers.values()) == phase["n_experts_used"]
    busy = stats["drives"][0]["decode"]
    assert busy["bytes_per_s_while_busy"] == pytest.approx(busy["read_bytes"] / busy["busy_s"])


def test_heat_and_trace_hold_every_use_of_prompt_and_decode(plain: Written) -> None:
    g = load_geometry("tiny")
    heat, trace = read_heat(plain.heat, g), read_trace(plain.trace, g)
    assert trace.shape == (4 + N_TOKENS - 1, 9, 4) and heat.sum() == N_USES
    counted = np.zeros_like(heat)
    for layer in range(9):
        np.add.at(counted[layer + 1], trace[:, layer].ravel(), 1)
    assert np.array_equal(heat, counted)
    decode = plain.stats["repeats"][0]["stats"]["phases"]["decode"]
    n_needed = len({(layer, expert) for token in trace[4:] for layer in range(9) for expert in token[layer]})
    assert decode["n_distinct_experts"] == n_needed


def test_the_prompt_s_experts_are_those_that_decode_arithmetic_chooses(plain: Written, tuned: Written) -> None:
    assert plain.stats["repeats"][0]["ids"] == tuned.stats["repeats"][0]["ids"]
    assert np.array_equal(*(read_trace(written.trace, load_geometry("tiny")) for written in (plain, tuned)))


def test_every_flag_shows_in_the_effective_configuration(plain: Written, tuned: Written) -> None:
    shown = ("at most 1 request in flight on tier A", "(required)", "records not hashed", "decode arithmetic", "cold: ")
    assert all(part in tuned.err and part not in plain.err for part in shown)
    assert "prefetch 2 experts" in tuned.err
    assert f"at most {N_TOKENS} tokens; the likeliest token each time" in plain.err
    stats = tuned.stats["repeats"][0]["stats"]["phases"]["decode"]
    assert stats["n_prefetch_issued"] == sum(stats[f"n_prefetch_{name}"] for name in ("used", "cancelled", "wasted")) > 0
    # What measured best is the default: on a CPU that is none.
    is_on_gpu = plain.stats["repeats"][0]["stats"]["device"].startswith("cuda")
    assert f"prefetch {2 if is_on_gpu else 0} experts" in plain.err
    assert (plain.stats["repeats"][0]["stats"]["phases"]["decode"]["n_prefetch_issued"] > 0) == is_on_gpu
    assert f"{stats['n_prefetch_issued']} prefetched (" in tuned.err


def test_a_tier_s_cap_holds_back_its_reads(extractions: dict[str, Path]) -> None:
    most = []
    for caps in ({}, {"A": 1}):
        options = Options(device="cpu", vram_cache="4slots", host_pool="16slots", tier_caps=caps)
        with Engine(extractions["tiny-k3.1"], options, on_remark=lambda _: None) as engine:
            scheduler, n_seen = engine.store._scheduler, [0]
            starts = scheduler.starts

            def watched(now: float, starts: Any = starts, scheduler: Any = scheduler, n_seen: list[int] = n_seen) -> Any:
                begun = starts(now)
                n_seen.append(scheduler.n_in_flight)
                return begun

            scheduler.starts = watched  # type: ignore[method-assign]
            engine.prompt([5, 6, 7, 8])
            most.append(max(n_seen))
    assert most[0] > 1 and most[1] == 1


@pytest.mark.parametrize(
    ("flags", "code", "parts"),
    [
        (("--ids", "512"), 3, ("512", "0 to 511")),
        (("--ids", "1,2,3", "-c", "2"), 3, ("the prompt has 3 tokens, but the context is 2",)),
        (("-p", ""), 3, ("the prompt is empty",)),
        (("--ids", "1", "-c", "2049"), 2, ("-c 2049",)),
        (("--ids", "1", "--vram-cache", "0"), 2, ("--vram-cache",)),
        (("--ids", "1", "--host-pool", "much"), 2, ("--host-pool",)),
        (("--ids", "1", "--stats-json", "/proc/absent/s.json"), 2, ("--stats-json /proc/absent/s.json: there is no directory /proc/absent",)),
        (("--ids", "1", "--heat-out", "/proc/h.json"), 2, ("--heat-out /proc/h.json: no file can be made in /proc",)),
        (("--ids", "1", "--trace-out", "/proc"), 2, ("--trace-out /proc: is a directory",)),
        (("--ids", "1", "--heat-out", "{tmp}/x", "--trace-out", "{tmp}/x"), 2, ("--heat-out and --trace-out both name {tmp}/x",)),
        (("--ids", "1", "--tier-cap", "E=1"), 2, ("--tier-cap E=1: expected a tier, A, B, C, D",)),
        (("--ids", "1", "--tier-cap", "AB=1"), 2, ("--tier-cap AB=1",)),
        (("--ids", "1", "--tier-cap", "A=0"), 2, ("--tier-cap A=0",)),
        (("--ids", "1", "--tier-cap", "A=few"), 2, ("--tier-cap A=few",)),
        (("--ids", "1", "--tier-cap", "A=" + 5000 * "1"), 2, ("--tier-cap A=11",)),
        (("--ids", "1", "--tier-cap", "A=1", "--tier-cap", "A=2"), 2, ("--tier-cap A=2: tier A has one already",)),
        (("--ids", "1", "--tier-cap", "D=2"), 2, ("--tier-cap D=2: no drive of", "is in tier D; it has A")),
        (("--ids", "1", "--prefetch", "3"), 2, ("--prefetch",)),
        (("--ids", "1", "--seed", "0", "--top-p", "0.5"), 2, ("--top-p, --seed: without effect at temperature 0",)),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else None,
)
def test_what_cannot_be_is_refused_before_the_spine_is_read(
    prepared_copy: Path, tmp_path: Path, flags: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    """The spine is no spine: whoever opens it says so, with another code or text."""
    (prepared_copy / "spine.gguf").write_bytes(b"")
    outcome = krun("generate", "-m", prepared_copy, "--device", "cpu", *(flag.format(tmp=tmp_path) for flag in flags))
    refused(outcome, code, *(part.format(tmp=tmp_path) for part in parts))
    assert "spine.gguf" not in outcome.err


@pytest.mark.parametrize(("name", "what"), [("fifo", "is a FIFO, expected a file"), ("x" * 250, "the name is too long")])
def test_an_output_that_would_take_the_place_of_no_file_is_refused(prepared_copy: Path, tmp_path: Path, name: str, what: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    refused(krun("generate", "-m", prepared_copy, "--ids", 1, "--stats-json", tmp_path / name), 2, f"--stats-json {tmp_path / name}: {what}")


def test_a_link_to_itself_gives_way_to_an_output(extractions: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    ran("generate", "-m", extractions["tiny-k3.1"], "--ids", 1, "-n", 1, "--device", "cpu", "--heat-out", tmp_path / "loop")
    assert (tmp_path / "loop").is_file() and not (tmp_path / "loop").is_symlink()


def test_an_output_that_fails_costs_none_of_the_others(extractions: dict[str, Path], tmp_path: Path) -> None:
    kept = tmp_path / "s.json", tmp_path / "t.safetensors"
    heat = tmp_path / "away" / "h.json"
    heat.parent.mkdir()
    flags = ("--heat-out", heat, "--stats-json", kept[0], "--trace-out", kept[1])
    model = extractions["tiny-k3.1"]
    process = real_run(model, "", "-n", "400", *map(str, flags))
    assert process.stdout is not None and process.stdout.read(1)
    heat.parent.rmdir()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and "away" in said and all(path.exists() for path in kept), said


def real_run(model: Path, redirected: str, *flags: str) -> subprocess.Popen[str]:
    """Start krun generate as a shell does, with streams closed or redirected."""
    program = Path(sys.executable).with_name("krun")
    line = shlex.join([str(program), "generate", "-m", str(model), "--ids", "5", "--device", "cpu", *flags])
    # A test run under nohup ignores hang-ups, and its children would, too.
    restored = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execvp('bash', ['bash', '-c', sys.argv[1]])"
    command = [sys.executable, "-c", restored, f"exec {line} {redirected}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_run_without_standard_error_still_gives_its_text(extractions: dict[str, Path]) -> None:
    process = real_run(extractions["tiny-k3.1"], "2>&-", "-n", "2", "--json")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and len(json.loads(out)["ids"]) == 2


def test_a_full_standard_output_is_named(extractions: dict[str, Path]) -> None:
    process = real_run(extractions["tiny-k3.1"], ">/dev/full", "-n", "2")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and "krun: standard output: No space left on device; the result is lost" in said


def test_a_closed_terminal_ends_a_run_in_order(extractions: dict[str, Path]) -> None:
    process = real_run(extractions["tiny-k3.1"], "", "-n", "2000")
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.rstrip().endswith("krun: interrupted; what was finished stays, and nothing half-written is left")


def test_no_file_is_left_by_a_run_that_is_refused(prepared_copy: Path, tmp_path: Path) -> None:
    (prepared_copy / "spine.gguf").write_bytes(b"")
    folder = tmp_path / "out"
    folder.mkdir()
    outcome = krun("generate", "-m", prepared_copy, "--ids", "1", "--device", "cpu", "--heat-out", folder / "h.json")
    assert outcome.code == DamagedDataError.exit_code and not list(folder.iterdir())


def test_direct_reads_can_be_required() -> None:
    refuse_buffered({"/a (tier A)": ReadMode(True)})
    with pytest.raises(UsageError, match=r"--require-direct: /b \(tier C\) would be read buffered \(asked for\); leave the flag out"):
        refuse_buffered({"/a (tier A)": ReadMode(True), "/b (tier C)": BUFFERED})


@pytest.mark.parametrize("kind", ["flipped", "cut short"])
def test_the_last_copy_failing_in_mid_run_ends_it_with_the_expert_s_name(prepared_copy: Path, kind: str) -> None:
    flags = ["--ids", PROMPT, "-n", "2000", "--device", "cpu", "--vram-cache", "1slots", "--host-pool", "1slots", "--verify-reads", "1"]
    program = Path(sys.executable).with_name("krun")
    arguments = [program, "generate", "-m", prepared_copy, *flags]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stdout is not None and process.stdout.read(1)
        for path in (prepared_copy / "experts").glob("L5-*.bin"):
            if kind == "flipped":
                with path.open("r+b") as file:
                    file.seek(4000)
                    file.write(bytes(255 - byte for byte in path.read_bytes()[4000:4001]))
            else:
                os.truncate(path, 5000)
        _, err = process.communicate(timeout=100)
    assert process.returncode == DamagedDataError.exit_code, err
    last = err.splitlines()[-1]
    assert last.startswith("krun: layer 5 expert ") and "no readable copy is left (tried " in last and "Traceback" not in err


def test_a_live_line_runs_on_a_terminal_and_leaves_the_result_alone(extractions: dict[str, Path]) -> None:
    terminal, end = pty.openpty()
    seen = bytearray()

    def read() -> None:
        try:
            while piece := os.read(terminal, 4096):
                seen.extend(piece)
        except OSError:
            return

    program = Path(sys.executable).with_name("krun")
    arguments = [program, "generate", "-m", extractions["tiny-k3.1"], "--ids", PROMPT, "-n", "5", *BUDGETS, "--json"]
    reader = threading.Thread(target=read)
    reader.start()
    process = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=end, timeout=100)
    os.close(end)
    reader.join()
    os.close(terminal)
    assert process.returncode == 0 and len(json.loads(process.stdout)["ids"]) == 5
    text = seen.decode()
    before, _, line = text.partition(" tok  ")
    assert "\r\x1b[2Kprompt 0 of 9 layers  0%\r\x1b[2K" in before and "VRAM" not in before and "VRAM" in line
    assert text.endswith("\r\x1b[2K"), "the line is gone at the end"


class Stream:
    def __init__(self, is_terminal: bool, fd: int = -1) -> None:
        self.text, self._is_terminal, self._fd = "", is_terminal, fd

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


@pytest.mark.parametrize(
    ("out", "err", "is_text", "expected"),
    [(True, True, True, False), (True, True, False, True), (False, True, True, True), (False, False, True, False), (True, False, False, False)],
)
def test_a_live_line_is_shown_only_where_it_meets_no_text(
    monkeypatch: pytest.MonkeyPatch, out: bool, err: bool, is_text: bool, expected: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", Stream(out))
    monkeypatch.setattr(sys, "stderr", Stream(err))
    assert can_show_live(is_text_on_stdout=is_text) is expected


@pytest.fixture
def terminal() -> Iterator[int]:
    """A terminal of twelve columns."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (3, 12))
    yield theirs
    os.close(ours)
    os.close(theirs)


def test_a_live_line_is_no_longer_than_the_terminal(terminal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    err = Stream(True, terminal)
    monkeypatch.setattr(sys, "stderr", err)
    LiveLine(is_shown=True).show("1 token, 10 tok/s")
    assert err.text == "\r\x1b[2K1 token, 10"


def test_remarks_stand_above_the_live_line(terminal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    err = Stream(True, terminal)
    monkeypatch.setattr(sys, "stderr", err)
    shown, hidden = LiveLine(is_shown=True), LiveLine(is_shown=False)
    shown.show("1 tok")
    shown.note("a drive is slow")
    shown.end()
    assert err.text == "\r\x1b[2K1 tok\r\x1b[2Ka drive is slow\n1 tok\r\x1b[2K"
    err.text = ""
    hidden.show("1 tok")
    hidden.note("a drive is slow")
    hidden.end()
    assert err.text == "a drive is slow\n"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (torch.AcceleratorError("an illegal memory access was encountered\nmore\nlines"), "the GPU failed while running: an illegal memory access"),
        (RuntimeError("CUDA error: device-side assert triggered\nCompile with"), "the GPU failed while running: CUDA error: device-side assert"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "the GPU's memory ran out: CUDA out of memory. Tried to allocate; ask"),
    ],
)
def test_a_gpu_that_fails_in_mid_run_is_told_in_one_sentence(
    error: RuntimeError, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(with_faults_told(fail))
    monkeypatch.setattr(sys, "argv", ["krun"])
    assert run_command(app, name="krun") == DeviceError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"krun: {text}")


def test_other_faults_of_ours_keep_their_stack_trace() -> None:
    def fail() -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        with_faults_told(fail)()


def test_a_missing_gpu_ends_the_real_command_with_its_code(extractions: dict[str, Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    outcome = command("krun", "generate", "-m", extractions["tiny-k3.1"], "--ids", "1", "--device", "cuda")
    assert outcome.code == DeviceError.exit_code and outcome.err.startswith("krun: --device cuda: ")


def test_a_kernel_that_is_wrong_ends_the_run_by_name() -> None:
    facts = KernelFacts("cuda", True, "nvcc is not on the PATH", None)
    right = [KernelTest("Q8_0 product", True, 0.1), KernelTest("bfloat16 product", True, 0.1)]
    text = kernels_text(facts, right)
    assert text.startswith("Triton; the CUDA C++ kernels do not run: nvcc is not on the PATH; self-test: Q8_0 product right")
    with pytest.raises(DeviceError, match=r"kernel self-test: .*bfloat16 product WRONG.*do not run on this GPU"):
        kernels_text(facts, [right[0], KernelTest("bfloat16 product", False, 0.1)])
    assert checked_kernels(torch.device("cpu"), pytest.fail) == "plain torch, float32: the CPU's only one"


def gpu_with(*processes: GpuProcess) -> GpuFacts:
    return GpuFacts("H", (9, 0), ("sm_90",), 96 * 10**9, 20 * 10**9, processes, "0000:01:00.0", None, 0)


def test_a_second_run_learns_who_has_the_gpu_s_memory() -> None:
    text = who_has_the_gpu(gpu_with(GpuProcess(123, "python", 70 * 10**9)))
    assert text.startswith("GPU: 20GB free of 96GB; also there: python (process 123, 70GB)") and "a second run gets what is left" in text
    assert "cannot be seen from here" in who_has_the_gpu(gpu_with())
    text = no_room_for_spine(Room(20 * 10**9, 4 * 10**9), 61 * 10**9, torch.device("cuda"))
    assert text.startswith("the spine takes 61GB on cuda, but 20GB are free, of which 4GB stay free; use a card with more memory")


def test_budgets_of_one_memory_do_not_count_it_twice() -> None:
    g, record = load_geometry("k3.1"), 17547264
    room = Room(100 * record, 20 * record)
    apart = budgets_of("60slots", "60slots", g, room, room, is_shared=False)
    assert (apart.vram.n_slots, apart.host.n_slots) == (60, 60) and "351MB of memory stay free" in str(apart.host)
    with pytest.raises(DeviceError, match=r"--host-pool 60slots: 1.05GB asked for, but 351MB are to be had, and 351MB of 702MB stay free"):
        budgets_of("60slots", "60slots", g, room, room, is_shared=True)
    assert budgets_of("60slots", "20slots", g, room, room, is_shared=True).host.n_slots == 20


def test_auto_is_a_quarter_of_what_there_is() -> None:
    g, record = load_geometry("k3.1"), 17547264
    budgets = budgets_of("auto", "auto", g, Room(80 * record, 0), Room(400 * record, 0), is_shared=False)
    assert (budgets.vram.n_slots, budgets.host.n_slots) == (20, 100)


def test_host_memory_is_what_cgroups_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.start.available_host_bytes", lambda: 10**9)
    assert host_room() == Room(10**9, 250_000_000)


def test_a_drafter_changes_no_token_and_is_told_and_counted(extractions: dict[str, Path], tmp_path: Path) -> None:
    def run(name: str, *flags: str) -> tuple[dict[str, Any], str, bytes, bytes]:
        model, heat, trace = extractions["tiny-k3.1"], tmp_path / f"{name}.json", tmp_path / f"{name}.safetensors"
        given = ("--ids", "5,6,7,5,6,7,5,6", "-n", 24, "--json", "--heat-out", heat, "--trace-out", trace)
        outcome = succeed("krun", "generate", "-m", model, "--device", "cpu", *given, *flags)
        return json.loads(outcome.out), outcome.err, heat.read_bytes(), trace.read_bytes()

    plain, _, *logs = run("plain")
    drafted, notes, *logs_of_drafted = run("drafted", "--drafter", "ngram", "--draft-gate", "0.5")
    assert drafted["ids"] == plain["ids"]
    assert "drafter ngram, gate 0.5" in notes
    assert plain["stats"]["drafting"] is None and drafted["stats"]["drafting"]["n_asked"] > 0
    assert logs_of_drafted == logs


def test_what_there_is_one_of_is_told_in_the_singular(extractions: dict[str, Path], tmp_path: Path) -> None:
    model, files = extractions["tiny-k3.1"], ("--state-out", tmp_path / "state", "--heat-out", tmp_path / "heat", "--trace-out", tmp_path / "trace")
    first = ran("generate", "-m", model, "--ids", 5, "-n", 9, "-c", 1, "--device", "cpu", *files)
    again = ran("generate", "-m", model, "--ids", "5,6", "-n", 2, "--device", "cpu", "--state-in", tmp_path / "state", "--drafter", "ngram")
    for part in ("at most 1 token, then the context is full;", "the state after 1 token,", "the experts of 1 token\n", "1 token, ended by context"):
        assert part in first.err, first.err
    assert "state: 1 token in prompt arithmetic" in again.err and "; 1 is new" in again.err and "2 tokens, ended by" in again.err, again.err


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--draft-gate", "0.5"), "--draft-gate: without effect"),
        (("--drafter", "ngram", "--draft-gate", "often"), "--draft-gate"),
        (("--drafter", "/nowhere"), "/nowhere"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused_before_anything_is_loaded(extractions: dict[str, Path], flags: tuple[str, ...], what: str) -> None:
    outcome = command("krun", "generate", "-m", extractions["tiny-k3.1"], "--ids", "5", *flags)
    assert outcome.code in (2, 3) and what in outcome.err
