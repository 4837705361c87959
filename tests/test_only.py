"""kprep extract --only: some experts again, from no more than the shards that hold them."""

import shutil
from pathlib import Path

import pytest
from conftest import DATA, command, succeed
from placing import N_RECORDS, check_drives, experts_in, flip_a_byte, place

from manifests.load import load_manifest

CHECKPOINT = DATA / "tiny-k3.1"


def only(home: Path, text: str, *flags: object, checkpoint: Path = CHECKPOINT) -> str:
    return succeed("kprep", "extract", checkpoint, home, "--only", text, *flags).out


def test_deleted_and_damaged_files_are_written_again_where_the_manifest_wants_them(prepared_copy: Path, extractions: dict[str, Path]) -> None:
    experts = prepared_copy / "experts"
    for name in ("L3-E2.bin", "L3-E3.bin"):
        (experts / name).unlink()
    flip_a_byte(experts / "L7-E15.bin")
    before = (prepared_copy / "manifest.yaml").read_bytes()
    assert "generation 1; 3 expert files written, 1 there and intact" in only(prepared_copy, "3:2-4,7:15")
    assert check_drives_of(prepared_copy, extractions) == [N_RECORDS]
    assert (prepared_copy / "manifest.yaml").read_bytes() == before


def check_drives_of(home: Path, extractions: dict[str, Path]) -> list[int]:
    return check_drives(home, extractions["tiny-k3.1"])


def test_only_the_shards_that_hold_them_are_needed(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    (prepared_copy / "experts" / "L3-E2.bin").unlink()
    layers = {file.name: file.expert_layers for file in load_manifest(prepared_copy / "manifest.yaml").source.files}
    name = next(name for name, text in layers.items() if text == "3")
    part = tmp_path / "part"
    part.mkdir()
    outcome = command("kprep", "extract", part, prepared_copy, "--only", "3:2")
    assert outcome.code == 3 and f"layer 3 expert 2: is in no shard here; fetch {name}" in outcome.err
    shutil.copy(CHECKPOINT / name, part)
    only(prepared_copy, "3:2", checkpoint=part)
    assert check_drives_of(prepared_copy, extractions) == [N_RECORDS]


def test_a_drive_that_is_gone_is_made_good_on_another(prepared_copy: Path, extractions: dict[str, Path], tmp_path: Path) -> None:
    """`missing` stands for all that has no copy left; the gone drive leaves the manifest."""
    a, b, new = tmp_path / "a", tmp_path / "b", tmp_path / "new"
    place(prepared_copy, f"A={a}", f"B={b}", flags=("--limit", "A=90slots", "--limit", "B=90slots"))
    shutil.rmtree(prepared_copy / "experts")
    n_lost = len(experts_in(b))
    shutil.rmtree(b)
    new.mkdir()
    outcome = command("kprep", "extract", CHECKPOINT, prepared_copy, "--only", "missing")
    assert outcome.code == 2 and "belong on drives that are gone; name one with --tier B=DIR" in outcome.err
    assert f"{n_lost} expert files written" in only(prepared_copy, "missing", "--tier", f"B={new}")
    assert check_drives_of(prepared_copy, extractions) == [N_RECORDS - n_lost, n_lost]
    assert [drive.directory for drive in load_manifest(prepared_copy / "manifest.yaml").drives] == [str(a), str(new)]
    assert "every expert has a copy" in only(prepared_copy, "missing")


def test_another_revision_of_a_shard_is_refused(prepared_copy: Path, checkpoint_copy: Path) -> None:
    (prepared_copy / "experts" / "L3-E2.bin").unlink()
    for shard in checkpoint_copy.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[:] = data.replace(b'"pt"', b'"xx"', 1)
        shard.write_bytes(data)
    outcome = command("kprep", "extract", checkpoint_copy, prepared_copy, "--only", "3:2")
    assert outcome.code == 3 and "is not the shard that was extracted: size or header differ" in outcome.err


def test_other_bytes_under_the_same_header_are_refused(prepared_copy: Path, checkpoint_copy: Path) -> None:
    (prepared_copy / "experts" / "L3-E2.bin").unlink()
    for shard in checkpoint_copy.glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        # Every byte of the data but for scales of 255, which are another fault.
        start = 8 + int.from_bytes(data[:8], "little")
        data[start:] = bytes(value ^ 1 if value not in (254, 255) else value for value in data[start:])
        shard.write_bytes(data)
    outcome = command("kprep", "extract", checkpoint_copy, prepared_copy, "--only", "3:2")
    assert outcome.code == 4 and "layer 3 expert 2 has xxh3-128" in outcome.err and "fetch it again" in outcome.err
    assert not (prepared_copy / "experts" / "L3-E2.bin").exists()


@pytest.mark.parametrize(
    ("text", "flags", "part"),
    [
        ("3", (), "'3' is no layer with an expert"),
        ("3:16", (), "goes beyond the last number, 15"),
        ("0:1", (), "the layers with experts are 1 to 9"),
        ("99:1", (), "the layers with experts are 1 to 9"),
        ("3:5-4", (), "runs backwards"),
        ("3:1", ("--release-shards",), "--only goes with one --tier"),
        ("3:1", ("--journal-every", "64"), "--only goes with one --tier"),
        ("3:1", ("--tier", "C=."), "tiers A and B only"),
    ],
)
def test_what_is_no_expert_or_no_flag_for_it_is_refused(extractions: dict[str, Path], text: str, flags: tuple[str, ...], part: str) -> None:
    outcome = command("kprep", "extract", CHECKPOINT, extractions["tiny-k3.1"], "--only", text, *flags)
    assert outcome.code in (2, 3) and part in outcome.err and "Traceback" not in outcome.err
