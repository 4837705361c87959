"""Made-up and recorded routings."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from manifests.errors import BadInputError, UsageError
from manifests.geometry import Geometry, load_geometry
from runtime.bench.routing import make_routing, read_trace, write_trace

KINDS = ("uniform", "zipf", "zipf:1.2", "among:20")


@pytest.fixture(scope="module")
def k31() -> Geometry:
    return load_geometry("k3.1")


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_holds_distinct_experts_in_rising_order_and_a_seed_repeats_them(k31: Geometry, kind: str) -> None:
    routing = make_routing(kind, k31, 5, seed=3)
    assert routing.shape == (5, 92, 16) and (np.diff(routing, axis=-1) > 0).all()
    assert routing.min() >= 0 and routing.max() < k31.n_experts
    assert np.array_equal(routing, make_routing(kind, k31, 5, seed=3))
    assert not np.array_equal(routing, make_routing(kind, k31, 5, seed=4))


def test_among_uses_no_more_experts_of_a_layer_than_it_says(k31: Geometry) -> None:
    routing = make_routing("among:20", k31, 40, seed=0)
    assert all(len(np.unique(routing[:, layer])) == 20 for layer in range(92))


def _shared(routing: np.ndarray) -> float:
    pairs = [np.intersect1d(a, b).size for a, b in zip(routing[:-1].reshape(-1, 16), routing[1:].reshape(-1, 16), strict=True)]
    return float(np.mean(pairs)) / 16


def test_zipf_repeats_a_quarter_of_the_former_tokens_experts_and_uniform_does_not(k31: Geometry) -> None:
    # Published of real texts: 22 to 34 %.
    assert 0.22 < _shared(make_routing("zipf", k31, 30, seed=1)) < 0.34
    assert _shared(make_routing("uniform", k31, 30, seed=1)) < 0.03


def test_zipf_uses_its_most_popular_tenth_for_about_two_fifths_of_the_picks(k31: Geometry) -> None:
    routing = make_routing("zipf", k31, 400, seed=2)
    counts = np.sort([np.bincount(routing[:, layer].ravel(), minlength=896) for layer in range(0, 92, 10)], axis=1)[:, ::-1]
    assert 0.35 < counts[:, :90].sum() / counts.sum() < 0.5


def test_a_trace_is_read_back_sorted_and_repeated_as_often_as_needed(k31: Geometry, tmp_path: Path) -> None:
    routing = make_routing("uniform", k31, 3, seed=0)
    write_trace(tmp_path / "t.safetensors", routing[..., ::-1], {"model": "x"})
    assert np.array_equal(read_trace(tmp_path / "t.safetensors", k31), routing)
    again = make_routing(f"trace:{tmp_path / 't.safetensors'}", k31, 7, seed=9)
    assert np.array_equal(again, routing[[0, 1, 2, 0, 1, 2, 0]])


@pytest.mark.parametrize("kind", ["zipf:x", "zipf:-1", "among:15", "among:897", "among", "trace:", "often", "uniform:3", ""])
def test_a_routing_that_does_not_exist_is_a_usage_error(k31: Geometry, kind: str) -> None:
    with pytest.raises(UsageError, match="--routing"):
        make_routing(kind, k31, 1, seed=0)


BAD_TRACES = {
    "another shape": np.zeros((2, 91, 16), np.int16),
    "no token": np.zeros((0, 92, 16), np.int16),
    "an expert twice": np.zeros((2, 92, 16), np.int16),
    "an expert too many": np.tile(np.arange(881, 897, dtype=np.int16), (2, 92, 1)),
    "numbers that are not whole": np.zeros((2, 92, 16), np.float32),
}


@pytest.mark.parametrize("name", BAD_TRACES)
def test_a_trace_of_another_model_is_refused_by_name(k31: Geometry, tmp_path: Path, name: str) -> None:
    path = tmp_path / "t.safetensors"
    safetensors.numpy.save_file({"experts": BAD_TRACES[name]}, path)
    with pytest.raises(BadInputError, match="t.safetensors: experts"):
        read_trace(path, k31)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.bool], ids=str)
def test_a_trace_of_a_kind_that_is_no_whole_number_is_refused(k31: Geometry, tmp_path: Path, kind: torch.dtype) -> None:
    path = tmp_path / "t.safetensors"
    safetensors.torch.save_file({"experts": torch.zeros(2, 92, 16, dtype=kind)}, path)
    with pytest.raises(BadInputError, match=r"t.safetensors: experts is \w+ \[2, 92, 16\], expected whole numbers"):
        read_trace(path, k31)


def test_a_file_that_is_no_trace_is_refused(k31: Geometry, tmp_path: Path) -> None:
    safetensors.numpy.save_file({"logits": np.zeros(3)}, tmp_path / "t.safetensors")
    with pytest.raises(BadInputError, match="not a routing trace"):
        read_trace(tmp_path / "t.safetensors", k31)
    (tmp_path / "text").write_text("no")
    with pytest.raises(BadInputError, match="not a readable safetensors file"):
        read_trace(tmp_path / "text", k31)
