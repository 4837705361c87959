"""An engine for many requests: it goes on from what earlier ones left, says how far a prompt pass is, and can be stopped within a layer.

A KDA layer's state cannot be cut, so states are kept at two places of a conversation: at the prompt's end and at the reply's end. They lie in
host memory; the device's is for experts. A prompt that goes on from a kept state computes only what follows.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from manifests.geometry import Geometry
from runtime.engine import Engine, Options, Timing
from runtime.kernels.rows import TILE_ROWS, Arithmetic
from runtime.model import Experts, Model
from runtime.state import FixedState, KdaState, LayerState, MlaState, State, initial_state
from runtime.stats import new_counts
from runtime.store import Phase
from runtime.tokens import Tokenizer


class Kept(NamedTuple):
    """What a text left behind: its tokens, the state after them in host memory, and the logits [vocabulary] after the last one."""

    ids: list[int]
    state: State
    logits: Tensor


class KeptStates:
    """The states of the texts used last, at most n_most."""

    def __init__(self, n_most: int) -> None:
        self.n_most = n_most
        self._kept: list[Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, ids: list[int]) -> Kept | None:
        """Return the longest kept text that `ids` begin with, or are."""
        fitting = [kept for kept in self._kept if ids[: len(kept.ids)] == kept.ids]
        if not fitting:
            return None
        best = max(fitting, key=lambda kept: len(kept.ids))
        self._put_last(best)
        return best

    def retold(self, ids: list[int], tokenizer: Tokenizer) -> list[int]:
        """Return ids that say the same, beginning with a kept text if one says the same in other tokens.

        A reply that comes back as text has the tokens that the tokenizer makes of it, which need not be those that the model chose.
        """
        for kept in sorted(self._kept, key=lambda kept: len(kept.ids), reverse=True):
            n_same = n_saying_the_same(kept.ids, ids, tokenizer)
            if n_same is not None:
                return kept.ids + ids[n_same:]
        return ids

    def keep(self, kept: Kept) -> None:
        """Keep a state in the place of an equal text's, or of the one that was used longest ago."""
        self._kept = [other for other in self._kept if other.ids != kept.ids]
        self._kept.append(kept)
        del self._kept[: max(0, len(self._kept) - self.n_most)]

    def _put_last(self, kept: Kept) -> None:
        self._kept = [other for other in self._kept if other is not kept] + [kept]


def n_saying_the_same(kept: list[int], ids: list[int], tokenizer: Tokenizer) -> int | None:
    """Return how many of the ids say what all of `kept` says: the same markers, and between them the same bytes. None if they do not."""
    runs, n_same = _runs(ids, tokenizer), 0
    for run, _ in _runs(kept, tokenizer):
        other, n_same = next(runs, (None, 0))
        if other != run:
            return None
    return n_same


def _runs(ids: list[int], tokenizer: Tokenizer) -> Iterator[tuple[int | bytes, int]]:
    """Yield each special token, and the bytes of each longest run of others, with the number of ids up to its end."""
    run: list[bytes] = []
    for n, token in enumerate(ids):
        if token < tokenizer.n_ranks:
            run.append(tokenizer.token_bytes(token))
            continue
        if run:
            yield b"".join(run), n
            run = []
        yield token, n + 1
    if run:
        yield b"".join(run), len(ids)


class _Watched:
    """Experts that have a look taken before each layer."""

    def __init__(self, experts: Experts, look: Callable[[], None]) -> None:
        self._experts, self._look = experts, look

    def run(self, layer: int, z: Tensor, ids: Tensor, is_tiled: bool) -> Tensor:
        self._look()
        return self._experts.run(layer, z, ids, is_tiled)


class ServingEngine(Engine):
    """An engine whose prompts go on from kept states.

    check     called before each layer of a prompt pass; what it raises ends the pass
    n_cached  tokens of the last prompt that were not computed again
    """

    def __init__(self, manifest: Path, options: Options, *, n_kept: int, on_remark: Callable[[str], None]) -> None:
        super().__init__(manifest, options, on_remark=on_remark)
        self.model = Model(self.geometry, self.weights, _Watched(self.model.experts, self._look))
        self.kept = KeptStates(n_kept)
        self.check: Callable[[], None] = lambda: None
        self.n_cached = self._n_done = 0
        self._n_due = 1

    def __enter__(self) -> "ServingEngine":
        return self

    @property
    def prompt_share(self) -> float:
        """How much of the prompt pass is done, 0 to 1; may be read by any thread."""
        return min(1.0, self._n_done / self._n_due)

    def begin_request(self, check: Callable[[], None]) -> None:
        """Count anew, and ask `check` from now on."""
        n_drives = len(self.prepared.manifest.drives)
        self.prompt_counts, self.decode_counts = new_counts(n_drives), new_counts(n_drives)
        self.timing, self.check = Timing(), check
        self.n_cached = self._n_done = 0

    @torch.inference_mode()
    def prompt(self, ids: list[int]) -> Tensor:
        """Return the logits [vocabulary] after the last token, computing only what follows the longest kept beginning."""
        self._check_ids(ids)
        kept = self.kept.find(ids)
        self.n_cached = len(kept.ids) if kept else 0
        new = ids[self.n_cached :]
        self.timing.n_prompt, self.timing.prompt_began = len(new), time.perf_counter()
        self.store.phase, self.store.counts = Phase.PROMPT, self.prompt_counts
        n_rows = TILE_ROWS if self.options.is_exact_prefill else self.options.chunk
        self._n_done, self._n_due = 0, max(1, math.ceil(len(new) / n_rows) * len(self.geometry.moe_layers))
        if kept and not new:
            self.decoder.begin(kept.state)
            logits = kept.logits.to(self.device)
        else:
            logits = self._exact_pass(new, kept) if self.options.is_exact_prefill else self._pass(new, kept)
        self._wait_for_device()
        self.timing.prompt_ended = time.perf_counter()
        if new:
            self._keep(ids, logits)
        return logits.clone()

    @torch.inference_mode()
    def keep_reply(self, ids: list[int], logits: Tensor) -> None:
        """Keep the state where a reply ended. ids: prompt and reply; logits: those that the last token was chosen from.

        The last token has not been computed: it is the first of what follows.
        """
        if self.decoder.state.n_tokens == len(ids) - 1:
            self._keep(ids[:-1], logits)

    def _keep(self, ids: list[int], logits: Tensor) -> None:
        if self.kept.n_most:
            self.kept.keep(Kept(ids, on_host(self.decoder.state), logits.to("cpu", copy=True)))

    def _pass(self, new: list[int], kept: Kept | None) -> Tensor:
        state = on_device(kept.state, self.device) if kept else initial_state(self.geometry, 1, self.device)
        tokens = torch.tensor([new], device=self.device)
        for start in range(0, len(new), self.options.chunk):
            h, state = self.model.trunk(tokens[:, start : start + self.options.chunk], state, arithmetic=Arithmetic.PROMPT)
        self.decoder.begin(state)
        return self.model.logits(h[:, -1:], arithmetic=Arithmetic.PROMPT)[0, -1]

    def _exact_pass(self, new: list[int], kept: Kept | None) -> Tensor:
        if kept:
            self.decoder.begin(kept.state)
        else:
            self.decoder.begin(self.model.initial_state(1))
        for start in range(0, len(new), TILE_ROWS):
            self.check()
            logits = self.decoder.step(new[start : start + TILE_ROWS])
            self._n_done += len(self.geometry.moe_layers)
        return logits[-1]

    def _look(self) -> None:
        self.check()
        self._n_done += 1


def on_host(state: FixedState | State) -> State:
    """Return a copy of a state in host memory; on the device nothing is set aside for it."""
    return State(state.n_tokens, tuple(_layer_on_host(layer, state.n_tokens) for layer in state.layers))


def _layer_on_host(layer: LayerState, n_tokens: int) -> LayerState:
    if isinstance(layer, MlaState):
        return MlaState(layer.latent[:, :n_tokens].to("cpu", copy=True), layer.k_rot[:, :n_tokens].to("cpu", copy=True))
    return KdaState(layer.memory.to("cpu", copy=True), layer.conv.to("cpu", copy=True))


def on_device(state: State, device: torch.device) -> State:
    """Return a state in the memory of a device."""

    def moved(layer: LayerState) -> LayerState:
        if isinstance(layer, MlaState):
            return MlaState(layer.latent.to(device), layer.k_rot.to(device))
        return KdaState(layer.memory.to(device), layer.conv.to(device))

    return State(state.n_tokens, tuple(map(moved, state.layers)))


def kept_bytes(geometry: Geometry, n_tokens: int) -> int:
    """Return what one kept state takes in host memory."""
    layers: Sequence[LayerState] = initial_state(geometry, 1, torch.device("meta")).layers
    fixed = sum(t.nbytes for layer in layers if isinstance(layer, KdaState) for t in (layer.memory, layer.conv))
    n_full = sum(isinstance(layer, MlaState) for layer in layers)
    return fixed + 4 * n_tokens * n_full * (geometry.kv_lora_rank + geometry.qk_rope_head_dim)
