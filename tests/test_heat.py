"""Heat files: read with all their faults at once, halved, and what a plan made with one half is worth on the other."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from manifests.errors import BadInputError
from manifests.geometry import load_geometry
from prep.placement.heat import held_out, read_heat, smoothed, split_by_lot, split_by_time
from prep.placement.plan import PlanDrive

TINY = load_geometry("tiny")
LAYER = TINY.n_dense_layers
ONE_LAYER = replace(load_geometry("k3.1"), n_layers=2, full_attention_layers=())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "heat.json"


@pytest.mark.parametrize("wrap", [lambda counts: counts, lambda counts: {"experts": counts, "date": "2026-11-30"}])
def test_reads_counts_plain_or_beside_other_facts(file: Path, wrap: object) -> None:
    assert callable(wrap)
    file.write_text(json.dumps(wrap({f"L{LAYER}-E0": 12, f"L{TINY.n_layers - 1}-E{TINY.n_experts - 1}": 3, f"L{LAYER}-E1": 0})))
    counts = read_heat(file, TINY)
    assert counts.shape == (TINY.n_layers, TINY.n_experts) and counts.dtype == np.int64
    assert (counts[LAYER, 0], counts[-1, -1], counts.sum()) == (12, 3, 15)


def test_tells_all_faults_at_once(file: Path) -> None:
    file.write_text(
        f'{{"L{LAYER}-E0": 1, "L{LAYER}-E1": -2, "L{LAYER}-E2": 1.5, "L{LAYER}-E3": "7", "L{LAYER}-E4": true, "L{LAYER}-E5": NaN, '
        f'"L{LAYER}-E{TINY.n_experts}": 1, "L{LAYER - 1}-E0": 1, "L{TINY.n_layers}-E0": 1, "L0{LAYER}-E6": 1, "expert": 1, '
        f'"L{LAYER}-E7": 1, "L{LAYER}-E7": 2, "L{LAYER}-E8": null, "L{LAYER}-E9": {10**30}}}'
    )
    with pytest.raises(BadInputError) as caught:
        read_heat(file, TINY)
    message = str(caught.value)
    for part in (
        f"'L{LAYER}-E7' is there 2 times",
        f"L{LAYER}-E1: -2 reads",
        f"L{LAYER}-E2: 1.5 is not a whole number",
        f"L{LAYER}-E3: '7' is not",
        f"L{LAYER}-E4: True is not",
        f"L{LAYER}-E5: nan is not",
        f"L{LAYER}-E8: None is not",
        f"L{LAYER}-E9: 1000000",
        f"'L{LAYER}-E{TINY.n_experts}' is no expert of this model; expected L{LAYER}-E0 to L{TINY.n_layers - 1}-E{TINY.n_experts - 1}",
        f"'L{LAYER - 1}-E0' is no expert",
        f"'L{TINY.n_layers}-E0' is no expert",
        f"'L0{LAYER}-E6' is no expert",
        "'expert' is no expert",
    ):
        assert part in message
    assert len(message.splitlines()) == 14


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ('{"L1-E0": 1', "not JSON"),
        ("[1, 2]", "expected an object"),
        ('{"experts": [1]}', "expected an object"),
        ("{}", "no reads"),
        ('{"schema": 1, "seconds": 2.5}', "is no file of krun generate --heat-out: expected .*, found the key 'schema'"),
        (f'{{"L{LAYER}-E0": 0}}', "no reads"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_refuses_what_is_no_heat(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(BadInputError, match=message):
        read_heat(file, TINY)


def test_names_a_file_that_cannot_be_read(file: Path) -> None:
    with pytest.raises(BadInputError, match=r"heat .*heat\.json: cannot be read"):
        read_heat(file, TINY)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match="cannot be read"):
        read_heat(file, TINY)


def test_halves_by_lot_are_the_whole_and_about_even() -> None:
    counts = np.random.default_rng(0).integers(0, 1000, (4, 50))
    first, second = split_by_lot(counts)
    assert (first + second == counts).all() and first.min() >= 0 and second.min() >= 0
    assert first.sum() / counts.sum() == pytest.approx(0.5, abs=0.02)
    assert (split_by_lot(counts)[0] == first).all() and (split_by_lot(counts, seed=1)[0] != first).any()


def test_halves_by_time_are_cut_where_they_are_most_alike() -> None:
    periods = [np.full((1, 2), n) for n in (1, 1, 1, 10, 8)]
    first, second = split_by_time(periods)
    assert (first.tolist(), second.tolist()) == ([[13, 13]], [[8, 8]])
    with pytest.raises(BadInputError, match="at least two"):
        split_by_time(periods[:1])


def test_an_expert_never_seen_is_not_impossible() -> None:
    assert smoothed(np.array([[0, 3]])).tolist() == [[0.5, 3.5]]


def reads_of(n_tokens: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    weights = rng.permutation(1 / np.arange(1, ONE_LAYER.n_experts + 1) ** 0.5)
    return np.stack([np.zeros(len(weights), np.int64), rng.multinomial(16 * n_tokens, weights / weights.sum())])


@pytest.mark.parametrize(("n_tokens", "most_of_gap"), [(20_000, 0.01), (100, np.inf)])
def test_many_reads_hold_for_others_and_few_flatter_themselves(n_tokens: int, most_of_gap: float) -> None:
    nothing = np.zeros((ONE_LAYER.n_layers, ONE_LAYER.n_experts), np.bool_)
    drives = [PlanDrive(tier, rate, n, n, None, nothing) for n, (tier, rate) in enumerate(zip("ABC", (26e9, 13e9, 6e9), strict=True))]
    room = [round(share * ONE_LAYER.n_experts) for share in (0.4, 0.8, 0.3)]
    found = held_out(ONE_LAYER, 17_547_264, drives, split_by_lot(reads_of(n_tokens)), pool_free=room, is_removing=False)
    gap = found.held_out.mean_ratio - found.in_sample.mean_ratio
    assert gap <= most_of_gap
    if n_tokens == 100:
        assert gap > 0.05
    assert found.without_heat.mean_ratio > found.held_out.mean_ratio + 0.05
