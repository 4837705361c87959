"""The model of the drives: closed form against hand results and a linear program, whole chunks against every assignment, the rule against both."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from layout.makespan import Servers, assign, chunked_makespan, counts_within, makespan

# Three servers as powers of two times a unit, so that the times below are exact: A reads 4 records a second, B 2, C 1.
ABC = Servers((4.0, 2.0, 1.0), (0, 1, 2))
A, B, C = 1, 2, 4


def table(*draws: list[int]) -> np.ndarray:
    most = max(len(draw) for draw in draws)
    return np.array([draw + [0] * (most - len(draw)) for draw in draws])


# Enough experts that only the named set holds, and one anywhere else, so that each of the seven sets binds in turn.
@pytest.mark.parametrize(
    ("masks", "binding", "seconds"),
    [
        ([A] * 4 + [B], A, 1.0),
        ([B] * 4 + [A], B, 2.0),
        ([C] * 3 + [A], C, 3.0),
        ([A | B] * 6 + [C | A], A | B, 1.0),
        ([A | C] * 10 + [B], A | C, 2.0),
        ([B | C] * 6 + [A], B | C, 2.0),
        ([A | B | C] * 7, A | B | C, 1.0),
        # A alone would take 1 s and B alone 0.5 s; together they hold 5 of A or B, which is no more than they read in a second.
        ([A] * 4 + [B] * 1, A, 1.0),
        # The union binds although neither member does: 3 on A (0.75 s), 1 on B (0.5 s), 2 on either: 6 at a rate of 6.
        ([A] * 3 + [B] * 1 + [A | B] * 2, A | B, 1.0),
    ],
)
def test_each_of_the_seven_sets_binds_where_it_must(masks: list[int], binding: int, seconds: float) -> None:
    found = makespan(ABC, table(masks), record_bytes=1.0)
    assert (found.seconds.tolist(), found.bottleneck.tolist()) == ([seconds], [binding])


def test_counts_the_experts_that_no_server_outside_a_set_holds() -> None:
    assert counts_within(ABC, table([A, A, B, A | B, B | C, A | B | C])).tolist() == [[0, 2, 1, 4, 0, 2, 2, 6]]


def test_nothing_drawn_takes_no_time() -> None:
    found = makespan(ABC, np.zeros((2, 3), np.int64), record_bytes=1.0)
    assert found.seconds.tolist() == [0, 0] and found.bottleneck.tolist() == [0, 0]
    nothing = assign(ABC, np.zeros((2, 3), np.int64), record_bytes=1.0, n_chunks=3)
    assert nothing.seconds.tolist() == [0, 0] and nothing.read_share.sum() == 0


def test_a_late_server_counts_from_its_start_and_not_before() -> None:
    # 8 records on A or B: A reads 4 a second from 0 on, B 2 a second from 1 on: 4 in the first second, 4 at 6 a second.
    found = makespan(ABC, table([A | B] * 8), record_bytes=1.0, offsets_s=(0, 1, 0))
    assert found.seconds.tolist() == [pytest.approx(1 + 4 / 6)]
    # The published form says the same: (8 + 2 * 1) / (4 + 2).
    assert found.seconds.tolist() == [pytest.approx((8 + 2 * 1.0) / 6)]
    # One that begins after the end is left out of the sum.
    assert makespan(ABC, table([A | B] * 2), record_bytes=1.0, offsets_s=(0, 1, 0)).seconds.tolist() == [0.5]


def test_a_shared_link_caps_what_its_servers_reach_together() -> None:
    linked = Servers((4.0, 2.0, 1.0), (0, 1, 2), (((0, 1), 5.0), ((0, 1, 2), 5.5)))
    assert linked.joint_rates.tolist() == [0, 4, 2, 5, 1, 5, 3, 5.5]
    assert makespan(linked, table([A | B] * 10), record_bytes=1.0).seconds.tolist() == [2.0]


def test_two_drives_on_one_device_are_one_server() -> None:
    servers = Servers((4.0, 1.0), (0, 0, 1))
    holds = [np.array([True, False, True]), np.array([True, True, False]), np.array([False, False, True])]
    assert servers.masks(holds).tolist() == [0b01, 0b01, 0b11]


@pytest.mark.parametrize(
    ("rates", "links", "message"),
    [
        ((), (), "0 servers"),
        ((1.0,) * 9, (), "9 servers"),
        ((1.0, 0.0), (), "above zero"),
        ((1.0, 1.0), (((0, 1), 0.0),), "above zero"),
        ((1.0, 1.0), (((0, 2), 1.0),), "expected servers 0 to 1"),
        ((1.0, 1.0, 1.0), (((0, 1), 1.0), ((1, 2), 1.0)), "nested or have no server in common"),
    ],
)
def test_refuses_what_is_no_model(rates: tuple[float, ...], links: tuple[tuple[tuple[int, ...], float], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Servers(rates, (), links)


LINKS = st.sampled_from([(), (((0, 1), 0.8),), (((1, 2), 0.6), ((0, 1, 2), 0.9)), (((0, 1, 2, 3), 0.7), ((2, 3), 0.5))])


@st.composite
def layers(draw: st.DrawFn) -> tuple[Servers, list[int], list[float]]:
    """Up to four servers with links, a layer's experts, and when each server begins."""
    rates = tuple(draw(st.lists(st.sampled_from([1.0, 2.5, 6.0, 13.0]), min_size=4, max_size=4)))
    links = tuple((group, share * sum(rates[server] for server in group)) for group, share in draw(LINKS))
    masks = draw(st.lists(st.integers(1, 15), min_size=1, max_size=12))
    return Servers(rates, (0, 1, 2, 3), links), masks, draw(st.lists(st.sampled_from([0.0, 0.1, 0.5]), min_size=4, max_size=4))


def least_time(servers: Servers, masks: list[int], offsets: list[float]) -> float:
    """The same by linear program: x[e, i, k] of expert e from server i in the k-th span between two starts; the last span's end is minimised."""
    n, starts = servers.n_servers, sorted(set(offsets))
    best = np.inf
    for last, start in enumerate(starts):
        columns = [(e, i, k) for e, mask in enumerate(masks) for i in range(n) for k in range(last + 1) if mask >> i & 1 and offsets[i] <= starts[k]]
        stages = [((i,), rate) for i, rate in enumerate(servers.rates)] + list(servers.links)
        rows, limits = [], []
        for members, rate in stages:
            for k in range(last + 1):
                row = [float(i in members and k == kk) for _, i, kk in columns]
                rows.append([*row, -rate if k == last else 0.0])
                limits.append(0.0 if k == last else rate * (starts[k + 1] - starts[k]))
        whole = [[*(float(e == expert) for e, _, _ in columns), 0.0] for expert in range(len(masks))]
        end = None if last + 1 == len(starts) else starts[last + 1] - start
        found = linprog(
            [0.0] * len(columns) + [1.0], A_ub=rows, b_ub=limits, A_eq=whole, b_eq=[1.0] * len(masks), bounds=[(0, None)] * len(columns) + [(0, end)],
            method="highs",
        )  # fmt: skip
        if found.success:
            best = min(best, start + found.fun)
    return best


@given(layers())
@settings(deadline=None, max_examples=60)
def test_the_closed_form_is_the_optimum_of_the_linear_program(layer: tuple[Servers, list[int], list[float]]) -> None:
    servers, masks, offsets = layer
    assert makespan(servers, table(masks), record_bytes=1.0, offsets_s=offsets).seconds[0] == pytest.approx(
        least_time(servers, masks, offsets), rel=1e-7
    )


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 2))
@settings(deadline=None, max_examples=60)
def test_whole_chunks_are_the_best_of_all_assignments(masks: list[int], n_chunks: int) -> None:
    servers, offsets = Servers((4.0, 2.5, 1.0), (0, 1, 2)), np.array([0.02, 0.0, 0.05])
    holders = [[i for i in range(3) if mask >> i & 1] for mask in masks for _ in range(n_chunks)]

    def end(chosen: tuple[int, ...]) -> float:
        n = np.bincount(chosen, minlength=3)
        return float(np.max(np.where(n > 0, offsets + n / n_chunks / servers.rates, 0)))

    best = min(end(chosen) for chosen in itertools.product(*holders))
    assert chunked_makespan(servers, table(masks), record_bytes=1.0, n_chunks=n_chunks, offsets_s=offsets.tolist())[0] == pytest.approx(best)


def test_many_draws_at_once_are_each_as_alone() -> None:
    masks = np.random.default_rng(0).integers(0, 8, (50, 16))
    together = makespan(ABC, masks, record_bytes=3.0, offsets_s=(0.1, 0, 0.2)).seconds
    assert together.tolist() == [makespan(ABC, row[None], record_bytes=3.0, offsets_s=(0.1, 0, 0.2)).seconds[0] for row in masks]
    chunked = chunked_makespan(ABC, masks, record_bytes=3.0, n_chunks=3)
    assert chunked.tolist() == pytest.approx([chunked_makespan(ABC, row[None], record_bytes=3.0, n_chunks=3)[0] for row in masks])


@given(layers())
@settings(deadline=None, max_examples=60)
def test_fluid_is_no_slower_than_chunks_and_chunks_no_slower_than_the_rule(layer: tuple[Servers, list[int], list[float]]) -> None:
    servers, masks, _ = layer
    fluid = makespan(servers, table(masks), record_bytes=1.0).seconds[0]
    chunked = chunked_makespan(servers, table(masks), record_bytes=1.0, n_chunks=3)[0]
    assert fluid <= chunked * (1 + 1e-9)
    if not servers.links:
        assert chunked <= assign(servers, table(masks), record_bytes=1.0, n_chunks=3).seconds[0] * (1 + 1e-9)


def test_the_rule_gives_each_chunk_to_the_server_that_completes_it_first() -> None:
    # The expert on C alone goes first and takes 1 s. Of the four halves left, A ends its first three at 1/8, 2/8 and 3/8 s, B one at 2/8 s.
    found = assign(ABC, table([A | B, A | B, C]), record_bytes=1.0, n_chunks=2)
    assert found.seconds.tolist() == [1.0]
    assert found.read_share.tolist() == [pytest.approx(3 / 6), pytest.approx(1 / 6), pytest.approx(2 / 6)]
    assert found.last_share.tolist() == [0, 0, 1]


def test_the_rule_serves_first_what_has_the_fewest_copies() -> None:
    # A reads the one that only it holds in 1/4 s, then A and B one each until 1/2 s. In the order given, A would end at 3/4 s.
    assert assign(ABC, table([A | B, A | B, A]), record_bytes=1.0, n_chunks=1).seconds.tolist() == [0.5]


def test_the_rule_waits_for_a_shared_link() -> None:
    linked = Servers((4.0, 4.0), (0, 1), (((0, 1), 4.0),))
    assert assign(linked, table([1, 2, 1, 2]), record_bytes=1.0, n_chunks=1).seconds.tolist() == [1.0]


def test_where_a_link_makes_all_as_late_the_faster_server_reads_more_and_none_is_last_alone() -> None:
    servers = Servers((4.0, 2.0), (0, 1), links=(((0, 1), 4.0),))
    found = assign(servers, np.full((1, 30), 3), record_bytes=1.0, n_chunks=1)
    assert found.seconds[0] == pytest.approx(7.5)
    assert found.read_share[0] == pytest.approx(2 / 3, abs=0.05)
    equal = assign(Servers((1.0, 1.0), (0, 1)), np.array([[1, 2]]), record_bytes=1.0, n_chunks=1)
    assert equal.last_share.tolist() == [0.5, 0.5]
