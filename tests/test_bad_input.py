"""What a user can get wrong or find damaged: each ends in its exit code and one message that names the place, and leaves nothing half-written."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import DATA, Outcome, command, succeed
from placing import add_copies
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from layout.checkpoint import INDEX_NAME, open_checkpoint
from layout.record import expert_file_name
from layout.terminal import run_command
from manifests.errors import BadInputError
from manifests.load import load_manifest
from runtime.cli import app as krun_app
from runtime.tensor_files import read_ids, read_logits

USAGE, BAD_INPUT, DAMAGED, NO_SPACE, DEVICE = 2, 3, 4, 5, 6
GOLDEN = DATA / "tiny-k3.1" / "golden.safetensors"
LAYER_1 = "language_model.model.layers.1."
Krun = Callable[..., Outcome]


def refused(outcome: Outcome, code: int, *parts: str) -> None:
    """The command ended with this code and one message, which holds all the parts."""
    assert outcome.code == code, outcome
    assert "Traceback" not in outcome.err
    assert len(re.findall("^(?:kprep|krun): |^Usage: ", outcome.err, re.MULTILINE)) == 1, outcome.err
    # A long word that typer's frame has broken is one word again.
    text = re.sub(r"[│\s]+", " ", outcome.err)
    assert [part for part in parts if part not in text] == [], outcome.err


def tree(directory: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


@pytest.fixture
def krun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Krun]:
    """krun's command line in this process, which has torch already; what it does not turn into a message fails the test."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in signals]

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["krun", *map(str, arguments)])
        code = run_command(krun_app, name="krun")
        return Outcome(code, *capsys.readouterr())

    yield run
    for number, handler in zip(signals, handlers, strict=True):
        signal.signal(number, handler)


# Checkpoints


def shard(number: int) -> str:
    return f"model-{number:05}-of-000013.safetensors"


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def edit_shard(path: Path, change: Callable[[dict[str, Any], bytearray], object]) -> None:
    """Change a shard's header and data."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + n]), bytearray(raw[8 + n :])
    change(header, data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def write_into_tensor(checkpoint: Path, name: str, at: int, data: bytes) -> None:
    extent = open_checkpoint(checkpoint).extent(name)
    assert at + len(data) <= extent.n_bytes
    overwrite(extent.path, extent.offset + at, data)


def lose_a_shard(checkpoint: Path) -> None:
    (checkpoint / shard(3)).unlink()


def cut_two_shards(checkpoint: Path) -> None:
    for number, n_bytes in ((2, 1000), (5, 7)):
        path = checkpoint / shard(number)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - n_bytes)


def spoil_a_header(checkpoint: Path) -> None:
    overwrite(checkpoint / shard(4), 8, b"!")


def announce_a_header_beyond_the_file(checkpoint: Path) -> None:
    overwrite(checkpoint / shard(4), 0, (600_000).to_bytes(8, "little"))


def announce_an_endless_header(checkpoint: Path) -> None:
    overwrite(checkpoint / shard(4), 0, b"\xff" * 8)


def add_a_tensor(checkpoint: Path) -> None:
    name = LAYER_1 + "self_attn.novelty.weight"

    def add(header: dict[str, Any], data: bytearray) -> None:
        header[name] = {"dtype": "F32", "shape": [2], "data_offsets": [len(data), len(data) + 8]}
        data += bytes(8)

    edit_shard(checkpoint / shard(2), add)
    edit_json(checkpoint / INDEX_NAME, lambda index: index["weight_map"].update({name: shard(2)}))


def take_a_tensor_away(checkpoint: Path) -> None:
    name = LAYER_1 + "self_attn.v_proj.weight"

    def take(header: dict[str, Any], data: bytearray) -> None:
        begin, end = header.pop(name)["data_offsets"]
        assert end == len(data)
        del data[begin:]

    edit_shard(checkpoint / shard(2), take)
    edit_json(checkpoint / INDEX_NAME, lambda index: index["weight_map"].pop(name))


def lose_the_tensors_of_a_shard(checkpoint: Path) -> None:
    def empty(header: dict[str, Any], data: bytearray) -> None:
        header.clear()
        data.clear()

    edit_shard(checkpoint / shard(12), empty)


def name_another_architecture(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", lambda config: config.update(architectures=["LlamaForCausalLM"], model_type="llama"))


def name_another_model_type(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", lambda config: config.update(architectures=["KimiK3ForConditionalGeneration"], model_type="kimi_k4"))


def contradict_the_layer_lists(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", lambda config: config["text_config"]["linear_attn_config"]["kda_layers"].append(4))


def contradict_the_indexer_s_layers(checkpoint: Path) -> None:
    edit_json(checkpoint / "config.json", lambda config: config["text_config"]["dsa_config"].update(full_attn_layers=[4, 8]))


def write_a_nan_scale(checkpoint: Path) -> None:
    write_into_tensor(checkpoint, LAYER_1 + "block_sparse_moe.experts.7.w2.weight_scale", 11, b"\xff")


def fill_the_padding(checkpoint: Path) -> None:
    write_into_tensor(checkpoint, LAYER_1 + "self_attn.A_log", 31 * 4, np.float32(0.5).tobytes())


def write_a_nan_weight(checkpoint: Path) -> None:
    write_into_tensor(checkpoint, LAYER_1 + "self_attn.q_proj.weight", 10, b"\xc0\x7f")


def lose_the_vocabulary(checkpoint: Path) -> None:
    (checkpoint / "tiktoken.model").unlink()


BAD_CHECKPOINTS: dict[Callable[[Path], None], tuple[str, ...]] = {
    lose_a_shard: (shard(3), "missing, but the index names it"),
    cut_two_shards: ("2 faults", f"{shard(2)}: short by 1000 bytes", f"{shard(5)}: short by 7 bytes"),
    spoil_a_header: (shard(4), "the header is not JSON"),
    announce_a_header_beyond_the_file: (shard(4), "a header of 600000 bytes, but the file has 520512"),
    announce_an_endless_header: (shard(4), "a header of 18446744073709551615 bytes"),
    add_a_tensor: (LAYER_1 + "self_attn.novelty.weight is unknown",),
    take_a_tensor_away: (LAYER_1 + "self_attn.v_proj.weight is missing",),
    lose_the_tensors_of_a_shard: (shard(12), "but the index places it there"),
    name_another_architecture: ("config.json", "LlamaForCausalLM", "KimiK31ForConditionalGeneration"),
    name_another_model_type: ("config.json", "kimi_k4", "kimi_k3"),
    contradict_the_layer_lists: ("config.json", "full_attn_layers and kda_layers contradict each other: in both [4]"),
    contradict_the_indexer_s_layers: ("config.json", "dsa_config.full_attn_layers is [4, 8], expected", "[4, 8, 10]"),
    write_a_nan_scale: (LAYER_1 + "block_sparse_moe.experts.7.w2.weight_scale", shard(2), "255"),
    fill_the_padding: (LAYER_1 + "self_attn.A_log", "entries 4..31 must be zero", "0.5"),
    write_a_nan_weight: (LAYER_1 + "self_attn.q_proj.weight", shard(2), "not finite"),
    lose_the_vocabulary: ("tiktoken.model", "missing"),
}


@pytest.mark.parametrize("damage", BAD_CHECKPOINTS, ids=lambda damage: damage.__name__)
def test_a_bad_checkpoint_is_refused_and_extracts_once_repaired(
    checkpoint_copy: Path, extractions: dict[str, Path], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    out = tmp_path / "out"
    damage(checkpoint_copy)
    refused(command("kprep", "extract", checkpoint_copy, out), BAD_INPUT, *BAD_CHECKPOINTS[damage])
    assert not (out / "manifest.yaml").exists()
    assert list(tmp_path.rglob("*.partial")) == []
    shutil.copytree(DATA / "tiny-k3.1", checkpoint_copy, dirs_exist_ok=True)
    succeed("kprep", "extract", checkpoint_copy, out)
    good = extractions["tiny-k3.1"]
    assert {p.name: p.read_bytes() for p in (out / "experts").iterdir()} == {p.name: p.read_bytes() for p in (good / "experts").iterdir()}


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused(command("kprep", "extract", tmp_path / "nothing", tmp_path / "out"), BAD_INPUT, str(tmp_path / "nothing"), "no such directory")
    assert not (tmp_path / "out").exists()


def test_an_output_with_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    refused(command("kprep", "extract", DATA / "tiny-k3.1", tmp_path), BAD_INPUT, str(tmp_path), "is not empty")
    assert tree(tmp_path) == {tmp_path / "notes.txt": b"mine"}
    refused(command("kprep", "extract", DATA / "tiny-k3.1", tmp_path / "notes.txt"), BAD_INPUT, "notes.txt", "is no directory")


def test_the_output_of_another_checkpoint_is_left_alone(prepared_copy: Path) -> None:
    before = tree(prepared_copy)
    refused(command("kprep", "extract", DATA / "tiny-k3", prepared_copy), BAD_INPUT, str(prepared_copy), "another checkpoint")
    assert tree(prepared_copy) == before
    # An unfinished one too: it has a journal, but no manifest.
    (prepared_copy / "manifest.yaml").unlink()
    (prepared_copy / "extract.journal").write_text("extract of checkpoint 00\n")
    refused(command("kprep", "extract", DATA / "tiny-k3", prepared_copy), BAD_INPUT, str(prepared_copy), "is not empty")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Make an empty file system of some megabytes; an extraction of tiny-k3.1 needs six."""
    disk = tmp_path / "disk"

    def mount(n_megabytes: int) -> Path:
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={n_megabytes}m", "tmpfs", disk], capture_output=True).returncode:
            pytest.skip("no file system can be mounted here: a small disk was not tried")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", disk], check=True)


def test_an_extraction_that_does_not_fit_is_refused_before_the_first_write(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(3)
    refused(command("kprep", "extract", DATA / "tiny-k3.1", disk / "out"), NO_SPACE, str(disk), "needed", "are free; nothing was written")
    assert list(disk.iterdir()) == []


def test_an_unfinished_extraction_s_own_files_are_not_counted_against_it(small_disk: Callable[[int], Path], extractions: dict[str, Path]) -> None:
    good, out = extractions["tiny-k3.1"], small_disk(7) / "out"
    shutil.copytree(good / "experts", out / "experts")
    (out / "extract.journal").write_text(json.dumps({"extract": load_manifest(good / "manifest.yaml").source.digest, "schema": 1}) + "\n")
    succeed("kprep", "extract", DATA / "tiny-k3.1", out)


def test_make_tiny_refuses_what_it_cannot_make(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    refused(command("kprep", "make-tiny", tmp_path), BAD_INPUT, str(tmp_path), "not empty")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    new = tmp_path / "new"
    refused(command("kprep", "make-tiny", new, "--geometry", "k9"), BAD_INPUT, "k9", "k3.1")
    refused(command("kprep", "make-tiny", new, "--architecture", "x"), USAGE, "--architecture x", "k3.1")
    refused(command("kprep", "make-tiny", new, "--layers", "1"), USAGE, "expected 2 to 10")
    assert not new.exists()


# Manifests


def edit_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


BAD_MANIFESTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing": (Path.unlink, ("no such file",)),
    "unknown key": (lambda path: path.write_text(path.read_text() + 'colour: "red"\n'), ("unknown keys ['colour']",)),
    "unknown schema": (lambda path: edit_text(path, "schema: 1", "schema: 9"), ("schema: is 9",)),
    "duplicate key": (lambda path: path.write_text(path.read_text() + "generation: 1\n"), ("the key 'generation' is there twice", "line")),
    "hole in the base": (lambda path: edit_text(path, '3: "0-15"', '3: "0-13,15"'), ("layer 3: experts 14 are on no drive",)),
    "no range": (lambda path: edit_text(path, '3: "0-15"', "3: 15"), ("drives[0].holds[3]", "double quotes")),
    "cut short": (lambda path: path.write_text(path.read_text()[:1500]), ()),
    "not UTF-8": (lambda path: overwrite(path, 100, b"\xff"), ("byte 100 is not UTF-8",)),
    "empty": (lambda path: path.write_text(""), ("the file: ",)),
    "another record": (lambda path: edit_text(path, 'nibbles: "', 'nibbles: "un'), ("record.nibbles", "this program reads")),
}


@pytest.mark.parametrize("fault", BAD_MANIFESTS)
def test_a_bad_manifest_is_refused_with_the_place_in_it(prepared_copy: Path, krun: Krun, fault: str) -> None:
    damage, parts = BAD_MANIFESTS[fault]
    manifest = prepared_copy / "manifest.yaml"
    # As by hand: without the last line, which is the hash of the others and would be what is wrong.
    manifest.write_text(manifest.read_text().partition("# sha256 of")[0])
    damage(manifest)
    refused(command("kprep", "verify-hashes", manifest), BAD_INPUT, str(manifest), *parts)
    refused(krun("generate", "-m", manifest, "--ids", "1", "--device", "cpu"), BAD_INPUT, str(manifest), *parts)


# Damaged data


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(("damage", "what"), [(Path.unlink, "No such file"), (cut, "9791 bytes, expected 9792")], ids=["missing", "too short"])
def test_an_expert_file_that_is_gone_is_named_before_the_run_begins(
    prepared_copy: Path, krun: Krun, damage: Callable[[Path], None], what: str
) -> None:
    damage(prepared_copy / "experts" / expert_file_name(5, 11))
    outcome = krun("generate", "-m", prepared_copy, "--ids", "1", "--device", "cpu")
    refused(outcome, DAMAGED, "layer 5 expert 11: no usable copy", str(prepared_copy / "experts"), what)
    refused(command("kprep", "verify-hashes", prepared_copy), DAMAGED, "1 bad expert file ")


def generate_with_seed_ids(krun: Krun, manifest: Path, *flags: object) -> Outcome:
    return krun("generate", "-m", manifest, "--ids", "5,6,7,8", "-n", "6", "--device", "cpu", "--json", "--verify-reads", "1", *flags)


def test_a_flipped_byte_ends_the_run_where_there_is_no_other_copy(prepared_copy: Path, krun: Krun) -> None:
    for path in prepared_copy.glob("experts/L3-E*.bin"):
        flip(path, 4321)
    outcome = generate_with_seed_ids(krun, prepared_copy)
    refused(outcome, DAMAGED, "layer 3 expert", "no readable copy is left", str(prepared_copy / "experts"), "kprep verify-hashes")
    assert outcome.out == ""


def test_a_flipped_byte_is_survived_by_the_other_copy_and_said_once(prepared_copy: Path, tmp_path: Path, krun: Krun) -> None:
    whole = json.loads(generate_with_seed_ids(krun, prepared_copy).out)
    drives = [tmp_path / "a", tmp_path / "b"]
    drives[0].mkdir()
    succeed("kprep", "place", prepared_copy / "manifest.yaml", "--tier", f"A={drives[0]}")
    add_copies(prepared_copy, drives[1], tier="B")
    for path in drives[0].glob("L3-E*.bin"):
        flip(path, 4321)
    # One slot each: every record is read again for every token, so a second message would come.
    outcome = generate_with_seed_ids(krun, prepared_copy, "--vram-cache", "1slots", "--host-pool", "1slots")
    assert outcome.code == 0, outcome
    document = json.loads(outcome.out)
    assert document["ids"] == whole["ids"]
    said = re.findall(rf"^(layer 3 expert \d+) on {drives[0]} \(tier A\): .* differs from .*; trying another copy$", outcome.err, re.MULTILINE)
    assert said and len(said) == len(set(said))
    assert outcome.err.count("trying another copy") == len(said)
    assert sum(phase["n_failed_reads"] for phase in document["stats"]["phases"].values()) == len(said)


@pytest.mark.parametrize("damage", [lambda path: flip(path, 1_500_000), cut, Path.unlink], ids=["flipped", "cut", "missing"])
def test_a_bad_spine_is_refused_at_the_start(prepared_copy: Path, krun: Krun, damage: Callable[[Path], None]) -> None:
    spine = prepared_copy / "spine.gguf"
    damage(spine)
    refused(krun("generate", "-m", prepared_copy, "--ids", "1", "--device", "cpu"), DAMAGED, str(spine), "expected" if not spine.exists() else "")
    outcome = command("kprep", "verify-hashes", prepared_copy)
    refused(outcome, DAMAGED, "1 other bad file")
    assert outcome.out.startswith(f"{spine}: ") and "restores it" in outcome.out


def test_an_altered_hash_list_is_refused_by_both(prepared_copy: Path, krun: Krun) -> None:
    flip(prepared_copy / "experts.xxh128", 3)
    for outcome in (krun("generate", "-m", prepared_copy, "--ids", "1"), command("kprep", "verify-hashes", prepared_copy)):
        refused(outcome, DAMAGED, str(prepared_copy / "experts.xxh128"), "differs from the manifest's")


# What krun is asked for


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    (root / "latin1.txt").write_bytes(b"caf\xe9")
    (root / "empty.txt").touch()
    ids = {"ids": np.array([1, 2, 3]), "float": np.array([1.0, 2.0]), "square": np.array([[1, 2]]), "none": np.zeros(0, np.int64)}
    save_file({**ids, "beyond": np.array([512])}, root / "ids.safetensors")
    save_file({"logits": np.zeros((2, 512), np.float32)}, root / "two.safetensors")
    return root


GENERATE_REFUSALS: list[tuple[tuple[str, ...], int, tuple[str, ...]]] = [
    (("--ids", "1", "-c", "2049"), USAGE, ("-c 2049", "2048", "selected positions only")),
    (("--ids", "1", "-c", "0"), USAGE, ("-c 0", "1 to 2048")),
    (("--ids", "1,2,3", "-c", "2"), BAD_INPUT, ("the prompt has 3 tokens, but the context is 2",)),
    (("-p", ""), BAD_INPUT, ("the prompt is empty",)),
    (("--prompt-file", "{files}/empty.txt"), BAD_INPUT, ("the prompt is empty",)),
    (("--ids", ""), BAD_INPUT, ("--ids ''", "like 1,2,3")),
    (("--ids", "1,x"), BAD_INPUT, ("--ids '1,x'", "like 1,2,3")),
    (("--ids", "512"), BAD_INPUT, ("512", "0 to 511")),
    (("--ids", "3,-1"), BAD_INPUT, ("--ids '3,-1'", "like 1,2,3")),
    (("--ids", "9" * 40), BAD_INPUT, ("--ids", "9" * 40)),
    (("--ids", "1", "-p", "a"), USAGE, ("exactly one of -p TEXT, --ids",)),
    ((), USAGE, ("exactly one of -p TEXT, --ids",)),
    (("--prompt-file", "{files}/nothing"), BAD_INPUT, ("--prompt-file {files}/nothing", "No such file")),
    (("--prompt-file", "{files}/latin1.txt"), BAD_INPUT, ("{files}/latin1.txt", "not UTF-8 at byte 3")),
    (("--ids", "1", "--temp", "-1"), USAGE, ("--temp is -1",)),
    (("--ids", "1", "--temp", "nan"), USAGE, ("--temp is nan",)),
    (("--ids", "1", "--top-p", "0"), USAGE, ("--top-p is 0",)),
    (("--ids", "1", "-n", "0"), USAGE, ("-n",)),
    (("--ids", "1", "--chunk", "0"), USAGE, ("--chunk",)),
    (("--ids", "1", "--verify-reads", "-1"), USAGE, ("--verify-reads",)),
    (("--ids", "1", "--device", "tpu"), USAGE, ("--device tpu", "cpu or cuda")),
    *(
        (("--ids", "1", flag, size), USAGE, (flag, size))
        for flag in ("--vram-cache", "--host-pool")
        for size in ("0", "27", "-1GB", "1B", "0slots", "much")
    ),
    (("--ids", "1", "--colour"), USAGE, ("--colour",)),
]


@pytest.mark.parametrize(("flags", "code", "parts"), GENERATE_REFUSALS, ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None)
def test_generate_refuses_what_it_cannot_do(
    extractions: dict[str, Path], files: Path, krun: Krun, flags: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    device = () if "--device" in flags else ("--device", "cpu")
    outcome = krun("generate", "-m", extractions["tiny-k3.1"], *device, *(flag.format(files=files) for flag in flags))
    refused(outcome, code, *(part.format(files=files) for part in parts))
    assert outcome.out == ""


def test_a_cache_larger_than_the_model_becomes_all_experts(extractions: dict[str, Path], krun: Krun) -> None:
    outcome = krun("generate", "-m", extractions["tiny-k3.1"], "--ids", "1", "-n", "1", "--device", "cpu", "--vram-cache", "900TB")
    assert outcome.code == 0, outcome
    assert "--vram-cache 900TB: 144 slots, 1.41MB (all experts)" in outcome.err


def test_cuda_is_refused_where_there_is_none(extractions: dict[str, Path], krun: Krun) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    for rest in (("generate", "-m", extractions["tiny-k3.1"], "--ids", "1"), ("score", "--checkpoint", DATA / "tiny-k3.1", *SCORE_IDS)):
        refused(krun(*rest, "--device", "cuda"), DEVICE, "--device cuda", "finds no CUDA device")


SCORE_IDS = ("--ids-file", GOLDEN, "--key", "0.ids", "--out", "never-written.safetensors")
SCORE_REFUSALS: list[tuple[str, int, tuple[str, ...]]] = [
    ("--ids-file {ids} --out {out}", USAGE, ("exactly one of -m MANIFEST and --checkpoint DIR",)),
    ("-m {model} --checkpoint {checkpoint} --ids-file {ids} --out {out}", USAGE, ("exactly one of -m MANIFEST and --checkpoint DIR",)),
    ("-m {model} --out {out}", USAGE, ("--ids-file is missing",)),
    ("-m {model} --ids-file {files}/nothing --out {out}", BAD_INPUT, ("{files}/nothing", "No such file")),
    ("-m {model} --ids-file {files}/latin1.txt --out {out}", BAD_INPUT, ("{files}/latin1.txt", "safetensors")),
    ("-m {model} --ids-file {ids} --key words --out {out}", BAD_INPUT, ("{ids}", "'words'", "it holds", "square")),
    ("-m {model} --ids-file {ids} --key float --out {out}", BAD_INPUT, ("{ids}", "float64", "whole numbers")),
    ("-m {model} --ids-file {ids} --key square --out {out}", BAD_INPUT, ("{ids}", "[1, 2]", "[tokens]")),
    ("-m {model} --ids-file {ids} --key none --out {out}", BAD_INPUT, ("the prompt is empty",)),
    ("-m {model} --ids-file {ids} --key beyond --out {out}", BAD_INPUT, ("512", "0 to 511")),
    ("-m {model} --ids-file {ids}", USAGE, ("--out", "--against")),
    ("-m {model} --ids-file {ids} --out {out} --arithmetic exact", USAGE, ("--arithmetic exact", "decode or prompt")),
    ("-m {model} --ids-file {ids} --out {out} -c 2", BAD_INPUT, ("3 tokens, but the context is 2",)),
    ("-m {model} --ids-file {ids} --against {files}/two.safetensors", BAD_INPUT, ("two.safetensors", "[2, 512], expected [3, 512]")),
    ("-m {model} --ids-file {ids} --against {files}/nothing", BAD_INPUT, ("{files}/nothing", "No such file")),
    ("--checkpoint {files}/nothing --ids-file {ids} --out {out}", BAD_INPUT, ("{files}/nothing", "no such directory")),
    ("--checkpoint {checkpoint} --ids-file {ids} --key beyond --out {out}", BAD_INPUT, ("512", "0 to 511")),
]


@pytest.mark.parametrize(("flags", "code", "parts"), SCORE_REFUSALS, ids=[flags for flags, _, _ in SCORE_REFUSALS])
def test_score_refuses_what_it_cannot_do(
    extractions: dict[str, Path], files: Path, tmp_path: Path, krun: Krun, flags: str, code: int, parts: tuple[str, ...]
) -> None:
    names = {
        "model": extractions["tiny-k3.1"],
        "checkpoint": DATA / "tiny-k3.1",
        "files": files,
        "ids": files / "ids.safetensors",
        "out": tmp_path / "logits.safetensors",
    }
    outcome = krun("score", "--device", "cpu", *(flag.format(**names) for flag in flags.split()))
    refused(outcome, code, *(part.format(**names) for part in parts))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [torch.tensor([[1.0, float("nan")]]), torch.tensor([[1.0, float("inf")]]), torch.ones(1, 2, dtype=torch.complex64)])
def test_logits_that_are_no_finite_numbers_are_refused(tmp_path: Path, value: torch.Tensor) -> None:
    save_tensors({"logits": value, "ids": value[0].clone()}, tmp_path / "l.safetensors")
    with pytest.raises(BadInputError, match="not of finite numbers alone"):
        read_logits(tmp_path / "l.safetensors")
    with pytest.raises(BadInputError, match="expected whole numbers"):
        read_ids(tmp_path / "l.safetensors", "ids")


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("-m", "{model}", "--ids", "1", "--top-p", "2"), USAGE, "--top-p is 2"),
        (("-m", "{model}/nothing", "--ids", "1"), BAD_INPUT, "{model}/nothing"),
        (("-m", "{damaged}", "--ids", "1"), DAMAGED, "layer 9 expert 15"),
    ],
    ids=["usage", "bad input", "damaged"],
)
def test_the_real_process_exits_with_the_code_and_no_stack_trace(
    extractions: dict[str, Path], prepared_copy: Path, arguments: tuple[str, ...], code: int, part: str
) -> None:
    (prepared_copy / "experts" / expert_file_name(9, 15)).unlink()
    names = {"model": extractions["tiny-k3.1"], "damaged": prepared_copy}
    outcome = command("krun", "generate", "--device", "cpu", *(a.format(**names) for a in arguments))
    refused(outcome, code, part.format(**names))
    assert outcome.out == ""


# Where kprep place is to put things


PLACE_REFUSALS: list[tuple[str, int, tuple[str, ...]]] = [
    ("--tier E={a}", USAGE, ("--tier E=", "A, B, C, D")),
    ("--tier AB={a}", USAGE, ("--tier AB=", "A, B, C, D")),
    ("--tier {a}", USAGE, ("--tier {a}", "like A=")),
    ("--tier A=", USAGE, ("--tier A=", "like A=")),
    ("", USAGE, ("--tier",)),
    ("--tier A={a}/nothing", USAGE, ("{a}/nothing: no such directory",)),
    ("--tier A={a} --tier B={a}/../a", USAGE, ("--tier B={a}/../a", "named twice")),
    ("--tier C={a} --tier D={b}", USAGE, ("at least one drive of tier A or B",)),
    ("--tier A={a} --limit A=1.7MB", NO_SPACE, ("room for 138 of 144 experts",)),
    ("--tier A={a} --limit A=143slots", NO_SPACE, ("room for 143 of 144 experts",)),
    ("--tier A={a} --tier C={b} --limit C=all", USAGE, ("--limit C", "'all' is not a size")),
    ("--tier A={a} --limit B=1GB", USAGE, ("no drive of tier B",)),
    ("--tier A={a} --reserve 900TB", NO_SPACE, ("room for 0 of 144 experts", "lower the reserve")),
    ("--tier A={a} --reserve much", USAGE, ("--reserve", "'much' is not a size")),
    ("--tier A={a} --measure-drives --measure-seconds 0", USAGE, ("--measure-seconds",)),
]


@pytest.mark.parametrize(("flags", "code", "parts"), PLACE_REFUSALS, ids=[flags for flags, _, _ in PLACE_REFUSALS])
def test_place_refuses_what_it_cannot_do(prepared_copy: Path, tmp_path: Path, flags: str, code: int, parts: tuple[str, ...]) -> None:
    names = {"a": tmp_path / "a", "b": tmp_path / "b"}
    for directory in names.values():
        directory.mkdir()
    before = tree(tmp_path)
    outcome = command("kprep", "place", prepared_copy / "manifest.yaml", *flags.format(**names).split())
    refused(outcome, code, *(part.format(**names) for part in parts))
    assert tree(tmp_path) == before
