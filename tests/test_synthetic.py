"""krun bench --synthetic: the engine without weights on directories that stand for drives; its numbers, its files, and what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from conftest import Outcome
from inside import krun, ran, refused

from layout.sizes import format_size
from manifests.errors import Interrupted
from manifests.geometry import load_geometry
from runtime.bench.rig import Rig
from runtime.bench.routing import read_trace, write_trace
from runtime.bench.synthetic import EmulatedDrive, random_spine, record_name, records_removed_afterwards, spine_bytes

N_FILES = 6
SMALL = ("--device", "cpu", "--expert-files", N_FILES, "--vram-cache", "20slots", "--host-pool", "30slots", "-n", 4, "--warm", 1)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    return a, b


def bench(*arguments: object) -> Outcome:
    return ran("bench", "--synthetic", "tiny", *SMALL, *arguments)


def stats_of(*arguments: object) -> dict[str, Any]:
    return json.loads(bench("--json", *arguments).out)["repeats"][0]["stats"]


def test_drives_that_do_not_answer_in_time_have_no_efficiency(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATIENCE_S", "_TICK_S"):
        monkeypatch.setattr(f"runtime.storage.flat_out.{name}", 0.0)
    assert stats_of("--dir", folders[0])["storage_efficiency"] is None
    assert "storage efficiency none" in bench("--dir", folders[0]).out


def test_a_small_geometry_gets_no_more_files_than_it_has_experts_unless_more_are_asked_for(folders: tuple[Path, Path]) -> None:
    flags = [flag for flag in SMALL if flag not in ("--expert-files", N_FILES)]
    done = ran("bench", "--synthetic", "tiny", *flags, "--dir", folders[0])
    assert "144 experts, 9 layers of 16, on 144 record files" in done.err and not list(folders[0].iterdir())


def test_a_run_says_what_it_emulates_and_what_came_of_it(folders: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = folders
    out, chart = tmp_path / "o.json", tmp_path / "c.svg"
    done = bench(
        "--dir", a, "--dir", f"{b}:0.02@0.5", "--routing", "zipf:1.5", "--rows", 3, "--prefetch", 1, "--seed", 9, "--out", out, "--chart", chart
    )
    document = json.loads(out.read_text())
    effective = document["configurations"]["A"]["effective"]
    assert all(line in done.err.splitlines() for line in effective)
    for part in (
        "geometry tiny over a random spine of 2.16MB, seed 9",
        f"144 experts, 9 layers of 16, on {N_FILES} record files of 9.79KB in each directory, those made are removed afterwards",
        f"{a} (tier A): as fast as it is, holds 100.0% of the experts; read ",
        f"{b} (tier B): slowed down to 20MB/s (emulated), holds 50.0% of the experts; read ",
        "device cpu, torch",
        "kernels: plain torch",
        "routing zipf:1.5; 4 steps counted after 1 to warm up, rows in each 3",
        "prefetch 1 expert of each layer, 95% of the guesses right (emulated); reads not hashed",
        "--vram-cache 20slots: 20 slots",
        "--host-pool 30slots: 30 slots",
    ):
        assert part in "\n".join(effective), part
    assert document["manifest"] is None and document["device"]["kind"] == "cpu" and document["command"][:2] == ["krun", "bench"]
    stats = document["repeats"][0]["stats"]
    assert len(stats["step_s"]) == 4 and len(stats["samples"]) == 5 and stats["phases"]["decode"]["n_prefetch_issued"] > 0
    assert stats["steady_decode_tok_per_s"] == pytest.approx(12 / sum(stats["step_s"]))
    parts = [stats["token_time"][name] for name in ("wait_s", "upload_wait_s", "gpu_s", "host_s")]
    assert sum(parts) == pytest.approx(sum(stats["step_s"]) / 4) and stats["host_ms_per_layer"] == pytest.approx(1e3 * parts[3] / 9)
    n_read = sum(drive["decode"]["read_bytes"] for drive in stats["drives"])
    assert n_read == stats["expert_read_bytes"]["decode"] == sum(tier["decode"]["read_bytes"] for tier in stats["tiers"].values()) > 0
    assert stats["storage_efficiency"] == pytest.approx(n_read / sum(stats["step_s"]) / stats["flat_out_bytes_per_s"])
    lines = done.out.splitlines()
    assert lines[0].startswith(f"{stats['steady_decode_tok_per_s']:.3f} tok/s") and lines[0].endswith("rows in it 3")
    assert any(f"storage efficiency {stats['storage_efficiency']:.3f} of" in line for line in lines)
    assert [drive["emulated_bytes_per_s"] for drive in stats["drives"]] == [None, 0.02e9]
    titles = [f"{a} (tier A)", f"{b} (tier B, emulated 20MB/s)"]
    assert [line.split(": ")[0] for line in lines[-2:]] == titles
    texts = [e.text for e in ElementTree.parse(chart).iter("{http://www.w3.org/2000/svg}text")]
    assert {"A 1", "waiting for drives", "host", *titles} <= set(texts)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return stats_of("--dir", tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    "flags", [("--vram-cache", "1slots", "--host-pool", "1slots"), ("--prefetch", 2, "--dir", "{b}:0.05@0.7"), ("--seed", 1)], ids=str
)
def test_no_setting_but_the_seed_changes_a_bit(folders: tuple[Path, Path], base: dict[str, Any], flags: tuple[object, ...]) -> None:
    a, b = folders
    stats = stats_of("--dir", a, *(str(flag).format(b=b) for flag in flags))
    is_same = "--seed" not in flags
    assert (stats["logits_digest"] == base["logits_digest"]) is is_same
    n_distinct = [run["phases"]["decode"]["n_distinct_experts"] for run in (stats, base)]
    assert (n_distinct[0] == n_distinct[1]) is is_same, "the routing is of the seed too"


def test_files_that_it_made_go_and_those_that_were_there_stay(folders: tuple[Path, Path]) -> None:
    a, b = folders
    (a / "mine.txt").write_text("mine")
    done = bench("--dir", a, "--dir", b, "--keep-files")
    names = {record_name(n) for n in range(N_FILES)}
    assert {p.name for p in a.iterdir()} == names | {"mine.txt"} and {p.name for p in b.iterdir()} == names and ", kept" in done.err
    assert len({(a / name).read_bytes() for name in names}) == N_FILES
    assert f"record files: {format_size(N_FILES * 9792)} of {format_size(N_FILES * 9792)}" in done.err
    (b / record_name(2)).unlink()
    before = {path: path.stat().st_mtime_ns for path in (*a.iterdir(), *b.iterdir())}
    done = bench("--dir", a, "--dir", b)
    assert {path: path.stat().st_mtime_ns for path in (*a.iterdir(), *b.iterdir())} == before
    assert f"{2 * N_FILES - 1} of {2 * N_FILES} were there" in done.err
    assert done.err.count("record files: ") == 1 and "record files: 9.79KB of 9.79KB" in done.err, "what was there is not told as written"


def test_records_of_another_seed_are_used_as_they_are_there_and_nothing_is_told_as_written(folders: tuple[Path, Path]) -> None:
    a, _ = folders
    bench("--dir", a, "--keep-files", "--seed", 1)
    before = {path: path.read_bytes() for path in a.iterdir()}
    done = bench("--dir", a, "--keep-files", "--seed", 2)
    assert f"all of {N_FILES} were there: records as they are there, whatever their seed; nothing was written" in done.err
    assert "record files: " not in done.err and {path: path.read_bytes() for path in a.iterdir()} == before


def test_files_go_whatever_the_end_is(tmp_path: Path) -> None:
    (tmp_path / record_name(0)).write_text("old")
    with pytest.raises(ValueError), records_removed_afterwards([tmp_path], 3) as n_there:
        assert n_there == 1
        (tmp_path / record_name(2)).write_text("new")
        raise ValueError
    assert [path.name for path in tmp_path.iterdir()] == [record_name(0)]


def test_a_second_run_in_the_same_directory_is_refused_and_removes_nothing(folders: tuple[Path, Path]) -> None:
    a, b = folders
    with records_removed_afterwards([a], N_FILES):
        (a / record_name(0)).write_text("the first one's")
        outcome = krun("bench", "--synthetic", "tiny", *SMALL, "--dir", b, "--dir", a)
        refused(outcome, 2, f"{a}: another bench uses this directory; wait for it, or name another")
        assert [path.name for path in a.iterdir()] == [record_name(0)] and not list(b.iterdir())
    with records_removed_afterwards([b, a], N_FILES) as n_there:
        assert n_there == 0, "both are free again"


def test_an_interrupted_run_leaves_no_file(folders: tuple[Path, Path]) -> None:
    a, _ = folders
    program = Path(sys.executable).with_name("krun")
    flags = [str(f) for f in SMALL if f not in ("-n", 4)]
    arguments = [program, "bench", "--synthetic", "tiny", *flags, "--dir", a, "-n", "2000"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        deadline = time.monotonic() + 60
        while not (a / record_name(N_FILES - 1)).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (a / record_name(N_FILES - 1)).exists()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == Interrupted.exit_code and "krun: interrupted" in err and "Traceback" not in err
    assert list(a.iterdir()) == []


def test_the_routing_of_a_real_run_is_followed(extractions: dict[str, Path], folders: tuple[Path, Path], tmp_path: Path) -> None:
    """The trace that generate wrote: its tokens over and over, so that each expert is used as often as it says."""
    trace = tmp_path / "t.safetensors"
    run = ("--ids", "5,6,7", "-n", 3, "--device", "cpu", "--trace-out", trace)
    ran("generate", "-m", extractions["tiny-k3.1"], *run)
    tokens = read_trace(trace, load_geometry("tiny"))
    assert len(tokens) == 5
    stats = stats_of("--dir", folders[0], "--routing", f"trace:{trace}")
    counted = tokens[1:5]
    used = {(layer, expert) for token in counted for layer in range(9) for expert in token[layer].tolist()}
    assert stats["phases"]["decode"]["n_distinct_experts"] == len(used)
    write_trace(trace, np.repeat(tokens[:1], 5, axis=0), {})
    stats = stats_of("--dir", folders[0], "--routing", f"trace:{trace}", "--vram-cache", "36slots")
    assert stats["phases"]["decode"]["n_device_hits"] == 4 * 36 and stats["expert_read_bytes"]["decode"] == 0


def test_a_drive_that_is_slowed_down_is_so_flat_out_too(folders: tuple[Path, Path]) -> None:
    a, _ = folders
    fast, slow = EmulatedDrive(a, None, 1.0), EmulatedDrive(a, 2e6, 1.0)
    rig = Rig(load_geometry("tiny"), torch.device("cpu"), [fast], N_FILES)
    rates = [rig.flat_out([drive], seconds=0.1)[0] for drive in (fast, slow)]
    assert rates[1] < 8e6 < rates[0]


def test_the_room_of_a_spine_is_known_before_it_is_made() -> None:
    g = load_geometry("tiny")
    made = random_spine(g, torch.device("cpu"), seed=0).n_bytes
    assert 0.9 * made < spine_bytes(g) <= made
    assert 60e9 < spine_bytes(load_geometry("k3.1")) < 62e9


@pytest.mark.parametrize(
    ("flags", "code", "parts"),
    [
        ((), 2, ("--dir is missing",)),
        (("--dir", "{a}/absent"), 2, ("--dir {a}/absent: there is no directory {a}/absent",)),
        (("--dir", "{a}", "--dir", "{a}/"), 2, ("is given twice",)),
        (("--dir", "{a}:fast"), 2, ("--dir {a}:fast: expected DIR[:GB_PER_S][@SHARE]",)),
        (("--dir", "{a}:-3"), 2, ("--dir {a}:-3: expected DIR[:GB_PER_S][@SHARE]",)),
        (("--dir", "{a}:1e-300"), 2, ("--dir {a}:1e-300: expected DIR[:GB_PER_S][@SHARE]",)),
        (("--dir", "{a}:0.0009"), 2, ("expected a rate from 0.001 GB/s, below 1000",)),
        (("--dir", "{a}:1_0"), 2, ("--dir {a}:1_0: expected",)),
        (("--dir", "{a}:\u0661"), 2, (":\u0661: expected DIR",)),
        (("--dir", "{a}:nan"), 2, (":nan: expected DIR",)),
        (("--dir", "{a}:"), 2, ("--dir {a}:: expected DIR",)),
        (("--dir", "{a}@1_0"), 2, ("@1_0: expected DIR",)),
        (("--dir", "{a}@0"), 2, ("a share above 0, at most 1",)),
        (("--dir", "{a}", "--seed", "9223372036854775808"), 2, ("--seed",)),
        (("--dir", "{a}@0.5"), 2, ("the first two directories must hold every expert",)),
        (("--dir", "{a}", "--routing", "zipf:x"), 2, ("--routing zipf:x",)),
        (("--dir", "{a}", "--routing", "gauss"), 2, ("--routing gauss: expected uniform, zipf",)),
        (("--dir", "{a}", "--routing", "trace:{a}/none"), 3, ("{a}/none: is missing or cannot be opened",)),
        (("--dir", "{a}", "--expert-files", "145"), 2, ("--expert-files 145: there are no more than 144",)),
        (("--dir", "{a}", "--rows", "17"), 2, ("--rows",)),
        (("--dir", "{a}", "-n", "2047"), 2, ("make a text of 2049 tokens; this model takes at most 2048",)),
        (("--dir", "{a}", "--vram-cache", "0"), 2, ("--vram-cache",)),
        (("--dir", "{a}", "--device", "tpu"), 2, ("--device tpu",)),
        (("--dir", "{a}", "--out", "{a}"), 2, ("--out {a}: is a directory",)),
        (("--dir", "{a}", "--repeat", "3"), 2, ("--repeat: without effect with --synthetic",)),
        (("--dir", "{a}", "--cold", "-p", "x", "--pair", "--cold"), 2, ("--prompt, --cold, --pair: without effect with --synthetic",)),
        (("--dir", "{a}", "--", "--chunk", "3"), 2, ("-- FLAGS: without effect with --synthetic",)),
        (("--dir", "{a}", "-m", "m"), 2, ("exactly one of -m MANIFEST and --synthetic",)),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else None,
)
def test_what_cannot_be_is_refused_and_nothing_is_made(folders: tuple[Path, Path], flags: tuple[str, ...], code: int, parts: tuple[str, ...]) -> None:
    a, _ = folders
    outcome = krun("bench", "--synthetic", "tiny", *SMALL[:-2], *(flag.format(a=a) for flag in flags))
    refused(outcome, code, *(part.format(a=a) for part in parts))
    assert list(a.iterdir()) == []


def test_a_geometry_that_is_none_is_refused() -> None:
    refused(krun("bench", "--synthetic", "k9", *SMALL), 3, "geometry k9: neither one of k3, k3.1, tiny nor a file")


def test_a_record_file_of_another_model_is_refused_and_stays(folders: tuple[Path, Path]) -> None:
    a, _ = folders
    (a / record_name(0)).write_bytes(b"other")
    refused(krun("bench", "--synthetic", "tiny", *SMALL, "--dir", a), 3, f"{a / record_name(0)}: has 5 bytes, expected 9792")
    assert [path.name for path in a.iterdir()] == [record_name(0)]
