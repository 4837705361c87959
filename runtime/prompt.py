"""The prompt pass on a GPU: many tokens of one text at once, every expert that they use read and computed once per layer.

The same mathematics as model.py and the same small kernels as decode.py, on the state that decode goes on from. Q8_0 products run on tensor
cores (kernels/prompt_q8_0.py); experts run as in decode, 16 rows an entry; KDA goes token by token, its memory in registers; MLA attends some
heads at a time, and where K3.1's indexer selects, 16 tokens at a time as in decode. A layer's reads begin as soon as its routing is known, those
first that most rows wait for, and the device computes what every token needs meanwhile. What an expert gives a row has a place of its own, and
is added up in expert order: the order of arrival changes no bit.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from layout.record import RecordLayout
from manifests.geometry import Geometry
from runtime.decode import DeviceRecords
from runtime.kernels.expert import MOST_GROUPS, run_experts
from runtime.kernels.indexer import select_in_cache
from runtime.kernels.kda import kda_decode_
from runtime.kernels.mla import SPLIT_POSITIONS, attend_in_cache
from runtime.kernels.norms import rms_norm, rms_norm_gated
from runtime.kernels.prompt_mla import attend_by_heads, attention_bytes
from runtime.kernels.prompt_q8_0 import product_bytes, q8_0_product_of_many
from runtime.kernels.residual import add_mix_and_norm_
from runtime.kernels.router import combine_and_norm, route
from runtime.kernels.rows import TILE_ROWS, linear
from runtime.kernels.sigmoid import gate_by_sigmoid
from runtime.kernels.situ import situ_halves
from runtime.model import IndexedMlaState
from runtime.running_sum import RunningSum
from runtime.segments import Moment
from runtime.state import FixedState, KdaState, MlaState, kda_input_sizes
from runtime.weights import SpineWeights

# The most tokens at a time: what K3.1 attends to without its indexer.
MOST_ROWS = 2048
_EMBEDDED_AT_ONCE = 256
_SCORED_AT_ONCE = 128
_DENSE_AT_ONCE = 512


class Uses(NamedTuple):
    """Which rows use which expert: pair row * k + rank says that a row has an expert at that rank.

    experts  those that are used, the one with most rows first
    ends     int [experts + 1]: the entries of experts[n] are ends[n] up to ends[n + 1]
    pairs    int32 [entries, 16]; -1 fills up
    """

    experts: list[int]
    ends: list[int]
    pairs: np.ndarray


def sort_uses(chosen: np.ndarray) -> Uses:
    """Return the uses of a layer's experts: chosen int64 [rows, k]."""
    # Of 16 bits, so that numpy sorts by radix: the drives wait for this.
    flat = chosen.ravel().astype(np.uint16)
    order, counts = np.argsort(flat, kind="stable"), np.bincount(flat)
    experts = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    ends = np.concatenate([[0], np.cumsum(-(-counts[experts] // TILE_ROWS))])
    # By number: where an expert's pairs begin in `order`, and where in the table.
    begins, places = np.cumsum(counts) - counts, np.zeros(len(counts), np.int64)
    places[experts] = TILE_ROWS * ends[:-1]
    pairs = np.full((ends[-1], TILE_ROWS), -1, np.int32)
    pairs.reshape(-1)[np.arange(len(flat)) + np.repeat(places - begins, counts)] = order
    return Uses(experts.tolist(), ends.tolist(), pairs)


def neighbours(places: Sequence[int]) -> Iterator[slice]:
    """Yield the runs of rising numbers without a gap, as slices of them: of 3 4 7 those of 3 4 and of 7."""
    start = 0
    for n in range(1, len(places) + 1):
        if n == len(places) or places[n] != places[n - 1] + 1:
            yield slice(start, n)
            start = n


class ExpertTables:
    """A layer's tables on the device, as `run_experts` takes them: the rows at its begin, addresses as records arrive."""

    def __init__(self, n_rows: int, geometry: Geometry, device: torch.device) -> None:
        n_pairs = n_rows * geometry.n_experts_per_token
        n = n_pairs // TILE_ROWS + min(n_pairs, geometry.n_experts)
        self._k, is_cuda = geometry.n_experts_per_token, device.type == "cuda"
        self._table_host = torch.zeros(2, n, TILE_ROWS, dtype=torch.int32, pin_memory=is_cuda)
        self._table = torch.zeros(2, n, TILE_ROWS, dtype=torch.int32, device=device)
        self._addresses = torch.zeros(n, dtype=torch.int64, device=device)

    def begin(self, pairs: np.ndarray) -> None:
        """Send which rows are in each entry and where their results go, from `Uses.pairs`. The device must be done with the layer before."""
        rows, places = self._table_host.numpy()[:, : len(pairs)]
        # Rounded down, so that -1 stays -1.
        rows[:], places[:] = pairs // self._k, pairs
        for target, source in zip(self._table, self._table_host, strict=True):
            target[: len(pairs)].copy_(source[: len(pairs)], non_blocking=True)

    def set_address(self, first: int, end: int, address: int) -> None:
        """Say where the record of some entries lies."""
        # As a kernel's argument: an upload would queue behind those of records.
        self._addresses[first:end].fill_(address)

    def entries(self, first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return addresses int64 [n], rows and places int32 [n, 16] of some entries."""
        rows, places = self._table
        return self._addresses[first:end], rows[first:end], places[first:end]


class PromptPass:
    """Takes tokens into a text's state, many at a time.

    on_layer   told a layer's number before its experts are fetched; what it raises ends the pass and spoils the state
    on_chosen  told a layer's number and the experts chosen in it, int64 [rows, k]
    """

    def __init__(
        self,
        geometry: Geometry,
        weights: SpineWeights,
        layout: RecordLayout,
        records: DeviceRecords,
        state: FixedState,
        *,
        routing: Tensor | None = None,
    ) -> None:
        """Make nothing yet: memory is taken while a pass runs.

        routing  int64 [context, MoE layers, k], on the device: experts to use instead of the router's choice, by position
        """
        self.geometry, self.weights, self.layout, self.records, self.state, self.routing = geometry, weights, layout, records, state, routing
        self.on_layer: Callable[[int], None] | None = None
        self.on_chosen: Callable[[int, np.ndarray], None] | None = None

    def run(self, ids: Sequence[int]) -> Tensor:
        """Run the next tokens of the text; return the logits after the last one, float32 [vocabulary].

        Raises DamagedDataError if an expert cannot be had from any copy.
        """
        return self.weights.product("output.weight", self._run(ids, is_last_only=True))[0, 0]

    def score(self, ids: Sequence[int]) -> Tensor:
        """Run the next tokens of the text; return the logits after each, float32 [tokens, vocabulary], on the CPU."""
        x = self._run(ids, is_last_only=False)[0]
        head = self.weights.quantised("output.weight")
        return torch.cat([q8_0_product_of_many(rows, head).cpu() for rows in x.split(_SCORED_AT_ONCE)])

    def _run(self, ids: Sequence[int], *, is_last_only: bool) -> Tensor:
        """Take in the tokens; return what the last product takes, [1, tokens or 1, hidden]."""
        assert 1 <= len(ids) <= MOST_ROWS
        x = _Rows(self, ids).run(is_last_only=is_last_only)
        self.state.set_n_tokens(self.state.n_tokens + len(ids))
        return x


class _Rows(RunningSum):
    """The tokens of one run and what is known of them so far; tensors are [1, rows, ...]."""

    def __init__(self, prompt: PromptPass, ids: Sequence[int]) -> None:
        self._prompt, self._g, self._weights, self._state = prompt, prompt.geometry, prompt.weights, prompt.state
        g, device = self._g, prompt.weights.device
        self.n_rows = len(ids)
        tokens = torch.tensor(ids, device=device).split(_EMBEDDED_AT_ONCE)
        self.h = torch.cat([self._weights.rows("token_embd.weight", part) for part in tokens]).unsqueeze(0)
        self.bank = torch.empty(-(-g.n_layers // g.residual_block_size), 1, self.n_rows, g.hidden_size, device=device)
        n_entries = min(MOST_GROUPS, self.n_rows * g.n_experts_per_token)
        self._hidden = torch.empty(n_entries, TILE_ROWS, g.expert_intermediate_size, device=device)
        self._tables, self._was_chosen = ExpertTables(self.n_rows, g, device), Moment(device)
        self._chosen = torch.zeros(self.n_rows, g.n_experts_per_token, dtype=torch.int64, pin_memory=device.type == "cuda")

    def run(self, *, is_last_only: bool) -> Tensor:
        g, addends = self._g, tuple[Tensor, ...]()
        for layer in range(g.n_layers):
            x = self._attend(layer, addends)
            addends = (self._dense(layer, x),) if layer < g.n_dense_layers else self._mixture(layer, x)
        score, gain = (self._weights.vector(f"output_{name}.weight") for name in ("res_score", "norm"))
        last = slice(-1 if is_last_only else 0, None)
        addends = tuple(addend[:, last] for addend in addends)
        return add_mix_and_norm_(self.bank[:, :, last], self.h[:, last], addends, score, gain, eps=g.rms_norm_eps)[1]

    def _kda(self, layer: int, x: Tensor) -> Tensor:
        g, state = self._g, self._state.layers[layer]
        assert isinstance(state, KdaState)
        products = self._product(layer, "attn_in", x)
        u, gate, low, beta = products.split(kda_input_sizes(g), dim=-1)
        z = self._product(layer, "ssm_f_b", low)
        kernel, dt_bias, a_log = (self._vector(layer, name) for name in ("ssm_conv1d", "ssm_dt.bias", "ssm_a"))
        bound = g.kda_gate_lower_bound
        o = kda_decode_(u, z, beta, state.conv, state.memory, kernel=kernel, dt_bias=dt_bias, a_log=a_log, lower_bound=bound)
        gate = gate.unflatten(-1, (g.kda_n_heads, -1))
        o = rms_norm_gated(o, self._vector(layer, "ssm_norm.weight"), gate, eps=g.rms_norm_eps, is_tiled=True)
        # The largest of a layer's tensors are let go of before the last product.
        del products, u, gate, low, beta, z
        return self._product(layer, "attn_output", o.flatten(-2))

    def _mla(self, layer: int, x: Tensor) -> Tensor:
        g, state, n_past = self._g, self._state.layers[layer], self._state.n_tokens
        assert isinstance(state, MlaState)
        sizes = [g.q_lora_rank, g.kv_lora_rank, g.qk_rope_head_dim, g.n_heads * g.v_head_dim]
        low, latent, k_rot, gate = self._product(layer, "attn_in", x).split(sizes, dim=-1)
        seen = slice(n_past + self.n_rows)
        state.latent[:, n_past : seen.stop] = rms_norm(latent, self._vector(layer, "attn_kv_a_norm.weight"), eps=g.lora_norm_eps, is_tiled=True)
        state.k_rot[:, n_past : seen.stop] = k_rot
        low = rms_norm(low, self._vector(layer, "attn_q_a_norm.weight"), eps=g.lora_norm_eps, is_tiled=True)
        q = self._product(layer, "attn_q_b", low)[0].unflatten(-1, (g.n_heads, -1))
        if isinstance(state, IndexedMlaState):
            o = self._attend_by_index(layer, x, low, q, state)
        else:
            del low
            o = self._attend_to_all(layer, q, state)
        return self._product(layer, "attn_output", gate_by_sigmoid(o.flatten(-2).unsqueeze(0), gate))

    def _attend_to_all(self, layer: int, q: Tensor, cache: MlaState) -> Tensor:
        """Return what the first rows attend to, [rows, heads, value size], for their queries [rows, heads, nope and rope size]."""
        seen = slice(self._state.n_tokens + len(q))
        return attend_by_heads(q, cache.latent[0, seen], cache.k_rot[0, seen], self._kv_b(layer))

    def _attend_by_index(self, layer: int, x: Tensor, low: Tensor, q: Tensor, cache: IndexedMlaState) -> Tensor:
        """Return what all rows attend to: those that see no more than the indexer selects as without it, the others as in decode."""
        assert self._g.indexer is not None
        n_past, n_most = self._state.n_tokens, self._g.indexer.top_k
        self._append_index_keys(layer, x, cache, self._state.n_past)
        n_dense = min(max(n_most - n_past, 0), self.n_rows)
        outputs = [self._attend_to_all(layer, q[:n_dense], cache)] if n_dense else []
        if n_dense < self.n_rows:
            queries, weights = self._index_queries(layer, x[:, n_dense:], low[:, n_dense:])
            for start in range(n_dense, self.n_rows, TILE_ROWS):
                rows, index = slice(start, start + TILE_ROWS), slice(start - n_dense, start - n_dense + TILE_ROWS)
                past = torch.full((1,), n_past + start, dtype=torch.int32, device=q.device)
                positions = select_in_cache(queries[index], weights[index], cache.index_k[0, : n_past + rows.stop], past, n_most)
                outputs.append(attend_in_cache(q[rows], cache.latent[0], cache.k_rot[0], past, kv_b=self._kv_b(layer), positions=positions))
        return torch.cat(outputs)

    def _kv_b(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._weights.by_head(f"blk.{layer}.attn_kv_b.weight", self._g.n_heads)

    def _dense(self, layer: int, x: Tensor) -> Tensor:
        """Return the dense feed-forward block, some rows at a time: it is several times as wide as all else."""
        parts = x.split(_DENSE_AT_ONCE, dim=1)
        return torch.cat([self._situ_mlp(layer, self._product(layer, "ffn_in", part), "ffn_down") for part in parts], dim=1)

    def _mixture(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a layer's routed and shared experts add to the running sum."""
        g = self._g
        ids, shares = self._route(layer, x)
        self._chosen.copy_(ids[0], non_blocking=True)
        self._was_chosen.mark()
        # The device is at this while the first records come.
        y = self._product(layer, "ffn_in", x)
        z, shared = y[0, :, : g.latent_size].contiguous(), self._situ_mlp(layer, y[..., g.latent_size :], "ffn_down_shexp")
        del y
        outputs = torch.empty(self.n_rows * g.n_experts_per_token, g.latent_size, device=z.device)
        self._was_chosen.wait()
        self._run_experts(layer, z, outputs)
        gain = self._vector(layer, "ffn_routed_norm.weight")
        y = combine_and_norm(outputs.view(*ids.shape, -1), shares, gain, eps=g.rms_norm_eps, is_tiled=True)
        del outputs, z
        return self._product(layer, "ffn_routed_up", y), shared

    def _route(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
        g, name = self._g, f"blk.{layer}.ffn_gate_inp.weight"
        logits = linear(x, self._weights.matrix(name), is_tiled=False)
        ids, shares = route(logits, self._vector(layer, "exp_probs_b.bias"), g.n_experts_per_token, scaling=g.routed_scaling_factor, is_tiled=True)
        if (routing := self._prompt.routing) is not None:
            ids = routing[self._state.n_tokens :][: self.n_rows, layer - g.n_dense_layers].unsqueeze(0).contiguous()
        return ids, shares

    def _run_experts(self, layer: int, z: Tensor, outputs: Tensor) -> None:
        """Write the output of every (row, expert), as the records arrive."""
        prompt, chosen = self._prompt, self._chosen.numpy()
        if prompt.on_layer is not None:
            prompt.on_layer(layer)
        uses = sort_uses(chosen)
        place = {expert: n for n, expert in enumerate(uses.experts)}
        self._tables.begin(uses.pairs)
        for group in prompt.records.fetch_groups(layer, uses.experts):
            places, addresses = zip(*sorted((place[expert], prompt.records.address(slot)) for expert, slot in group), strict=True)
            for run in neighbours(places):
                self._run_neighbours(uses.ends[places[run.start] : places[run.stop - 1] + 2], addresses[run], z, outputs)
        if prompt.on_chosen is not None:
            prompt.on_chosen(layer, chosen)

    def _run_neighbours(self, ends: list[int], addresses: Sequence[int], z: Tensor, outputs: Tensor) -> None:
        """Run experts whose entries follow each other: a launch for each, and two for every so many entries as are taken at a time."""
        g, end, most = self._g, ends[-1], len(self._hidden)
        for address, first, after in zip(addresses, ends, ends[1:], strict=False):
            self._tables.set_address(first, after, address)
        for first in range(ends[0], end, most):
            addressed, rows, places = self._tables.entries(first, min(first + most, end))
            run_experts(
                z, addressed, rows, places, self._prompt.layout, situ_beta=g.situ_beta, situ_linear_beta=g.situ_linear_beta,
                hidden=self._hidden, outputs=outputs,
            )  # fmt: skip

    def _situ_mlp(self, layer: int, gate_up: Tensor, down: str) -> Tensor:
        y = situ_halves(gate_up, beta=self._g.situ_beta, linear_beta=self._g.situ_linear_beta)
        return self._product(layer, down, y)

    def _product(self, layer: int, name: str, x: Tensor) -> Tensor:
        return q8_0_product_of_many(x[0], self._weights.quantised(f"blk.{layer}.{name}.weight")).unsqueeze(0)


def prompt_bytes(g: Geometry, n_rows: int, n_positions: int, *, is_long_context: bool = False) -> int:
    """Return the device memory that a pass of n_rows tokens takes at its worst, beside spine, state and caches.

    n_positions      tokens that the last of them sees, itself included
    is_long_context  whether the indexer is evaluated
    """
    # cuBLAS keeps a workspace.
    workspace_bytes = 64_000_000
    floats = n_rows * (g.hidden_size * (-(-g.n_layers // g.residual_block_size) + 5)) + MOST_GROUPS * TILE_ROWS * g.expert_intermediate_size

    def with_product(floats_per_row: int, n_cols: int, n_rows_of_x: int = n_rows) -> int:
        return 4 * n_rows_of_x * floats_per_row + product_bytes(n_rows_of_x, n_cols)

    kda_in, q_size, values = sum(kda_input_sizes(g)), g.n_heads * (g.qk_nope_head_dim + g.qk_rope_head_dim), g.n_heads * g.v_head_dim
    mla_in = g.q_lora_rank + g.kv_lora_rank + g.qk_rope_head_dim + values
    moe_in = g.latent_size + 2 * g.shared_intermediate_size
    indexer = g.indexer if is_long_context else None
    attention = attention_bytes(
        n_rows, n_positions if indexer is None else min(n_positions, indexer.top_k), g.n_heads,
        n_nope=g.qk_nope_head_dim, n_rope=g.qk_rope_head_dim, n_values=g.v_head_dim, n_latents=g.kv_lora_rank,
    )  # fmt: skip
    if indexer is not None:
        # Keys, queries and the weights of their heads; what they are made of.
        mla_in += indexer.head_dim + indexer.n_heads * (indexer.head_dim + 1) + g.q_lora_rank
        attention = max(attention, _selection_bytes(g, indexer.top_k, n_positions))
    return (
        workspace_bytes
        + 4 * floats
        + max(
            with_product(max(kda_in, mla_in + q_size, moe_in), g.hidden_size),
            # q, k, v and the decay, z, what is attended to, and the same normalised.
            4 * n_rows * (kda_in + 7 * g.kda_size),
            4 * n_rows * (mla_in + q_size + 2 * values) + attention,
            with_product(mla_in + q_size, max(g.kda_size, values)),
            with_product(moe_in + g.latent_size + g.shared_intermediate_size, g.shared_intermediate_size),
            4 * n_rows * (g.n_experts_per_token + 2) * g.latent_size,
            with_product(3 * g.dense_intermediate_size, g.dense_intermediate_size, min(n_rows, _DENSE_AT_ONCE)) if g.n_dense_layers else 0,
        )
    )


def _selection_bytes(g: Geometry, n_most: int, n_positions: int) -> int:
    """Return what 16 rows take to select up to n_most positions, sort keys counted twice for the library's sake, and to attend to them."""
    n_selected = min(n_most, n_positions)
    n_splits = -(-n_selected // SPLIT_POSITIONS)
    attended = (n_splits + 2) * g.n_heads * g.kv_lora_rank + 2 * g.n_heads * g.v_head_dim
    return TILE_ROWS * (2 * 8 * n_positions + 32 * n_selected + 4 * attended)


def rows_that_fit(g: Geometry, context: int, free_bytes: int, *, is_long_context: bool = False) -> int:
    """Return how many tokens a pass can take at a time in that much memory, a multiple of 16 up to MOST_ROWS; 0 if there is not even room for 16."""
    sizes = range(MOST_ROWS, 0, -TILE_ROWS)
    fitting = (n for n in sizes if prompt_bytes(g, n, max(n, context), is_long_context=is_long_context) <= free_bytes)
    return next(fitting, 0)
