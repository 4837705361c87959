"""Every fault of a checkpoint is found from its headers, told by name and together with the others; and what its tensors hold is judged."""

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layout.checkpoint import INDEX_NAME, Checkpoint, open_checkpoint
from layout.direct import aligned_buffer, round_up, span_bytes
from layout.gather import gather_record
from layout.record import SEGMENT_NAMES
from layout.tensor_data import read_float_tensor
from layout.tensors import SpineTensor, expert_tensor_names
from manifests.errors import BadInputError, KtierError
from prep.extraction.spine import write_spine

DATA = Path(__file__).parent / "data"
P = "language_model.model."
# The second layer: the first that has experts.
SHARD = "model-00002-of-000013.safetensors"
NEXT = "model-00003-of-000013.safetensors"
EXPERT = P + "layers.1.block_sparse_moe.experts.0."
NORM = P + "layers.1.input_layernorm.weight"
GATE = P + "layers.1.block_sparse_moe.gate.weight"

Header = dict[str, Any]
Damage = Callable[[Path], None]


def split_shard(path: Path) -> tuple[Header, bytes]:
    """Return a shard's header and its data."""
    raw = path.read_bytes()
    n = 8 + struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:n]), raw[n:]


def join_shard(path: Path, header: Header | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def change_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX_NAME).read_bytes())
    change(index["weight_map"])
    (directory / INDEX_NAME).write_text(json.dumps(index))


def header_of(change: Callable[[Header], object], shard: str = SHARD) -> Damage:
    """Change a shard's header and leave its data."""

    def damage(directory: Path) -> None:
        header, data = split_shard(directory / shard)
        change(header)
        join_shard(directory / shard, header, data)

    return damage


def entry_of(tensor: str, **values: object) -> Damage:
    """Change a tensor's entry in its header."""
    return header_of(lambda header: header[tensor].update(values))


def raw_header(make: Callable[[bytes], bytes]) -> Damage:
    """Change the text of a header."""

    def damage(directory: Path) -> None:
        header, data = split_shard(directory / SHARD)
        join_shard(directory / SHARD, make(json.dumps(header).encode()), data)

    return damage


def rename(old: str, new: str | None = None) -> Damage:
    """Give a tensor another name, in header and index; None takes it away and puts nothing in its place but a vision tensor."""
    name = new or "vision_tower.filler"

    def damage(directory: Path) -> None:
        header_of(lambda header: header.update({name: header.pop(old)}))(directory)
        change_index(directory, lambda index: index.update({name: index.pop(old)}))

    return damage


def cut(*n_bytes: int) -> Damage:
    """Shorten the first shards, each by so many bytes."""

    def damage(directory: Path) -> None:
        for number, n in enumerate(n_bytes, start=2):
            path = directory / f"model-{number:05}-of-000013.safetensors"
            path.write_bytes(path.read_bytes()[:-n])

    return damage


def append(data: bytes) -> Damage:
    def damage(directory: Path) -> None:
        with (directory / SHARD).open("ab") as shard:
            shard.write(data)

    return damage


def index_of(change: Callable[[dict[str, str]], object]) -> Damage:
    return lambda directory: change_index(directory, change)


def file(name: str, content: bytes | None) -> Damage:
    """Replace a file; None takes it away."""

    def damage(directory: Path) -> None:
        (directory / name).unlink() if content is None else (directory / name).write_bytes(content)

    return damage


def put_in_another_shard_too(directory: Path) -> None:
    header, data = split_shard(directory / NEXT)
    n = 2 * 128
    join_shard(directory / NEXT, header | {NORM: {"dtype": "BF16", "shape": [128], "data_offsets": [len(data), len(data) + n]}}, data + bytes(n))


def swap_offsets(header: Header) -> None:
    """Let a tensor begin two bytes early: it overlaps the one before."""
    begin, end = header[NORM]["data_offsets"]
    header[NORM]["data_offsets"] = [begin - 2, end - 2] if begin else [begin + 2, end + 2]


def faults_of(directory: Path) -> str:
    with pytest.raises(BadInputError) as caught:
        open_checkpoint(directory)
    return str(caught.value)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        pytest.param(raw_header(lambda text: b"x" + text[1:]), [f"{SHARD}: the header is not JSON"], id="not JSON"),
        pytest.param(raw_header(lambda text: b"\xff" + text[1:]), [f"{SHARD}: the header is not JSON"], id="not UTF-8"),
        pytest.param(raw_header(lambda text: b"[" * 100_000), [f"{SHARD}: the header is not JSON"], id="nested too deep"),
        pytest.param(raw_header(lambda _: b"[1]"), [f"{SHARD}: the header is a JSON list, expected an object"], id="no object"),
        pytest.param(
            raw_header(lambda text: text[:-1] + b', "' + NORM.encode() + b'": 1}'),
            [f"{SHARD}: the header is not JSON (the key '{NORM}' appears twice)"],
            id="doubled key",
        ),
        pytest.param(file(SHARD, b""), [f"{SHARD}: 0 bytes are no safetensors file; fetch it again"], id="empty"),
        pytest.param(file(SHARD, b"1234567"), [f"{SHARD}: 7 bytes are no safetensors file"], id="seven bytes"),
        pytest.param(
            file(SHARD, struct.pack("<Q", 1000) + b"{}"),
            [f"{SHARD}: its first 8 bytes announce a header of 1000 bytes, but the file has 10"],
            id="header beyond the file",
        ),
        pytest.param(entry_of(NORM, dtype="F4"), [f"{SHARD}: the header's entry for {NORM} is malformed: KeyError 'F4'"], id="unknown type"),
        pytest.param(entry_of(NORM, shape="a"), [f"{SHARD}: the header's entry for {NORM} is malformed"], id="shape no list"),
        pytest.param(
            entry_of(NORM, shape=[64]),
            [f"{SHARD}: the header's entry for {NORM} is malformed: ValueError BF16 [64] needs 128 bytes, data_offsets give 256"],
            id="shape and range differ",
        ),
        pytest.param(entry_of(NORM, data_offsets=[256, 0]), [f"{SHARD}: the header's entry for {NORM} is malformed"], id="range reversed"),
        pytest.param(entry_of(NORM, data_offsets=[-256, 0]), [f"{SHARD}: the header's entry for {NORM} is malformed"], id="range below zero"),
        pytest.param(entry_of(NORM, data_offsets=[0, 1, 2]), [f"{SHARD}: the header's entry for {NORM} is malformed"], id="three offsets"),
        pytest.param(
            header_of(lambda h: h[NORM].pop("shape")), [f"{SHARD}: the header's entry for {NORM} is malformed: KeyError 'shape'"], id="no shape"
        ),
        pytest.param(header_of(lambda h: h.update({NORM: 5})), [f"{SHARD}: the header's entry for {NORM} is malformed"], id="no mapping"),
        pytest.param(header_of(swap_offsets), [f"{SHARD}: ", "ranges overlap or leave a gap"], id="overlap"),
        pytest.param(header_of(lambda h: h.pop(NORM)), [f"{SHARD}: ", "ranges overlap or leave a gap"], id="gap"),
        pytest.param(
            append(b"abc"),
            [f"{SHARD}: 3 bytes follow the last tensor (547507, its header needs 547504)"],
            id="trailing bytes",
        ),
        pytest.param(
            cut(1, 4096),
            [f"{SHARD}: short by 1 bytes: it has 547503, its header needs 547504; the download is incomplete", f"{NEXT}: short by 4096 bytes"],
            id="two short shards",
        ),
        pytest.param(file(SHARD, None), [f"{SHARD}: missing, but the index names it; fetch it"], id="missing shard"),
        pytest.param(put_in_another_shard_too, [f"{NEXT}: tensor {NORM} is also in {SHARD}"], id="in two shards"),
        pytest.param(index_of(lambda w: w.update({"lost": SHARD})), [f"{SHARD}: tensor lost is missing, but the index places it there"], id="lost"),
        pytest.param(
            index_of(lambda w: w.update({NORM: NEXT})), [f"{NEXT}: tensor {NORM} is missing, but the index places it there"], id="elsewhere"
        ),
        pytest.param(
            index_of(lambda w: w.update({"x": "model-9.safetensors"})), ["model-9.safetensors: missing, but the index names it"], id="no shard"
        ),
        pytest.param(index_of(lambda w: w.pop(NORM)), [f"{SHARD}: tensor {NORM} is not in the index"], id="not in the index"),
        pytest.param(
            index_of(lambda w: w.update({"x": "../x"})), [f"{INDEX_NAME}: weight_map names files outside the checkpoint: ['../x']"], id="outside"
        ),
        pytest.param(file(INDEX_NAME, b"{}"), [f"{INDEX_NAME}: weight_map is missing or is no mapping from tensor to file"], id="no weight_map"),
        pytest.param(file(INDEX_NAME, b'{"weight_map": {"a": 1}}'), [f"{INDEX_NAME}: weight_map is missing or is no mapping"], id="number as file"),
        pytest.param(file(INDEX_NAME, b"{"), [f"{INDEX_NAME}: cannot be read as JSON"], id="index not JSON"),
        pytest.param(file(INDEX_NAME, b"[]"), [f"{INDEX_NAME}: expected a JSON object, found list"], id="index a list"),
        pytest.param(file(INDEX_NAME, None), [f"{INDEX_NAME}: no such file; is the download complete?"], id="no index"),
        pytest.param(file("config.json", None), ["config.json: no such file; is the download complete?"], id="no config"),
        pytest.param(file("config.json", b"\xff"), ["config.json: cannot be read as JSON"], id="config not UTF-8"),
        pytest.param(file("config.json", b"[" * 100_000), ["config.json: cannot be read as JSON"], id="config nested too deep"),
        pytest.param(
            rename(NORM, P + "layers.1.new.weight"), [f"tensor {P}layers.1.new.weight is unknown", f"tensor {NORM} is missing"], id="unknown"
        ),
        pytest.param(rename(NORM), [f"tensor {NORM} is missing"], id="missing"),
        pytest.param(rename(EXPERT + "w2.weight_scale"), [f"tensor {EXPERT}w2.weight_scale is missing"], id="expert's tensor missing"),
        pytest.param(
            rename(EXPERT + "w2.weight_scale", P + "layers.1.block_sparse_moe.experts.16.w2.weight_scale"),
            ["experts.16.w2.weight_scale is unknown: no role for it in 10 layers of 16 experts", f"tensor {EXPERT}w2.weight_scale is missing"],
            id="expert beyond the last",
        ),
        pytest.param(
            rename(EXPERT + "w2.weight_scale", P + "layers.0.block_sparse_moe.experts.0.w2.weight_scale"),
            ["layers.0.block_sparse_moe.experts.0.w2.weight_scale is unknown", f"tensor {EXPERT}w2.weight_scale is missing"],
            id="expert of a dense layer",
        ),
        pytest.param(
            rename(EXPERT + "w2.weight_scale", P + "layers.1.block_sparse_moe.experts.00.w2.weight_scale"),
            ["experts.00.w2.weight_scale is unknown", f"tensor {EXPERT}w2.weight_scale is missing"],
            id="number written otherwise",
        ),
        pytest.param(entry_of(NORM, shape=[2, 64]), [f"tensor {NORM} is [2, 64], expected [128]"], id="shape of a vector"),
        pytest.param(entry_of(GATE, shape=[128, 16]), [f"tensor {GATE} is [128, 16], expected [16, 128]"], id="shape of a matrix"),
        pytest.param(entry_of(NORM, dtype="I16"), [f"tensor {NORM} is I16, expected one of BF16, F32, F16"], id="type"),
        pytest.param(
            entry_of(EXPERT + "w1.weight_packed", dtype="I8"),
            [f"tensor {EXPERT}w1.weight_packed is I8 [96, 32], expected U8 [96, 32]"],
            id="expert's type",
        ),
        pytest.param(
            entry_of(EXPERT + "w1.weight_scale", shape=[2, 96]),
            [f"tensor {EXPERT}w1.weight_scale is U8 [2, 96], expected U8 [96, 2]"],
            id="expert's shape",
        ),
        pytest.param(
            entry_of(P + "layers.1.self_attn.A_log", shape=[2, 16]),
            [f"tensor {P}layers.1.self_attn.A_log is [2, 16], expected [4]"],
            id="A_log a matrix",
        ),
    ],
)
def test_a_fault_is_told_by_the_name_of_file_and_tensor(checkpoint_copy: Path, damage: Damage, expected: list[str]) -> None:
    damage(checkpoint_copy)
    message = faults_of(checkpoint_copy)
    assert [part for part in expected if part not in message] == [], message
    assert str(checkpoint_copy) in message


def test_faults_of_all_kinds_are_told_together_and_only_they(checkpoint_copy: Path) -> None:
    cut(7)(checkpoint_copy)
    header_of(lambda header: header[P + "layers.2.input_layernorm.weight"].update(shape=[1, 128]), NEXT)(checkpoint_copy)
    file("model-00005-of-000013.safetensors", None)(checkpoint_copy)
    index_of(lambda w: w.update({"lost": NEXT}))(checkpoint_copy)
    message = faults_of(checkpoint_copy)
    assert message.splitlines()[0] == f"{checkpoint_copy}: the checkpoint cannot be used; 4 faults:"
    # The tensors of the two shards that could not be read are not told as missing.
    for part in ("short by 7 bytes", "is [1, 128], expected [128]", "model-00005-of-000013.safetensors: missing", "tensor lost is missing"):
        assert message.count(part) == 1


def test_faults_of_config_and_headers_are_told_together(checkpoint_copy: Path) -> None:
    cut(7)(checkpoint_copy)
    config = json.loads((checkpoint_copy / "config.json").read_bytes())
    config["text_config"]["hidden_act"] = "gelu"
    (checkpoint_copy / "config.json").write_text(json.dumps(config))
    message = faults_of(checkpoint_copy)
    assert "short by 7 bytes" in message and "hidden_act is 'gelu'" in message


def test_many_faults_are_counted(checkpoint_copy: Path) -> None:
    header, data = split_shard(checkpoint_copy / SHARD)
    join_shard(checkpoint_copy / SHARD, {("x" + name if "experts" in name else name): entry for name, entry in header.items()}, data)
    message = faults_of(checkpoint_copy)
    # Six for each of 16 experts and three shared ones: not where the index puts them, not in the index, unknown, missing.
    n_faults = 4 * (16 * 6 + 3)
    assert f"cannot be used; {n_faults} faults:" in message and message.endswith(f"... and {n_faults - 20} more")


@pytest.mark.parametrize("path", ["absent", INDEX_NAME])
def test_a_checkpoint_that_is_no_directory_is_refused(checkpoint_copy: Path, path: str) -> None:
    assert faults_of(checkpoint_copy / path).startswith(f"{checkpoint_copy / path}: no such directory; expected a checkpoint with config.json")


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-k3.1"])
def test_the_tiny_checkpoints_are_good(name: str) -> None:
    checkpoint = open_checkpoint(DATA / name)
    index = json.loads((DATA / name / INDEX_NAME).read_bytes())["weight_map"]
    assert sorted(checkpoint.tensors) == sorted(index)
    assert [s.name for s in checkpoint.shards] == sorted(set(index.values()))
    assert checkpoint.facts.remarks == []
    for tensor in checkpoint.tensors:
        assert checkpoint.extent(tensor).path == DATA / name / index[tensor]


def test_a_tensor_is_where_its_bytes_are() -> None:
    checkpoint = open_checkpoint(DATA / "tiny-k3")
    header, data = split_shard(checkpoint.extent(GATE).path)
    begin, end = header[GATE]["data_offsets"]
    path, offset, n_bytes = checkpoint.extent(GATE)
    assert path.read_bytes()[offset : offset + n_bytes] == data[begin:end]


def test_vision_tensors_of_any_kind_are_left_alone(checkpoint_copy: Path) -> None:
    name = "vision_tower.new.kind"
    header, data = split_shard(checkpoint_copy / SHARD)
    join_shard(checkpoint_copy / SHARD, header | {name: {"dtype": "I8", "shape": [3], "data_offsets": [len(data), len(data) + 3]}}, data + b"abc")
    index_of(lambda w: w.update({name: SHARD}))(checkpoint_copy)
    checkpoint = open_checkpoint(checkpoint_copy)
    assert sorted(checkpoint.vision_tensors) == sorted([n for n in open_checkpoint(DATA / "tiny-k3.1").vision_tensors] + [name])
    assert not any(s.name in checkpoint.vision_tensors for t in checkpoint.spine_tensors() for s in t.sources)


def test_one_file_without_an_index_is_a_checkpoint(tmp_path: Path) -> None:
    source = open_checkpoint(DATA / "tiny-k3")
    header: Header = {}
    data = b""
    for shard in source.shards:
        entries, content = split_shard(source.directory / shard.name)
        entries.pop("__metadata__", None)
        for entry in entries.values():
            entry["data_offsets"] = [n + len(data) for n in entry["data_offsets"]]
        header, data = header | entries, data + content
    shutil.copy(source.directory / "config.json", tmp_path)
    join_shard(tmp_path / "model.safetensors", header, data)
    checkpoint = open_checkpoint(tmp_path)
    assert [s.name for s in checkpoint.shards] == ["model.safetensors"]
    assert sorted(checkpoint.tensors) == sorted(source.tensors) and record_of(checkpoint, 1, 0) == record_of(source, 1, 0)


def test_the_bias_of_the_indexers_norm_may_be_missing(checkpoint_copy: Path) -> None:
    shard = "model-00004-of-000013.safetensors"
    name = P + "layers.3.self_attn.indexer.k_norm.bias"
    header_of(lambda header: header.update({"vision_tower.filler": header.pop(name)}), shard)(checkpoint_copy)
    index_of(lambda w: w.update({"vision_tower.filler": w.pop(name)}))(checkpoint_copy)
    names = [t.name for t in open_checkpoint(checkpoint_copy).spine_tensors()]
    assert "blk.3.indexer.k_norm.bias" not in names and "blk.7.indexer.k_norm.bias" in names


def test_the_digest_follows_config_headers_and_sizes_and_not_the_place(checkpoint_copy: Path) -> None:
    digests = [open_checkpoint(DATA / "tiny-k3.1").digest]
    assert open_checkpoint(checkpoint_copy).digest == digests[0]
    shard = checkpoint_copy / SHARD
    shard.write_bytes(shard.read_bytes().replace(b'"pt"', b'"xx"', 1))
    digests.append(open_checkpoint(checkpoint_copy).digest)
    config = json.loads((checkpoint_copy / "config.json").read_bytes())
    (checkpoint_copy / "config.json").write_text(json.dumps(config | {"new": 1}))
    digests.append(open_checkpoint(checkpoint_copy).digest)
    assert len(set(digests)) == 3


# What the tensors hold.


def record_of(checkpoint: Checkpoint, layer: int, expert: int) -> bytes:
    n_bytes = checkpoint.record.n_bytes
    incoming, outgoing = aligned_buffer(span_bytes(n_bytes, checkpoint.read_mode.alignment)), aligned_buffer(round_up(n_bytes, 4096))
    # Whatever an earlier record has left behind must not matter.
    np.frombuffer(outgoing, np.uint8)[:] = 255
    gather_record(checkpoint, layer, expert, incoming=incoming, outgoing=outgoing)
    return bytes(outgoing[:n_bytes])


def parts_of(checkpoint: Checkpoint, layer: int, expert: int) -> bytes:
    """Read an expert's tensors one by one, plainly."""
    extents = [checkpoint.extent(name) for name in expert_tensor_names(layer, expert)]
    return b"".join(path.read_bytes()[offset : offset + n_bytes] for path, offset, n_bytes in extents)


def put(directory: Path, name: str, at: int, value: bytes) -> None:
    """Overwrite bytes of a tensor."""
    path, offset, n_bytes = open_checkpoint(directory).extent(name)
    assert at + len(value) <= n_bytes
    with path.open("r+b") as shard:
        shard.seek(offset + at)
        shard.write(value)


def reorder(path: Path, key: Callable[[str], Any]) -> None:
    """Lay a shard's tensors out anew."""
    header, data = split_shard(path)
    metadata = header.pop("__metadata__", {})
    new_header, new_data = {"__metadata__": metadata}, b""
    for name in sorted(header, key=key):
        begin, end = header[name]["data_offsets"]
        new_header[name] = header[name] | {"data_offsets": [len(new_data), len(new_data) + end - begin]}
        new_data += data[begin:end]
    join_shard(path, new_header, new_data)


def test_an_expert_in_record_order_is_one_extent_and_its_own_bytes() -> None:
    checkpoint = open_checkpoint(DATA / "tiny-k3.1")
    for layer, expert in ((1, 0), (1, 15), (9, 7)):
        (extent,) = checkpoint.expert_extents(layer, expert)
        assert extent.n_bytes == checkpoint.record.n_bytes == 9792
        assert record_of(checkpoint, layer, expert) == parts_of(checkpoint, layer, expert)


@pytest.mark.parametrize("key", [lambda name: name[::-1], lambda name: (name.endswith("scale"), name)], ids=["mixed", "scales last"])
def test_an_expert_that_lies_apart_is_six_extents_and_the_same_record(checkpoint_copy: Path, key: Callable[[str], Any]) -> None:
    before = [record_of(open_checkpoint(checkpoint_copy), 1, expert) for expert in range(16)]
    reorder(checkpoint_copy / SHARD, key)
    checkpoint = open_checkpoint(checkpoint_copy)
    assert [e.n_bytes for e in checkpoint.expert_extents(1, 3)] == [s.n_bytes for s in checkpoint.record.segments]
    assert [record_of(checkpoint, 1, expert) for expert in range(16)] == before
    assert len(checkpoint.expert_extents(2, 3)) == 1


def test_an_expert_in_two_shards_is_the_same_record(checkpoint_copy: Path) -> None:
    before, name = record_of(open_checkpoint(checkpoint_copy), 1, 15), P + "layers.1.block_sparse_moe.experts.15.w3.weight_scale"
    header, data = split_shard(checkpoint_copy / SHARD)
    begin, end = header[name]["data_offsets"]
    other, other_data = split_shard(checkpoint_copy / NEXT)
    other[name] = header[name] | {"data_offsets": [len(other_data), len(other_data) + end - begin]}
    join_shard(checkpoint_copy / NEXT, other, other_data + data[begin:end])
    header["vision_tower.filler"] = header.pop(name)
    index_of(lambda w: w.update({name: NEXT, "vision_tower.filler": SHARD}))(checkpoint_copy)
    # The moved tensor begins at the very offset at which it would go on in the first shard.
    text = json.dumps(header).encode()
    text += b" " * (len(json.dumps(other)) + len(other_data) - len(text) - begin)
    join_shard(checkpoint_copy / SHARD, text, data)
    checkpoint = open_checkpoint(checkpoint_copy)
    *_, fifth, sixth = checkpoint.expert_extents(1, 15)
    assert fifth.path != sixth.path and fifth.offset + fifth.n_bytes == sixth.offset
    assert record_of(checkpoint, 1, 15) == before


@pytest.mark.parametrize("segment", [name for name in SEGMENT_NAMES if name.endswith("scale")])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_scale_of_255_is_refused_by_the_tensors_name(checkpoint_copy: Path, segment: str, is_last: bool) -> None:
    name = f"{P}layers.2.block_sparse_moe.experts.5.{segment.replace('.', '.weight_')}"
    n_bytes = open_checkpoint(checkpoint_copy).tensors[name].n_bytes
    put(checkpoint_copy, name, n_bytes - 1 if is_last else 0, b"\xff")
    checkpoint = open_checkpoint(checkpoint_copy)
    with pytest.raises(BadInputError, match=f"^tensor {name} in {NEXT}: a scale byte is 255, which E8M0 defines as NaN"):
        record_of(checkpoint, 2, 5)
    assert record_of(checkpoint, 2, 4) == parts_of(checkpoint, 2, 4)


def test_two_nibbles_of_15_are_no_scale(checkpoint_copy: Path) -> None:
    put(checkpoint_copy, EXPERT + "w1.weight_packed", 96 * 32 - 2, b"\xff\xff")
    put(checkpoint_copy, EXPERT + "w2.weight_packed", 0, b"\xff\xff")
    checkpoint = open_checkpoint(checkpoint_copy)
    assert record_of(checkpoint, 1, 0) == parts_of(checkpoint, 1, 0)


def spine_tensor(checkpoint: Checkpoint, name: str) -> SpineTensor:
    return next(t for t in checkpoint.spine_tensors() if t.name == name)


def test_padding_behind_a_log_must_be_zero(checkpoint_copy: Path) -> None:
    name = P + "layers.1.self_attn.A_log"
    checkpoint = open_checkpoint(checkpoint_copy)
    assert checkpoint.tensors[name].shape == (32,) and read_float_tensor(checkpoint, spine_tensor(checkpoint, "blk.1.ssm_a")).shape == (4,)
    put(checkpoint_copy, name, 31 * 4, struct.pack("<f", 0.25))
    with pytest.raises(BadInputError, match=rf"tensor {name}: entries 4\.\.31 must be zero padding behind 4 heads, but hold 0\.25;"):
        read_float_tensor(checkpoint, spine_tensor(checkpoint, "blk.1.ssm_a"))


@pytest.mark.parametrize(
    ("tensor", "source", "at", "value"),
    [
        ("blk.1.attn_norm.weight", "layers.1.input_layernorm.weight", 254, b"\xc0\x7f"),
        ("blk.1.attn_norm.weight", "layers.1.input_layernorm.weight", 0, b"\x80\xff"),
        ("blk.1.attn_q.weight", "layers.1.self_attn.q_proj.weight", 2 * 128 * 127 + 254, b"\x80\x7f"),
        ("blk.1.ffn_res_score.weight", "layers.1.mlp_res_proj.weight", 4, b"\xc0\xff"),
        ("blk.1.ssm_dt.bias", "layers.1.self_attn.dt_bias", 8, b"\x00\x00\xc0\x7f"),
        ("blk.1.ffn_gate_inp.weight", "layers.1.block_sparse_moe.gate.weight", 0, b"\xc0\x7f"),
    ],
)
def test_a_value_that_is_not_finite_stops_the_spine_by_the_tensors_name(
    checkpoint_copy: Path, tmp_path: Path, tensor: str, source: str, at: int, value: bytes
) -> None:
    put(checkpoint_copy, P + source, at, value)
    checkpoint = open_checkpoint(checkpoint_copy)
    out = tmp_path / "out"
    out.mkdir()
    for run in (
        lambda: read_float_tensor(checkpoint, spine_tensor(checkpoint, tensor)),
        lambda: write_spine(checkpoint, out / "spine.gguf", expert_directories=[], on_progress=lambda *_: None),
    ):
        with pytest.raises(BadInputError) as caught:
            run()
        message = str(caught.value)
        assert message.startswith(f"tensor {P}{source} in {SHARD} ") and "not finite" in message and message.endswith("; fetch the file again")
    assert list(out.iterdir()) == []


def test_a_shard_that_cannot_be_read_while_the_spine_is_written_is_what_is_told(checkpoint_copy: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(checkpoint_copy)
    (checkpoint_copy / NEXT).unlink()
    with pytest.raises(KtierError, match=NEXT) as caught:
        write_spine(checkpoint, tmp_path / "spine.gguf", expert_directories=[], on_progress=lambda *_: None)
    assert "spine.gguf: cannot be written" not in str(caught.value)
    assert not list(tmp_path.glob("spine*"))


def test_a_drive_that_fails_while_the_spine_is_written_is_told_by_the_shard(
    checkpoint_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def failing_preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    checkpoint = open_checkpoint(checkpoint_copy)
    monkeypatch.setattr("layout.direct.os.preadv", failing_preadv)
    with pytest.raises(KtierError, match=r"/model-000\d\d-of-000013\.safetensors: cannot be read: Input/output error"):
        write_spine(checkpoint, tmp_path / "spine.gguf", expert_directories=[], on_progress=lambda *_: None)
    assert not list(tmp_path.glob("spine*"))
