"""Routings without a model: which experts each token of each layer uses, made up from a seed or read from a recorded trace.

A trace is a safetensors file with `experts`, int16 [tokens, MoE layers, k]; `krun --trace-out` writes one.
"""

from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from layout.writer import write_bytes
from manifests.errors import BadInputError, UsageError
from manifests.geometry import Geometry
from runtime.tensor_files import opened

TRACE_KEY = "experts"
# As safetensors calls them.
_WHOLE_KINDS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
# With it the most used tenth of 896 experts takes 40 % of the picks, as was published of real texts.
ZIPF_EXPONENT = 0.6
# Consecutive tokens of real texts share 22 to 34 % of their experts.
REPEAT_SHARE = 0.25
# Of guesses from the state before a layer so many are right: on the small model that ships 98 of 100 with one a layer, 96 with two.
RIGHT_GUESSES = 0.95


def make_routing(kind: str, geometry: Geometry, n_tokens: int, *, seed: int) -> np.ndarray:
    """Return the experts of each token, rising, int64 [n_tokens, MoE layers, k].

    kind  uniform: every expert alike
          zipf, zipf:S: popularity 1 / rank**S, ranks by lot in every layer, and a quarter of a token's experts are its predecessor's
          among:N: every one of N experts of each layer alike
          trace:F: the tokens of a recorded trace, over and over

    Raises UsageError for another kind, BadInputError for a trace of another shape.
    """
    name, _, detail = kind.partition(":")
    rng = np.random.default_rng(seed)
    n_layers, n_experts, k = len(geometry.moe_layers), geometry.n_experts, geometry.n_experts_per_token
    if name == "uniform" and not detail:
        return _picks(np.ones((n_layers, n_experts)), n_tokens, k, rng)
    if name == "among":
        n_among = _number(kind, detail, least=k, most=n_experts)
        popularity = np.zeros((n_layers, n_experts))
        if n_among != int(n_among):
            raise UsageError(f"--routing {kind}: expected a whole number of experts after the colon")
        popularity[:, : int(n_among)] = 1
        return _picks(rng.permuted(popularity, axis=1), n_tokens, k, rng)
    if name == "zipf":
        exponent = _number(kind, detail, least=0, most=10) if detail else ZIPF_EXPONENT
        ranks = np.arange(1, n_experts + 1, dtype=np.float64)
        popularity = rng.permuted(np.tile(ranks**-exponent, (n_layers, 1)), axis=1)
        return _with_repeats(_picks(popularity, n_tokens, k, rng), REPEAT_SHARE, rng)
    if name == "trace" and detail:
        trace = read_trace(Path(detail), geometry)
        return trace[np.arange(n_tokens) % len(trace)]
    raise UsageError(f"--routing {kind}: expected uniform, zipf, zipf:EXPONENT, among:N or trace:FILE")


def make_guesses(routing: np.ndarray, geometry: Geometry, n_guessed: int, *, seed: int) -> np.ndarray:
    """Return guesses of a routing [tokens, MoE layers, k], int64 [tokens, MoE layers, n_guessed], of which a share of RIGHT_GUESSES is right."""
    rng = np.random.default_rng(seed)
    guesses = rng.permuted(routing, axis=-1)[..., :n_guessed]
    is_wrong = rng.random(guesses.shape) >= RIGHT_GUESSES
    return np.where(is_wrong, rng.integers(geometry.n_experts, size=guesses.shape), guesses)


def _number(kind: str, text: str, *, least: float, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = np.nan
    if not least <= number <= most:
        raise UsageError(f"--routing {kind}: expected a number from {least:g} to {most:g} after the colon")
    return number


def _picks(popularity: np.ndarray, n_tokens: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Draw k experts without replacement for every token and layer: popularity [layers, experts] -> [n_tokens, layers, k]."""
    with np.errstate(divide="ignore"):
        weights = np.log(popularity)
    # Token by token: the noise of all tokens at once would take gigabytes.
    picks = [np.argpartition(-(weights + rng.gumbel(size=weights.shape)), k - 1, axis=1)[:, :k] for _ in range(n_tokens)]
    return np.sort(np.array(picks, np.int64), axis=-1)


def _with_repeats(picks: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Replace a share of each token's experts by experts of the token before, keeping them distinct."""
    result = picks.copy()
    for token in range(1, len(picks)):
        for layer in range(picks.shape[1]):
            former, own = result[token - 1, layer], picks[token, layer]
            kept = former[rng.random(len(former)) < share]
            fresh = rng.permutation(own[~np.isin(own, kept)])
            result[token, layer] = np.sort(np.concatenate([kept, fresh])[: len(own)])
    return result


def read_trace(path: Path, geometry: Geometry) -> np.ndarray:
    """Return a recorded trace, rising, int64 [tokens, MoE layers, k]. Raises BadInputError if it is not one of this geometry."""
    expected = (len(geometry.moe_layers), geometry.n_experts_per_token)
    try:
        with opened(path, "np") as file:
            if TRACE_KEY not in file.keys():  # noqa: SIM118
                raise BadInputError(f"{path}: no tensor named {TRACE_KEY}: not a routing trace")
            # Before it is read: numpy knows no bfloat16 and no float8.
            kind, shape = file.get_slice(TRACE_KEY).get_dtype(), file.get_slice(TRACE_KEY).get_shape()
            if kind not in _WHOLE_KINDS or len(shape) != 3 or tuple(shape[1:]) != expected or not shape[0]:
                raise BadInputError(f"{path}: {TRACE_KEY} is {kind} {shape}, expected whole numbers [tokens, {expected[0]}, {expected[1]}]")
            trace = file.get_tensor(TRACE_KEY)
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"{path}: not a readable safetensors file: {error}") from None
    trace = np.sort(trace.astype(np.int64), axis=-1)
    if trace.min() < 0 or trace.max() >= geometry.n_experts or (np.diff(trace, axis=-1) == 0).any():
        raise BadInputError(f"{path}: {TRACE_KEY} holds an expert twice in one row, or one outside 0..{geometry.n_experts - 1}")
    return trace


def write_trace(path: Path, trace: np.ndarray, facts: dict[str, str]) -> None:
    """Write a trace [tokens, MoE layers, k], whole or not at all."""
    write_bytes(path, safetensors.numpy.save({TRACE_KEY: np.ascontiguousarray(trace, np.int16)}, metadata=facts))
