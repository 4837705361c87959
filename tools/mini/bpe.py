"""Byte-pair ranks learned from texts, in the form of `tiktoken.model`: the 256 bytes first, then the merges in the order in which they were found."""

import base64
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

import regex

from runtime.tokens import SPLIT_PATTERN

N_BYTES = 256

_Pair = tuple[bytes, bytes]


def learn_ranks(texts: Iterable[str], n_ranks: int) -> dict[bytes, int]:
    """Return n_ranks tokens and their ranks. Of pairs that are equally frequent the last in the order of bytes is merged first.

    texts    each tokenised alone, as the tokenizer does it
    Raises ValueError if the texts have too few different pairs.
    """
    counts = Counter(text for text in texts)
    pieces: Counter[str] = Counter()
    pattern = regex.compile(SPLIT_PATTERN, regex.V1)
    for text, count in counts.items():
        for piece in pattern.findall(text):
            pieces[piece] += count
    words = [([bytes([byte]) for byte in piece.encode()], count) for piece, count in sorted(pieces.items())]
    tokens = [bytes([byte]) for byte in range(N_BYTES)]
    return {token: rank for rank, token in enumerate(tokens + _merges(words, n_ranks - N_BYTES))}


def _merges(words: list[tuple[list[bytes], int]], n: int) -> list[bytes]:
    """Return the n tokens that merging the most frequent pair again and again makes."""
    totals: Counter[_Pair] = Counter()
    words_with: defaultdict[_Pair, set[int]] = defaultdict(set)
    for number, (parts, count) in enumerate(words):
        for pair in pairwise(parts):
            totals[pair] += count
            words_with[pair].add(number)
    merged: dict[bytes, None] = {}
    while len(merged) < n:
        best = max(totals, key=lambda pair: (totals[pair], pair), default=None)
        if best is None or totals[best] <= 0:
            raise ValueError(f"the texts give {len(merged)} merges, expected {n}: more text is needed, or a smaller vocabulary")
        for number in sorted(words_with.pop(best)):
            parts, count = words[number]
            totals.subtract({pair: times * count for pair, times in Counter(pairwise(parts)).items()})
            parts[:] = _joined(parts, best)
            for pair in pairwise(parts):
                totals[pair] += count
                words_with[pair].add(number)
        del totals[best]
        # Two pairs can make the same bytes; they are one token.
        merged[best[0] + best[1]] = None
    return list(merged)


def _joined(parts: list[bytes], pair: _Pair) -> list[bytes]:
    result: list[bytes] = []
    at = 0
    while at < len(parts):
        is_pair = tuple(parts[at : at + 2]) == pair
        result.append(pair[0] + pair[1] if is_pair else parts[at])
        at += 2 if is_pair else 1
    return result


def ranks_file(ranks: dict[bytes, int]) -> bytes:
    """Return the content of `tiktoken.model`."""
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]))
