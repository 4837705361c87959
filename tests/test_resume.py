"""An extraction that is killed, that runs out of room, that meets another one: it goes on, and ends with the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import DATA, command, succeed
from loop_mounts import mounted_ext4

from layout.drives import free_bytes
from manifests.geometry import load_geometry
from prep.extraction.journal import JOURNAL_NAME

CHECKPOINT = DATA / "tiny-k3.1"
N_KILLS = 50


def contents(out: Path, *directories: Path) -> dict[str, bytes]:
    """Return the bytes of everything that an extraction makes but the manifest, which holds dates."""
    roots = [out, *directories]
    files = [p for root in roots for p in root.rglob("*") if p.is_file() and p.name != "manifest.yaml"]
    return {str(p.relative_to(next(r for r in roots if p.is_relative_to(r)))): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("uninterrupted") / "out"
    succeed("kprep", "extract", CHECKPOINT, out)
    return contents(out)


def start(*arguments: object) -> subprocess.Popen[str]:
    program = Path(sys.executable).with_name("kprep")
    return subprocess.Popen([program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def kill_after_journal_lines(process: subprocess.Popen[str], journal: Path, n_lines: int, delay: float) -> bool:
    """Kill -9 once the journal has so many lines, and a moment; return whether the kill came before the end."""
    while process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= n_lines:
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
            process.wait()
            return process.returncode == -signal.SIGKILL
        time.sleep(0.001)
    return False


def test_fifty_kills_end_with_the_bytes_of_an_uninterrupted_run(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    rng, out, n_killed = random.Random(5), tmp_path / "out", 0
    journal = out / JOURNAL_NAME
    for n in range(N_KILLS):
        n_there = journal.read_bytes().count(b"\n") if journal.exists() else 0
        process = start("extract", CHECKPOINT, out, "--journal-every", 1)
        # Spread over the whole run: a few entries further each time, and at once in every tenth.
        is_killed = kill_after_journal_lines(process, journal, 0 if n % 10 == 0 else n_there + rng.randint(0, 5), rng.random() * 0.004)
        n_killed += is_killed
        if not is_killed:
            break
        assert not (out / "manifest.yaml").exists() or not journal.exists()
    assert n_killed >= 25, "the kills came too late to show anything"
    succeed("kprep", "extract", CHECKPOINT, out)
    assert contents(out) == uninterrupted
    succeed("kprep", "verify-hashes", out)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "FIFO", "hole"])
def test_what_the_journal_names_counts_only_if_it_is_there_and_right(tmp_path: Path, uninterrupted: dict[str, bytes], damage: str) -> None:
    out = tmp_path / "out"
    process = start("extract", CHECKPOINT, out, "--journal-every", 1)
    assert kill_after_journal_lines(process, out / JOURNAL_NAME, 40, 0)
    victim = next((out / "experts").glob("L1-*.bin"))
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[777] ^= 4
        victim.write_bytes(data)
    elif damage == "truncate":
        os.truncate(victim, 5000)
    elif damage in ("remove", "FIFO"):
        victim.unlink()
        if damage == "FIFO":
            os.mkfifo(victim)
    else:
        victim.unlink()
        with victim.open("wb") as file:
            file.truncate(len(data))
    succeed("kprep", "extract", CHECKPOINT, out)
    assert contents(out) == uninterrupted


def test_a_directory_in_the_place_of_an_expert_s_file_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start("extract", CHECKPOINT, out, "--journal-every", 1)
    assert kill_after_journal_lines(process, out / JOURNAL_NAME, 40, 0)
    victim = next((out / "experts").glob("L1-*.bin"))
    victim.unlink()
    victim.mkdir()
    outcome = command("kprep", "extract", CHECKPOINT, out)
    assert outcome.code == 1 and f"kprep: {victim}: cannot be written: Is a directory" in outcome.err


def test_a_trusted_journal_is_believed_but_for_size_and_holes(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    process = start("extract", CHECKPOINT, out, "--journal-every", 1)
    assert kill_after_journal_lines(process, out / JOURNAL_NAME, 60, 0)
    flipped, short = sorted((out / "experts").glob("L1-*.bin"))[:2]
    data = bytearray(flipped.read_bytes())
    data[0] ^= 1
    flipped.write_bytes(data)
    os.truncate(short, 1)
    succeed("kprep", "extract", CHECKPOINT, out, "--trust-journal")
    assert {name for name, found in contents(out).items() if uninterrupted[name] != found} == {f"experts/{flipped.name}"}
    assert command("kprep", "verify-hashes", out).code == 4


def test_a_journal_cut_within_a_line_is_good_up_to_there(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    process = start("extract", CHECKPOINT, out, "--journal-every", 1)
    assert kill_after_journal_lines(process, out / JOURNAL_NAME, 30, 0)
    with (out / JOURNAL_NAME).open("ab") as file:
        file.write(b'{"expert": [3, 4], "ha')
    succeed("kprep", "extract", CHECKPOINT, out)
    assert contents(out) == uninterrupted


def test_a_journal_damaged_in_the_middle_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start("extract", CHECKPOINT, out, "--journal-every", 1)
    assert kill_after_journal_lines(process, out / JOURNAL_NAME, 30, 0)
    lines = (out / JOURNAL_NAME).read_bytes().splitlines(keepends=True)
    lines[10] = b"nonsense\n"
    (out / JOURNAL_NAME).write_bytes(b"".join(lines))
    outcome = command("kprep", "extract", CHECKPOINT, out)
    assert outcome.code == 4 and "cannot be understood" in outcome.err


def test_a_second_extraction_into_the_same_directory_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start("extract", CHECKPOINT, out, "--journal-every", 1)
    while not ((out / JOURNAL_NAME).exists() and (out / JOURNAL_NAME).read_bytes().count(b"\n") > 5):
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)
    try:
        outcome = command("kprep", "extract", CHECKPOINT, out)
    finally:
        process.send_signal(signal.SIGCONT)
    assert outcome.code == 1 and "another extraction is at work" in outcome.err
    assert process.wait() == 0


def test_going_on_needs_the_same_drives(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    process = start("extract", CHECKPOINT, out, "--journal-every", 1)
    assert kill_after_journal_lines(process, out / JOURNAL_NAME, 30, 0)
    outcome = command("kprep", "extract", CHECKPOINT, out, "--tier", f"A={other}")
    assert outcome.code == 2 and f"--tier A={out / 'experts'}" in outcome.err


def test_goes_on_only_where_something_is_left_of_what_a_drive_had(tmp_path: Path) -> None:
    """An empty mount point: the drive is not mounted, and writing there would fill another file system."""
    out, drive, elsewhere = tmp_path / "out", tmp_path / "drive", tmp_path / "elsewhere"
    drive.mkdir()
    process = start("extract", CHECKPOINT, out, "--tier", f"A={drive}", "--journal-every", 1)
    assert kill_after_journal_lines(process, out / JOURNAL_NAME, 40, 0.0)
    drive.rename(elsewhere)
    drive.mkdir()
    refused = command("kprep", "extract", CHECKPOINT, out, "--tier", f"A={drive}")
    assert refused.code == 2 and f"{drive}: none of the" in refused.err and "mount the drive" in refused.err
    assert list(drive.iterdir()) == []
    drive.rmdir()
    elsewhere.rename(drive)
    succeed("kprep", "extract", CHECKPOINT, out, "--tier", f"A={drive}")
    succeed("kprep", "verify-hashes", out)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_ext4(tmp_path / "disk", n_bytes=16_000_000) as mount:
        yield mount


def test_refuses_to_start_when_it_cannot_end(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(9_000_000))
    outcome = command("kprep", "extract", CHECKPOINT, small_disk / "out", "--reserve", "0")
    assert outcome.code == 5 and "needed" in outcome.err and "are free; nothing was written" in outcome.err
    assert not (small_disk / "out" / "manifest.yaml").exists()


@pytest.mark.parametrize("reserve", ["0", "1MB"])
def test_pauses_when_the_disk_fills_and_goes_on_when_there_is_room(small_disk: Path, uninterrupted: dict[str, bytes], reserve: str) -> None:
    """Something else fills the disk while the extraction runs; the reserve is never touched."""
    out, ballast = small_disk / "out", small_disk / "ballast"
    process = start("extract", CHECKPOINT, out, "--reserve", reserve, "--journal-every", 1)
    while process.poll() is None and not ((out / JOURNAL_NAME).exists() and (out / JOURNAL_NAME).read_bytes().count(b"\n") > 20):
        time.sleep(0.001)
    fill(ballast)
    assert process.wait() == 5, process.stdout and process.stdout.read()
    assert not list(small_disk.rglob("*.partial"))
    assert not (out / "manifest.yaml").exists()
    paused = command("kprep", "extract", CHECKPOINT, out, "--reserve", reserve)
    assert paused.code == 5
    ballast.unlink()
    succeed("kprep", "extract", CHECKPOINT, out, "--reserve", reserve)
    assert contents(out) == uninterrupted


@pytest.fixture
def checkpoint_of_120_mb(tmp_path: Path) -> Path:
    """The tiny K3.1 with experts of 836 kB."""
    values = load_geometry("tiny").to_dict() | {"latent_size": 512, "expert_intermediate_size": 1024}
    (tmp_path / "larger.yaml").write_text(yaml.safe_dump(values))
    succeed("kprep", "make-tiny", tmp_path / "checkpoint", "--geometry", tmp_path / "larger.yaml")
    return tmp_path / "checkpoint"


def test_pauses_on_a_full_disk_of_200_mb_and_goes_on_when_there_is_room(tmp_path: Path, checkpoint_of_120_mb: Path) -> None:
    checkpoint, whole = checkpoint_of_120_mb, tmp_path / "whole"
    succeed("kprep", "extract", checkpoint, whole)
    expected = contents(whole)
    assert sum(map(len, expected.values())) > 120_000_000
    with mounted_ext4(tmp_path / "disk", n_bytes=200_000_000) as disk:
        out, ballast = disk / "out", disk / "ballast"
        process = start("extract", checkpoint, out, "--reserve", "0", "--journal-every", 1)
        while process.poll() is None and not ((out / JOURNAL_NAME).exists() and (out / JOURNAL_NAME).read_bytes().count(b"\n") > 20):
            time.sleep(0.001)
        # Held meanwhile: filling so much takes longer than what is left to extract.
        process.send_signal(signal.SIGSTOP)
        fill(ballast)
        assert free_bytes(disk) < 836_000
        process.send_signal(signal.SIGCONT)
        said = process.communicate()[0]
        assert process.returncode == 5 and "Traceback" not in said, said
        assert not list(disk.rglob("*.partial")) and not (out / "manifest.yaml").exists()
        done = {path.name: path.read_bytes() for path in (out / "experts").glob("L*.bin")}
        assert 20 <= len(done) < 144 and all(expected[f"experts/{name}"] == data for name, data in done.items())
        again = command("kprep", "extract", checkpoint, out, "--reserve", "0")
        assert again.code == 5 and not (out / "manifest.yaml").exists()
        ballast.unlink()
        succeed("kprep", "extract", checkpoint, out, "--reserve", "0")
        assert contents(out) == expected


def fill(path: Path) -> None:
    with path.open("wb") as file:
        try:
            while True:
                file.write(bytes(4096))
                file.flush()
        except OSError:
            pass


def test_a_run_that_releases_shards_goes_on_after_kills(tmp_path: Path, checkpoint_copy: Path, uninterrupted: dict[str, bytes]) -> None:
    out, rng, n_killed = tmp_path / "out", random.Random(2), 0
    journal = out / JOURNAL_NAME
    for _ in range(12):
        n_there = journal.read_bytes().count(b"\n") if journal.exists() else 0
        process = start("extract", checkpoint_copy, out, "--release-shards", "--journal-every", 1)
        if not kill_after_journal_lines(process, journal, n_there + rng.randint(5, 20), rng.random() * 0.01):
            break
        n_killed += 1
    outcome = succeed("kprep", "extract", checkpoint_copy, out, "--release-shards") if not (out / "manifest.yaml").exists() else None
    assert n_killed >= 3 and (outcome is None or "freed" in outcome.err or outcome.out)
    assert {p.name[:11] for p in checkpoint_copy.glob("model-*.safetensors")} == {"model-00012", "model-00013"}
    found = contents(out)
    assert {k: v for k, v in found.items() if k != "spine.gguf"} == {k: v for k, v in uninterrupted.items() if k != "spine.gguf"}
    succeed("kprep", "verify-hashes", out)


def test_an_expert_lost_after_its_shard_was_released_names_the_shard(tmp_path: Path, checkpoint_copy: Path) -> None:
    out = tmp_path / "out"
    journal = out / JOURNAL_NAME
    process = start("extract", checkpoint_copy, out, "--release-shards", "--journal-every", 1)
    assert kill_after_journal_lines(process, journal, 100, 0), process.stdout and process.stdout.read()
    assert b"model-00002" in b"".join(line for line in journal.read_bytes().splitlines() if b"released" in line)
    (out / "experts" / "L1-E3.bin").unlink()
    outcome = command("kprep", "extract", checkpoint_copy, out, "--release-shards")
    assert outcome.code == 4 and "fetch these shards" in outcome.err and "model-00002-of-000013.safetensors" in outcome.err


def test_room_that_released_shards_give_back_is_counted(small_disk: Path) -> None:
    """Checkpoint and output together are larger than the disk; with --release-shards it ends all the same."""
    checkpoint = small_disk / "checkpoint"
    checkpoint.mkdir()
    for path in CHECKPOINT.iterdir():
        if path.name != "golden.safetensors":
            (checkpoint / path.name).write_bytes(path.read_bytes())
    (small_disk / "ballast").write_bytes(bytes(4_000_000))
    assert command("kprep", "extract", checkpoint, small_disk / "out", "--reserve", "0").code == 5
    succeed("kprep", "extract", checkpoint, small_disk / "out", "--reserve", "0", "--release-shards", "--journal-every", 1)
