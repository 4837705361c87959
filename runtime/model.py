"""The K3 text model: token numbers and a state in, logits and a new state out.

It knows the names of the spine's tensors, and nothing of files, slots or drives. Forward functions take [batch, tokens, ...], are
differentiable and change nothing in place. K3.1's indexer is evaluated on demand only: without it attention is dense, which is exact up to
`geometry.max_context`.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from manifests.geometry import Geometry
from runtime.kernels.indexer import attend_selected, index_keys, select_positions
from runtime.kernels.kda import kda_chunked, kda_recurrent, log_decay, short_conv
from runtime.kernels.mla import attend_absorbed, attend_expanded
from runtime.kernels.norms import l2_norm, rms_norm
from runtime.kernels.residual import mix_residuals
from runtime.kernels.router import choose_experts, combine_experts, expert_weights
from runtime.kernels.rows import Arithmetic, linear
from runtime.kernels.sigmoid import sigmoid, silu
from runtime.kernels.situ import situ
from runtime.state import KdaState, LayerState, MlaState, State, initial_state


@dataclass(frozen=True, slots=True)
class IndexedMlaState(MlaState):
    """The cache of an MLA layer whose indexer is evaluated.

    index_k  float32 [batch, tokens, index head size], normalised
    """

    index_k: Tensor


def initial_indexed_state(geometry: Geometry, batch: int, device: torch.device) -> State:
    """Return the state before the first token of `batch` texts whose indexer is evaluated."""
    assert geometry.indexer is not None
    state, no_keys = initial_state(geometry, batch, device), torch.zeros(batch, 0, geometry.indexer.head_dim, device=device)
    layers = (IndexedMlaState(past.latent, past.k_rot, no_keys) if isinstance(past, MlaState) else past for past in state.layers)
    return State(0, tuple(layers))


class Weights(Protocol):
    """The spine's tensors by their names there, as float32 on one device."""

    @property
    def device(self) -> torch.device: ...

    def matrix(self, name: str) -> Tensor:
        """Return a matrix [out, in]."""
        ...

    def vector(self, name: str) -> Tensor:
        """Return a tensor in the shape in which the spine holds it. Raises KeyError if it has none of that name."""
        ...

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Return the rows [..., in] of a matrix whose numbers are ids [...], without expanding the others."""
        ...


class Experts(Protocol):
    """The routed experts, wherever their records are."""

    def run(self, layer: int, z: Tensor, ids: Tensor, is_tiled: bool) -> Tensor:
        """Return the output of every (row, expert) pair: z [rows, latent], ids int64 [rows, k] -> [rows, k, latent]."""
        ...


class Layer(NamedTuple):
    """One layer in one arithmetic; tensors go by their names within the layer."""

    geometry: Geometry
    weights: Weights
    number: int
    is_tiled: bool

    def vector(self, name: str) -> Tensor:
        return self.weights.vector(f"blk.{self.number}.{name}")

    def vector_if_any(self, name: str) -> Tensor | None:
        try:
            return self.vector(name)
        except KeyError:
            return None

    def matrix(self, name: str) -> Tensor:
        return self.weights.matrix(f"blk.{self.number}.{name}")

    def linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.matrix(name), is_tiled=self.is_tiled)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.vector(name), eps=self.geometry.rms_norm_eps, is_tiled=self.is_tiled)

    def lora_norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.vector(name), eps=self.geometry.lora_norm_eps, is_tiled=self.is_tiled)

    def mix(self, name: str, bank: list[Tensor], total: Tensor) -> Tensor:
        return mix_residuals(bank, total, self.vector(name), eps=self.geometry.rms_norm_eps, is_tiled=self.is_tiled)


class Model:
    """A text model over given weights and experts.

    is_long_context  evaluate K3.1's indexer, whose form is not verified; texts may then be longer than `geometry.max_context`
    """

    def __init__(self, geometry: Geometry, weights: Weights, experts: Experts, *, is_long_context: bool = False) -> None:
        assert geometry.indexer is not None or not is_long_context
        self.geometry = geometry
        self.weights = weights
        self.experts = experts
        self.is_long_context = is_long_context

    def initial_state(self, batch: int) -> State:
        """Return the state before the first token of `batch` texts."""
        return (initial_indexed_state if self.is_long_context else initial_state)(self.geometry, batch, self.weights.device)

    def forward(self, ids: Tensor, state: State, *, arithmetic: Arithmetic, is_last_only: bool = False) -> tuple[Tensor, State]:
        """Return the logits of the new tokens, or of the last one alone, and the state after them.

        ids      int64 [batch, tokens], at least one token
        returns  float32 [batch, tokens or 1, vocabulary]
        """
        h, state = self.trunk(ids, state, arithmetic=arithmetic)
        return self.logits(h[:, -1:] if is_last_only else h, arithmetic=arithmetic), state

    def trunk(self, ids: Tensor, state: State, *, arithmetic: Arithmetic) -> tuple[Tensor, State]:
        """Return what the output norm takes, [batch, tokens, hidden], and the state after the new tokens."""
        g, n_tokens = self.geometry, state.n_tokens + ids.shape[1]
        assert n_tokens <= (g.max_position_embeddings if self.is_long_context else g.max_context)
        h = self.weights.rows("token_embd.weight", ids)
        bank: list[Tensor] = []
        layers: list[LayerState] = []
        for number, past in enumerate(state.layers):
            layer = Layer(g, self.weights, number, arithmetic.is_tiled)
            # h is the sum of the outputs since the residual block began; at its end it goes to the bank, and the sum begins anew.
            x = layer.mix("attn_res_score.weight", bank, h) if bank else h
            is_first_of_block = number % g.residual_block_size == 0
            if is_first_of_block:
                bank.append(h)
            attended, new = attention(layer, layer.norm("attn_norm.weight", x), past)
            h = attended if is_first_of_block else h + attended
            x = layer.norm("ffn_norm.weight", layer.mix("ffn_res_score.weight", bank, h))
            h = h + (dense_feed_forward(layer, x) if number < g.n_dense_layers else self._mixture_of_experts(layer, x))
            layers.append(new)
        score = self.weights.vector("output_res_score.weight")
        return mix_residuals(bank, h, score, eps=g.rms_norm_eps, is_tiled=arithmetic.is_tiled), State(n_tokens, tuple(layers))

    def logits(self, h: Tensor, *, arithmetic: Arithmetic) -> Tensor:
        """Return the logits [batch, tokens, vocabulary] of the trunk's output [batch, tokens, hidden]."""
        gain = self.weights.vector("output_norm.weight")
        x = rms_norm(h, gain, eps=self.geometry.rms_norm_eps, is_tiled=arithmetic.is_tiled)
        return linear(x, self.weights.matrix("output.weight"), is_tiled=arithmetic.is_tiled)

    def _mixture_of_experts(self, layer: Layer, x: Tensor) -> Tensor:
        g = self.geometry
        scores = sigmoid(layer.linear("ffn_gate_inp.weight", x))
        ids = choose_experts(scores, layer.vector("exp_probs_b.bias"), g.n_experts_per_token)
        weights = expert_weights(scores, ids, scaling=g.routed_scaling_factor, is_tiled=layer.is_tiled)
        z = layer.linear("ffn_routed_down.weight", x)
        outputs = self.experts.run(layer.number, z.flatten(0, 1), ids.flatten(0, 1), layer.is_tiled)
        y = combine_experts(outputs.unflatten(0, x.shape[:2]), weights)
        y = layer.linear("ffn_routed_up.weight", layer.norm("ffn_routed_norm.weight", y))
        return y + _situ_mlp(layer, x, ("ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight"))


def attention(layer: Layer, x: Tensor, past: LayerState) -> tuple[Tensor, LayerState]:
    """Return the attention's output [batch, tokens, hidden] for the normalised input x of that shape, and the layer's new state."""
    return _mla(layer, x, past) if isinstance(past, MlaState) else _kda(layer, x, past)


def _kda(layer: Layer, x: Tensor, past: KdaState) -> tuple[Tensor, KdaState]:
    g, by_head = layer.geometry, (layer.geometry.kda_n_heads, layer.geometry.kda_head_dim)
    u = torch.cat([layer.linear(f"attn_{part}.weight", x) for part in "qkv"], dim=-1)
    kernel = torch.cat([layer.vector(f"ssm_conv1d_{part}.weight").squeeze(1) for part in "qkv"])
    u, conv = short_conv(u, kernel, past.conv)
    q, k, v = silu(u).unflatten(-1, (3, *by_head)).unbind(2)
    q = l2_norm(q, is_tiled=layer.is_tiled) * g.kda_head_dim**-0.5
    k = l2_norm(k, is_tiled=layer.is_tiled)
    z = layer.linear("ssm_f_b.weight", layer.linear("ssm_f_a.weight", x)) + layer.vector("ssm_dt.bias")
    decay = log_decay(z.unflatten(-1, by_head), layer.vector("ssm_a"), lower_bound=g.kda_gate_lower_bound)
    beta = sigmoid(layer.linear("ssm_beta.weight", x))
    o, memory = (kda_recurrent if layer.is_tiled else kda_chunked)(q, k, v, decay, beta, past.memory)
    o = layer.norm("ssm_norm.weight", o).flatten(-2) * sigmoid(layer.linear("ssm_g.weight", x))
    return layer.linear("attn_output.weight", o), KdaState(memory, conv)


def _mla(layer: Layer, x: Tensor, past: MlaState) -> tuple[Tensor, MlaState]:
    g = layer.geometry
    low = layer.lora_norm("attn_q_a_norm.weight", layer.linear("attn_q_a.weight", x))
    q = layer.linear("attn_q_b.weight", low).unflatten(-1, (g.n_heads, -1))
    latent, k_rot = layer.linear("attn_kv_a_mqa.weight", x).split([g.kv_lora_rank, g.qk_rope_head_dim], dim=-1)
    new = past.extended(layer.lora_norm("attn_kv_a_norm.weight", latent), k_rot)
    if isinstance(past, IndexedMlaState):
        new = IndexedMlaState(new.latent, new.k_rot, torch.cat([past.index_k, _index_keys(layer, x)], dim=1))
        o = _attend_by_index(layer, x, low, q, new)
    else:
        o = _attend_to_all(layer, q, new)
    return layer.linear("attn_output.weight", o.flatten(-2) * sigmoid(layer.linear("attn_gate.weight", x))), new


def _attend_to_all(layer: Layer, q: Tensor, cache: MlaState) -> Tensor:
    attend = attend_absorbed if layer.is_tiled else attend_expanded
    return attend(*_split_queries(layer, q), cache.latent, cache.k_rot, _kv_b(layer))


def _attend_by_index(layer: Layer, x: Tensor, low: Tensor, q: Tensor, cache: IndexedMlaState) -> Tensor:
    """Attend to what the indexer selects; a token that sees no more positions than it would select attends to all of them, as without it.

    x         [batch, tokens, hidden], and low [batch, tokens, q_lora_rank], which q was made of
    q         [batch, tokens, heads, nope and rope size]
    returns   [batch, tokens, heads, value size]
    """
    indexer = layer.geometry.indexer
    assert indexer is not None
    n_past = cache.latent.shape[1] - q.shape[1]
    n_dense = min(max(indexer.top_k - n_past, 0), q.shape[1])
    outputs = []
    if n_dense:
        seen = slice(n_past + n_dense)
        outputs.append(_attend_to_all(layer, q[:, :n_dense], MlaState(cache.latent[:, seen], cache.k_rot[:, seen])))
    if n_dense < q.shape[1]:
        rest = slice(n_dense, None)
        index_q = layer.linear("indexer.attn_q_b.weight", low[:, rest]).unflatten(-1, (indexer.n_heads, indexer.head_dim))
        positions = select_positions(index_q, layer.linear("indexer.proj.weight", x[:, rest]), cache.index_k, indexer.top_k)
        outputs.append(attend_selected(*_split_queries(layer, q[:, rest]), cache.latent, cache.k_rot, _kv_b(layer), positions))
    return torch.cat(outputs, dim=1)


def _index_keys(layer: Layer, x: Tensor) -> Tensor:
    gain, bias = layer.vector("indexer.k_norm.weight"), layer.vector_if_any("indexer.k_norm.bias")
    return index_keys(layer.linear("indexer.attn_k.weight", x), gain, bias, eps=layer.geometry.rms_norm_eps, is_tiled=layer.is_tiled)


def _split_queries(layer: Layer, q: Tensor) -> tuple[Tensor, Tensor]:
    q_nope, q_rot = q.split([layer.geometry.qk_nope_head_dim, layer.geometry.qk_rope_head_dim], dim=-1)
    return q_nope, q_rot


def _kv_b(layer: Layer) -> Tensor:
    return layer.matrix("attn_kv_b.weight").unflatten(0, (layer.geometry.n_heads, -1))


def dense_feed_forward(layer: Layer, x: Tensor) -> Tensor:
    """Return the dense feed-forward block of the first layers: [batch, tokens, hidden] -> the same shape."""
    return _situ_mlp(layer, x, ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"))


def _situ_mlp(layer: Layer, x: Tensor, names: tuple[str, str, str]) -> Tensor:
    gate, up, down = names
    g = layer.geometry
    y = situ(layer.linear(gate, x), layer.linear(up, x), beta=g.situ_beta, linear_beta=g.situ_linear_beta)
    return layer.linear(down, y)
