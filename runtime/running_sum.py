"""The running sum of decode and of the GPU's prompt pass: residual blocks, and what a layer's attention and feed-forward block get of them."""

from abc import ABC, abstractmethod

from torch import Tensor

from manifests.geometry import Geometry
from runtime.kernels.indexer import append_index_keys_
from runtime.kernels.norms import rms_norm
from runtime.kernels.residual import add_mix_and_norm_, mix_and_norm
from runtime.model import IndexedMlaState
from runtime.weights import SpineWeights


class RunningSum(ABC):
    """Some rows on their way through the layers.

    h     [1, rows, hidden], the sum of the outputs since the residual block began
    bank  [blocks, 1, rows, hidden], the sums of the blocks before
    """

    h: Tensor
    bank: Tensor
    _g: Geometry
    _weights: SpineWeights

    @abstractmethod
    def _mla(self, layer: int, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _kda(self, layer: int, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _product(self, layer: int, name: str, x: Tensor) -> Tensor: ...

    def _attend(self, layer: int, addends: tuple[Tensor, ...]) -> Tensor:
        """Add what the layer before left and the layer's attention to the running sum; return the normalised input of its feed-forward block."""
        g = self._g
        n_done, gain = -(-layer // g.residual_block_size), self._vector(layer, "attn_norm.weight")
        if n_done:
            x = self._mix(layer, "attn_res_score.weight", n_done, gain, addends)
        else:
            assert not addends
            x = rms_norm(self.h, gain, eps=g.rms_norm_eps, is_tiled=True)
        attended = self._mla(layer, x) if g.is_full_attention(layer) else self._kda(layer, x)
        gain = self._vector(layer, "ffn_norm.weight")
        if layer % g.residual_block_size:
            return self._mix(layer, "ffn_res_score.weight", n_done, gain, (attended,))
        # The sum of the outputs since the residual block began goes to the bank, and begins anew.
        self.bank[n_done].copy_(self.h)
        self.h.copy_(attended)
        return self._mix(layer, "ffn_res_score.weight", n_done + 1, gain, ())

    def _mix(self, layer: int, score: str, n_done: int, gain: Tensor, addends: tuple[Tensor, ...]) -> Tensor:
        bank, scores, eps = self.bank[:n_done], self._vector(layer, score), self._g.rms_norm_eps
        if addends:
            return add_mix_and_norm_(bank, self.h, addends, scores, gain, eps=eps)[1]
        return mix_and_norm(bank, self.h, scores, gain, eps=eps, is_tiled=True)[1]

    def _vector(self, layer: int, name: str) -> Tensor:
        return self._weights.vector(f"blk.{layer}.{name}")

    def _append_index_keys(self, layer: int, x: Tensor, cache: IndexedMlaState, n_past: Tensor) -> None:
        """Take the rows' index keys into a layer's cache: x is the layer's normalised input, n_past int32 [1]."""
        try:
            bias = self._vector(layer, "indexer.k_norm.bias")
        except KeyError:
            # A spine may have none.
            bias = None
        keys, gain = self._product(layer, "indexer.attn_k", x)[0], self._vector(layer, "indexer.k_norm.weight")
        append_index_keys_(keys, cache.index_k[0], n_past, gain=gain, bias=bias, eps=self._g.rms_norm_eps)

    def _index_queries(self, layer: int, x: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows' index queries [rows, index heads, index head size] and the weights of their heads [rows, index heads].

        x    [1, rows, hidden], the layer's normalised input
        low  [1, rows, q_lora_rank], normalised: what the layer's queries are made of
        """
        assert self._g.indexer is not None
        queries = self._product(layer, "indexer.attn_q_b", low)[0].unflatten(-1, (self._g.indexer.n_heads, -1))
        return queries, self._product(layer, "indexer.proj", x)[0]
