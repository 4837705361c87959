"""Two hundred flipped bytes, anywhere in a prepared model: every one is found, and the file is named."""

import random
from pathlib import Path

import pytest
from conftest import DATA, command, succeed
from placing import add_copies

from layout.prepared import Prepared, open_prepared
from manifests.errors import KtierError
from manifests.load import load_manifest
from prep.proof.receipts import Receipts
from prep.proof.repair import describe_bad_records, repair
from prep.proof.selection import select_records
from prep.proof.verify import Findings, verify

N_FLIPS = 200


def findings_of(prepared: Prepared) -> Findings:
    selection = select_records(prepared, drive=None, layers=[], n_sample=None, seed=0)
    return verify(prepared, selection, receipts=Receipts(prepared), is_trusting=False, on_progress=lambda *_: None)


def messages(home: Path) -> str:
    """Return everything that a verification says of a model."""
    try:
        prepared = open_prepared(home)
        findings = findings_of(prepared)
    except KtierError as error:
        return str(error)
    return "\n".join([*describe_bad_records(prepared, findings.bad_records, findings), *findings.bad_files])


def victims(home: Path, rng: random.Random) -> list[Path]:
    """Return N_FLIPS files to damage, a third of them experts, the others spread over all kinds."""
    experts = sorted(home.rglob("L*.bin"))
    rest = sorted(p for p in home.rglob("*") if p.is_file() and p not in experts and "manifest.history" not in p.parts)
    return [rng.choice(experts if n % 3 == 0 else rest) for n in range(N_FLIPS)]


def test_two_hundred_flipped_bytes_are_found_and_named(prepared_copy: Path) -> None:
    rng = random.Random(7)
    assert messages(prepared_copy) == ""
    for path in victims(prepared_copy, rng):
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        original = path.read_bytes()
        path.write_bytes(data)
        said = messages(prepared_copy)
        assert path.name in said or said.startswith(f"layer {path.stem[1:].replace('-E', ' expert ')} "), (path, at, said)
        path.write_bytes(original)
    assert messages(prepared_copy) == ""


@pytest.mark.parametrize("n_bad", [1, 20])
def test_with_two_copies_repair_restores_and_a_second_verify_is_clean(prepared_copy: Path, tmp_path: Path, n_bad: int) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    directories[0].mkdir()
    succeed("kprep", "place", prepared_copy, "--tier", f"A={directories[0]}")
    add_copies(prepared_copy, directories[1], tier="B")
    rng = random.Random(n_bad)
    for path in rng.sample(sorted(directories[0].glob("L*.bin")), n_bad):
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1
        path.write_bytes(data)
    prepared = open_prepared(prepared_copy)
    findings = findings_of(prepared)
    assert len(findings.bad_records) == n_bad
    restored, lost = repair(prepared, findings, None)
    assert (len(restored), lost) == (n_bad, [])
    assert findings_of(prepared).is_clean


def test_with_one_copy_the_shard_is_named(prepared_copy: Path) -> None:
    (prepared_copy / "experts" / "L4-E2.bin").write_bytes(b"short")
    assert "fetch model-00005-of-000013.safetensors again" in messages(prepared_copy)


def test_receipts_spare_unchanged_files_and_only_when_they_are_trusted(prepared_copy: Path) -> None:
    first = succeed("kprep", "verify-hashes", prepared_copy, "--trust-receipts").out
    again = succeed("kprep", "verify-hashes", prepared_copy, "--trust-receipts").out
    assert "144 expert files" in first and "0 expert files (0B, 144 more by their receipts)" in again
    path = prepared_copy / "experts" / "L2-E5.bin"
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)
    assert "layer 2 expert 5" in messages(prepared_copy)
    prepared = open_prepared(prepared_copy)
    selection = select_records(prepared, drive=None, layers=[], n_sample=None, seed=0)
    trusting = verify(prepared, selection, receipts=Receipts(prepared), is_trusting=True, on_progress=lambda *_: None)
    assert (trusting.n_records, [b[1:3] for b in trusting.bad_records]) == (1, [(2, 5)])


def test_a_sample_is_spread_over_layers_and_drives_and_repeatable(prepared_copy: Path, tmp_path: Path) -> None:
    add_copies(prepared_copy, tmp_path / "b")
    prepared = open_prepared(prepared_copy)
    assert load_manifest(prepared.path).generation == 2
    sample = select_records(prepared, drive=None, layers=[], n_sample=36, seed=3)
    assert sample.n_records == 36
    assert all((records.sum(1)[1:] == 2).all() for records in sample.records.values())
    again, other = (select_records(prepared, drive=None, layers=[], n_sample=36, seed=seed) for seed in (3, 4))
    assert all((sample.records[n] == again.records[n]).all() for n in sample.drives)
    assert any((sample.records[n] != other.records[n]).any() for n in sample.drives)
    only = select_records(prepared, drive="C", layers=[4, 5], n_sample=None, seed=0)
    assert only.drives == [1] and only.n_records == 32


def test_what_no_copy_is_left_of_is_restored_from_the_checkpoint(prepared_copy: Path) -> None:
    path = prepared_copy / "experts" / "L4-E2.bin"
    whole = path.read_bytes()
    path.unlink()
    assert "--checkpoint goes with" in command("kprep", "verify-hashes", prepared_copy, "--checkpoint", DATA / "tiny-k3.1").err
    outcome = command("kprep", "verify-hashes", prepared_copy, "--repair", "--checkpoint", DATA / "tiny-k3")
    assert outcome.code == 3 and "is not the checkpoint" in outcome.err
    succeed("kprep", "verify-hashes", prepared_copy, "--repair", "--checkpoint", DATA / "tiny-k3.1")
    assert path.read_bytes() == whole
