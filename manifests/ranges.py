"""Sets of experts as short text: "0-15,17,40-895". One set has one text, so equal placements are equal lines."""

import re

import numpy as np
import numpy.typing as npt

from manifests.errors import BadInputError

# Nine digits at most: a longer number is beyond any model, and int() refuses thousands of digits with an error of its own.
_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})(?:-(0|[1-9][0-9]{0,8}))?")


def format_ranges(held: npt.NDArray[np.bool_]) -> str:
    """Return the numbers where `held` (bool [n]) is true as ascending ranges; "" for none."""
    edges = np.flatnonzero(np.diff(held, prepend=False, append=False)).tolist()
    return ",".join(str(first) if first + 1 == end else f"{first}-{end - 1}" for first, end in zip(edges[::2], edges[1::2], strict=True))


def parse_ranges(text: str, n: int, *, where: str) -> npt.NDArray[np.bool_]:
    """Return bool [n], true at the numbers of `text`; the exact inverse of `format_ranges`.

    Raises BadInputError, opened by `where`, on anything that `format_ranges` would not have written: blanks, leading zeros, numbers that do
    not rise, overlaps, neighbours that were not joined, numbers from n on.
    """
    held = np.zeros(n, dtype=np.bool_)
    highest = -2
    for part in text.split(",") if text else ():
        match = _RANGE.fullmatch(part)
        if match is None:
            raise BadInputError(f'{where}: {part!r} in "{_shortened(text)}" is no range, expected such as "0-15,17" without blanks')
        first, last = int(match[1]), int(match[2] or match[1])
        if first <= highest + 1 or last >= n or (match[2] and last <= first):
            raise BadInputError(f"{where}: {_fault(part, first, last, highest, n)}")
        held[first : last + 1] = True
        highest = last
    return held


def _fault(part: str, first: int, last: int, highest: int, n: int) -> str:
    if last < first:
        return f'"{part}" runs backwards, expected "{last}-{first}"'
    if last >= n:
        return f'"{part}" goes beyond the last number, {n - 1}'
    if first <= highest:
        return f'"{part}" comes after {highest}: numbers must rise and not overlap'
    if first == highest + 1:
        return f'"{part}" follows {highest} without a gap: join the two into one range'
    return f'"{part}" is one number, expected "{first}"'


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
