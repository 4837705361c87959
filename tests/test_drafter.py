"""Drafts change how many rows a step has and nothing else: tokens, logits and random draws are those of plain decoding."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from manifests.errors import UsageError
from runtime.draft.drafter import MOST_DRAFTS, DrafterFault
from runtime.draft.gates import AdaptiveGate, EconomyGate, FixedGate, Round, parse_gate
from runtime.draft.ngram import NgramDrafter
from runtime.engine import Engine, Options
from runtime.sampler import Sampler
from runtime.speculate import Drafting, Limits, Step, continue_text
from runtime.state import State

N_TOKENS = 34
CONTEXT = 96
PROMPT = [7, 300, 12, 12, 45, 7, 300, 12]


def quiet(_: str) -> None: ...


class Scripted:
    """Knows what the text will be, and says it with mistakes: `script` is given what follows and the number of the call."""

    def __init__(self, whole: Sequence[int], script: Callable[[list[int], int], list[int]]) -> None:
        self._whole, self._script, self.settled, self.is_closed = list(whole), script, list[tuple[int, int]](), False
        self.most_tokens = 0

    def propose(self, text: Sequence[int], n_most: int) -> list[int]:
        assert list(text) == self._whole[: len(text)]
        self.most_tokens = max(self.most_tokens, len(text) + n_most)
        return self._script(self._whole[len(text) :][:n_most], len(self.settled))

    def settle(self, *, n_proposed: int, n_accepted: int) -> None:
        self.settled.append((n_proposed, n_accepted))

    def close(self) -> None:
        self.is_closed = True


def wrong_at(place: int) -> Callable[[list[int], int], list[int]]:
    """Propose what follows with a mistake at one place, counted from either end."""

    def script(right: list[int], _: int) -> list[int]:
        return [(token + 1) % 512 if n == place % len(right) else token for n, token in enumerate(right)] if right else []

    return script


SCRIPTS = {
    "all right": lambda right, _: right,
    "first wrong": lambda right, n: wrong_at(0)(right[:4], n),
    "middle wrong": wrong_at(7),
    "last wrong": wrong_at(-1),
    "short": lambda right, _: right[:2],
    "of every length": lambda right, n: right[: n % 16],
    "sometimes silent": lambda right, n: right if n % 3 == 0 else [],
    "wrong in turn": lambda right, n: wrong_at(n)(right, n),
}
SAMPLERS = {"greedy": (0.0, 1.0), "drawn": (1.0, 0.95)}


@dataclass
class Prompted:
    """An engine after its prompt pass."""

    engine: Engine
    logits: torch.Tensor
    state: State

    def steps(self, sampler: Sampler, drafting: Drafting | None, limits: Limits) -> Generator[Step, None, None]:
        self.engine.decoder.begin(self.state)
        yield from continue_text(self.engine.decoder, sampler, self.logits, text=PROMPT, limits=limits, drafting=drafting)

    def continued(
        self, sampler: Sampler, drafting: Drafting | None = None, *, n_tokens: int = N_TOKENS, context: int = CONTEXT, end_ids: Sequence[int] = ()
    ) -> list[Step]:
        return list(self.steps(sampler, drafting, Limits(n_tokens, context, end_ids)))


@pytest.fixture(scope="module")
def prompted(extractions: dict[str, Path], device: str) -> Iterator[Prompted]:
    with Engine(extractions["tiny-k3.1"], Options(device=device, context=CONTEXT), on_remark=quiet) as engine, torch.inference_mode():
        yield Prompted(engine, engine.prompt(PROMPT), engine.decoder.state.copied())


@pytest.fixture(scope="module")
def greedy(prompted: Prompted) -> list[Step]:
    return prompted.continued(Sampler(0, 1, 0))


def tokens_of(steps: list[Step]) -> list[int]:
    return [step.token for step in steps]


def drafting_of(drafter: Scripted | NgramDrafter, on_remark: Callable[[str], None] = quiet) -> Drafting:
    return Drafting(drafter, 512, on_remark, economy=None)


def assert_equal(found: list[Step], expected: list[Step]) -> None:
    assert tokens_of(found) == tokens_of(expected)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(found, expected, strict=True))
    assert [step.finish for step in found] == [step.finish for step in expected]


@pytest.fixture(scope="module", params=SAMPLERS)
def settings(request: pytest.FixtureRequest) -> tuple[float, float]:
    return SAMPLERS[request.param]


@pytest.fixture(scope="module")
def plain(prompted: Prompted, settings: tuple[float, float]) -> list[Step]:
    return prompted.continued(Sampler(*settings, seed=3))


def test_without_drafts_it_is_what_the_engine_generates(prompted: Prompted, settings: tuple[float, float], plain: list[Step]) -> None:
    expected = list(prompted.engine.generate(PROMPT, n_tokens=N_TOKENS, sampler=Sampler(*settings, seed=3)))
    assert tokens_of(plain) == [step.token for step in expected]
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(plain, expected, strict=True))


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_draft_changes_a_token_a_logit_or_a_draw(prompted: Prompted, settings: tuple[float, float], plain: list[Step], name: str) -> None:
    drafting = drafting_of(Scripted([*PROMPT, *tokens_of(plain)], SCRIPTS[name]))
    sampler = Sampler(*settings, seed=3)
    assert_equal(prompted.continued(sampler, drafting), plain)
    assert prompted.engine.decoder.state.n_tokens == len(PROMPT) + N_TOKENS - 1
    # The next draw is the same too.
    other = Sampler(*settings, seed=3)
    for step in plain:
        other.choose(step.logits)
    assert sampler.choose(plain[0].logits) == other.choose(plain[0].logits)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("all right", [(15, 15), (15, 15)]),
        ("first wrong", [(4, 0)] * 29 + [(3, 0), (2, 0), (1, 0)]),
        ("middle wrong", [(15, 7)] * 3 + [(8, 7)]),
        ("last wrong", [(15, 14), (15, 14), (2, 1)]),
        ("short", [(2, 2)] * 11),
    ],
)
def test_the_known_number_of_drafts_is_accepted(prompted: Prompted, greedy: list[Step], name: str, expected: list[tuple[int, int]]) -> None:
    drafter = Scripted([*PROMPT, *tokens_of(greedy)], SCRIPTS[name])
    drafting = drafting_of(drafter)
    prompted.continued(Sampler(0, 1, 0), drafting)
    counts = drafting.counts
    assert drafter.settled == expected
    assert [counts.n_proposed, counts.n_accepted] == [sum(column) for column in zip(*expected, strict=True)]
    assert counts.n_blocks == len(expected)


@pytest.mark.parametrize("place", [1, 2, 9, 15, 16, 17])
def test_an_end_token_inside_a_block_ends_the_text(prompted: Prompted, greedy: list[Step], place: int) -> None:
    end = greedy[place].token
    expected = greedy[: tokens_of(greedy).index(end) + 1]
    drafting = drafting_of(Scripted([*PROMPT, *tokens_of(greedy)], SCRIPTS["all right"]))
    found = prompted.continued(Sampler(0, 1, 0), drafting, end_ids=[end])
    assert tokens_of(found) == tokens_of(expected) and found[-1].finish == "end"
    assert prompted.engine.decoder.state.n_tokens == len(PROMPT) + len(found) - 1


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 16, 17, 18])
def test_the_length_asked_for_ends_a_block(prompted: Prompted, greedy: list[Step], n_tokens: int) -> None:
    drafter = Scripted([*PROMPT, *tokens_of(greedy)], SCRIPTS["all right"])
    found = prompted.continued(Sampler(0, 1, 0), drafting_of(drafter), n_tokens=n_tokens)
    assert tokens_of(found) == tokens_of(greedy)[:n_tokens] and found[-1].finish == "length"
    # The last token is never run, so no draft may take its place.
    assert drafter.most_tokens < len(PROMPT) + n_tokens
    assert prompted.engine.decoder.state.n_tokens == len(PROMPT) + n_tokens - 1


@pytest.mark.parametrize("n_room", [0, 1, 2, 15, 16, 17])
def test_a_full_context_ends_a_block(prompted: Prompted, greedy: list[Step], n_room: int) -> None:
    drafter = Scripted([*PROMPT, *tokens_of(greedy)], SCRIPTS["all right"])
    expected = prompted.continued(Sampler(0, 1, 0), context=len(PROMPT) + n_room)
    assert len(expected) == n_room + 1 and expected[-1].finish == "context"
    assert_equal(prompted.continued(Sampler(0, 1, 0), drafting_of(drafter), context=len(PROMPT) + n_room), expected)
    assert drafter.most_tokens <= len(PROMPT) + n_room


@pytest.mark.parametrize("n_taken", [1, 2, 9, 16, 17])
def test_a_text_that_is_broken_off_leaves_the_state_of_plain_decoding(prompted: Prompted, greedy: list[Step], n_taken: int) -> None:
    states = []
    for drafting in (None, drafting_of(Scripted([*PROMPT, *tokens_of(greedy)], SCRIPTS["all right"]))):
        steps = prompted.steps(Sampler(0, 1, 0), drafting, Limits(N_TOKENS, CONTEXT, ()))
        for _ in range(n_taken):
            next(steps)
        steps.close()
        state = prompted.engine.decoder.state
        states.append((state.n_tokens, state.memory.clone(), state.conv.clone()))
    assert states[0][0] == states[1][0] == len(PROMPT) + n_taken - 1
    assert torch.equal(states[0][1], states[1][1]) and torch.equal(states[0][2], states[1][2])


NONSENSE = {
    "token 512,": lambda right, n: [*right[:2], 512] if n > 1 else right[:3],
    "token -1,": lambda right, n: [-1] if n > 1 else right[:3],
    "token '7',": lambda right, n: ["7"] if n > 1 else right[:3],
    "proposed 16 tokens": lambda right, n: [1] * 16 if n > 1 else right[:3],
}


@pytest.mark.parametrize("why", NONSENSE)
def test_nonsense_from_a_drafter_is_said_once_and_decoding_goes_on(prompted: Prompted, greedy: list[Step], why: str) -> None:
    remarks: list[str] = []
    drafter = Scripted([*PROMPT, *tokens_of(greedy)], NONSENSE[why])
    drafting = drafting_of(drafter, remarks.append)
    assert_equal(prompted.continued(Sampler(0, 1, 0), drafting), greedy)
    assert len(remarks) == 1 and why in remarks[0] and "decoding goes on" in remarks[0]
    assert drafting.counts.n_faults == 1 and drafting.counts.n_asked == 3 and drafter.is_closed
    # A later text is not drafted either, and nothing is said again.
    assert tokens_of(prompted.continued(Sampler(0, 1, 0), drafting, n_tokens=5)) == tokens_of(greedy)[:5]
    assert len(remarks) == 1 and drafting.counts.n_asked == 3


def test_a_fault_of_a_drafter_is_counted(prompted: Prompted, greedy: list[Step]) -> None:
    def fail(right: list[int], n: int) -> list[int]:
        raise DrafterFault("its process was ended by signal 9")

    remarks: list[str] = []
    drafting = drafting_of(Scripted([*PROMPT, *tokens_of(greedy)], fail), remarks.append)
    assert_equal(prompted.continued(Sampler(0, 1, 0), drafting), greedy)
    assert remarks == ["drafter: its process was ended by signal 9; decoding goes on without it, and the text stays the same"]
    assert drafting.statistics()["n_faults"] == 1 and drafting.statistics()["n_plain_steps"] == N_TOKENS - 1


def test_ngram_drafts_change_nothing(prompted: Prompted, plain: list[Step], settings: tuple[float, float]) -> None:
    drafting = drafting_of(NgramDrafter(shortest_match=1))
    assert_equal(prompted.continued(Sampler(*settings, seed=3), drafting), plain)
    assert drafting.counts.n_proposed > 0


# Where n-grams come from.


def test_ngram_proposes_what_followed_the_longest_match() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]
    assert NgramDrafter().propose(text, 3) == [4, 9, 2]


def test_ngram_takes_the_latest_of_equal_matches() -> None:
    assert NgramDrafter().propose([1, 2, 7, 0, 1, 2, 8, 5, 1, 2], 2) == [8, 5]


def test_ngram_has_no_guess_where_nothing_repeats_or_the_match_is_too_short() -> None:
    assert NgramDrafter().propose([1, 2, 3, 4], 15) == []
    assert NgramDrafter().propose([1], 15) == []
    assert NgramDrafter().propose([], 15) == []
    assert NgramDrafter(shortest_match=3).propose([1, 2, 9, 1, 2], 15) == []


def test_ngram_continues_a_period_up_to_the_most_asked_for() -> None:
    assert NgramDrafter().propose([5, 1, 2, 3, 1, 2, 3, 1, 2], MOST_DRAFTS) == [3, 1, 2] * 5
    assert NgramDrafter().propose([4, 4, 4], 4) == [4] * 4


def test_ngram_goes_on_with_a_growing_text_and_begins_anew_with_another() -> None:
    drafter, text = NgramDrafter(), [1, 2, 3, 1]
    assert drafter.propose(text, 2) == []
    text.append(2)
    assert drafter.propose(text, 2) == [3, 1]
    assert drafter.propose([9, 1, 2], 2) == []
    assert drafter.propose([9, 1, 2, 9, 1], 2) == [2, 9]


def test_ngram_agrees_with_a_plain_search_on_random_texts() -> None:
    generator = torch.Generator().manual_seed(0)
    for n_tokens in range(2, 50):
        text = torch.randint(0, 3, (n_tokens,), generator=generator).tolist()
        lengths = {place: next((n for n in range(place) if text[place - 1 - n] != text[-1 - n]), place) for place in range(1, n_tokens)}
        best = max(lengths, key=lambda place: (lengths[place], place))
        assert NgramDrafter().propose(text, 1) == ([text[best]] if lengths[best] >= 2 else [])


# When drafting pays.


def test_a_fixed_gate_stays_and_an_adaptive_one_moves_within_its_limits() -> None:
    fixed, adaptive = FixedGate(0.7), AdaptiveGate()
    assert adaptive.value == 0.9
    fixed.settle(n_proposed=4, n_accepted=0)
    adaptive.settle(n_proposed=4, n_accepted=0)
    assert fixed.value == 0.7 and adaptive.value > 0.9
    for _ in range(100):
        adaptive.settle(n_proposed=4, n_accepted=0)
    assert adaptive.value == AdaptiveGate.MOST < 1
    for _ in range(10):
        before = adaptive.value
        adaptive.settle(n_proposed=0, n_accepted=0)
        assert adaptive.value < before
    for _ in range(100):
        adaptive.settle(n_proposed=4, n_accepted=4)
    assert adaptive.value == AdaptiveGate.LEAST > 0


def test_more_rejections_raise_the_gate_more() -> None:
    few, many = AdaptiveGate(), AdaptiveGate()
    few.settle(n_proposed=10, n_accepted=9)
    many.settle(n_proposed=10, n_accepted=1)
    assert 0.9 < few.value < many.value


def test_a_gate_is_adaptive_or_a_probability() -> None:
    assert isinstance(parse_gate("adaptive", flag="--draft-gate"), AdaptiveGate)
    assert parse_gate("0.8", flag="--draft-gate").value == 0.8
    for bad in ("1.5", "-0.1", "nan", "high", ""):
        with pytest.raises(UsageError, match="--draft-gate"):
            parse_gate(bad, flag="--draft-gate")


def paced(gate: EconomyGate, n_rounds: int, *, plain_s: float, block_s: float, n_tokens: int, drafter_s: float = 0.0) -> list[bool]:
    """Run rounds of known cost; return which of them drafted."""
    drafted = []
    for _ in range(n_rounds):
        drafted.append(gate.allows())
        gate.settle(Round(drafter_s, block_s, 15, n_tokens) if drafted[-1] else Round(None, plain_s, 0, 1))
    return drafted


def test_drafting_begins_after_a_few_plain_steps_and_goes_on_while_it_pays() -> None:
    gate = EconomyGate()
    drafted = paced(gate, 200, plain_s=1.0, block_s=2.0, n_tokens=4)
    assert not any(drafted[: gate.N_PLAIN_FIRST]) and sum(drafted) > 170 and gate.n_pauses == 0


def test_plain_steps_are_timed_now_and_then_while_drafting_pays() -> None:
    drafted = paced(EconomyGate(), 200, plain_s=1.0, block_s=2.0, n_tokens=4)
    assert False in drafted[100:120]


def test_drafting_that_costs_more_pauses_and_is_tried_again_for_ever() -> None:
    gate = EconomyGate()
    drafted = paced(gate, 2000, plain_s=1.0, block_s=3.0, n_tokens=2)
    assert gate.n_pauses > 3 and sum(drafted) < 100
    assert any(drafted[-gate.LONGEST_PAUSE - gate.N_ATTEMPTS :])


def test_the_time_of_the_drafter_counts() -> None:
    for drafter_s, pays in ((0.5, True), (1.5, False)):
        gate = EconomyGate()
        paced(gate, 50, plain_s=1.0, block_s=1.0, n_tokens=2, drafter_s=drafter_s)
        assert (gate.n_pauses == 0) is pays


def test_a_drafter_without_a_guess_is_dropped_for_its_time_alone() -> None:
    for drafter_s, n_pauses in ((1e-5, 0), (0.3, 1)):
        gate = EconomyGate()
        paced(gate, 3, plain_s=1.0, block_s=0, n_tokens=1)
        for n in range(4):
            # What the step itself costs varies, and says nothing about the drafter.
            gate.settle(Round(drafter_s, 1.0 + n % 2, 0, 1))
        assert gate.n_pauses == n_pauses


def test_drafting_comes_back_when_it_pays_again() -> None:
    gate = EconomyGate()
    paced(gate, 300, plain_s=1.0, block_s=3.0, n_tokens=2)
    assert sum(paced(gate, 600, plain_s=1.0, block_s=1.5, n_tokens=6)) > 300


class SteppedClock:
    """Each reading is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_run_pauses_and_resumes_by_its_clock_and_its_text_stays(prompted: Prompted, greedy: list[Step]) -> None:
    drafter = Scripted([*PROMPT, *tokens_of(greedy)], wrong_at(0))
    drafting = Drafting(drafter, 512, quiet, economy=EconomyGate(), clock=SteppedClock())
    assert_equal(prompted.continued(Sampler(0, 1, 0), drafting), greedy)
    stats = drafting.statistics()
    # Three plain steps, four attempts, a pause of sixteen, four attempts more.
    assert stats["n_pauses"] == 2 and stats["n_asked"] == stats["n_blocks"] == 8
    assert stats["drafter_s"] == stats["n_asked"]
