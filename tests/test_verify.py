"""kprep verify-hashes: names every bad byte with its place, says where an intact copy is, and restores from it."""

import errno
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import inside
import pytest
from conftest import DATA, Outcome, command, succeed
from inside import kprep, prepared
from placing import add_copies

from layout.direct import ReadMode, span_bytes
from layout.drives import shares_device
from layout.prepared import find_copies, open_prepared
from layout.record import expert_file_name
from layout.sizes import format_size
from manifests.errors import DamagedDataError
from prep.proof.receipts import Receipts
from prep.proof.selection import select_records
from prep.proof.verify import BUFFER_BYTES, Findings, Progress, Spine, Stream, n_buffers, record_streams, verify, with_spine

RECORD_BYTES = 9792
DAMAGED, USAGE = 4, 2
EXPERT = expert_file_name(5, 11)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def run_verify(home: Path, *flags: object) -> Outcome:
    return command("kprep", "verify-hashes", home / "manifest.yaml", *flags, timeout=30)


def found_damage(outcome: Outcome, *parts: str) -> None:
    assert outcome.code == DAMAGED, outcome
    assert "Traceback" not in outcome.err
    assert [part for part in parts if part not in outcome.out] == [], outcome


def is_clean(outcome: Outcome) -> bool:
    return outcome.code == 0 and "intact" in outcome.out


@pytest.fixture
def two_copies(prepared_copy: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """tiny-k3.1 with every expert on drive a (tier A) and on drive b (tier C): its home, a, b."""
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    succeed("kprep", "place", prepared_copy / "manifest.yaml", "--tier", f"A={a}")
    add_copies(prepared_copy, b)
    return prepared_copy, a, b


def test_an_intact_model_is_said_to_be_intact(extracted: Path) -> None:
    outcome = succeed("kprep", "verify-hashes", extracted)
    assert re.fullmatch(r"all intact: \d+ expert files \([0-9.]+[KM]B\), spine, tokenizer, hash lists\n", outcome.out)


@pytest.mark.parametrize("at", [0, 4095, 4096, 6144, RECORD_BYTES - 1])
def test_a_flipped_byte_anywhere_in_an_expert_file_is_named(prepared_copy: Path, at: int) -> None:
    flip(prepared_copy / "experts" / EXPERT, at)
    outcome = run_verify(prepared_copy)
    found_damage(outcome, f"layer 5 expert 11 on {prepared_copy / 'experts'} (tier A): xxh3-128 ", "no other copy is intact", "layer 5")
    assert outcome.out.count("layer 5 expert 11") == 1
    assert "kprep: 1 bad expert file and 0 other bad files" in outcome.err


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (Path.unlink, f"{EXPERT} is missing or cannot be opened: No such file"),
        (cut, f"{EXPERT} has 9791 bytes, expected 9792"),
        (lengthen, f"{EXPERT} has 9793 bytes, expected 9792"),
        (lambda path: path.write_bytes(b""), f"{EXPERT} has 0 bytes, expected 9792"),
        (become_fifo, f"{EXPERT} is a FIFO, expected a file"),
        (become_directory, f"{EXPERT} is a directory, expected a file: move it away"),
    ],
    ids=["missing", "short", "long", "empty", "FIFO", "directory"],
)
def test_an_expert_file_of_another_size_or_kind_is_named(prepared_copy: Path, damage: Callable[[Path], object], what: str) -> None:
    damage(prepared_copy / "experts" / EXPERT)
    found_damage(run_verify(prepared_copy), f"layer 5 expert 11 on {prepared_copy / 'experts'} (tier A): {what}")


def test_all_bad_files_are_named_at_once_and_nothing_is_changed(prepared_copy: Path) -> None:
    experts = prepared_copy / "experts"
    flip(experts / "L1-E0.bin", 9)
    (experts / "L2-E3.bin").unlink()
    cut(experts / "L9-E15.bin")
    flip(prepared_copy / "spine.gguf", 2_000_000)
    flip(prepared_copy / "tokenizer" / "tiktoken.model", 7)
    (prepared_copy / "tokenizer" / "config.json").unlink()
    flip(experts / "experts.xxh128", 40)
    before = {path: path.read_bytes() for path in prepared_copy.rglob("*") if path.is_file()}
    outcome = run_verify(prepared_copy)
    found_damage(
        outcome,
        "layer 1 expert 0 ",
        "layer 2 expert 3 ",
        "layer 9 expert 15 ",
        f"{prepared_copy}/spine.gguf: xxh3-128 ",
        f"{prepared_copy}/tokenizer/tiktoken.model: xxh3-128 ",
        f"{prepared_copy}/tokenizer/config.json: cannot be read",
        f"{experts}/experts.xxh128: does not list the 144 experts of this drive by hash",
    )
    assert "kprep: 3 bad expert files and 4 other bad files" in outcome.err
    assert {path: path.read_bytes() for path in prepared_copy.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("at", [0, 100, 25_000, -1], ids=["magic", "key", "tensor", "last byte"])
def test_a_flipped_byte_anywhere_in_the_spine_is_named(prepared_copy: Path, at: int) -> None:
    flip(prepared_copy / "spine.gguf", at)
    found_damage(run_verify(prepared_copy), f"{prepared_copy}/spine.gguf: xxh3-128 ", "differs from the manifest's", "restores it")


def test_a_repair_does_not_wait_for_a_fifo_in_the_place_of_a_copy_that_was_not_read(two_copies: tuple[Path, Path, Path]) -> None:
    home, a, b = two_copies
    become_fifo(a / EXPERT)
    (b / EXPERT).unlink()
    found_damage(run_verify(home, "--drive", b, "--repair"), "layer 5 expert 11", f"{EXPERT} is missing or cannot be opened")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (cut, "bytes, expected"),
        (lengthen, "bytes, expected"),
        (Path.unlink, "is missing or cannot be opened: No such file"),
        (become_fifo, "is a FIFO, expected a file"),
        (become_directory, "is a directory, expected a file"),
    ],
    ids=["short", "long", "missing", "FIFO", "directory"],
)
def test_a_spine_of_another_size_or_kind_is_named(prepared_copy: Path, damage: Callable[[Path], object], what: str) -> None:
    damage(prepared_copy / "spine.gguf")
    found_damage(run_verify(prepared_copy), f"{prepared_copy}/spine.gguf: ", what, "restores it")


@pytest.mark.parametrize("damage", [lambda path: flip(path, 40), cut, Path.unlink], ids=["altered", "short", "missing"])
def test_a_bad_master_hash_list_ends_it_since_nothing_can_be_proved_without(prepared_copy: Path, damage: Callable[[Path], object]) -> None:
    damage(prepared_copy / "experts.xxh128")
    outcome = run_verify(prepared_copy)
    assert outcome.code == DAMAGED and outcome.out == ""
    assert outcome.err.startswith(f"kprep: {prepared_copy}/experts.xxh128: ")


def test_the_intact_copy_is_named_and_repair_restores_from_it(two_copies: tuple[Path, Path, Path]) -> None:
    home, a, b = two_copies
    good = {path: path.read_bytes() for drive in (a, b) for path in drive.glob("*.bin")}
    flip(a / EXPERT, 5000)
    (a / "L1-E1.bin").unlink()
    cut(b / "L2-E2.bin")
    found_damage(run_verify(home), f"another copy is intact on {b} (tier C)", f"another copy is intact on {a} (tier A)", "--repair restores it")
    outcome = run_verify(home, "--repair")
    assert is_clean(outcome), outcome
    assert outcome.out.count("restored: ") == 3
    assert f"restored: layer 5 expert 11 on {a} (tier A): xxh3-128 " in outcome.out
    assert {path: path.read_bytes() for drive in (a, b) for path in drive.glob("*.bin")} == good
    assert is_clean(run_verify(home))


def test_repair_counts_what_it_restored_apart_from_what_was_intact(two_copies: tuple[Path, Path, Path]) -> None:
    home, a, b = two_copies
    flip(a / "L5-E11.bin", 17)
    (b / "L1-E0.bin").unlink()
    n_intact = 2 * 144 - 2
    out = prepared("verify-hashes", home, "--repair").out
    assert out.count("restored: layer ") == 2
    assert f"restored; all else is intact: {n_intact} expert files ({format_size(n_intact * 9792)}), spine" in out
    assert f"all intact: {2 * 144} expert files ({format_size(2 * 144 * 9792)}), spine" in prepared("verify-hashes", home).out


def test_a_seed_without_a_sample_is_refused(extracted: Path) -> None:
    inside.refused(kprep("verify-hashes", extracted, "--seed", 0), 2, "--seed goes with --sample")


@pytest.mark.parametrize("has_other", [True, False])
def test_the_cure_that_krun_names_for_an_expert_without_a_base_copy_works(
    two_copies: tuple[Path, Path, Path], prepared_copy: Path, has_other: bool
) -> None:
    home, a, b = two_copies
    (a / "L5-E11.bin").unlink()
    if not has_other:
        (b / "L5-E11.bin").unlink()
    with pytest.raises(DamagedDataError) as caught:
        find_copies(open_prepared(home))
    message = str(caught.value)
    assert (f"no usable copy on {a} (tier A); another copy is on {b} (tier C)\n" in message) is has_other
    cure = re.search(r"else kprep (verify-hashes \S+ --repair) restores them from other copies, with (--checkpoint) CHECKPOINT ", message)
    assert cure is not None
    prepared(*cure[1].split(), *(() if has_other else (cure[2], DATA / "tiny-k3.1")))
    assert (a / "L5-E11.bin").exists() and find_copies(open_prepared(home)).faults == []


def test_where_both_copies_are_bad_repair_restores_the_rest_and_ends_with_4(two_copies: tuple[Path, Path, Path]) -> None:
    home, a, b = two_copies
    for drive, at in ((a, 3), (b, 9000)):
        flip(drive / "L3-E3.bin", at)
    flip(a / "L4-E4.bin", 0)
    spoilt = (b / "L3-E3.bin").read_bytes()
    outcome = run_verify(home, "--repair")
    found_damage(outcome, f"layer 3 expert 3 on {a} ", f"layer 3 expert 3 on {b} ", "restored: layer 4 expert 4")
    assert outcome.out.count("no other copy is intact") == 2
    assert (b / "L3-E3.bin").read_bytes() == spoilt
    again = run_verify(home)
    found_damage(again, f"layer 3 expert 3 on {a} ", f"layer 3 expert 3 on {b} ")
    assert "layer 4 expert 4" not in again.out


def test_with_one_copy_repair_changes_nothing_and_says_what_to_do(prepared_copy: Path) -> None:
    flip(prepared_copy / "experts" / EXPERT, 77)
    spoilt = (prepared_copy / "experts" / EXPERT).read_bytes()
    outcome = run_verify(prepared_copy, "--repair")
    found_damage(outcome, "layer 5 expert 11", "no other copy is intact; fetch model-00006-of-000013.safetensors again, then")
    assert (prepared_copy / "experts" / EXPERT).read_bytes() == spoilt


def test_a_copy_that_was_not_read_is_not_called_intact(two_copies: tuple[Path, Path, Path]) -> None:
    home, a, b = two_copies
    for name in (EXPERT, "L6-E6.bin"):
        flip(a / name, 5000)
    flip(b / EXPERT, 6000)
    only_a = run_verify(home, "--drive", "A")
    found_damage(only_a, f"a copy that was not read now is on {b} (tier C)")
    assert "is intact on" not in only_a.out
    # Trying it shows that one is bad; the other is restored all the same.
    repaired = run_verify(home, "--drive", "A", "--repair")
    found_damage(repaired, "restored: layer 6 expert 6", f"layer 5 expert 11 on {a} (tier A)")
    assert "kprep: 1 bad expert file " in repaired.err


def test_drive_limits_the_reading_to_one_drive(two_copies: tuple[Path, Path, Path]) -> None:
    home, a, b = two_copies
    flip(b / EXPERT, 5000)
    for name in ("A", a, f"{b}/../a"):
        outcome = run_verify(home, "--drive", name)
        assert is_clean(outcome) and f"144 of 288 expert files (1.41MB on {name})" in outcome.out
    for name in ("C", b):
        found_damage(run_verify(home, "--drive", name), f"layer 5 expert 11 on {b} (tier C)")


def test_an_unknown_drive_is_refused_with_those_that_there_are(two_copies: tuple[Path, Path, Path]) -> None:
    home, a, b = two_copies
    for name in ("B", "nowhere"):
        outcome = run_verify(home, "--drive", name)
        assert outcome.code == USAGE and outcome.out == ""
        assert f"--drive {name}: no such drive" in outcome.err and f"{a} (tier A), {b} (tier C)" in outcome.err


def test_a_drive_that_is_not_mounted_is_named_and_not_filled(two_copies: tuple[Path, Path, Path]) -> None:
    home, _, b = two_copies
    shutil.rmtree(b)
    outcome = run_verify(home, "--repair")
    found_damage(outcome)
    cure = "mount it, or place again with the drives that are left"
    assert outcome.out == f"tier C {b}: the directory is gone, 144 copies left out of the repair; {cure}\n", "one line, however many experts it holds"
    assert outcome.err.endswith("kprep: 0 bad expert files and 0 other bad files; 1 drive not there\n")
    assert not b.exists()
    outcome = run_verify(home, "--layer", "5")
    assert outcome.code == DAMAGED and outcome.out == f"tier C {b}: the directory is gone, 16 copies not checked; {cure}\n"
    assert json.loads(run_verify(home, "--json").out)["gone_drives"] == [{"drive": str(b), "n_copies": 144}]


def test_a_drive_without_one_expert_file_is_named_once_and_can_be_filled_again(two_copies: tuple[Path, Path, Path]) -> None:
    home, _, b = two_copies
    for path in b.glob("L*"):
        path.unlink()
    outcome = run_verify(home)
    found_damage(
        outcome, f"{b} (tier C): not one expert file is there, 144 copies missing\n    mount it, or kprep verify-hashes --repair restores them"
    )
    assert "layer 5" not in outcome.out and "kprep: 144 bad expert files and 0 other bad files" in outcome.err
    assert is_clean(run_verify(home, "--repair")) and is_clean(run_verify(home))


def test_a_drive_that_is_gone_is_no_source_for_repairs(two_copies: tuple[Path, Path, Path]) -> None:
    home, a, b = two_copies
    flip(a / EXPERT, 9)
    shutil.rmtree(b)
    for flags in ((), ("--repair",), ("--repair", "--drive", "A")):
        found_damage(run_verify(home, *flags), f"layer 5 expert 11 on {a} (tier A): ", "no other copy is intact; fetch ")


def test_a_bad_list_on_a_drive_is_named_with_its_cure(two_copies: tuple[Path, Path, Path]) -> None:
    home, a, b = two_copies
    good = (b / "experts.xxh128").read_bytes()
    cut(b / "experts.xxh128")
    outcome = run_verify(home)
    found_damage(outcome, f"{b}/experts.xxh128: does not list the 144 experts", "kprep place with the same drives writes it anew")
    assert f"{a}/experts.xxh128" not in outcome.out
    succeed("kprep", "place", home / "manifest.yaml", "--tier", f"A={a}", "--tier", f"C={b}")
    assert (b / "experts.xxh128").read_bytes() == good
    assert is_clean(run_verify(home))


def test_json_says_the_same(two_copies: tuple[Path, Path, Path]) -> None:
    home, a, b = two_copies
    clean = run_verify(home, "--json")
    nothing_bad: dict[str, list[object]] = {"bad_records": [], "bad_files": [], "gone_drives": []}
    assert (clean.code, json.loads(clean.out)) == (0, {"n_records": 288, "n_trusted": 0, "n_bytes": 288 * RECORD_BYTES, **nothing_bad})
    flip(a / EXPERT, 5000)
    for drive in (a, b):
        cut(drive / "L1-E0.bin")
    (b / "experts.xxh128").unlink()
    for flags in ((), ("--repair",)):
        outcome = run_verify(home, "--json", *flags)
        assert outcome.code == DAMAGED
        document = json.loads(outcome.out)
        found = [(bad["drive"], bad["layer"], bad["expert"], bad["is_restored"]) for bad in document["bad_records"]]
        assert found == [(str(a), 1, 0, False), (str(a), 5, 11, bool(flags)), (str(b), 1, 0, False)]
        assert [bad["what"] for bad in document["bad_records"]][::2] == ["L1-E0.bin has 9791 bytes, expected 9792"] * 2
        assert len(document["bad_files"]) == 1 and f"{b}/experts.xxh128" in document["bad_files"][0]


def findings_of(home: Path, on_progress: Progress = lambda *_: None) -> Findings:
    prepared = open_prepared(home)
    selection = select_records(prepared, drive=None, layers=[], n_sample=None, seed=0)
    return verify(prepared, selection, receipts=Receipts(prepared), is_trusting=False, on_progress=on_progress)


def path_of(fd: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{fd}"))


@pytest.mark.usefixtures("python_reads")
def test_the_spines_blocks_are_hashed_in_their_order_whatever_the_order_of_their_ends(prepared_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, rng, ends = os.preadv, random.Random(4), []

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(rng.random() * 0.002)
        if path_of(fd).name == "spine.gguf":
            ends.append(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr("prep.proof.verify.SPINE_BLOCK_BYTES", 65536)
    monkeypatch.setattr("layout.direct.os.preadv", preadv)
    assert findings_of(prepared_copy).is_clean
    assert len(ends) > 40 and ends != sorted(ends)
    flip(prepared_copy / "spine.gguf", 3 * 65536 + 1)
    assert [fault.partition(":")[0] for fault in findings_of(prepared_copy).bad_files] == [f"{prepared_copy}/spine.gguf"]


@pytest.mark.usefixtures("python_reads")
def test_a_drive_that_fails_within_the_spine_is_told_once_and_the_records_are_read_all_the_same(
    prepared_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if path_of(fd).name == "spine.gguf" and offset >= 1_000_000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr("prep.proof.verify.SPINE_BLOCK_BYTES", 65536)
    monkeypatch.setattr("layout.direct.os.preadv", preadv)
    findings = findings_of(prepared_copy)
    assert (findings.n_records, findings.bad_records) == (144, [])
    cure = "kprep extract with the same checkpoint and output restores it"
    assert findings.bad_files == [f"{prepared_copy}/spine.gguf: cannot be read: Input/output error; {cure}"]


def test_progress_ends_at_the_bytes_of_records_and_spine(extracted: Path) -> None:
    told: list[tuple[str, int, int]] = []
    findings = findings_of(extracted, lambda *what: told.append(what))
    n_bytes = findings.n_bytes + (extracted / "spine.gguf").stat().st_size
    assert told[-1] == ("read", n_bytes, n_bytes)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_the_spine_is_read_through_the_queue_of_a_drive_on_its_device_and_else_through_its_own(prepared_copy: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        if shares_device(Path(memory), tmp_path):
            pytest.skip("the temporary directory is in memory, too: there is no second device to try")
        succeed("kprep", "place", prepared_copy, "--tier", f"A={memory}", "--tier", f"C={prepared_copy / 'experts'}")
        prepared = open_prepared(prepared_copy)
        spine = Spine(prepared)
        n_blocks = len(list(spine.wanted()))
        for drives, n_wanted in (([0], [144, n_blocks]), ([1], [144 + n_blocks]), ([0, 1], [144, 144 + n_blocks])):
            records = {n: prepared.manifest.drives[n].holds for n in drives}
            streams = with_spine(prepared, drives, record_streams(prepared, records), spine)
            assert [len(list(stream.wanted)) for stream in streams] == n_wanted


@pytest.mark.parametrize("n_streams", [1, 3, 8, 24])
@pytest.mark.parametrize("depth", [4, 32])
def test_all_buffers_together_stay_small_however_many_and_deep_the_drives(n_streams: int, depth: int) -> None:
    stream = Stream(ReadMode(is_direct=True), depth, iter(()), 17_547_264)
    n = n_buffers(stream, n_streams)
    assert n >= 2 and n * n_streams * span_bytes(stream.most_bytes) <= BUFFER_BYTES
    assert n_buffers(stream, 1) > depth
