"""Decoding one text, plainly or with drafts that the model checks several at a time.

Every token is chosen from its own row's logits, in order, by the same sampler as without drafts; a draft only decides which rows are computed
together. As a row's bits do not depend on its block, tokens, logits and random draws are those of plain decoding, whatever a drafter proposes.
"""

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from runtime.decode import Decoder
from runtime.draft.drafter import MOST_DRAFTS, Drafter, DrafterFault
from runtime.draft.gates import EconomyGate, Round
from runtime.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Step:
    """A token that was generated; `finish` is why it is the last: end, length or context."""

    token: int
    logits: Tensor
    finish: str | None


class Limits(NamedTuple):
    """Where a text ends: after a number of new tokens, with its context full, or at an end token."""

    n_tokens: int
    context: int
    end_ids: Collection[int]


@dataclass(slots=True)
class DraftCounts:
    """n_blocks counts steps of several rows; the seconds are those of the drafter, asked n_asked times."""

    n_asked: int = 0
    n_blocks: int = 0
    n_proposed: int = 0
    n_accepted: int = 0
    n_faults: int = 0
    n_plain_steps: int = 0
    drafter_s: float = 0.0


@dataclass(slots=True)
class Drafting:
    """A drafter in use, through any number of texts. After its first fault decoding is plain, which is said once.

    economy  None drafts whether it pays or not
    clock    seconds, as a step's cost is measured in
    """

    drafter: Drafter
    vocab_size: int
    on_remark: Callable[[str], None]
    economy: EconomyGate | None = field(default_factory=EconomyGate)
    clock: Callable[[], float] = time.perf_counter
    counts: DraftCounts = field(default_factory=DraftCounts)
    is_off: bool = False

    def propose(self, text: Sequence[int], n_most: int) -> tuple[list[int], float | None]:
        """Return at most n_most drafts, none if now is no time for them, and the seconds that the drafter took, None if it was not asked."""
        if self.is_off or n_most < 1 or (self.economy is not None and not self.economy.allows()):
            return [], None
        began, drafts = self.clock(), list[int]()
        try:
            drafts = self.drafter.propose(text, n_most)
            self._check(drafts, n_most)
        except DrafterFault as fault:
            drafts, self.is_off = [], True
            self.counts.n_faults += 1
            self.on_remark(f"drafter: {fault}; decoding goes on without it, and the text stays the same")
            self.drafter.close()
        seconds = self.clock() - began
        self.counts.n_asked += 1
        self.counts.drafter_s += seconds
        return drafts, seconds

    def settle(self, done: Round, n_accepted: int) -> None:
        """Learn from a step."""
        counts = self.counts
        if done.n_proposed:
            counts.n_blocks += 1
        else:
            counts.n_plain_steps += 1
        counts.n_proposed += done.n_proposed
        counts.n_accepted += n_accepted
        if self.is_off:
            return
        if done.drafter_s is not None:
            self.drafter.settle(n_proposed=done.n_proposed, n_accepted=n_accepted)
        if self.economy is not None:
            self.economy.settle(done)

    def statistics(self) -> dict[str, Any]:
        """Return the counts under their names in a run's statistics."""
        counts = self.counts
        return {
            "n_asked": counts.n_asked,
            "n_blocks": counts.n_blocks,
            "n_plain_steps": counts.n_plain_steps,
            "n_proposed": counts.n_proposed,
            "n_accepted": counts.n_accepted,
            "n_faults": counts.n_faults,
            "n_pauses": self.economy.n_pauses if self.economy is not None else 0,
            "drafter_s": counts.drafter_s,
        }

    def _check(self, drafts: list[int], n_most: int) -> None:
        if len(drafts) > n_most:
            raise DrafterFault(f"proposed {len(drafts)} tokens, at most {n_most} were asked for")
        strays = [draft for draft in drafts if type(draft) is not int or not 0 <= draft < self.vocab_size]
        if strays:
            raise DrafterFault(f"proposed token {strays[0]!r}, but token numbers go from 0 to {self.vocab_size - 1}")


def continue_text(
    decoder: Decoder,
    sampler: Sampler,
    logits: Tensor,
    *,
    text: Sequence[int],
    limits: Limits,
    drafting: Drafting | None = None,
    on_step: Callable[[], None] | None = None,
) -> Generator[Step, None, None]:
    """Yield the tokens that follow a text, until one says why it is the last.

    decoder  has run all of the text
    logits   float32 [vocabulary], after the text's last token
    on_step  called after each step of the decoder, before its results are waited for

    After the last token, and if it is closed before, the decoder has run all tokens but the one that was yielded last.
    """
    writer = _Writer(sampler, limits, list(text), on_step or (lambda: None))
    step = writer.choose(logits, decoder.state.n_tokens)
    yield step
    while step.finish is None:
        n_most = min(MOST_DRAFTS, writer.n_left - 1, limits.context - decoder.state.n_tokens - 1)
        if drafting is None:
            rows = decoder.step([step.token])
            writer.on_step()
            step = writer.choose(rows[0].clone(), decoder.state.n_tokens)
            yield step
        else:
            step = yield from _drafted_round(decoder, writer, drafting, n_most)


@dataclass(slots=True)
class _Writer:
    """Chooses a text's next tokens and says which is the last."""

    sampler: Sampler
    limits: Limits
    text: list[int]
    on_step: Callable[[], None]
    n_chosen: int = 0

    @property
    def n_left(self) -> int:
        return self.limits.n_tokens - self.n_chosen

    def choose(self, row: Tensor, n_past: int) -> Step:
        """Choose from logits [vocabulary] after n_past tokens."""
        token = self.sampler.choose(row)
        self.n_chosen += 1
        self.text.append(token)
        finish = "end" if token in self.limits.end_ids else None if self.n_left else "length"
        return Step(token, row, finish or ("context" if n_past >= self.limits.context else None))


def _drafted_round(decoder: Decoder, writer: _Writer, drafting: Drafting, n_most: int) -> Generator[Step, None, Step]:
    """Run the text's last token with drafts behind it. Yield a token for each row up to the first whose draft is another; return the last."""
    drafts, drafter_s = drafting.propose(writer.text, n_most)
    # Not part of what a step costs: it happens once.
    decoder.capture(1 + len(drafts), can_cut=True)
    n_before, model_s, began = decoder.state.n_tokens, 0.0, drafting.clock()
    rows = decoder.step([writer.text[-1], *drafts], can_cut=True)
    writer.on_step()
    for n_rows, (row, draft) in enumerate(zip(rows, [*drafts, None], strict=True), start=1):
        step = writer.choose(row.clone(), n_before + n_rows)
        is_last = step.token != draft or step.finish is not None
        if is_last:
            decoder.keep(n_rows)
        model_s += drafting.clock() - began
        if is_last:
            drafting.settle(Round(drafter_s, model_s, len(drafts), n_rows), n_rows - (step.token != draft))
        try:
            yield step
        except GeneratorExit:
            decoder.keep(n_rows)
            raise
        began = drafting.clock()
        if is_last:
            break
    return step
