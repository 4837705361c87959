"""Ctrl-C at many instants: exit code 130, nothing half-written, and the same command again ends as if nothing had happened."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import DATA, Outcome
from inside import kprep, prepared, ran
from safetensors.numpy import save_file

from layout.checkpoint import open_checkpoint
from manifests.errors import BadInputError
from manifests.geometry import load_geometry
from manifests.load import load_manifest

N_LAYERS, N_EXPERTS = 40, 64
N_RECORDS = (N_LAYERS - 1) * N_EXPERTS


def interrupt(is_at_work: Callable[[int], bool], name: str, *arguments: object, wait_s: float = 0.0, n_times: int = 1) -> Outcome:
    """Start a command, press Ctrl-C `wait_s` after it is seen at work, and return how it ended.

    is_at_work  called with the process id until it says yes; the command must not end before
    """
    program = Path(sys.executable).with_name(name)
    process = subprocess.Popen([program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not is_at_work(process.pid):
            assert process.poll() is None, f"ended before it was seen at work: {process.communicate()}"
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(wait_s)
        for _ in range(n_times):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.001)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    return Outcome(process.returncode, out, err)


def is_interrupted(outcome: Outcome) -> bool:
    return outcome.code == 130 and "interrupted" in outcome.err and "Traceback" not in outcome.err


def exists(path: Path) -> Callable[[int], bool]:
    return lambda _: path.exists()


def reads_from(directory: Path) -> Callable[[int], bool]:
    """The process has a file of the directory open."""

    def is_open(pid: int) -> bool:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if Path(os.readlink(link)).parent == directory:
                    return True
            except OSError:
                # Closed in between.
                continue
        return False

    return is_open


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def partials(*directories: Path) -> list[Path]:
    return [path for directory in directories for path in directory.rglob("*.partial")]


@pytest.fixture(scope="module")
def geometry_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny geometry with more layers and experts, so that every command takes a while."""
    values = load_geometry("tiny").to_dict()
    values |= {"n_layers": N_LAYERS, "n_experts": N_EXPERTS, "full_attention_layers": list(range(3, N_LAYERS, 4))}
    path = tmp_path_factory.mktemp("geometry") / "larger.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def checkpoint(geometry_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("larger") / "checkpoint"
    prepared("make-tiny", made, "--geometry", geometry_file)
    return made


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Path:
    """The checkpoint, extracted without interruption; not to be changed."""
    out = checkpoint.parent / "whole"
    prepared("extract", checkpoint, out)
    return out


@pytest.fixture(scope="module")
def good(whole: Path) -> dict[str, bytes]:
    """What every expert's file must have."""
    return files_of(whole / "experts")


def test_make_tiny_leaves_no_checkpoint_that_could_pass_for_a_whole_one(geometry_file: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "made"
    arguments = ("make-tiny", out, "--geometry", geometry_file)
    assert is_interrupted(interrupt(exists(out / "model-00005-of-000043.safetensors"), "kprep", *arguments))
    assert partials(tmp_path) == []
    with pytest.raises(BadInputError, match=r"model\.safetensors\.index\.json|config\.json"):
        open_checkpoint(out)
    good = files_of(checkpoint)
    assert all(good[name] == data for name, data in files_of(out).items())
    shutil.rmtree(out)
    prepared(*arguments)
    assert files_of(out) == good


# More than one Ctrl-C meets the cleaning up, which has one kind for the spine and one for the experts.
@pytest.mark.parametrize(
    ("sign", "wait_s", "n_times"),
    [
        ("spine.gguf.partial", 0.0, 1),
        ("spine.gguf.partial", 0.0, 3),
        ("experts/L1-E0.bin", 0.0, 1),
        ("experts/L9-E0.bin", 0.001, 1),
        ("experts/L9-E0.bin", 0.001, 3),
        ("experts/L39-E40.bin", 0.002, 1),
    ],
)
def test_extract(checkpoint: Path, whole: Path, good: dict[str, bytes], tmp_path: Path, sign: str, wait_s: float, n_times: int) -> None:
    out = tmp_path / "out"
    assert is_interrupted(interrupt(exists(out / sign), "kprep", "extract", checkpoint, out, wait_s=wait_s, n_times=n_times))
    assert partials(out) == []
    assert not (out / "manifest.yaml").exists()
    if (out / "experts").exists():
        assert all(good[name] == data for name, data in files_of(out / "experts").items())
    if n_times == 1:
        prepared("extract", checkpoint, out)
        assert files_of(out / "experts") == good
        assert (out / "spine.gguf").read_bytes() == (whole / "spine.gguf").read_bytes()
        assert files_of(out / "tokenizer") == files_of(whole / "tokenizer")
        assert not (out / "extract.journal").exists()


def test_extract_killed_outright_goes_on_too(checkpoint: Path, good: dict[str, bytes], tmp_path: Path) -> None:
    """Not even a chance to clean up: what is left under partial names is taken over by the next run."""
    out = tmp_path / "out"
    program = Path(sys.executable).with_name("kprep")
    for sign in ("extract.journal", "spine.gguf.partial", "experts/L20-E0.bin"):
        process = subprocess.Popen([program, "extract", checkpoint, out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (out / sign).exists():
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
        process.wait()
        assert not (out / "manifest.yaml").exists()
    # As if it had been killed while it wrote its journal.
    shutil.rmtree(out)
    out.mkdir()
    (out / "extract.journal").touch()
    prepared("extract", checkpoint, out)
    assert files_of(out / "experts") == good
    assert [path for path in partials(out) if not path.name.startswith(".probe-")] == []


def copy_of(whole: Path, home: Path) -> Path:
    """A manifest of its own over the same files: place changes nothing else of a model."""
    home.mkdir()
    for path in whole.iterdir():
        (home / path.name).symlink_to(path)
    (home / "manifest.yaml").unlink()
    return Path(shutil.copyfile(whole / "manifest.yaml", home / "manifest.yaml"))


@pytest.mark.parametrize(("sign", "n_times"), [("a/L1-E0.bin", 1), ("a/L20-E9.bin", 1), ("a/L20-E9.bin", 3), ("a/L39-E60.bin", 1)])
def test_place(whole: Path, good: dict[str, bytes], tmp_path: Path, sign: str, n_times: int) -> None:
    manifest = copy_of(whole, tmp_path / "model")
    former = manifest.read_bytes()
    # On one device: the base is split over both.
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    arguments = ("place", manifest, "--tier", f"A={a}", "--tier", f"B={b}", "--limit", "B=2slots")
    assert is_interrupted(interrupt(exists(tmp_path / sign), "kprep", *arguments, n_times=n_times))
    assert partials(tmp_path / "model", a, b) == []
    assert manifest.read_bytes() == former
    prepared("verify-hashes", manifest)
    if n_times > 1:
        return
    prepared(*arguments)
    drives = load_manifest(manifest).drives
    assert sum(int(drive.holds.sum()) for drive in drives) == N_RECORDS
    assert all(good[name] == data for drive in (a, b) for name, data in files_of(drive).items() if name.endswith(".bin"))
    prepared("verify-hashes", manifest)


def test_place_again_after_one_that_was_interrupted_keeps_the_former_placement_true(whole: Path, tmp_path: Path) -> None:
    manifest = copy_of(whole, tmp_path / "model")
    for name in "ab":
        (tmp_path / name).mkdir()
    prepared("place", manifest, "--tier", f"A={tmp_path / 'a'}")
    former = manifest.read_bytes()
    move = ("place", manifest, "--tier", f"A={tmp_path / 'b'}")
    assert is_interrupted(interrupt(exists(tmp_path / "b" / "L5-E5.bin"), "kprep", *move))
    assert manifest.read_bytes() == former
    prepared("verify-hashes", manifest)
    prepared(*move)
    assert load_manifest(manifest).generation == 3
    assert files_of(tmp_path / "b").keys() == files_of(tmp_path / "a").keys()


def test_measuring_drives_leaves_no_trial_files(whole: Path, tmp_path: Path) -> None:
    drive = tmp_path / "a"
    drive.mkdir()
    arguments = ("kprep", "place", whole / "manifest.yaml", "--tier", f"A={drive}", "--measure-drives", "--dry-run")
    assert is_interrupted(interrupt(reads_from(drive), *arguments, wait_s=0.3))
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.1])
def test_verify_hashes(whole: Path, wait_s: float) -> None:
    outcome = interrupt(reads_from(whole / "experts"), "kprep", "verify-hashes", whole / "manifest.yaml", wait_s=wait_s)
    assert is_interrupted(outcome)
    assert outcome.out == ""
    assert partials(whole) == []


@pytest.mark.parametrize("wait_s", [0.0, 0.4])
def test_generate(whole: Path, wait_s: float) -> None:
    arguments = ("krun", "generate", "-m", whole, "--ids", "1,2,3", "-n", "2000", "--device", "cpu")
    outcome = interrupt(reads_from(whole / "experts"), *arguments, wait_s=wait_s)
    assert is_interrupted(outcome)
    assert "ended by" not in outcome.err


@pytest.mark.parametrize("wait_s", [0.0, 0.4])
def test_score(whole: Path, tmp_path: Path, wait_s: float) -> None:
    save_file({"long": np.arange(1500) % 480, "short": np.arange(5)}, tmp_path / "ids.safetensors")
    out = tmp_path / "logits.safetensors"
    arguments = ("score", "-m", whole, "--ids-file", tmp_path / "ids.safetensors", "--out", out, "--device", "cpu")
    assert is_interrupted(interrupt(reads_from(whole / "experts"), "krun", *arguments, "--key", "long", wait_s=wait_s))
    assert sorted(tmp_path.iterdir()) == [tmp_path / "ids.safetensors"]
    if wait_s:
        ran(*arguments, "--key", "short")
        assert out.exists()


def test_a_request_to_end_is_an_interruption_too(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [Path(sys.executable).with_name("kprep"), "extract", checkpoint, out], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (out / "experts" / "L2-E0.bin").exists():
        assert process.poll() is None
        time.sleep(0.001)
    process.terminate()
    outcome = Outcome(0, *process.communicate(timeout=60))._replace(code=process.returncode)
    assert is_interrupted(outcome)
    assert partials(out) == []
    assert kprep("verify-hashes", out).code == 3


@pytest.mark.parametrize("program", ["kprep", "krun"])
@pytest.mark.parametrize("delay", [0.02, 0.1, 0.3])
def test_an_interrupt_while_the_command_is_still_loading_leaves_no_stack_trace(program: str, delay: float) -> None:
    package, arguments = ("prep", ["doctor"]) if program == "kprep" else ("runtime", ["generate", "-m", str(DATA), "-p", "x"])
    # What the installed command does; before its first line the interpreter is on its own.
    command = f"import sys; from {package}.entry import main; print('begun', flush=True); sys.exit(main())"
    process = subprocess.Popen([sys.executable, "-c", command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    # On a fast machine it may have ended by itself.
    assert process.returncode in (130, 0, 1, 3) and "Traceback" not in err
    assert process.returncode != 130 or "interrupted" in err
