import hashlib
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from layout.hash_lists import ExpertHashes, format_hash_list, parse_hash_list, xxh3_128_hex
from layout.record import expert_file_name
from manifests.errors import BadInputError

# XXH3-128 of b"abc" and of nothing, as xxhsum 0.8.1 prints them.
ABC = "06b05ab6733a618578af5f94892f3950"
EMPTY = "99aa06d3014798d86001c324468d497f"

needs_xxhsum = pytest.mark.skipif(shutil.which("xxhsum") is None, reason="xxhsum is not installed (package xxhash)")


def test_hashes_as_xxhsum_prints_them() -> None:
    assert xxh3_128_hex(b"abc") == xxh3_128_hex(memoryview(b"abc")) == xxh3_128_hex(np.frombuffer(b"abc", np.uint8)) == ABC
    assert xxh3_128_hex(b"") == EMPTY


def test_the_list_is_sorted_by_number_and_byte_exact() -> None:
    assert format_hash_list({(10, 0): ABC, (2, 895): EMPTY, (2, 9): ABC}) == (
        "06b05ab6733a618578af5f94892f3950  L2-E9.bin\n99aa06d3014798d86001c324468d497f  L2-E895.bin\n06b05ab6733a618578af5f94892f3950  L10-E0.bin\n"
    )


def test_reads_what_it_writes_in_any_order() -> None:
    hashes = {(10, 0): ABC, (2, 9): EMPTY}
    text = format_hash_list(hashes)
    assert parse_hash_list(text, where="x") == hashes
    assert parse_hash_list("".join(reversed(text.splitlines(keepends=True))).encode(), where="x") == hashes
    assert parse_hash_list("", where="x") == {}


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (f"{ABC} L1-E1.bin\n", "expected 32 lower-case hex digits, two spaces"),
        (f"{ABC} *L1-E1.bin\n", "expected 32 lower-case hex digits, two spaces"),
        (f"{ABC.upper()}  L1-E1.bin\n", "expected 32 lower-case hex digits"),
        (f"{ABC[:-1]}  L1-E1.bin\n", "expected 32 lower-case hex digits"),
        (f"0{ABC}  L1-E1.bin\n", "expected 32 lower-case hex digits"),
        ("\n", "expected 32 lower-case hex digits"),
        ("# note\n", "expected 32 lower-case hex digits"),
        (f"{ABC}  L1-E1.bin\r\n", "is not the name of an expert file"),
        (f"{ABC}  L01-E1.bin\n", "is not the name of an expert file"),
        (f"{ABC}  sub/L1-E1.bin\n", "is not the name of an expert file"),
        (f"{ABC}  L1-E1.bin.partial\n", "is not the name of an expert file"),
        (f"{ABC}  L1-E\u0661.bin\n", "is not the name of an expert file"),
        (f"{ABC}  L1-E1.bin\x0b\n", "is not the name of an expert file"),
        (f"{ABC}  L1-E0.bin\n", "L1-E0.bin was already named in line 1"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(bad: str, fault: str) -> None:
    text = f"{EMPTY}  L1-E0.bin\n{bad}{EMPTY}  L1-E2.bin\n"
    for form in (text, text.encode()):
        with pytest.raises(BadInputError, match="line 2: ") as caught:
            parse_hash_list(form, where="/drive/experts.xxh128")
        message = str(caught.value)
        assert message.startswith("/drive/experts.xxh128: ") and fault in message
        assert message.count("line ") == 1 + message.count("in line")


def test_a_list_that_was_cut_off_is_refused() -> None:
    text = f"{EMPTY}  L1-E0.bin\n{ABC}  L1-E10.bin\n"
    for n_lost in range(1, 20):
        with pytest.raises(BadInputError, match=r"line 2: .* has no end of line: the file was cut off"):
            parse_hash_list(text[:-n_lost], where="x")


def test_bytes_that_are_not_ascii_are_not_dropped() -> None:
    with pytest.raises(BadInputError, match=r"line 1: .* is not the name of an expert file"):
        parse_hash_list(f"{ABC}  L1-E0.bin".encode() + b"\xff\n", where="x")


def test_all_bad_lines_are_listed() -> None:
    with pytest.raises(BadInputError) as caught:
        parse_hash_list(f"one\n{ABC}  L1-E0.bin\nthree\n".encode() + b"\xff\n", where="x")
    assert [n for n in range(1, 5) if f"line {n}:" in str(caught.value)] == [1, 3, 4]


def test_expert_hashes_know_only_what_was_set() -> None:
    hashes = ExpertHashes(3, 4)
    hashes.set(2, 3, ABC)
    assert hashes.get(2, 3) == ABC
    assert hashes.get(2, 2) is None
    assert not ExpertHashes.from_text("", 3, 4, "x").is_known.any()
    assert hashes.is_known.sum() == 1
    assert hashes.to_text() == f"{ABC}  L2-E3.bin\n"


def test_expert_hashes_of_a_drive_are_what_it_holds() -> None:
    hashes = ExpertHashes.from_text(f"{ABC}  L1-E0.bin\n{EMPTY}  L2-E3.bin\n", 3, 4, "x")
    holds = np.zeros((3, 4), np.bool_)
    assert hashes.to_text(holds) == ""
    holds[2, 3] = True
    assert hashes.to_text(holds) == f"{EMPTY}  L2-E3.bin\n"
    holds[1, 1] = True
    with pytest.raises(AssertionError):
        hashes.to_text(holds)


@pytest.mark.parametrize("name", ["L3-E0.bin", "L1-E4.bin", "L999999999-E0.bin"])
def test_expert_hashes_refuse_what_the_model_does_not_have(name: str) -> None:
    with pytest.raises(BadInputError, match=f"master: line 2: {name}, but the model has layers 0 to 2 and experts 0 to 3"):
        ExpertHashes.from_text(f"{ABC}  L2-E3.bin\n{ABC}  {name}\n", 3, 4, "master")


def test_a_full_model_is_read_in_well_under_half_a_second() -> None:
    hashes = {(layer, expert): hashlib.md5(b"%d %d" % (layer, expert)).hexdigest() for layer in range(1, 93) for expert in range(896)}
    text = format_hash_list(hashes).encode()
    # CPU time of the fastest of three: neighbours on the machine must not fail the test.
    seconds = []
    for _ in range(3):
        start = time.process_time()
        read = ExpertHashes.from_text(text, 93, 896, "x")
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.4
    assert read.is_known.sum() == 82_432
    assert read.get(92, 895) == hashes[92, 895]
    assert read.to_text().encode() == text


def _write_experts(directory: Path) -> ExpertHashes:
    hashes = ExpertHashes(3, 2)
    for layer in (1, 2):
        for expert in (0, 1):
            content = b"expert %d %d" % (layer, expert) * 1000
            (directory / expert_file_name(layer, expert)).write_bytes(content)
            hashes.set(layer, expert, xxh3_128_hex(content))
    (directory / "experts.xxh128").write_text(hashes.to_text())
    return hashes


@needs_xxhsum
def test_xxhsum_checks_a_directory_by_the_list(tmp_path: Path) -> None:
    _write_experts(tmp_path)
    check = ["xxhsum", "-c", "--strict", "experts.xxh128"]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 0
    damaged = bytearray((tmp_path / "L2-E1.bin").read_bytes())
    damaged[500] ^= 1
    (tmp_path / "L2-E1.bin").write_bytes(damaged)
    result = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode != 0
    assert "L2-E1.bin: FAILED" in result.stdout and "L2-E0.bin: OK" in result.stdout


@needs_xxhsum
def test_a_list_that_xxhsum_made_is_read(tmp_path: Path) -> None:
    hashes = _write_experts(tmp_path)
    names = sorted(p.name for p in tmp_path.glob("*.bin"))
    made = subprocess.run(["xxhsum", "-q", "-H128", *names], cwd=tmp_path, capture_output=True, check=True).stdout
    assert ExpertHashes.from_text(made, 3, 2, "x").to_text() == hashes.to_text()
