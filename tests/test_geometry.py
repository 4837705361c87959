"""Geometries: the shipped ones load, and whatever is not a sound shape is refused by name."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from layout.checkpoint import open_checkpoint
from manifests.errors import BadInputError
from manifests.geometry import Geometry, geometry_from_dict, known_geometries, load_geometry

DATA = Path(__file__).parent / "data"
WIDTHS = {
    "hidden_size", "dense_intermediate_size", "expert_intermediate_size", "latent_size", "q_lora_rank", "kv_lora_rank", "kda_head_dim", "v_head_dim",
}  # fmt: skip
# More than 64 bits hold.
MANY = 99999999999999999999


def values_of(name: str = "tiny") -> dict[str, Any]:
    return load_geometry(name).to_dict()


def test_ships_the_two_models_and_a_toy() -> None:
    assert known_geometries() == ["k3", "k3.1", "tiny"]


@pytest.mark.parametrize("name", known_geometries())
def test_a_geometry_survives_being_written_down(name: str) -> None:
    geometry = load_geometry(name)
    assert geometry_from_dict(yaml.safe_load(yaml.safe_dump(geometry.to_dict())), where="here") == geometry


def test_tiny_is_the_shape_of_the_golden_checkpoint() -> None:
    assert load_geometry("tiny") == open_checkpoint(DATA / "tiny-k3.1").geometry


def test_k31_is_k3_with_an_indexer() -> None:
    k3, k31 = load_geometry("k3"), load_geometry("k3.1")
    assert k31.to_dict() | {"indexer": None} == k3.to_dict()
    assert k31.indexer is not None
    assert (k31.indexer.n_heads, k31.indexer.head_dim, k31.indexer.top_k) == (32, 128, 2048)


def test_k3_has_24_full_attention_layers_the_last_two_side_by_side() -> None:
    k3 = load_geometry("k3")
    assert len(k3.full_attention_layers) == 24
    assert k3.full_attention_layers[:2] == (3, 7)
    assert k3.full_attention_layers[-3:] == (87, 91, 92)
    assert [layer for layer in (0, 3, 4, 91, 92) if k3.is_full_attention(layer)] == [3, 91, 92]


def test_derived_sizes() -> None:
    k31 = load_geometry("k3.1")
    assert (k31.moe_layers, k31.n_routed_experts) == (range(1, 93), 82_432)
    assert (k31.kda_size, k31.shared_intermediate_size) == (12_288, 6_144)
    assert (k31.max_context, load_geometry("k3").max_context) == (2048, 1_048_576)


def test_reads_a_geometry_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(values_of() | {"n_experts": 48}))
    assert load_geometry(str(path)).n_experts == 48


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "not YAML"), ("- 1", "expected a mapping"), ("", "expected a mapping"), (f"a: {'9' * 5000}", "not YAML: Exceeds")]
)
def test_refuses_a_file_that_holds_no_mapping(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(BadInputError, match=message) as caught:
        load_geometry(str(path))
    assert str(path) in str(caught.value)


def test_refuses_a_name_that_is_neither_shipped_nor_a_file() -> None:
    with pytest.raises(BadInputError, match="geometry k4: neither one of k3, k3.1, tiny nor a file that can be read: No such file"):
        load_geometry("k4")


def set_to(**changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: values | changes


def without(key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda values: {k: v for k, v in values.items() if k != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_to(n_layer=3), r"unknown keys \['n_layer'\]"),
        (without("n_experts"), r"missing keys \['n_experts'\]"),
        (without("full_attention_layers"), r"missing keys \['full_attention_layers'\]"),
        (set_to(n_experts="16"), "n_experts is '16', expected a whole number"),
        (set_to(n_experts=16.0), "n_experts is 16.0, expected a whole number"),
        (set_to(n_experts=True), "n_experts is True, expected a whole number"),
        (set_to(n_experts=None), "n_experts is None, expected a whole number"),
        (set_to(rms_norm_eps="1e-5"), "rms_norm_eps is '1e-5', expected a number"),
        (set_to(kda_gate_lower_bound=[]), r"kda_gate_lower_bound is \[\], expected a number"),
        (set_to(indexer=4), "indexer is 4, expected a mapping"),
        (set_to(indexer={"n_heads": 4, "head_dim": 32}), r"indexer: unknown keys \[\], missing keys \['top_k'\]"),
        (set_to(indexer={"n_heads": 4, "head_dim": 32, "top_k": 9, "rope": 1}), r"indexer: unknown keys \['rope'\]"),
        (set_to(indexer={"n_heads": 4, "head_dim": 32, "top_k": "9"}), "indexer: top_k is '9'"),
        (set_to(full_attention_layers="3-9"), "full_attention_layers is '3-9', expected a list of layer numbers"),
        (set_to(full_attention_layers=[3, "7"]), "expected a list of layer numbers"),
        (set_to(full_attention_layers=[3, 10]), r"\[3, 10\] must rise and lie in 0..9"),
        (set_to(full_attention_layers=[-1, 3]), r"\[-1, 3\] must rise"),
        (set_to(full_attention_layers=[7, 3]), r"\[7, 3\] must rise"),
        (set_to(full_attention_layers=[3, 3]), r"\[3, 3\] must rise"),
        (set_to(latent_size=48), "latent_size is 48, expected a multiple of 32"),
        (set_to(hidden_size=0), "hidden_size is 0, expected a multiple of 32"),
        (set_to(n_heads=0), "n_heads is 0, expected at least 1"),
        (set_to(n_dense_layers=10), "n_dense_layers is 10, expected 0 to 9"),
        (set_to(rms_norm_eps=None), "rms_norm_eps is None, expected a number"),
        (set_to(rms_norm_eps=float("nan")), "rms_norm_eps is nan, expected a number"),
        (set_to(full_attention_layers=[True]), "expected a list of layer numbers"),
        (lambda values: values | {5: 1}, r"unknown keys \[5\]"),
        (set_to(indexer={"n_heads": 4, "head_dim": 33, "top_k": 9}), "a head_dim that is a multiple of 32"),
        (set_to(indexer={"n_heads": 0, "head_dim": 32, "top_k": 9}), "at least one head"),
        (set_to(indexer={"n_heads": 4, "head_dim": 32, "top_k": MANY}), rf"indexer\.top_k is {MANY}, expected at most 16777216"),
        (set_to(rms_norm_eps=-1), "rms_norm_eps is -1, expected a finite number above 0"),
        (set_to(rms_norm_eps=0.0), r"rms_norm_eps is 0\.0, expected a finite number above 0"),
        (set_to(lora_norm_eps=-1e-6), "lora_norm_eps is -1e-06, expected a finite number above 0"),
        (set_to(n_experts_per_token=17), "n_experts_per_token is 17, but there are 16 experts"),
    ],
)
def test_refuses_an_unsound_geometry_and_says_where(change: Callable[[dict[str, Any]], dict[str, Any]], message: str) -> None:
    with pytest.raises(BadInputError, match=f"here.*{message}"):
        geometry_from_dict(change(values_of()), where="here")


@pytest.mark.parametrize("name", [f.name for f in fields(Geometry) if f.type is int])
@pytest.mark.parametrize("above", [32, MANY])
def test_refuses_a_number_that_no_model_has(name: str, above: int) -> None:
    most = 1 << (40 if name in WIDTHS else 24)
    with pytest.raises(BadInputError, match=f"{name} is {most + above}, expected at most {most}"):
        geometry_from_dict(values_of() | {name: most + above}, where="here")


@pytest.mark.parametrize("number", [-1, -MANY])
def test_refuses_a_size_below_0(number: int) -> None:
    with pytest.raises(BadInputError, match=f"qk_rope_head_dim is {number}, expected at least 0"):
        geometry_from_dict(values_of() | {"qk_rope_head_dim": number}, where="here")


def test_names_all_faults_of_a_shape_at_once() -> None:
    with pytest.raises(BadInputError) as caught:
        geometry_from_dict(values_of() | {"latent_size": 48, "n_heads": 0}, where="here")
    assert "latent_size" in str(caught.value)
    assert "n_heads" in str(caught.value)


def test_a_gate_without_a_lower_bound_is_a_geometry() -> None:
    geometry: Geometry = geometry_from_dict(values_of() | {"kda_gate_lower_bound": None}, where="here")
    assert geometry.kda_gate_lower_bound is None
