import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.errors import DamagedDataError, UsageError
from runtime.sampler import Sampler


def float32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def draws(sampler: Sampler, logits: torch.Tensor, n: int) -> list[int]:
    return [sampler.choose(logits) for _ in range(n)]


def plain_nucleus(logits: torch.Tensor, temperature: float, top_p: float) -> dict[int, float]:
    """The tokens that may be drawn, likeliest first, and how likely each is to be drawn."""
    weights = [math.exp((value - logits.max().item()) / temperature) for value in logits.tolist()]
    kept: dict[int, float] = {}
    for token in sorted(range(len(weights)), key=lambda n: -weights[n]):
        if math.fsum(kept.values()) >= top_p:
            break
        kept[token] = weights[token] / math.fsum(weights)
    return {token: probability / math.fsum(kept.values()) for token, probability in kept.items()}


def chi_square(tokens: list[int], expected: dict[int, float]) -> float:
    assert set(tokens) <= set(expected)
    return sum((tokens.count(t) - p * len(tokens)) ** 2 / (p * len(tokens)) for t, p in expected.items())


@pytest.mark.parametrize("temperature", [0.0, 1e-320])
def test_no_or_next_to_no_temperature_takes_the_likeliest(temperature: float) -> None:
    assert draws(Sampler(temperature, 1.0, 0), float32(-1, 3, 2.9999998, -math.inf), 20) == [1] * 20


def test_temperature_zero_takes_the_lowest_index_of_equals() -> None:
    logits = torch.full((163_840,), -2.5)
    logits[[1000, 70_001, 163_839]] = 1.5
    assert Sampler(0.0, 1.0, None).choose(logits) == 1000
    assert Sampler(0.0, 1.0, None).choose(torch.zeros(37)) == 0


LOGITS = float32(0.3, 2.0, -1.0, 1.1, -4.0, 0.9, 1.6, -math.inf)


# The bounds are the chi-square quantiles at 0.999 for one degree of freedom less than there are tokens to draw.
@pytest.mark.parametrize(
    ("temperature", "top_p", "n_kept", "bound"),
    [(1.0, 1.0, 7, 22.46), (2.5, 1.0, 7, 22.46), (0.5, 1.0, 7, 22.46), (1.0, 0.9, 4, 16.27), (1.0, 0.6, 2, 10.83), (3.0, 0.8, 5, 18.47)],
)
def test_frequencies_follow_temperature_and_top_p(temperature: float, top_p: float, n_kept: int, bound: float) -> None:
    expected = plain_nucleus(LOGITS, temperature, top_p)
    expected.pop(7, None)
    assert len(expected) == n_kept
    tokens = draws(Sampler(temperature, top_p, 11), LOGITS, 20_000)
    assert chi_square(tokens, expected) < bound


@pytest.mark.parametrize(("top_p", "n_kept"), [(1e-300, 1), (0.25, 1), (0.2500001, 2), (0.5, 2), (0.75, 3), (0.7500001, 4), (1.0, 4)])
def test_equals_enter_the_nucleus_by_index(top_p: float, n_kept: int) -> None:
    logits = float32(-math.inf, 5, 5, -math.inf, 5, 5)
    assert set(draws(Sampler(1.0, top_p, 3), logits, 300)) == set([1, 2, 4, 5][:n_kept])


@pytest.mark.parametrize("n_tokens", [1, 3, 7, 163_840])
def test_the_smallest_top_p_leaves_one_token(n_tokens: int) -> None:
    assert draws(Sampler(1.0, 5e-324, 3), torch.zeros(n_tokens), 5) == [0] * 5


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = float32(-math.inf, -2000, 1, -math.inf)
    assert set(draws(Sampler(1.0, 1.0, 5), logits, 500)) == {2}


@settings(deadline=None)
@given(
    logits=st.lists(st.integers(-12, 12), min_size=1, max_size=60),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 5.0]),
    top_p=st.integers(1, 98).map(lambda n: (n + 0.31415) / 100),
    seed=st.integers(0, 2**64),
)
def test_draws_where_the_seeded_number_falls_in_the_nucleus(logits: list[int], temperature: float, top_p: float, seed: int) -> None:
    values = float32(*(value / 4 for value in logits))
    expected = plain_nucleus(values, temperature, top_p)
    point = np.random.Generator(np.random.PCG64(seed)).random()
    below = 0.0
    token = Sampler(temperature, top_p, seed).choose(values)
    for other in expected:
        if other == token:
            break
        below += expected[other]
    assert below - 1e-9 <= point <= below + expected[token] + 1e-9


def test_a_seed_repeats_the_run_and_another_does_not() -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    first = draws(Sampler(1.0, 0.95, 42), logits, 50)
    assert draws(Sampler(1.0, 0.95, 42), logits, 50) == first
    assert draws(Sampler(1.0, 0.95, 43), logits, 50) != first


def test_a_seed_gives_the_same_tokens_on_every_machine() -> None:
    # Tokens 1, 6, 3, 5 end at 0.415, 0.693, 0.862, 1; PCG64(7) begins 0.625, 0.897, 0.776, 0.225, 0.300, 0.874.
    assert draws(Sampler(1.0, 0.9, 7), LOGITS, 6) == [6, 5, 3, 1, 1, 5]


def test_a_seed_that_was_drawn_can_be_read_and_repeats_the_run() -> None:
    logits = torch.zeros(1000)
    sampler = Sampler(1.0, 1.0, None)
    assert draws(Sampler(1.0, 1.0, sampler.seed), logits, 20) == draws(sampler, logits, 20)
    assert len({Sampler(1.0, 1.0, None).seed for _ in range(5)}) > 1


def test_logits_are_left_as_they_are() -> None:
    logits = LOGITS.clone()
    Sampler(0.5, 0.9, 1).choose(logits)
    assert torch.equal(logits, LOGITS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_logits_on_a_gpu_give_the_tokens_of_the_cpu() -> None:
    logits = torch.randn(163_840, generator=torch.Generator().manual_seed(2)) * 3
    for temperature in (0.0, 1.0):
        assert draws(Sampler(temperature, 0.95, 9), logits.cuda(), 20) == draws(Sampler(temperature, 0.95, 9), logits, 20)


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_a_temperature_out_of_range_names_the_flag(temperature: float) -> None:
    with pytest.raises(UsageError, match=rf"--temp is {temperature}, expected"):
        Sampler(temperature, 1.0, 0)


@pytest.mark.parametrize("top_p", [0.0, -0.5, 1.0001, math.nan])
def test_a_top_p_out_of_range_names_the_flag(top_p: float) -> None:
    with pytest.raises(UsageError, match=rf"--top-p is {top_p}, expected"):
        Sampler(1.0, top_p, 0)


def test_a_negative_seed_names_the_flag() -> None:
    with pytest.raises(UsageError, match=r"--seed is -1, expected"):
        Sampler(1.0, 1.0, -1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "found"),
    [
        (float32(1, math.inf, math.nan, 2, math.nan), r"NaN at 2 of 5 tokens, the first is 2"),
        (float32(1, math.inf), r"no finite maximum but inf"),
        (float32(-math.inf, -math.inf), r"no finite maximum but -inf"),
    ],
)
def test_logits_that_are_not_finite_are_damage(temperature: float, logits: torch.Tensor, found: str) -> None:
    with pytest.raises(DamagedDataError, match=f"logits hold {found}.*verify-hashes"):
        Sampler(temperature, 1.0, 0).choose(logits)
