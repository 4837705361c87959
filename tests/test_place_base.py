"""The split of the base, one copy of each expert, that an extraction writes: as a pure function."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from manifests.errors import NoSpaceError
from manifests.geometry import load_geometry
from manifests.manifest import BASE_TIERS, TIERS
from prep.extraction.base_split import Candidate, plan_base

TINY = load_geometry("tiny")
N_RECORDS = 144


def nothing() -> np.ndarray:
    return np.zeros((TINY.n_layers, TINY.n_experts), np.bool_)


def drive(tier: str, weight: float = 1.0, *, pool: int = 0, limit: int | None = None, present: np.ndarray | None = None) -> Candidate:
    return Candidate(tier, weight, pool, limit, nothing() if present is None else present)


@st.composite
def presences(draw: st.DrawFn) -> np.ndarray:
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    present = np.random.default_rng(draw(st.integers(0, 99))).random((TINY.n_layers, TINY.n_experts)) < share
    present[: TINY.n_dense_layers] = False
    return present


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Candidate], list[int]]:
    """Up to five drives on up to three file systems, with room for too little up to more than enough."""
    n_pools = draw(st.integers(1, 3))
    limits = st.none() | st.integers(0, 2 * N_RECORDS)
    candidates = [
        drive(
            draw(st.sampled_from(TIERS)),
            draw(st.sampled_from([0.1, 1.0, 1.7, 3.0, 7.2])),
            pool=draw(st.integers(0, n_pools - 1)),
            limit=draw(limits),
            present=draw(presences()),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]
    return candidates, draw(st.lists(st.integers(0, 4 * N_RECORDS), min_size=n_pools, max_size=n_pools))


def most_base_experts(candidates: list[Candidate], pool_room: list[int]) -> int:
    """Room of tiers A and B, a file system counted once."""
    room = 0
    for pool, n in enumerate(pool_room):
        limits = [c.limit for c in candidates if c.pool == pool and c.tier in BASE_TIERS]
        room += min(n, sum(n if limit is None else limit for limit in limits))
    return room


@given(problems())
@settings(deadline=None, max_examples=300)
def test_the_base_is_complete_within_every_limit_or_refused_for_want_of_room(problem: tuple[list[Candidate], list[int]]) -> None:
    candidates, pool_room = problem
    if most_base_experts(candidates, pool_room) < N_RECORDS:
        with pytest.raises(NoSpaceError, match=f"room for {most_base_experts(candidates, pool_room)} of {N_RECORDS} experts"):
            plan_base(TINY, candidates, pool_room=pool_room)
        return
    holds = plan_base(TINY, candidates, pool_room=pool_room)
    base = np.any([h for h, c in zip(holds, candidates, strict=True) if c.tier in BASE_TIERS], axis=0)
    assert base[TINY.n_dense_layers :].all()
    assert not np.any([h[: TINY.n_dense_layers] for h in holds])
    for held, candidate in zip(holds, candidates, strict=True):
        assert candidate.limit is None or held.sum() <= candidate.limit
    for pool, n in enumerate(pool_room):
        assert sum(int(h.sum()) for h, c in zip(holds, candidates, strict=True) if c.pool == pool) <= n


def test_room_for_all_experts_is_enough_and_for_one_less_is_not() -> None:
    for room in ([100, 44], [144, 0], [7, 137]):
        plan_base(TINY, [drive("A", 3.0, pool=0), drive("B", pool=1)], pool_room=room)
        with pytest.raises(NoSpaceError, match="room for 143 of 144"):
            plan_base(TINY, [drive("A", 3.0, pool=0), drive("B", pool=1)], pool_room=[room[0] - 1, room[1]])


@given(problems())
@settings(deadline=None, max_examples=50)
def test_the_same_problem_has_the_same_plan(problem: tuple[list[Candidate], list[int]]) -> None:
    candidates, pool_room = problem
    assume(most_base_experts(candidates, pool_room) >= N_RECORDS)
    first, second = (plan_base(TINY, candidates, pool_room=pool_room) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=5))
@settings(deadline=None, max_examples=200)
def test_a_base_with_room_is_split_so_that_the_slowest_drive_of_a_layer_is_soonest_done(weights: list[float]) -> None:
    """No drive gets less than its proportion rounded down, and no expert would be read sooner on another drive."""
    # With one copy of each expert there is room for nothing but the base: what each drive holds is its share.
    candidates = [drive("AB"[n % 2], weight) for n, weight in enumerate(weights)]
    holds = plan_base(TINY, candidates, pool_room=[N_RECORDS])
    for layer in TINY.moe_layers:
        shares = [int(h[layer].sum()) for h in holds]
        assert sum(shares) == TINY.n_experts
        for share, weight in zip(shares, weights, strict=True):
            assert share >= math.floor(TINY.n_experts * weight / sum(weights) - 1e-9)
        slowest = max(share / weight for share, weight in zip(shares, weights, strict=True))
        assert all((share + 1) / weight >= slowest * (1 - 1e-9) for share, weight in zip(shares, weights, strict=True))


@given(st.floats(0.05, 20), st.floats(0.05, 20))
@settings(deadline=None)
def test_two_drives_share_a_layer_within_one_expert_of_their_rates(a: float, b: float) -> None:
    holds = plan_base(TINY, [drive("A", a), drive("B", b)], pool_room=[N_RECORDS])
    for layer in TINY.moe_layers:
        assert abs(holds[0][layer].sum() - TINY.n_experts * a / (a + b)) <= 1 + 1e-9


def test_a_drive_too_small_for_its_share_takes_what_it_can_evenly_over_the_layers() -> None:
    holds = plan_base(TINY, [drive("A", 9.0, limit=40), drive("B", 1.0)], pool_room=[N_RECORDS])
    per_layer = holds[0].sum(axis=1)[TINY.n_dense_layers :]
    assert holds[0].sum() == 40
    assert per_layer.min() >= 4 and per_layer.max() <= 5


@given(st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_planning_again_from_where_a_plan_led_to_moves_nothing(seed: int) -> None:
    first = [drive("A", 2.0, limit=90), drive("B", limit=80)]
    holds = plan_base(TINY, first, pool_room=[N_RECORDS], seed=seed)
    again = [replace(candidate, present=held) for candidate, held in zip(first, holds, strict=True)]
    # Another seed, so that what is there decides and not the same lot drawn twice.
    for planned, held in zip(plan_base(TINY, again, pool_room=[N_RECORDS], seed=seed + 1), holds, strict=True):
        assert np.array_equal(planned, held)


def test_what_is_there_is_kept() -> None:
    present = nothing()
    present[TINY.n_dense_layers :, 3:11] = True
    holds = plan_base(TINY, [drive("A"), drive("B", present=present)], pool_room=[N_RECORDS])
    assert np.array_equal(holds[1], present)
