"""make_checkpoint: the published format in every header, values that follow from the seed, and refusals before the first write."""

import base64
import json
import math
import struct
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from safetensors import safe_open

from layout.checkpoint import Checkpoint, open_checkpoint
from layout.config import K3, K31
from layout.mxfp4 import decode_mxfp4
from layout.record import record_layout
from layout.tensors import is_vision, spine_tensors
from manifests.errors import BadInputError, NoSpaceError, UsageError
from manifests.geometry import Geometry, load_geometry
from prep.tiny import _bf16, _shards, limit_layers, make_checkpoint

DATA = Path(__file__).parent / "data"
TINY = load_geometry("tiny")
PLAIN = replace(TINY, indexer=None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "tiny"
    make_checkpoint(out, TINY, architecture=K31, seed=7)
    return out


def header_of(path: Path) -> dict:
    raw = path.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    assert n % 8 == 0
    return json.loads(raw[8 : 8 + n])


def text_tensors(path: Path) -> list[tuple]:
    """Name, type, shape and place of the tensors that are not vision's, in the order of their bytes."""
    header = header_of(path)
    assert header.pop("__metadata__") == {"format": "pt"}
    places = [(name, e["dtype"], e["shape"], e["data_offsets"]) for name, e in header.items() if not is_vision(name)]
    return sorted(places, key=lambda place: place[3])


def shards_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("model-*.safetensors"))


def tensor_bytes(checkpoint: Checkpoint, name: str) -> bytes:
    path, offset, n_bytes = checkpoint.extent(name)
    return path.read_bytes()[offset : offset + n_bytes]


@pytest.mark.parametrize(("like", "architecture", "pad_a_log"), [("tiny-k3.1", K31, True), ("tiny-k3", K3, False)])
def test_differs_from_the_published_format_in_nothing_but_values(tmp_path: Path, like: str, architecture: str, pad_a_log: bool) -> None:
    published = DATA / like
    make_checkpoint(tmp_path, open_checkpoint(published).geometry, architecture=architecture, seed=1, pad_a_log=pad_a_log)
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in published.iterdir()} - {"golden.safetensors"}
    for ours, theirs in zip(shards_of(tmp_path), shards_of(published), strict=True):
        assert text_tensors(ours) == text_tensors(theirs), ours.name
        assert ours.stat().st_size == theirs.stat().st_size
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((published / name).read_text()), name


def test_opens_with_safetensors_and_as_the_geometry_that_was_asked_for(made: Path) -> None:
    checkpoint = open_checkpoint(made)
    assert checkpoint.geometry == TINY
    assert checkpoint.facts.remarks == []
    for path in shards_of(made):
        with safe_open(path, "numpy") as file:
            assert set(file.keys()) == set(header_of(path)) - {"__metadata__"}


def test_every_expert_is_one_run_in_record_order(made: Path) -> None:
    checkpoint = open_checkpoint(made)
    for layer in TINY.moe_layers:
        extents = [checkpoint.expert_extents(layer, expert) for expert in range(TINY.n_experts)]
        assert [len(e) for e in extents] == [1] * TINY.n_experts
        starts = [e[0].offset for e in extents]
        assert np.diff(starts).tolist() == [record_layout(TINY).n_bytes] * (TINY.n_experts - 1)


def test_same_seed_gives_the_same_bytes_and_another_seed_others(made: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "again", TINY, architecture=K31, seed=7)
    make_checkpoint(tmp_path / "other", TINY, architecture=K31, seed=8)
    for path in made.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
    ours, theirs = open_checkpoint(made), open_checkpoint(tmp_path / "other")
    assert not [name for name in ours.tensors if tensor_bytes(ours, name) == tensor_bytes(theirs, name)]


def test_a_tensor_depends_on_its_name_and_not_on_what_is_written_before_it(made: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, replace(TINY, n_experts=4, dense_intermediate_size=32), architecture=K31, seed=7)
    few, all_ = open_checkpoint(tmp_path), open_checkpoint(made)
    resized = ("layers.0.mlp.", "block_sparse_moe.gate.")
    same = [name for name in few.tensors if not any(part in name for part in resized)]
    assert not [name for name in same if tensor_bytes(few, name) != tensor_bytes(all_, name)]


def test_no_two_tensors_hold_the_same_bytes(made: Path) -> None:
    checkpoint = open_checkpoint(made)
    contents = [tensor_bytes(checkpoint, name) for name in checkpoint.tensors if not name.endswith("weight_scale")]
    assert len(set(contents)) == len(contents)


@pytest.mark.parametrize("matrix", ["w1", "w2", "w3"])
def test_expert_weights_have_unit_gain_and_no_nan_scale(made: Path, matrix: str) -> None:
    weights, scales = [], set()
    for path in shards_of(made)[1 : TINY.n_layers]:
        with safe_open(path, "numpy") as file:
            for name in (n for n in file.keys() if n.endswith(f"{matrix}.weight_scale")):  # noqa: SIM118
                scale = file.get_tensor(name)
                scales |= set(scale.ravel().tolist())
                weights.append(decode_mxfp4(file.get_tensor(name.replace("scale", "packed")), scale))
    stacked = np.stack(weights)
    assert stacked.std() * math.sqrt(stacked.shape[-1]) == pytest.approx(1, rel=0.02)
    assert len(scales) == 2
    assert max(scales) < 130


def test_every_nibble_occurs_about_equally_often(made: Path) -> None:
    with safe_open(shards_of(made)[1], "numpy") as file:
        packed = np.concatenate([file.get_tensor(n).ravel() for n in file.keys() if n.endswith("packed")])  # noqa: SIM118
    for nibbles in (packed & 15, packed >> 4):
        assert np.bincount(nibbles, minlength=16) / len(nibbles) == pytest.approx(1 / 16, rel=0.05)


def test_spine_values_are_healthy(made: Path) -> None:
    checkpoint = open_checkpoint(made)

    def values(name: str) -> np.ndarray:
        raw, tensor = tensor_bytes(checkpoint, f"language_model.{name}"), checkpoint.tensors[f"language_model.{name}"]
        if tensor.dtype == "F32":
            return np.frombuffer(raw, np.float32)
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)

    layer = "model.layers.1."
    assert values("model.embed_tokens.weight").std() == pytest.approx(1, rel=0.02)
    assert values("lm_head.weight").std() == pytest.approx(3 / math.sqrt(128), rel=0.02)
    assert values(layer + "self_attn.q_proj.weight").std() == pytest.approx(1 / math.sqrt(128), rel=0.05)
    assert values(layer + "input_layernorm.weight") == pytest.approx(1, abs=0.6)
    assert np.abs(values(layer + "block_sparse_moe.gate.e_score_correction_bias")).max() < 0.5
    a_log = values(layer + "self_attn.A_log")
    assert (a_log[:4] != 0).all()
    assert (a_log[4:] == 0).all()
    assert len(a_log) == 32


def test_a_matrix_larger_than_one_block_is_random_throughout(tmp_path: Path) -> None:
    wide = 2**18 + 32
    small = replace(limit_layers(PLAIN, 2), hidden_size=32, dense_intermediate_size=wide)
    make_checkpoint(tmp_path, small, architecture=K3, seed=1)
    raw = tensor_bytes(open_checkpoint(tmp_path), "language_model.model.layers.0.mlp.up_proj.weight")
    blocks = np.frombuffer(raw, np.uint16).reshape(-1, 32)
    assert len(blocks) == wide
    assert len(np.unique(blocks, axis=0)) == wide


def test_bf16_rounds_to_nearest_and_ties_to_even() -> None:
    values = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 3 * 2**-8, 0.0, 255.9]
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xBF82, 0x0000, 0x4380]
    assert _bf16(np.array(values, np.float32)).tolist() == expected


def read_tokenizer(directory: Path) -> tuple[dict[bytes, int], tiktoken.Encoding]:
    lines = (directory / "tiktoken.model").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    assert len(ranks) == len(lines)
    assert list(ranks.values()) == list(range(len(lines)))
    specials = json.loads((directory / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    encoding = tiktoken.Encoding(
        "made",
        pat_str=r"\s?\p{L}+|[^\s\p{L}]+|\s+",
        mergeable_ranks=ranks,
        special_tokens={entry["content"]: int(i) for i, entry in specials.items()},
    )
    return ranks, encoding


def merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Byte-pair encode from single bytes, without the short cut of looking up the whole."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        known = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not known:
            return parts
        _, i = min(known)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_tokenizer_encodes_and_decodes_any_text(made: Path) -> None:
    ranks, encoding = read_tokenizer(made)
    for text in ("tena hiru", "Hello, world!\n\n  x", "naïve 漢字 \u2028", "", "[BOS] as text"):
        assert encoding.decode(encoding.encode_ordinary(text)) == text
    assert encoding.encode_ordinary(" te") == [ranks[b" te"]]
    assert encoding.encode("<|open|>te<|end_of_msg|>", allowed_special="all") == [483, ranks[b"te"], 482]


@pytest.mark.parametrize(("vocab_size", "step"), [(288, 1), (300, 1), (500, 1), (4096, 1), (20_000, 1), (163_840, 101)])
def test_every_rank_is_reached_by_merging(tmp_path: Path, vocab_size: int, step: int) -> None:
    make_checkpoint(tmp_path, replace(limit_layers(PLAIN, 2), vocab_size=vocab_size, hidden_size=32), architecture=K3, seed=1)
    ranks, _ = read_tokenizer(tmp_path)
    assert len(ranks) == vocab_size - (32 if vocab_size <= 4096 else 256)
    assert not [token for token in list(ranks)[::step] if merge(token, ranks) != [token]]


def test_a_large_vocabulary_has_its_special_tokens_where_the_published_model_has_them(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, replace(limit_layers(PLAIN, 2), vocab_size=163_840, hidden_size=32), architecture=K3, seed=1)
    config = json.loads((tmp_path / "config.json").read_text())
    assert [config[f"{kind}_token_id"] for kind in ("bos", "eos", "pad", "media_placeholder")] == [163584, 163586, 163839, 163605]
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 163586


def test_k31_has_the_sizes_of_the_real_model() -> None:
    k3, k31 = load_geometry("k3"), load_geometry("k3.1")
    assert record_layout(k31).n_bytes == 17_547_264
    assert record_layout(k31).n_bytes * k31.n_routed_experts == 1_446_456_066_048
    n_indexer = 24 * (4096 * 1536 + (128 + 32) * 7168 + 2 * 128)
    for geometry, n_parameters in ((k3, 56_743_645_792), (k31, 56_743_645_792 + n_indexer)):
        assert sum(math.prod(s.shape) for t in spine_tensors(geometry) for s in t.sources) == n_parameters


def test_k3_has_the_shards_tensors_and_bytes_of_the_published_index() -> None:
    shards = _shards(load_geometry("k3"), pad_a_log=True)
    text = [shard for shard in shards if not is_vision(shard.tensors[0].name)]
    assert (shards[0].name, len(shards), len(text)) == ("model-00001-of-000096.safetensors", 96, 94)
    # The published totals less those of its vision tower and projector.
    assert sum(len(shard.tensors) for shard in text) == 497_220 - 168
    assert sum(shard.data_bytes for shard in text) == 1_560_860_324_864 - 894_717_952


@pytest.mark.parametrize(("n", "full"), [(2, (1,)), (3, (2,)), (4, (3,)), (5, (3,)), (8, (3, 7)), (10, (3, 7, 9))])
def test_fewer_layers_keep_their_kinds_and_one_with_full_attention(n: int, full: tuple[int, ...]) -> None:
    limited = limit_layers(TINY, n)
    assert (limited.n_layers, limited.full_attention_layers) == (n, full)
    assert replace(limited, n_layers=10, full_attention_layers=TINY.full_attention_layers) == TINY


@pytest.mark.parametrize("n", [-1, 0, 1, 11])
def test_refuses_a_number_of_layers_that_leaves_none_with_experts(n: int) -> None:
    with pytest.raises(UsageError, match=f"layers is {n}, expected 2 to 10"):
        limit_layers(TINY, n)


def test_fewer_layers_make_a_checkpoint_that_opens(tmp_path: Path) -> None:
    limited = limit_layers(TINY, 2)
    make_checkpoint(tmp_path, limited, architecture=K31, seed=1)
    assert open_checkpoint(tmp_path).geometry == limited


def test_progress_rises_to_the_size_that_the_index_gives(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    make_checkpoint(tmp_path, TINY, architecture=K31, seed=1, on_progress=lambda *call: calls.append(call))
    total = json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    done = [call[1] for call in calls]
    assert done == sorted(done)
    assert done[-1] == total
    assert {call[2] for call in calls} == {total}
    assert list(dict.fromkeys(call[0] for call in calls)) == [path.name for path in shards_of(tmp_path)]


def test_an_interrupted_run_leaves_whole_shards_and_no_index(tmp_path: Path) -> None:
    def interrupt(shard: str, n_done: int, n_total: int) -> None:
        if n_done > n_total // 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path, TINY, architecture=K31, seed=1, on_progress=interrupt)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"model-{i:05}-of-000013.safetensors" for i in range(1, 1 + len(names))]
    assert 0 < len(names) < 13


def test_refuses_a_directory_that_is_not_empty_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(BadInputError, match="not empty") as caught:
        make_checkpoint(tmp_path, TINY, architecture=K31, seed=1)
    assert caught.value.exit_code == 3
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("mine", "precious")]


def test_refuses_a_file_in_the_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(BadInputError, match="is a file"):
        make_checkpoint(tmp_path / "out", TINY, architecture=K31, seed=1)
    with pytest.raises(BadInputError, match="cannot be created"):
        make_checkpoint(tmp_path / "out" / "below", TINY, architecture=K31, seed=1)


@pytest.mark.parametrize(
    ("geometry", "architecture", "message"),
    [
        (TINY, "LlamaForCausalLM", "architecture is 'LlamaForCausalLM', expected one of KimiK3"),
        (PLAIN, K31, "the geometry has no indexer, expected one"),
        (TINY, K3, "the geometry has an indexer, expected none"),
        (replace(TINY, lora_norm_eps=1e-5), K31, "lora_norm_eps is 1e-05, expected 1e-06"),
        (replace(TINY, vocab_size=287), K31, "vocab_size is 287, expected 288"),
        (replace(TINY, vocab_size=10), K31, "vocab_size is 10, expected 288"),
        (replace(TINY, vocab_size=2_000_000), K31, "vocab_size is 2000000"),
    ],
)
def test_refuses_what_the_format_cannot_hold(tmp_path: Path, geometry: Geometry, architecture: str, message: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(BadInputError, match=message):
        make_checkpoint(out, geometry, architecture=architecture, seed=1)
    assert not out.exists()


def test_refuses_what_does_not_fit_on_the_disk_before_the_first_write(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    huge = replace(TINY, dense_intermediate_size=2**40)
    with pytest.raises(NoSpaceError, match=r"needs 844,424,93\d,\d{3},\d{3} bytes, but .* has [\d,]+ bytes free") as caught:
        # Without the check this would fill the disk: stop at the first block.
        make_checkpoint(out, huge, architecture=K31, seed=1, on_progress=lambda *_: pytest.fail("it wrote"))
    assert caught.value.exit_code == 5
    assert not out.parent.exists()


def test_a_sparse_checkpoint_differs_only_in_its_data_which_is_a_hole(made: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, TINY, architecture=K31, seed=7, is_sparse=True)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in made.iterdir()}
    for path in made.iterdir():
        ours, theirs = (tmp_path / path.name).read_bytes(), path.read_bytes()
        n = 8 + int.from_bytes(theirs[:8], "little") if path.suffix == ".safetensors" else len(theirs)
        assert len(ours) == len(theirs)
        assert ours[:n] == theirs[:n], path.name
        assert not any(ours[n:])
        assert (tmp_path / path.name).stat().st_blocks * 512 < n + 2 * 4096, path.name
    assert open_checkpoint(tmp_path).digest == open_checkpoint(made).digest


def test_a_sparse_checkpoint_may_be_larger_than_the_disk(tmp_path: Path) -> None:
    huge = replace(limit_layers(PLAIN, 2), dense_intermediate_size=2**34)
    with pytest.raises(NoSpaceError):
        make_checkpoint(tmp_path / "whole", huge, architecture=K3, seed=1, on_progress=lambda *_: pytest.fail("it wrote"))
    make_checkpoint(tmp_path / "sparse", huge, architecture=K3, seed=1, is_sparse=True)
    assert sum(path.stat().st_size for path in (tmp_path / "sparse").iterdir()) > 13 * 10**12
    assert open_checkpoint(tmp_path / "sparse").geometry == huge


def test_progress_of_a_sparse_checkpoint_rises_to_its_apparent_size(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    make_checkpoint(tmp_path, TINY, architecture=K31, seed=1, is_sparse=True, on_progress=lambda *call: calls.append(call))
    assert [call[0] for call in calls] == [path.name for path in shards_of(tmp_path)]
    assert calls[-1][1] == calls[-1][2] == json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
