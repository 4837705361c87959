"""Rows of token ids for training: documents packed to a fixed length, none cut, each row beginning with a document.

A batch follows from its seed and number alone, so it does not matter which process makes it, or when.
"""

import multiprocessing
import signal
from collections import deque
from collections.abc import Generator, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from runtime.chat.format import encode_segments
from runtime.tokens import Tokenizer, load_tokenizer
from tools.mini.corpus import Document, Split, Topic, documents

N_AHEAD_PER_PROCESS = 3
_MOST_LEFT_OUT = 200


class Form(NamedTuple):
    """What batches are made of: the tokenizer's directory and vocabulary, rows and their tokens, and the seed."""

    tokenizer: Path
    vocab_size: int
    n_rows: int
    n_tokens: int
    seed: str


def batches(form: Form, n_processes: int) -> Generator[np.ndarray, None, None]:
    """Yield batch 0, 1, 2, ... without end, made ahead by other processes if there are any."""
    if not n_processes:
        for number in range(1 << 40):
            yield make_batch(form, number)
    # Fresh processes: a fork of one that uses a GPU cannot be relied on. They are ended by a signal that whoever started us may ignore.
    with multiprocessing.get_context("spawn").Pool(n_processes, signal.signal, (signal.SIGTERM, signal.SIG_DFL)) as pool:
        waiting = deque(pool.apply_async(make_batch, (form, n)) for n in range(n_processes * N_AHEAD_PER_PROCESS))
        number = len(waiting)
        while True:
            yield waiting.popleft().get()
            waiting.append(pool.apply_async(make_batch, (form, number)))
            number += 1


def make_batch(form: Form, number: int) -> np.ndarray:
    """Return a training batch, int64 [rows, tokens + 1]; -1 where a row has no more documents."""
    return packed_rows(documents(f"{form.seed}/{number}", "train"), form)


def held_out_rows(form: Form, topic: Topic, *, split: Split = "held-out") -> np.ndarray:
    """Return rows of held-out documents of one topic, as `make_batch` does."""
    return packed_rows((document for document in documents(form.seed, split) if document.topic == topic), form)


def packed_rows(source: Iterator[Document], form: Form) -> np.ndarray:
    """Return rows filled with documents: the longest first, each into the fullest row that has room, then mixed within its row.

    Documents that are longer than a row are left out. Raises ValueError if hardly one fits.
    """
    size, tokenizer = form.n_tokens + 1, _tokenizer(form.tokenizer, form.vocab_size)
    texts: list[list[int]] = []
    n_wanted, n_found, n_left_out = form.n_rows * size, 0, 0
    while n_found < n_wanted:
        if n_left_out > _MOST_LEFT_OUT:
            raise ValueError(f"{n_left_out} documents are longer than {size} tokens: longer rows are needed")
        for document in islice(source, 16):
            ids = encode_segments(document.segments, tokenizer)
            if len(ids) <= size:
                texts.append(ids)
                n_found += len(ids)
            else:
                n_left_out += 1
    rows: list[list[list[int]]] = [[] for _ in range(form.n_rows)]
    room = np.full(form.n_rows, size)
    for ids in sorted(texts, key=len, reverse=True):
        row = int(np.where(room >= len(ids), room, size + 1).argmin())
        if room[row] >= len(ids):
            rows[row].append(ids)
            room[row] -= len(ids)
    mix = Random(form.seed)
    result = np.full((form.n_rows, size), -1, np.int64)
    for target, row_texts in zip(result, rows, strict=True):
        mix.shuffle(row_texts)
        joined = [token for ids in row_texts for token in ids]
        target[: len(joined)] = joined
    return result


@cache
def _tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    return load_tokenizer(directory, vocab_size=vocab_size)
