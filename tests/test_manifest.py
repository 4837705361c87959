"""The manifest: its exact text, and what is refused and where."""

import os
import random
import re
import time
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

import manifests
from layout import record
from manifests.errors import BadInputError
from manifests.geometry import load_geometry
from manifests.load import load_manifest, parse_manifest
from manifests.manifest import (
    CarriedFile,
    DepthRate,
    Device,
    Drive,
    HashList,
    Manifest,
    Profile,
    Record,
    SharedLink,
    Source,
    SourceFile,
    Spine,
    Tokenizer,
    check_base,
)
from manifests.seal import has_seal, sealed
from manifests.store import manifest_text, write_manifest

EXAMPLE = Path(manifests.__file__).parent / "example.yaml"
A32, B32, C32, D32, E32 = ("0a" * 16, "1b" * 16, "2c" * 16, "3d" * 16, "4e" * 16)

SMALL_TEXT = """\
# A model that kprep prepared: what it is, where its parts lie, and which drive holds which experts.
# Paths start from this file's directory, unless they start with a slash. Texts are in double quotes.
# holds: for each layer, the experts in that directory. Tiers A and B together hold every expert; C and D hold further copies.
# kprep keeps each former version in manifest.history/.

schema: 1
generation: 1
created: "2026-11-05T10:00:00Z"

geometry:
  vocab_size: 512
  hidden_size: 128
  n_layers: 4
  n_dense_layers: 1
  dense_intermediate_size: 256
  n_experts: 16
  n_experts_per_token: 4
  n_shared_experts: 2
  expert_intermediate_size: 96
  latent_size: 64
  n_heads: 4
  q_lora_rank: 64
  kv_lora_rank: 32
  qk_nope_head_dim: 32
  qk_rope_head_dim: 16
  v_head_dim: 32
  kda_n_heads: 4
  kda_head_dim: 32
  conv_kernel_size: 4
  kda_gate_lower_bound: -5.0
  full_attention_layers: [3]
  residual_block_size: 4
  rms_norm_eps: 1.0e-05
  lora_norm_eps: 1.0e-06
  situ_beta: 4.0
  situ_linear_beta: 25.0
  routed_scaling_factor: 1.0
  max_position_embeddings: 1048576
  indexer: null

end_ids: [510, 511]

source:
  architecture: "KimiK3ForConditionalGeneration"
  model_type: "kimi_k3"
  digest: "0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a"
  files:
    - {name: "model-00001-of-000002.safetensors", n_bytes: 1234, header_xxh3_128: "1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b", expert_layers: null}
    - {name: "model-00002-of-000002.safetensors", n_bytes: 56789, header_xxh3_128: "2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c2c", expert_layers: "1-2"}

record:
  layout: "w1+w2"
  nibbles: "low first"
  scale: "E8M0"
  n_bytes: 9792

spine:
  path: "spine.gguf"
  n_bytes: 4096
  xxh3_128: "1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b1b"

tokenizer:
  directory: "tokenizer"
  files:
    - {name: "tiktoken.model", n_bytes: 77, xxh3_128: "3d3d3d3d3d3d3d3d3d3d3d3d3d3d3d3d"}

experts:
  path: "experts.xxh128"
  xxh3_128: "4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e"

links:
  - directories: ["/mnt/a \\"b\\" \\\\ é\\U0000000a", "more"]
    read_bytes_per_s: 8000000000.0

drives:
  - tier: "A"
    directory: "/mnt/a \\"b\\" \\\\ é\\U0000000a"
    file_system: "ext4"
    devices:
      - name: "nvme0n1"
        model: "Disk  7"
        serial: ""
        kind: null
        pci_address: "0000:01:00.0"
        link_speed: "16.0 GT/s PCIe"
        link_width: "4"
        max_link_speed: null
        max_link_width: null
        numa_node: -1
    profile:
      date: "2026-11-05"
      reader: "preadv"
      is_direct: true
      depth: 3
      read_bytes_per_s: 7000000000.5
      p50_us: 2.5e-07
      p95_us: 1.0e+16
      p99_us: 3
      max_us: 4.0
      n_bytes: 100
      seconds: 0.1
      curve:
        - {depth: 1, read_bytes_per_s: 5000000000.0}
        - {depth: 3, read_bytes_per_s: 7000000000.5}
      device_bytes: 96
      is_cache_suspected: false
      is_on_trial_files: true
      with_uploads_bytes_per_s: null
    holds:
      1: "0-15"
      2: "0-3,10-15"
      3: "7"
  - tier: "B"
    directory: "more"
    file_system: "xfs"
    devices: []
    profile: null
    holds:
      1: ""
      2: "4-9"
      3: "0-15"
"""


def small_manifest() -> Manifest:
    geometry = replace(load_geometry("tiny"), n_layers=4, full_attention_layers=(3,), indexer=None)
    a, b = (np.zeros((4, 16), dtype=bool) for _ in range(2))
    a[1], a[2, :4], a[2, 10:], a[3, 7] = True, True, True, True
    b[2, 4:10], b[3] = True, True
    device = Device("nvme0n1", "Disk  7", "", None, "0000:01:00.0", "16.0 GT/s PCIe", "4", None, None, -1)
    curve = (DepthRate(1, 5e9), DepthRate(3, 7000000000.5))
    profile = Profile("2026-11-05", "preadv", True, 3, 7000000000.5, 2.5e-7, 1e16, 3, 4.0, 100, 0.1, curve, 96, is_on_trial_files=True)
    return Manifest(
        generation=1,
        created="2026-11-05T10:00:00Z",
        geometry=geometry,
        end_ids=(510, 511),
        source=Source(
            "KimiK3ForConditionalGeneration",
            "kimi_k3",
            A32,
            (SourceFile("model-00001-of-000002.safetensors", 1234, B32, None), SourceFile("model-00002-of-000002.safetensors", 56789, C32, "1-2")),
        ),
        record=Record("w1+w2", "low first", "E8M0", 9792),
        spine=Spine("spine.gguf", 4096, B32),
        tokenizer=Tokenizer("tokenizer", (CarriedFile("tiktoken.model", 77, D32),)),
        experts=HashList("experts.xxh128", E32),
        drives=(Drive("A", '/mnt/a "b" \\ é\n', "ext4", (device,), profile, a), Drive("B", "more", "xfs", (), None, b)),
        links=(SharedLink(('/mnt/a "b" \\ é\n', "more"), 8e9),),
    )


def assert_same(left, right) -> None:
    """Field by field, types too; arrays by content."""
    assert type(left) is type(right)
    if is_dataclass(left):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    else:
        assert left == right


def scattered_manifest(n_copies: int) -> Manifest:
    """K3.1, each copy's experts thrown at random on two drives: the longest range texts that a placement has."""
    geometry, rng = load_geometry("k3.1"), np.random.default_rng(7)
    drives = []
    for copy in range(n_copies):
        half = rng.random((geometry.n_layers, geometry.n_experts)) < 0.5
        for name, holds in (("x", half), ("y", ~half)):
            holds[: geometry.n_dense_layers] = False
            drives.append(Drive("ABCD"[copy], f"/mnt/{copy}{name}", "ext4", (), None, holds))
    return replace(small_manifest(), geometry=geometry, drives=tuple(drives), links=())


def test_the_text_is_this_to_the_byte():
    assert manifest_text(small_manifest()) == SMALL_TEXT


def test_the_text_gives_back_every_field():
    assert_same(parse_manifest(SMALL_TEXT, where="m"), small_manifest())
    assert manifest_text(parse_manifest(SMALL_TEXT, where="m")) == SMALL_TEXT


def test_a_geometry_with_an_indexer_and_scattered_drives_comes_back(tmp_path):
    manifest = scattered_manifest(2)
    path = write_manifest(tmp_path / "manifest.yaml", manifest)
    assert_same(load_manifest(path), manifest)
    assert sealed(manifest_text(load_manifest(path))) == path.read_text()


@pytest.mark.parametrize("text", ["\u2028", "\x85", "\ufeff", "\x00", "\x7f", "😀", " a: #b ", "no", "\t", "'", "%", "日本", "\xa0"])
def test_any_text_comes_back(text):
    manifest = replace(small_manifest(), spine=Spine(text, 1, B32))
    assert parse_manifest(manifest_text(manifest), where="m").spine.path == text


def test_a_manifest_of_before_curves_and_links_is_read():
    later = (
        SMALL_TEXT[SMALL_TEXT.index("      curve:") : SMALL_TEXT.index("    holds:")],
        SMALL_TEXT[SMALL_TEXT.index("links:") : SMALL_TEXT.index("drives:")],
    )
    text = SMALL_TEXT.replace(later[0], "").replace(later[1], "")
    assert len(text) < len(SMALL_TEXT) - 300
    manifest, small = parse_manifest(text, where="m"), small_manifest()
    profile = Profile("2026-11-05", "preadv", True, 3, 7000000000.5, 2.5e-7, 1e16, 3, 4.0, 100, 0.1, (), None, False, False, None)
    assert_same(manifest, replace(small, links=(), drives=(replace(small.drives[0], profile=profile), small.drives[1])))
    assert_same(parse_manifest(manifest_text(manifest), where="m"), manifest)


def test_a_directory_that_is_not_unicode_is_refused_when_written():
    with pytest.raises(BadInputError, match="is not Unicode"):
        manifest_text(replace(small_manifest(), spine=Spine(os.fsdecode(b"\xff"), 1, B32)))


def test_a_number_of_a_foreign_kind_is_refused_when_written():
    with pytest.raises(TypeError):
        manifest_text(replace(small_manifest(), spine=Spine("s", np.int64(3), B32)))


def test_what_was_loaded_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        parse_manifest(SMALL_TEXT, where="m").drives[0].holds[1, 0] = False


HASH = 'xxh3_128: "4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e4e"'
REFUSED = [
    # keys
    ("schema: 1", "schema: 2", "schema: is 2, this ktier reads 1"),
    ("schema: 1", "schema: true", "schema: is True"),
    ("schema: 1\n", "", "the file: unknown keys [], missing keys ['schema']"),
    ("schema: 1", "schema: 1\ncolour: 3", "the file: unknown keys ['colour'], missing keys []"),
    ("generation: 1\n", "", "missing keys ['generation']"),
    ("  indexer: null", "  indexer: null\n  n_ears: 2", "geometry: unknown keys ['n_ears']"),
    ("  vocab_size: 512\n", "", "geometry: unknown keys [], missing keys ['vocab_size']"),
    ("  nibbles:", "  nibble:", "record: unknown keys ['nibble'], missing keys ['nibbles']"),
    ("n_bytes: 1234, ", "", "source.files[0]: unknown keys [], missing keys ['n_bytes']"),
    ("        kind: null\n", "", "drives[0].devices[0]: unknown keys [], missing keys ['kind']"),
    ("      depth: 3\n", "", "drives[0].profile: unknown keys [], missing keys ['depth']"),
    ("    profile: null\n    h", "    h", "drives[1]: unknown keys [], missing keys ['profile']"),
    ("      curve:", "      colour: 3\n      curve:", "drives[0].profile: unknown keys ['colour'], missing keys []"),
    ("{depth: 1, read", "{depth: 1, write: 2, read", "drives[0].profile.curve[0]: unknown keys ['write'], missing keys []"),
    ('"more"]\n    read_bytes_per_s: 8000000000.0', '"more"]', "links[0]: unknown keys [], missing keys ['read_bytes_per_s']"),
    ("generation: 1", "generation: 1\ngeneration: 1", "line 8, column 1: the key 'generation' is there twice"),
    ('      2: "4-9"', '      2: "4-9"\n      2: "4-9"', "line 121, column 7: the key 2 is there twice"),
    ("n_bytes: 1234, ", "n_bytes: 1234, n_bytes: 1234, ", "the key 'n_bytes' is there twice"),
    ("schema: 1", "<<: {generation: 1}\nschema: 1", "line 6, column 1: could not determine a constructor for the tag"),
    ("schema: 1", "schema: 1\ntrue: 1", "the key True is neither a name nor a number"),
    ('      2: "4-9"', '      "2": "4-9"', "line 120, column 7: the key '2' is a name among numbers"),
    # types
    ("generation: 1", 'generation: "1"', "generation: is '1', expected a whole number"),
    ("generation: 1", "generation: true", "generation: is True, expected a whole number"),
    ("generation: 1", "generation: 1.0", "generation: is 1.0, expected a whole number"),
    ("end_ids: [510, 511]", "end_ids: 510", "end_ids: is 510, expected a list"),
    ("end_ids: [510, 511]", 'end_ids: [510, "511"]', "end_ids[1]: is '511', expected a whole number"),
    ("is_direct: true", "is_direct: 1", "drives[0].profile.is_direct: is 1, expected true or false"),
    ("seconds: 0.1", "seconds: fast", "drives[0].profile.seconds: is 'fast', expected a number"),
    ("numa_node: -1", 'numa_node: ""', "drives[0].devices[0].numa_node: is '', expected a whole number"),
    ('serial: ""', "serial: 123", "drives[0].devices[0].serial: is 123, expected a text in double quotes"),
    ("profile: null", 'profile: ""', "drives[1].profile: is '', expected keys with values"),
    ("devices: []", "devices: null", "drives[1].devices: is None, expected a list"),
    ('created: "2026-11-05T10:00:00Z"', "created: 2026-11-05T10:00:00Z", "created: is datetime.datetime(2026, 11, 5"),
    ('created: "2026-11-05T10:00:00Z"', "created: 2026-13-05", "a bare value is no date or number"),
    ("indexer: null", "indexer: 3", "geometry: indexer is 3, expected a mapping"),
    # values
    ("generation: 1", "generation: 0", "generation: is 0, expected a number from 1 on"),
    ('created: "2026-11-05T10:00:00Z"', 'created: "yesterday"', "created: is 'yesterday', expected a date with a time"),
    ('created: "2026-11-05T10:00:00Z"', 'created: "2026-11-05"', "created: is '2026-11-05', expected a date with a time"),
    ('date: "2026-11-05"', 'date: "2026-11-35"', "drives[0].profile.date: is '2026-11-35', expected a date"),
    ("n_bytes: 4096", "n_bytes: -1", "spine.n_bytes: is -1, expected a number from 0 on"),
    ("depth: 3", "depth: 0", "drives[0].profile.depth: is 0, expected a number from 1 on"),
    ("numa_node: -1", "numa_node: -2", "numa_node: is -2, expected a number from -1 on"),
    ("seconds: 0.1", "seconds: .nan", "seconds: is nan, expected a finite number"),
    ("seconds: 0.1", "seconds: .inf", "seconds: is inf, expected a finite number"),
    ("seconds: 0.1", "seconds: -0.1", "seconds: is -0.1, expected a finite number from 0 on"),
    ('layout: "w1+w2"', 'layout: ""', "record.layout: is '', expected a text that is not empty"),
    ('nibbles: "low first"', 'nibbles: ""', "record.nibbles: is '', expected a text that is not empty"),
    ('scale: "E8M0"', 'scale: ""', "record.scale: is '', expected a text that is not empty"),
    (HASH, HASH.upper().replace("XXH3", "xxh3"), "experts.xxh3_128: is '4E4E"),
    (HASH, HASH.replace('e"', '"'), "expected 32 lower-case hex digits"),
    ('header_xxh3_128: "1b', 'header_xxh3_128: "1g', "source.files[0].header_xxh3_128: is '1g1b"),
    ('digest: "0a', 'digest: "xa', "source.digest: is 'xa0a"),
    ("end_ids: [510, 511]", "end_ids: [510, 512]", "end_ids has 512, but the vocabulary ends at 511"),
    ("  hidden_size: 128", "  hidden_size: 127", "geometry: model geometry: hidden_size is 127"),
    ("  n_experts: 16", f"  n_experts: {10**20 - 1}", "geometry: model geometry: n_experts is 99999999999999999999, expected at most 16777216"),
    ("  n_layers: 4", f"  n_layers: {10**20}", "n_layers is 100000000000000000000, expected at most 16777216"),
    ("  vocab_size: 512", f"  vocab_size: {10**20}", "vocab_size is 100000000000000000000, expected at most 16777216"),
    ("rms_norm_eps: 1.0e-05", "rms_norm_eps: -1", "geometry: model geometry: rms_norm_eps is -1, expected a finite number above 0"),
    ("situ_beta: 4.0", f"situ_beta: 1{'0' * 400}", "geometry: situ_beta is 1000"),
    ("  n_layers: 4", f"  n_layers: 0x{'F' * 5000}", "a bare value is no date or number: Exceeds the limit"),
    ("seconds: 0.1", f"seconds: 1{'0' * 400}", "drives[0].profile.seconds: is 1000"),
    ('"more"]', '"less"]', "links[0]: less is the directory of no drive"),
    (', "more"]', "]", "links[0]: names /mnt/a "),
    ('"more"]', '"more", "more"]', "expected two drives or more, each once"),
    ("- {depth: 1, read", "- {depth: 0, read", "drives[0].profile.curve[0].depth: is 0, expected a number from 1 on"),
    # drives
    ('tier: "B"', 'tier: "E"', "drives[1]: tier is 'E', expected one of A, B, C, D"),
    ('tier: "B"', 'tier: "AB"', "drives[1]: tier is 'AB', expected one of A, B, C, D"),
    ('directory: "more"', 'directory: ""', "drives[1].directory: is '', expected a text that is not empty"),
    ('      3: "7"', "      3: 7", 'drives[0].holds[3]: is 7, expected ranges in double quotes, such as "7"'),
    ('      3: "7"', "      3: null", "drives[0].holds[3]: is None, expected ranges in double quotes"),
    ('      3: "7"', "      3: [7]", "drives[0].holds[3]: is [7], expected ranges in double quotes"),
    ('      3: "7"', '      3: "7-7"', 'drives[0].holds[3]: "7-7" is one number'),
    ('      3: "7"', '      3: "16"', 'drives[0].holds[3]: "16" goes beyond the last number, 15'),
    ('      3: "7"\n', "", "drives[0].holds: unknown layers [], missing layers 3; expected one line for each layer of 1-3"),
    ('      1: ""\n', "", "drives[1].holds: unknown layers [], missing layers 1;"),
    ('      3: "7"', '      3: "7"\n      4: ""', "drives[0].holds: unknown layers [4], missing layers none"),
    ('      3: "7"', '      3: "7"\n      0: ""', "drives[0].holds: unknown layers [0], missing layers none"),
    ('      2: "4-9"', '      2: "5-8"', "layer 2: experts 4,9 are on no drive of tiers A and B"),
    ('tier: "B"', 'tier: "C"', "layer 3: experts 0-6,8-15 are on no drive of tiers A and B"),
]


@pytest.mark.parametrize(("old", "new", "message"), REFUSED, ids=[f"{i}-{new[:30]!r}" for i, (_, new, _) in enumerate(REFUSED)])
def test_refuses_and_names_the_place(tmp_path, old, new, message):
    assert old in SMALL_TEXT
    path = tmp_path / "manifest.yaml"
    path.write_text(SMALL_TEXT.replace(old, new, 1))
    with pytest.raises(BadInputError) as error:
        load_manifest(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file: is None, expected keys with values"),
        (b"- 1\n", "the file: is [1], expected keys with values"),
        (b"schema: 1\ngeneration: [1\n", "line 3, column 1: did not find expected ',' or ']'"),
        (b"schema: 1\n\tgeneration: 1\n", "line 2, column 1: found "),
        (b"schema: 1\n---\nschema: 1\n", "line 2, column 1: but found another document"),
        (b"schema: !!python/name:os.system 1\n", "line 1, column 9: could not determine a constructor"),
        (b"schema: 1\ncreated: \x01\n", "line 2: a character that YAML does not allow"),
        ("é: 1\nü: 1\ncreated: \x01\n".encode(), "line 3: a character that YAML does not allow"),
        (b"schema: 1\ncreated: \xff\n", "byte 19 is not UTF-8"),
        (SMALL_TEXT.encode("utf-16"), "byte 0 is not UTF-8"),
    ],
)
def test_a_file_that_is_no_yaml_is_refused_with_its_line(tmp_path, data, message):
    path = tmp_path / "manifest.yaml"
    path.write_bytes(data)
    with pytest.raises(BadInputError) as error:
        load_manifest(path)
    assert str(error.value).startswith(f"{path}: {message}")


def test_a_missing_file_and_a_directory_are_bad_input(tmp_path):
    with pytest.raises(BadInputError, match=r"none\.yaml: no such file, expected a manifest as kprep extract writes it"):
        load_manifest(tmp_path / "none.yaml")
    with pytest.raises(BadInputError, match="is a directory, expected the manifest file in it"):
        load_manifest(tmp_path)
    with pytest.raises(BadInputError, match=r"cannot be read: Not a directory"):
        load_manifest(EXAMPLE / "manifest.yaml")


def test_one_directory_cannot_be_two_drives():
    a, b = small_manifest().drives
    with pytest.raises(BadInputError, match="drives: more is there 2 times, expected once"):
        replace(small_manifest(), drives=(replace(a, directory="./more/"), b), links=())


def test_several_drives_may_share_a_tier():
    a, b = small_manifest().drives
    check_base(replace(small_manifest(), drives=(a, replace(b, tier="A"))))


def test_a_dense_layer_holds_nothing():
    a, b = small_manifest().drives
    holds = a.holds.copy()
    holds[0, 3] = True
    with pytest.raises(BadInputError, match=r"drives\[0\]: holds experts of a layer below 1, but these layers are dense"):
        replace(small_manifest(), drives=(replace(a, holds=holds), b))


def test_copies_of_tiers_c_and_d_do_not_complete_the_base():
    a, b = small_manifest().drives
    gap = replace(a, holds=a.holds & (np.arange(16) != 5))
    everything = np.ones((4, 16), dtype=bool)
    everything[0] = False
    copies = tuple(Drive(tier, f"/mnt/{tier}", "ext4", (), None, everything) for tier in "CD")
    with pytest.raises(BadInputError) as error:
        check_base(replace(small_manifest(), drives=(gap, b, *copies)))
    assert re.findall("layer .*", str(error.value)) == ["layer 1: experts 5 are on no drive of tiers A and B"]


def test_base_holds_is_the_union_of_a_and_b_alone():
    a, b = small_manifest().drives
    expected = np.zeros((4, 16), dtype=bool)
    expected[1:] = True
    np.testing.assert_array_equal(small_manifest().base_holds(), expected)
    np.testing.assert_array_equal(replace(small_manifest(), drives=(a, replace(b, tier="C"))).base_holds(), a.holds)


def test_a_drive_says_which_experts_it_holds():
    a, b = small_manifest().drives
    assert a.holds_expert(3, 7) is True and a.holds_expert(3, 8) is False
    assert b.holds_expert(0, 0) is False


def test_a_relative_directory_starts_from_the_manifest():
    a, b = small_manifest().drives
    path = Path("/models/k3/manifest.yaml")
    assert Manifest.drive_directory(b, path) == Path("/models/k3/more")
    assert Manifest.drive_directory(replace(a, directory="/mnt/a"), path) == Path("/mnt/a")


def test_the_example_is_a_valid_three_tier_k3_1_manifest():
    manifest = load_manifest(EXAMPLE)
    assert manifest.geometry == load_geometry("k3.1")
    assert [drive.tier for drive in manifest.drives] == ["A", "B", "C"]
    assert 0 < manifest.drives[2].holds.sum() < manifest.geometry.n_routed_experts
    names = (manifest.record.layout, manifest.record.nibbles, manifest.record.scale)
    assert names == (record.LAYOUT_NAME, record.NIBBLE_ORDER, record.SCALE_KIND)
    assert manifest.record.n_bytes == record.record_layout(manifest.geometry).n_bytes


def test_the_example_has_its_keys_in_the_order_that_kprep_writes():
    values = [line for line in EXAMPLE.read_text().splitlines() if line and not line.lstrip().startswith("#")]
    written = [line for line in manifest_text(load_manifest(EXAMPLE)).splitlines() if line and not line.startswith("#")]
    assert [line.partition(":")[0] for line in values] == [line.partition(":")[0] for line in written]


def test_a_cut_text_is_never_another_manifest():
    lines = SMALL_TEXT.splitlines(keepends=True)
    for n_lines in range(len(lines)):
        with pytest.raises(BadInputError):
            parse_manifest("".join(lines[:n_lines]), where="m")


def test_a_random_byte_gives_a_manifest_or_bad_input_and_nothing_else(tmp_path):
    rng, path = random.Random(5), tmp_path / "manifest.yaml"
    for _ in range(300):
        data = bytearray(SMALL_TEXT.encode())
        data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            load_manifest(path)
        except BadInputError as error:
            assert str(error).startswith(f"{path}: ")


def test_says_how_long_82432_experts_in_three_copies_take_to_load(tmp_path):
    path = write_manifest(tmp_path / "manifest.yaml", scattered_manifest(3))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        load_manifest(path)
        seconds.append(time.perf_counter() - start)
    kind = "libyaml" if hasattr(yaml, "CSafeLoader") else "plain Python YAML"
    print(f"{path.stat().st_size} bytes of manifest load in {min(seconds):.3f} s ({kind}), expected under 0.5 s")


@pytest.mark.parametrize("at", range(0, len(SMALL_TEXT) + 90, 37))
def test_a_byte_that_changes_in_a_written_manifest_is_noticed_or_breaks_the_seal(tmp_path, at):
    path = write_manifest(tmp_path / "manifest.yaml", small_manifest())
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    try:
        load_manifest(path)
    except BadInputError:
        return
    assert not has_seal(path.read_text())


def test_a_manifest_without_a_seal_is_read_and_with_a_wrong_one_refused(tmp_path):
    assert parse_manifest(SMALL_TEXT, where="m").generation == small_manifest().generation
    with pytest.raises(BadInputError, match="a byte has changed"):
        parse_manifest(sealed(SMALL_TEXT).replace("generation: 1", "generation: 2"), where="m")
