"""What a drafter is: it sees the text so far as token ids and proposes some that may follow."""

from collections.abc import Sequence
from typing import Protocol

from runtime.kernels.rows import TILE_ROWS

# With the token before them they fill a block.
MOST_DRAFTS = TILE_ROWS - 1


class DrafterFault(Exception):
    """A drafter crashed, took too long or answered nonsense; the message says which. It is not asked again in this run."""


class Drafter(Protocol):
    """Proposes tokens. Whoever uses one trusts nothing that it proposes."""

    def propose(self, text: Sequence[int], n_most: int) -> list[int]:
        """Return up to n_most ids that may follow the text, none if it has no guess. Raises DrafterFault."""
        ...

    def settle(self, *, n_proposed: int, n_accepted: int) -> None:
        """Learn how many of the last proposal were right."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...
