"""Which experts a run chose: token by token, and how often each, which is what the planner of copies wants to know."""

import json
from pathlib import Path

import numpy as np
from torch import Tensor

from layout.record import expert_file_name
from layout.writer import write_bytes
from manifests.geometry import Geometry
from runtime.decode import LayerFacts
from runtime.model import Experts


class RoutingLog:
    """The experts that every token used, in the order of the tokens, prompt and decode alike."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._chosen: dict[int, list[np.ndarray]] = {layer: [] for layer in geometry.moe_layers}

    def add(self, layer: int, chosen: np.ndarray) -> None:
        """Take in the next tokens' experts in a layer, [tokens, k]."""
        self._chosen[layer].append(chosen.astype(np.int16))

    def add_layer(self, facts: LayerFacts) -> None:
        """Take in what the decoder tells of a layer."""
        self.add(facts.layer, facts.chosen)

    def drop(self, n_tokens: int) -> None:
        """Forget the last tokens, which the text turned out not to have; they came in one piece."""
        for parts in self._chosen.values():
            parts[-1] = parts[-1][: len(parts[-1]) - n_tokens]

    def trace(self) -> np.ndarray:
        """Return the experts of every token, int16 [tokens, MoE layers, k]; a token that was broken off is left out."""
        none = np.zeros((0, self._geometry.n_experts_per_token), np.int16)
        layers = [np.concatenate([none, *self._chosen[layer]]) for layer in self._geometry.moe_layers]
        n_tokens = min(map(len, layers))
        return np.stack([chosen[:n_tokens] for chosen in layers], axis=1)

    def heat(self) -> np.ndarray:
        """Return how often each expert was used, int64 [n_layers, n_experts]."""
        counts = np.zeros((self._geometry.n_layers, self._geometry.n_experts), np.int64)
        for layer, chosen in self._chosen.items():
            for part in chosen:
                np.add.at(counts[layer], part.ravel(), 1)
        return counts


class LoggedExperts:
    """Routed experts that note what was asked of them."""

    def __init__(self, experts: Experts, log: RoutingLog) -> None:
        self._experts, self._log = experts, log

    def run(self, layer: int, z: Tensor, ids: Tensor, is_tiled: bool) -> Tensor:
        self._log.add(layer, ids.cpu().numpy())
        return self._experts.run(layer, z, ids, is_tiled)


def write_heat(path: Path, counts: np.ndarray) -> None:
    """Write counts [n_layers, n_experts] as {"L17-E413": 12, ...}, whole or not at all; what was never used is not in it."""
    uses = {expert_file_name(*place).removesuffix(".bin"): int(counts[tuple(place)]) for place in np.argwhere(counts).tolist()}
    write_bytes(path, json.dumps(uses, indent=0).encode())
