"""What an extraction writes where: the checkpoint's own bytes, on the drives that were named; releasing shards; adopting files."""

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path

import inside
import numpy as np
import pytest
from conftest import DATA, command, succeed
from inside import kprep

from layout.checkpoint import open_checkpoint
from layout.record import expert_file_name
from layout.tensors import expert_tensor_names
from manifests.load import load_manifest
from prep.extraction.journal import JOURNAL_NAME

K31 = DATA / "tiny-k3.1"


def tree(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in root.rglob("*") if p.is_file()}


def test_each_expert_file_is_the_six_tensors_bytes(extracted: Path, model: str) -> None:
    tensors = {name: t for path in (DATA / model).glob("model-*.safetensors") for name, t in load_bytes(path).items()}
    geometry = load_manifest(extracted / "manifest.yaml").geometry
    for layer in geometry.moe_layers:
        for expert in range(geometry.n_experts):
            expected = b"".join(tensors[name] for name in expert_tensor_names(layer, expert))
            assert (extracted / "experts" / expert_file_name(layer, expert)).read_bytes() == expected
    assert len(list((extracted / "experts").glob("*.bin"))) == geometry.n_routed_experts


def load_bytes(path: Path) -> dict[str, bytes]:
    """Read a safetensors file with nothing of ours."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    return {n: data[start + e["data_offsets"][0] : start + e["data_offsets"][1]] for n, e in header.items() if n != "__metadata__"}


def test_the_output_is_what_later_commands_rely_on(extracted: Path) -> None:
    names = {p.name for p in extracted.iterdir()}
    assert names == {"manifest.yaml", "spine.gguf", "experts", "experts.xxh128", "tokenizer"}
    carried = {p.name for p in (extracted / "tokenizer").iterdir()}
    assert carried == {"config.json", "generation_config.json", "tiktoken.model", "tokenizer_config.json"}


def test_says_that_vision_tensors_are_left_out(tmp_path: Path) -> None:
    assert "left out: 4 vision tensors" in succeed("kprep", "extract", DATA / "tiny-k3", tmp_path / "out").err


def test_extracting_again_changes_nothing(prepared_copy: Path) -> None:
    before = tree(prepared_copy)
    assert "already extracted" in succeed("kprep", "extract", K31, prepared_copy).out
    assert tree(prepared_copy) == before


def test_two_drives_get_each_expert_once_and_half_of_every_layer(tmp_path: Path, extractions: dict[str, Path]) -> None:
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    a.mkdir()
    b.mkdir()
    succeed("kprep", "extract", K31, out, "--tier", f"A={a}", "--tier", f"B={b}")
    drives = load_manifest(out / "manifest.yaml").drives
    assert [d.directory for d in drives] == [str(a), str(b)]
    assert not (drives[0].holds & drives[1].holds).any()
    assert (drives[0].holds.sum(1)[1:] == 8).all() and (drives[1].holds.sum(1)[1:] == 8).all()
    whole = extractions["tiny-k3.1"] / "experts"
    for drive in drives:
        found = {p.name: p.read_bytes() for p in Path(drive.directory).glob("*.bin")}
        assert found == {expert_file_name(*place): (whole / expert_file_name(*place)).read_bytes() for place in np.argwhere(drive.holds).tolist()}
    assert not (out / "experts").exists()
    succeed("kprep", "verify-hashes", out)


def test_a_limit_moves_the_base_to_the_other_drive(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    succeed("kprep", "extract", K31, tmp_path / "out", "--tier", f"A={a}", "--tier", f"B={b}", "--limit", "A=450KB")
    n_a, n_b = (len(list(d.glob("*.bin"))) for d in (a, b))
    assert n_a + n_b == 144 and 0 < n_a <= 450_000 // 12288


def test_drives_too_small_for_the_base_are_refused_with_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    outcome = command("kprep", "extract", K31, tmp_path / "out", "--tier", f"A={tmp_path / 'a'}", "--limit", "A=1MB")
    assert outcome.code == 5 and "81 of 144" in outcome.err
    assert not list((tmp_path / "a").iterdir())


def shards_of(checkpoint: Path) -> set[str]:
    return {p.name for p in checkpoint.glob("model-*.safetensors")}


def test_released_shards_are_gone_and_everything_in_them_is_proved(checkpoint_copy: Path, tmp_path: Path, extractions: dict[str, Path]) -> None:
    outcome = succeed("kprep", "extract", checkpoint_copy, tmp_path / "out", "--release-shards")
    assert shards_of(checkpoint_copy) == {"model-00012-of-00013.safetensors", "model-00013-of-00013.safetensors"} or shards_of(checkpoint_copy) == {
        "model-00012-of-000013.safetensors",
        "model-00013-of-000013.safetensors",
    }
    assert "model-00002-of-000013.safetensors: 16 experts and" in outcome.err and "freed" in outcome.err
    assert "model-00013-of-000013.safetensors stays: it holds vision tensors" in outcome.err
    ignored = {"manifest.yaml", "spine.gguf"}
    assert {k: v for k, v in tree(tmp_path / "out").items() if k not in ignored} == {
        k: v for k, v in tree(extractions["tiny-k3.1"]).items() if k not in ignored
    }
    succeed("kprep", "verify-hashes", tmp_path / "out")


def test_nothing_is_ever_deleted_without_the_flag(checkpoint_copy: Path, tmp_path: Path) -> None:
    before = tree(checkpoint_copy)
    succeed("kprep", "extract", checkpoint_copy, tmp_path / "out")
    assert tree(checkpoint_copy) == before


def adoptable(extractions: dict[str, Path], where: Path) -> Path:
    """Expert files as another program may have made them: nothing but the files."""
    where.mkdir()
    for path in (extractions["tiny-k3.1"] / "experts").glob("*.bin"):
        shutil.copyfile(path, where / path.name)
    return where


def test_adopts_files_that_equal_the_checkpoint_without_touching_them(extractions: dict[str, Path], tmp_path: Path) -> None:
    theirs = adoptable(extractions, tmp_path / "theirs")
    before = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in theirs.iterdir()}
    outcome = succeed("kprep", "adopt", theirs, tmp_path / "out", "--checkpoint", K31)
    assert "adopted 144 expert files unchanged; still to be extracted: 0" in outcome.err
    assert {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in theirs.glob("*.bin")} == before
    assert load_manifest(tmp_path / "out" / "manifest.yaml").drives[0].directory == str(theirs)
    succeed("kprep", "verify-hashes", tmp_path / "out")


def test_extracts_what_an_adopted_directory_lacks(extractions: dict[str, Path], tmp_path: Path) -> None:
    theirs = adoptable(extractions, tmp_path / "theirs")
    for path in list(theirs.glob("L3-*.bin")):
        path.unlink()
    outcome = succeed("kprep", "adopt", theirs, tmp_path / "out", "--checkpoint", K31)
    assert "adopted 128 expert files unchanged; still to be extracted: 16" in outcome.err
    assert len(list(theirs.glob("*.bin"))) == 144


@pytest.mark.parametrize("how", ["flipped", "short"])
def test_files_that_differ_are_named_and_nothing_is_adopted(extractions: dict[str, Path], tmp_path: Path, how: str) -> None:
    theirs = adoptable(extractions, tmp_path / "theirs")
    victim = theirs / "L4-E7.bin"
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(data if how == "flipped" else data[:-1])
    before = tree(theirs)
    outcome = command("kprep", "adopt", theirs, tmp_path / "out", "--checkpoint", K31)
    assert outcome.code == 4 and "L4-E7.bin" in outcome.err and "layer 4 expert 7" in outcome.err
    assert tree(theirs) == before and not (tmp_path / "out" / "manifest.yaml").exists()
    shutil.copytree(extractions["tiny-k3.1"], tmp_path / "model")
    outcome = command("kprep", "adopt", theirs, "--manifest", tmp_path / "model")
    assert outcome.code == 4 and "L4-E7.bin" in outcome.err
    assert load_manifest(tmp_path / "model" / "manifest.yaml").generation == 1


def test_adopts_a_directory_as_a_further_drive_of_a_manifest(extractions: dict[str, Path], prepared_copy: Path, tmp_path: Path) -> None:
    theirs = adoptable(extractions, tmp_path / "theirs")
    for path in list(theirs.glob("L5-*.bin")):
        path.unlink()
    succeed("kprep", "adopt", theirs, "--manifest", prepared_copy)
    manifest = load_manifest(prepared_copy / "manifest.yaml")
    assert manifest.generation == 2 and manifest.drives[1].tier == "C"
    assert manifest.drives[1].holds.sum() == 128 and not manifest.drives[1].holds[5].any()
    succeed("kprep", "verify-hashes", prepared_copy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "exactly one of --checkpoint CK and --manifest M"),
        (("--checkpoint", K31), "OUT is missing"),
        (("--manifest", "nowhere", "--tier", "E"), "expected one of A, B, C, D"),
    ],
)
def test_adopt_says_what_it_lacks(tmp_path: Path, arguments: tuple[object, ...], message: str) -> None:
    outcome = command("kprep", "adopt", tmp_path, *arguments)
    assert outcome.code == 2 and message in outcome.err


def test_experts_that_are_no_single_run_of_the_shard_come_out_the_same(checkpoint_copy: Path, tmp_path: Path, extractions: dict[str, Path]) -> None:
    """Another writer may order the tensors otherwise; the record does not change."""
    shard = checkpoint_copy / "model-00003-of-000013.safetensors"
    rewrite(shard, reverse=True)
    checkpoint = open_checkpoint(checkpoint_copy)
    assert len(checkpoint.expert_extents(2, 0)) == 6
    succeed("kprep", "extract", checkpoint_copy, tmp_path / "out")
    found, expected = tree(tmp_path / "out" / "experts"), tree(extractions["tiny-k3.1"] / "experts")
    assert found == expected


def rewrite(shard: Path, *, reverse: bool) -> None:
    tensors = load_bytes(shard)
    header = json.loads(shard.read_bytes()[8 : 8 + struct.unpack("<Q", shard.read_bytes()[:8])[0]])
    data, entries = b"", {}
    for name in sorted(tensors, reverse=reverse):
        entries[name] = header[name] | {"data_offsets": [len(data), len(data) + len(tensors[name])]}
        data += tensors[name]
    raw = json.dumps(entries).encode()
    shard.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def test_the_journal_is_gone_when_the_manifest_is_there(extracted: Path) -> None:
    assert not (extracted / JOURNAL_NAME).exists()


@pytest.mark.parametrize("how", ["flipped", "missing", "FIFO"])
def test_a_damaged_spine_and_tokenizer_are_restored_from_the_checkpoint(prepared_copy: Path, how: str) -> None:
    spine, vocabulary, before = prepared_copy / "spine.gguf", prepared_copy / "tokenizer" / "tiktoken.model", tree(prepared_copy)
    for path in (spine, vocabulary):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        if how != "flipped":
            path.unlink()
    if how == "FIFO":
        os.mkfifo(spine)
    assert command("kprep", "verify-hashes", prepared_copy).code == 4
    assert "it is written anew" in succeed("kprep", "extract", K31, prepared_copy).err
    assert tree(prepared_copy) == before


def test_a_spine_restored_after_placing_is_true_to_a_new_manifest(prepared_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    succeed("kprep", "place", prepared_copy, "--tier", f"A={tmp_path / 'a'}")
    (prepared_copy / "spine.gguf").unlink()
    succeed("kprep", "extract", K31, prepared_copy)
    manifest = load_manifest(prepared_copy / "manifest.yaml")
    assert manifest.generation == 3 and manifest.drives[0].directory == str(tmp_path / "a")
    succeed("kprep", "verify-hashes", prepared_copy)


def test_an_end_id_beyond_the_vocabulary_is_refused_before_the_first_write(checkpoint_copy: Path, tmp_path: Path) -> None:
    (checkpoint_copy / "generation_config.json").write_text('{"eos_token_id": 99999}')
    outcome = command("kprep", "extract", checkpoint_copy, tmp_path / "out", "--release-shards")
    assert outcome.code == 3 and "token 99999, expected 0 to 511" in outcome.err
    assert not (tmp_path / "out").exists() and len(shards_of(checkpoint_copy)) == 13


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_an_error_page_for_a_vocabulary_is_refused_before_the_first_write(checkpoint_copy: Path, tmp_path: Path, name: str) -> None:
    (checkpoint_copy / name).write_text("<html>not found</html>\n")
    outcome = command("kprep", "extract", checkpoint_copy, tmp_path / "out")
    assert outcome.code == 3 and name in outcome.err and not (tmp_path / "out").exists()


def test_a_finished_output_whose_shards_are_gone_is_finished(checkpoint_copy: Path, tmp_path: Path) -> None:
    succeed("kprep", "extract", checkpoint_copy, tmp_path / "out", "--release-shards")
    assert "already extracted" in succeed("kprep", "extract", checkpoint_copy, tmp_path / "out", "--release-shards").out


def test_a_finished_output_does_not_let_shards_go_that_are_all_there(prepared_copy: Path, checkpoint_copy: Path) -> None:
    text = f"--release-shards: {prepared_copy} is finished; kprep verify-hashes {prepared_copy} proves it, then remove the shards by hand"
    inside.refused(kprep("extract", checkpoint_copy, prepared_copy, "--release-shards"), 2, text)
    assert len(shards_of(checkpoint_copy)) == 13


def test_links_to_shards_are_not_taken_for_shards(tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in K31.iterdir():
        (linked / path.name).symlink_to(path)
    outcome = succeed("kprep", "extract", linked, tmp_path / "out", "--release-shards")
    assert "model-00002-of-000013.safetensors stays: it is a link" in outcome.err and "freed" not in outcome.err
    assert len(shards_of(linked)) == 13


def test_other_drives_for_a_finished_output_are_refused(prepared_copy: Path, tmp_path: Path) -> None:
    outcome = command("kprep", "extract", K31, prepared_copy, "--tier", f"A={tmp_path}")
    assert outcome.code == 2 and "kprep place" in outcome.err


def test_a_pipe_in_place_of_a_shard_is_refused(checkpoint_copy: Path, tmp_path: Path) -> None:
    shard = checkpoint_copy / "model-00002-of-000013.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    outcome = command("kprep", "plan", checkpoint_copy, timeout=20)
    assert outcome.code == 3 and "is no regular file" in outcome.err
