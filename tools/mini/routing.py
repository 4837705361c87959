"""What recorded routings say: how uneven the use of experts is, what consecutive tokens share, how many experts a block of tokens needs.

    python -m tools.mini.routing TRACE... [--experts N]

TRACE  as `krun generate --trace-out` and `tools.mini.judge --trace-out` write it
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import safe_open

from manifests.geometry import load_geometry
from runtime.bench.routing import TRACE_KEY
from tools.mini.export import GEOMETRY

# In a trace's metadata, of several texts one after the other: the tokens of each, a JSON list.
LENGTHS = "lengths"
SHARES = (0.01, 0.05, 0.10, 0.20, 0.30, 0.50)
BLOCKS = (1, 2, 4, 8, 12, 16)


def read_texts(path: Path) -> list[np.ndarray]:
    """Return the experts of each text of a trace, [tokens, MoE layers, k]."""
    with safe_open(path, "np") as file:
        trace, facts = file.get_tensor(TRACE_KEY), file.metadata() or {}
    lengths = json.loads(facts.get(LENGTHS, f"[{len(trace)}]"))
    assert sum(lengths) == len(trace), f"{path}: texts of {sum(lengths)} tokens, {len(trace)} in the trace"
    return np.split(trace, np.cumsum(lengths)[:-1])


def uses(texts: Sequence[np.ndarray], n_experts: int) -> np.ndarray:
    """Return how often each expert was used, int64 [MoE layers, experts]."""
    layers = np.concatenate(texts).swapaxes(0, 1)
    return np.stack([np.bincount(layer.ravel(), minlength=n_experts) for layer in layers])


def top_shares(counts: np.ndarray, shares: Sequence[float]) -> list[float]:
    """Return the part of all uses that the most used experts have, for each share of all experts of all layers together."""
    falling = np.sort(counts.ravel())[::-1]
    return [float(falling[: round(share * falling.size)].sum() / falling.sum()) for share in shares]


def overlaps(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Return for each layer the mean share of a token's experts that the token before it used too."""
    shared = [(text[1:, :, :, None] == text[:-1, :, None, :]).any(-1).mean(-1) for text in texts]
    return np.asarray(np.concatenate(shared).mean(0))


def distinct(texts: Sequence[np.ndarray], n_rows: int) -> float:
    """Return the mean number of different experts of a layer that n_rows consecutive tokens of a text use. NaN if no text has so many."""
    counts = [
        np.unique(text[at : at + n_rows, layer]).size for text in texts for at in range(len(text) - n_rows + 1) for layer in range(text.shape[1])
    ]
    return float(np.mean(counts)) if counts else float("nan")


def by_chance(n_experts: int, k: int, n_rows: int) -> float:
    """Return what `distinct` would be if every token chose at random."""
    return n_experts * (1 - (1 - k / n_experts) ** n_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--experts", type=int, default=load_geometry(str(GEOMETRY)).n_experts, help="of a layer; without it the small model's")
    arguments = parser.parse_args()
    texts = [text for path in arguments.traces for text in read_texts(path)]
    k, by_layer = texts[0].shape[2], overlaps(texts)
    counts = uses(texts, arguments.experts)
    print(f"{sum(map(len, texts))} tokens of {len(texts)} texts, {k} of {arguments.experts} experts in {len(counts)} layers")
    for share, part in zip(SHARES, top_shares(counts, SHARES), strict=True):
        print(f"the {share:.0%} most used experts: {part:.1%} of the uses")
    print(f"never used: {int((counts == 0).sum())} of {counts.size}")
    each = ", ".join(f"{share:.1%}" for share in by_layer)
    print(f"shared with the token before: {by_layer.mean():.1%}, by layer {each}; by chance {k / arguments.experts:.1%}")
    for n_rows in BLOCKS:
        print(f"{n_rows} rows: {distinct(texts, n_rows):.1f} different experts of a layer, by chance {by_chance(arguments.experts, k, n_rows):.1f}")


if __name__ == "__main__":
    main()
