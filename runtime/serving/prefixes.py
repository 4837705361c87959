"""An engine for many requests: it goes on from what earlier ones left, says how far a prompt pass is, and can be stopped within a layer.

A KDA layer's state cannot be cut, so states are kept at two places of a conversation: at the prompt's end and at the reply's end. They lie in
host memory; the device's is for experts. A prompt that goes on from a kept state computes only what follows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.decode import Decoder, LayerFacts, empty_state
from runtime.engine import Engine, Options, PromptProgress, Timing
from runtime.kernels.rows import TILE_ROWS
from runtime.saved_state import SavedState, made_on
from runtime.state import FixedState, LayerState, MlaState, State, tensors_of, with_tensors
from runtime.stats import new_counts
from runtime.tokens import Tokenizer


class _Kept(NamedTuple):
    """A state, and the text it belongs to: its own ids, and perhaps one more that was chosen and not computed."""

    saved: SavedState
    told: tuple[int, ...]


class KeptStates:
    """The states of the texts used last, in host memory, at most n_most."""

    def __init__(self, n_most: int) -> None:
        self.n_most = n_most
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, ids: list[int]) -> SavedState | None:
        """Return the longest kept text that `ids` begin with, or are."""
        fitting = [kept for kept in self._kept if tuple(ids[: len(kept.saved.ids)]) == kept.saved.ids]
        if not fitting:
            return None
        best = max(fitting, key=lambda kept: len(kept.saved.ids))
        self._kept = [kept for kept in self._kept if kept is not best] + [best]
        return best.saved

    def retold(self, ids: list[int], tokenizer: Tokenizer) -> list[int]:
        """Return ids that say the same, beginning with a kept text if one says the same in other tokens.

        A reply that comes back as text has the tokens that the tokenizer makes of it, which need not be those that the model chose.
        """
        texts = {text for kept in self._kept for text in (kept.told, kept.saved.ids)}
        for text in sorted(texts, key=len, reverse=True):
            n_same = n_saying_the_same(text, ids, tokenizer)
            if n_same is not None:
                return [*text, *ids[n_same:]]
        return ids

    def keep(self, saved: SavedState, *, told: Sequence[int] | None = None) -> None:
        """Keep a state in the place of an equal text's, or of the one that was used longest ago.

        told  the text, if it goes on by one token that was not computed
        """
        self._kept = [other for other in self._kept if other.saved.ids != saved.ids]
        self._kept.append(_Kept(saved, saved.ids if told is None else tuple(told)))
        del self._kept[: max(0, len(self._kept) - self.n_most)]


def n_saying_the_same(kept: Sequence[int], ids: Sequence[int], tokenizer: Tokenizer) -> int | None:
    """Return how many of the ids say what all of `kept` says: the same markers, and between them the same bytes. None if they do not."""
    runs, n_same = _runs(ids, tokenizer), 0
    for run, _ in _runs(kept, tokenizer):
        other, n_same = next(runs, (None, 0))
        if other != run:
            return None
    return n_same


def _runs(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[int | bytes, int]]:
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


class ServingEngine(Engine):
    """An engine whose prompts go on from kept states.

    check  called with each layer of a prompt pass; what it raises ends the pass
    """

    def __init__(self, manifest: Path, options: Options, *, n_kept: int, on_remark: Callable[[str], None]) -> None:
        super().__init__(manifest, options, on_remark=on_remark)
        self.on_progress = self._look
        self.kept = KeptStates(n_kept)
        self.check: Callable[[], None] = lambda: None
        # How much of the prompt pass is done, 0 to 1; may be read by any thread.
        self.prompt_share = 0.0

    def __enter__(self) -> "ServingEngine":
        return self

    @property
    def n_cached(self) -> int:
        """Tokens of the last prompt that were not computed again."""
        return self.timing.n_reused

    def kept_bytes(self, n_tokens: int) -> int:
        """Return what a state kept after so many tokens takes in host memory."""
        return empty_state(self.geometry, n_tokens, torch.device("meta"), is_long_context=self.options.is_long_context).n_bytes

    def begin_request(self, check: Callable[[], None]) -> None:
        """Count anew, and ask `check` from now on."""
        n_drives = len(self.prepared.manifest.drives)
        self.prompt_counts, self.decode_counts = new_counts(n_drives), new_counts(n_drives)
        self.timing, self.check, self.prompt_share = Timing(), check, 0.0

    @torch.inference_mode()
    def prompt(self, ids: list[int]) -> Tensor:
        """Return the logits [vocabulary] after the last token, computing only what follows the longest kept beginning."""
        self._saved = self.kept.find(ids)
        n_new = len(ids) - (len(self._saved.ids) if self._saved else 0)
        with self._looking_at_steps(math.ceil(n_new / TILE_ROWS)):
            logits = super().prompt(ids)
        if n_new:
            self._keep(ids, logits)
        return logits

    @torch.inference_mode()
    def keep_reply(self, ids: list[int], logits: Tensor) -> None:
        """Keep the state where a reply ended. ids: prompt and reply; logits: those that the last token was chosen from.

        The last token has not been computed: it is the first of what follows.
        """
        if self.decoder.state.n_tokens == len(ids) - 1:
            self._keep(ids[:-1], logits, told=ids)

    def _keep(self, ids: list[int], logits: Tensor, *, told: list[int] | None = None) -> None:
        if self.kept.n_most:
            state = on_host(self.decoder.state)
            saved = SavedState(tuple(ids), state, logits.to("cpu", copy=True), self.options.arithmetic, made_on(self.device))
            self.kept.keep(saved, told=told)

    @contextmanager
    def _looking_at_steps(self, n_steps: int) -> Iterator[None]:
        """Look after each layer of the decoder's steps: with --exact-prefill they are the prompt pass."""
        assert isinstance(self.decoder, Decoder)
        n_done, n_due = 0, n_steps * len(self.geometry.moe_layers)

        def look(facts: LayerFacts) -> None:
            nonlocal n_done
            n_done += 1
            self._look(PromptProgress(n_done, n_due, 0.0, 0))

        self.decoder.on_layer = look
        try:
            yield
        finally:
            self.decoder.on_layer = None

    def _look(self, progress: PromptProgress) -> None:
        self.prompt_share = progress.n_done / progress.n_due
        self.check()


def on_host(state: FixedState | State) -> State:
    """Return a copy of a state in host memory; on the device nothing is set aside for it."""
    return State(state.n_tokens, tuple(_layer_on_host(layer, state.n_tokens) for layer in state.layers))


def _layer_on_host(layer: LayerState, n_tokens: int) -> LayerState:
    seen = slice(n_tokens if isinstance(layer, MlaState) else None)
    return with_tensors(layer, {name: tensor[:, seen].to("cpu", copy=True) for name, tensor in tensors_of(layer).items()})
