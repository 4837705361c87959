"""Drafts without a model: what followed when the text's last tokens stood in it before."""

from collections.abc import Sequence

SHORTEST_MATCH = 2
# What one proposal costs is bounded: occurrences that are compared, the latest first, and tokens that are compared of each.
_MOST_COMPARED = 64
_LONGEST_MATCH = 64


class NgramDrafter:
    """Finds the longest suffix of the text that occurs in it before, and the latest of such places."""

    def __init__(self, *, shortest_match: int = SHORTEST_MATCH) -> None:
        assert shortest_match > 0
        self._shortest = shortest_match
        self._text: list[int] = []
        # Where the token behind each run of `shortest_match` tokens stands, in rising order.
        self._places: dict[tuple[int, ...], list[int]] = {}

    def propose(self, text: Sequence[int], n_most: int) -> list[int]:
        """Return what followed there; where that runs into the end of the text, it goes on as it began: a period is continued."""
        known = list(text)
        self._take_in(known)
        places = self._places.get(tuple(known[-self._shortest :]), [])
        # The last place is the end of the text itself.
        candidates = [place for place in places[-_MOST_COMPARED - 1 :] if place < len(known)]
        if not candidates:
            return []
        place = max(candidates, key=lambda place: (self._match_length(place), place))
        period = known[place:]
        return [period[n % len(period)] for n in range(n_most)]

    def settle(self, *, n_proposed: int, n_accepted: int) -> None: ...

    def close(self) -> None: ...

    def _take_in(self, text: list[int]) -> None:
        if text[: len(self._text)] != self._text:
            self._text, self._places = [], {}
        for end in range(max(self._shortest, len(self._text) + 1), len(text) + 1):
            self._places.setdefault(tuple(text[end - self._shortest : end]), []).append(end)
        self._text = text

    def _match_length(self, place: int) -> int:
        """Return how many tokens before a place are those at the end of the text."""
        text, most = self._text, min(place, _LONGEST_MATCH)
        return next((n for n in range(self._shortest, most) if text[place - 1 - n] != text[-1 - n]), most)
