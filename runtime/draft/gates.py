"""When to draft: how sure a drafter must be of a token, and whether drafting is worth its time."""

from collections import deque
from typing import NamedTuple, Protocol

from manifests.errors import UsageError

ADAPTIVE = "adaptive"
FIRST_ADAPTIVE = 0.9


class Gate(Protocol):
    """The probability that a drafter must give a token to propose it."""

    @property
    def value(self) -> float: ...

    def settle(self, *, n_proposed: int, n_accepted: int) -> None:
        """Learn how a proposal fared; one of no tokens is one too."""
        ...


class FixedGate:
    def __init__(self, value: float) -> None:
        self.value = value

    def settle(self, *, n_proposed: int, n_accepted: int) -> None: ...


class AdaptiveGate:
    """Begins at 0.9. Rejections raise it, the more the larger their share; proposals that were right throughout, or empty, lower it."""

    LEAST, MOST = 0.3, 0.98
    _UP, _DOWN, _DOWN_IF_SILENT = 0.06, 0.02, 0.01

    def __init__(self) -> None:
        self.value = FIRST_ADAPTIVE

    def settle(self, *, n_proposed: int, n_accepted: int) -> None:
        assert 0 <= n_accepted <= n_proposed
        if n_proposed == 0:
            step = -self._DOWN_IF_SILENT
        elif n_accepted == n_proposed:
            step = -self._DOWN
        else:
            step = self._UP * (n_proposed - n_accepted) / n_proposed
        self.value = min(self.MOST, max(self.LEAST, self.value + step))


def parse_gate(text: str, *, flag: str) -> Gate:
    """Return the gate that a flag asks for. Raises UsageError unless it is `adaptive` or a number from 0 to 1."""
    if text == ADAPTIVE:
        return AdaptiveGate()
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UsageError(f"{flag} {text}: expected {ADAPTIVE} or a probability from 0 to 1")
    return FixedGate(value)


class Round(NamedTuple):
    """What one step of the model cost and gave.

    drafter_s   seconds of the drafter, None if it was not asked
    model_s     seconds of the step and of the choice of its tokens
    n_proposed  drafts that the step checked
    n_tokens    tokens that came of it
    """

    drafter_s: float | None
    model_s: float
    n_proposed: int
    n_tokens: int


class EconomyGate:
    """Whether a token costs less time with drafts than without; while it does not, drafting pauses.

    Both costs are means over the last rounds. Some rounds are plain even while drafting pays: as the caches fill, plain steps become cheaper. A
    pause is a number of plain rounds. It doubles while attempts fail, up to a limit: drafting is never off for good.
    """

    N_PLAIN_FIRST = 3
    PLAIN_EVERY = 16
    N_ATTEMPTS = 4
    SHORTEST_PAUSE, LONGEST_PAUSE = 16, 128
    # Rounds that the means are over.
    _WINDOW = 8
    # A drafter that costs next to nothing and has no guess is no loss.
    _MOST_RATIO = 1.01

    def __init__(self) -> None:
        self.n_pauses = 0
        # (seconds, tokens) of rounds.
        self._plain, self._drafted = (deque[tuple[float, int]](maxlen=self._WINDOW) for _ in range(2))
        self._n_since_plain, self._pause, self._n_left = 0, self.SHORTEST_PAUSE, 0

    def allows(self) -> bool:
        """Return whether the next round should draft."""
        return not self._n_left and len(self._plain) >= self.N_PLAIN_FIRST and self._n_since_plain < self.PLAIN_EVERY

    def settle(self, done: Round) -> None:
        """Learn from a round."""
        if done.n_proposed:
            self._drafted.append((done.model_s, done.n_tokens))
            self._n_since_plain += 1
        else:
            self._plain.append((done.model_s, done.n_tokens))
            self._n_since_plain = 0
        if done.drafter_s is None:
            self._n_left = max(0, self._n_left - 1)
            return
        if not done.n_proposed:
            # Without a guess the step is a plain one, whatever this one happened to cost.
            self._drafted.append((_cost(self._plain), 1))
        seconds, n_tokens = self._drafted[-1]
        self._drafted[-1] = (seconds + done.drafter_s, n_tokens)
        if len(self._drafted) >= self.N_ATTEMPTS:
            self._decide()

    def _decide(self) -> None:
        if _cost(self._drafted) <= self._MOST_RATIO * _cost(self._plain):
            self._pause = self.SHORTEST_PAUSE
            return
        self.n_pauses += 1
        self._n_left, self._pause = self._pause, min(2 * self._pause, self.LONGEST_PAUSE)
        self._drafted.clear()


def _cost(rounds: deque[tuple[float, int]]) -> float:
    return sum(seconds for seconds, _ in rounds) / sum(n_tokens for _, n_tokens in rounds)
