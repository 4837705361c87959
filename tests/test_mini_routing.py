"""What is said of a recorded routing, on routings small enough to count by hand; and the trace that ships."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA

from manifests.geometry import load_geometry
from runtime.bench.routing import make_routing, read_trace, write_trace
from tools.mini.export import GEOMETRY
from tools.mini.routing import LENGTHS, by_chance, distinct, overlaps, read_texts, top_shares, uses

TRACE = DATA / "mini-routing.safetensors"
# Two layers, two experts chosen of four; the second text begins after three tokens.
TEXTS = [
    np.array([[[0, 1], [0, 3]], [[0, 2], [1, 2]], [[0, 2], [0, 1]]], np.int16),
    np.array([[[1, 2], [0, 3]], [[1, 2], [0, 3]]], np.int16),
]


def test_uses_are_counted_by_layer_and_expert() -> None:
    assert uses(TEXTS, 4).tolist() == [[3, 3, 4, 0], [4, 2, 1, 3]]


def test_the_most_used_experts_of_all_layers_come_first() -> None:
    counts = uses(TEXTS, 4)
    assert top_shares(counts, [0.125, 0.25, 0.5, 1]) == [0.2, 0.4, 0.7, 1.0]


def test_tokens_of_different_texts_share_nothing() -> None:
    # First layer: 1 of 2, 2 of 2 and 2 of 2; second layer: none, 1 of 2 and 2 of 2.
    assert overlaps(TEXTS).tolist() == pytest.approx([2.5 / 3, 0.5])


def test_different_experts_are_counted_over_consecutive_tokens_of_one_text() -> None:
    assert distinct(TEXTS, 1) == 2
    assert distinct(TEXTS, 2) == pytest.approx((3 + 4 + 2 + 3 + 2 + 2) / 6)
    assert distinct(TEXTS, 3) == pytest.approx((3 + 4) / 2)
    assert np.isnan(distinct(TEXTS, 4))


def test_by_chance_a_block_needs_what_random_choices_need() -> None:
    rng = np.random.default_rng(1)
    chosen = rng.random((4000, 1, 64)).argsort(-1)[:, :, :6]
    assert by_chance(64, 6, 8) == pytest.approx(distinct([chosen], 8), rel=0.01)


def test_a_trace_is_split_into_its_texts(tmp_path: Path) -> None:
    whole = np.concatenate(TEXTS)
    write_trace(tmp_path / "one", whole, {})
    write_trace(tmp_path / "two", whole, {LENGTHS: json.dumps([3, 2])})
    assert [text.tolist() for text in read_texts(tmp_path / "one")] == [whole.tolist()]
    assert [text.tolist() for text in read_texts(tmp_path / "two")] == [text.tolist() for text in TEXTS]


def test_the_trace_that_ships_is_a_routing_for_the_bench() -> None:
    geometry = load_geometry(str(GEOMETRY))
    trace = read_trace(TRACE, geometry)
    assert len(trace) >= 300 and sum(map(len, read_texts(TRACE))) == len(trace)
    played = make_routing(f"trace:{TRACE}", geometry, len(trace) + 5, seed=0)
    assert np.array_equal(played, np.concatenate([trace, trace[:5]]))


def test_the_routing_that_ships_is_uneven_and_repeats_more_than_chance() -> None:
    texts, g = read_texts(TRACE), load_geometry(str(GEOMETRY))
    assert top_shares(uses(texts, g.n_experts), [0.2])[0] > 0.22
    assert overlaps(texts).mean() > 1.2 * g.n_experts_per_token / g.n_experts
    assert distinct(texts, 8) < 0.95 * by_chance(g.n_experts, g.n_experts_per_token, 8)
