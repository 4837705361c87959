"""The choice of the next token from its logits: the likeliest one, or a seeded draw by temperature and top-p.

All arithmetic is numpy on the CPU, so that a choice depends on seed and logits and not on the device that made them.
"""

import math
import secrets

import numpy as np
import numpy.typing as npt
import torch

from manifests.errors import DamagedDataError, UsageError


class Sampler:
    """Chooses tokens one after another; equal settings, seed and logits give equal tokens.

    temperature   0 takes the likeliest token, without any draw
    top_p         draw among the fewest likeliest tokens that together have this probability
    seed          None draws one; `.seed` says which, to repeat the run
    """

    def __init__(self, temperature: float, top_p: float, seed: int | None) -> None:
        """Raises UsageError, naming the flag, if a setting is out of range."""
        if not (math.isfinite(temperature) and temperature >= 0):
            raise UsageError(f"--temp is {temperature}, expected a finite number of at least 0 (0 takes the likeliest token)")
        if not 0 < top_p <= 1:
            raise UsageError(f"--top-p is {top_p}, expected a number above 0 and at most 1 (1 leaves no token out)")
        if seed is not None and seed < 0:
            raise UsageError(f"--seed is {seed}, expected a whole number of at least 0")
        self.temperature = temperature
        self.top_p = top_p
        self.seed = secrets.randbits(32) if seed is None else seed
        self._generator = np.random.Generator(np.random.PCG64(self.seed))

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token.

        logits   float32 [vocab], on any device; -inf leaves a token out

        Equal logits count as ranked by index, lowest first. Raises DamagedDataError if the logits hold NaN or have no finite maximum.
        """
        assert logits.ndim == 1 and logits.dtype == torch.float32
        values = logits.detach().cpu().numpy()
        # numpy takes the first of equals, and a NaN before any number.
        likeliest = int(values.argmax())
        _check_maximum(values, likeliest)
        if self.temperature == 0:
            return likeliest
        tokens, cumulative = _nucleus(_softmax(values, self.temperature), self.top_p)
        point = self._generator.random() * cumulative[-1]
        # The product can round up to the last sum itself.
        return int(tokens[min(np.searchsorted(cumulative, point, side="right"), tokens.size - 1)])


def _check_maximum(values: npt.NDArray[np.float32], likeliest: int) -> None:
    if math.isfinite(values[likeliest]):
        return
    n_nan = int(np.isnan(values).sum())
    found = f"NaN at {n_nan} of {values.size} tokens, the first is {likeliest}" if n_nan else f"no finite maximum but {values[likeliest]}"
    raise DamagedDataError(f"logits hold {found}; expected finite numbers. Weights may be damaged: run kprep verify-hashes on the manifest")


def _softmax(values: npt.NDArray[np.float32], temperature: float) -> npt.NDArray[np.float64]:
    """Return softmax(values / temperature), float64 [vocab]. The maximum of `values` is finite."""
    distance = values.astype(np.float64) - values.max()
    # A tiny temperature sends all but the maximum to -inf, which is the limit meant.
    with np.errstate(over="ignore"):
        weights: npt.NDArray[np.float64] = np.exp(distance / temperature)
    return weights / np.sum(weights)


def _nucleus(probabilities: npt.NDArray[np.float64], top_p: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the fewest likeliest tokens whose probabilities reach top_p, likeliest first, and their cumulative probabilities."""
    # Sorting a whole vocabulary costs milliseconds a token. What is left out here has at most half of 1 - top_p together, so the rest
    # reaches top_p; the half keeps rounding from leaving out the likeliest token itself where all are alike and top_p is tiny.
    candidates = np.flatnonzero(probabilities > (1 - top_p) / 2 / probabilities.size)
    order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
    cumulative = np.cumsum(probabilities[order])
    # Rounding can leave the last sum below top_p; then the slice takes all.
    n_kept = int(np.searchsorted(cumulative, top_p, side="left")) + 1
    return order[:n_kept], cumulative[:n_kept]
