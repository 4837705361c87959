"""Decode: 1 to 16 tokens of one text at a time, on buffers of fixed place, with the experts that are on the device computed at once.

The same mathematics as model.py, written for speed: weights that take the same input are one product, small operations are fused, and each
layer is two pieces of work that a GPU replays as graphs. Between them the host learns which experts were chosen and brings those that are
missing; meanwhile the device is busy with the ones that it has. A row's bits do not depend on how many rows there are. A block's last rows can
be forgotten again.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from layout.record import RecordLayout
from manifests.geometry import Geometry
from runtime.kernels.driver import raw_stream, upload
from runtime.kernels.expert import run_experts
from runtime.kernels.groups import GroupArrays, Groups, group_resident, groups_of
from runtime.kernels.indexer import select_in_cache
from runtime.kernels.kda import kda_decode_
from runtime.kernels.mla import mla_decode_
from runtime.kernels.norms import rms_norm, rms_norm_gated
from runtime.kernels.residual import add_mix_and_norm_, mix_and_norm
from runtime.kernels.router import combine_and_norm, route
from runtime.kernels.rows import TILE_ROWS
from runtime.kernels.situ import situ_halves
from runtime.model import IndexedMlaState, initial_indexed_state
from runtime.running_sum import RunningSum
from runtime.segments import Moment, Segment
from runtime.state import FixedState, KdaState, MlaState, Rewind, State, kda_input_sizes
from runtime.weights import SpineWeights

# In a block of so many rows an expert must be used by so many of them to count as recently used. In shorter ones most are used by one row.
LEAST_RETAINING_ROWS, LEAST_USES_TO_STAY = 4, 2


class DeviceRecords(Protocol):
    """Records in slots on the device."""

    def address(self, slot: int) -> int:
        """Return where a slot lies on the device; its record begins there."""
        ...

    def addresses(self, layer: int) -> np.ndarray:
        """Return where each of a layer's experts lies on the device now, int64 [n_experts]; 0 where it does not."""
        ...

    def fetch_groups(
        self, layer: int, experts: Sequence[int], *, passing: Collection[int] = (), meanwhile: Callable[[], None] | None = None
    ) -> Iterable[list[tuple[int, int]]]:
        """Yield every expert once, as (expert, slot), in groups as they arrive; a group stays where it is until the next is asked for.

        passing    those of them that need not stay afterwards
        meanwhile  what to do while reads are under way; it may prefetch
        """
        ...

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Read experts in the time that drives have to spare."""
        ...


def n_guessed(geometry: Geometry, n_prefetch: int) -> int:
    """Return how many experts of a layer are guessed: some are on the device already. The likeliest quarter is nearly always chosen."""
    return max(n_prefetch, geometry.n_experts_per_token // 4) if n_prefetch else 0


def empty_state(geometry: Geometry, context: int, device: torch.device, *, is_long_context: bool = False) -> FixedState:
    """Return the state before the first token, with room for `context` tokens, and for their index keys if the indexer is evaluated."""
    start = initial_indexed_state(geometry, 1, torch.device("meta")) if is_long_context else None
    return FixedState.empty(geometry, context, device, start=start)


class LayerFacts(NamedTuple):
    """What one layer of one step needed: the experts chosen, int64 [rows, k], those that the device lacked, and the seconds until they were there."""

    layer: int
    chosen: np.ndarray
    missing: list[int]
    seconds: float


class Decoder:
    """Decodes one text."""

    def __init__(
        self,
        geometry: Geometry,
        weights: SpineWeights,
        layout: RecordLayout,
        records: DeviceRecords,
        *,
        context: int,
        n_prefetch: int = 0,
        routing: Tensor | None = None,
        guesses: Tensor | None = None,
        is_long_context: bool = False,
    ) -> None:
        """Make the buffers.

        n_prefetch       experts of the next layer to guess, which the store reads behind the layer's own
        routing          int64 [context, MoE layers, k], on the device: experts to use instead of the router's choice, by position
        guesses          int64 [context, MoE layers, n], on the device: experts to guess instead of the router's guesses
        is_long_context  evaluate K3.1's indexer, as in `Model`
        """
        self.geometry, self.weights, self.layout, self.records = geometry, weights, layout, records
        self.device, self.routing, self.guesses = weights.device, routing, guesses
        self.state = empty_state(geometry, context, self.device, is_long_context=is_long_context)
        shape, is_cuda = (geometry.n_layers, geometry.n_experts), self.device.type == "cuda"
        # Where each expert lies, as the device knows it. The host's rows are pinned, so that a copy does not wait.
        self.known = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self._known_host = torch.zeros(shape, dtype=torch.int64, pin_memory=is_cuda)
        self._blocks: dict[tuple[int, bool], _Block] = {}
        # For blocks that can be cut: made with the first of them.
        self._rewind: Rewind | None = None
        self._replays: dict[int, Segment] = {}
        self._cut_from, self._is_cuttable = 0, False
        self._pool = torch.cuda.graph_pool_handle() if is_cuda else None
        self._stream = torch.cuda.Stream(self.device) if is_cuda else None
        self.n_prefetch = n_prefetch
        # Layers that lacked experts the last time: there is time to guess in.
        self._lacking = set(geometry.moe_layers)
        self.wait_device_s = 0.0
        self.on_layer: Callable[[LayerFacts], None] | None = None
        # Called with how many of the last rows are forgotten.
        self.on_cut: Callable[[int], None] | None = None

    def begin(self, state: State) -> None:
        """Go on from a state of one text."""
        self._is_cuttable = False
        self.state.load(state)

    def capture(self, n_rows: int, *, can_cut: bool = False) -> "_Block":
        """Return the buffers and work of n_rows rows, made at the first call: on CUDA that takes about a second.

        can_cut  whether `keep` may follow a step of them; one row can always be kept
        """
        key = (n_rows, can_cut and n_rows > 1)
        if key not in self._blocks:
            if key[1] and self._rewind is None:
                self._rewind = Rewind.empty(self.geometry, TILE_ROWS, self.device)
            # Capturing runs the work: what it changes of the text's state is put aside. MLA caches it only changes behind the text.
            memory, conv = self.state.memory.clone(), self.state.conv.clone()
            block = _Block(self, n_rows, self._rewind if key[1] else None)
            for segment in block.segments():
                segment.capture(self._pool, self._stream)
            self._blocks[key] = block
            self.state.memory.copy_(memory)
            self.state.conv.copy_(conv)
        return self._blocks[key]

    def step(self, ids: Sequence[int], *, can_cut: bool = False) -> Tensor:
        """Run the next tokens of the text; return their logits, float32 [tokens, vocabulary], valid until the next step.

        can_cut  whether `keep` may follow: several rows then cost a copy of the KDA layers' state

        Raises DamagedDataError if an expert cannot be had from any copy.
        """
        assert 1 <= len(ids) <= TILE_ROWS
        block, first = self.capture(len(ids), can_cut=can_cut), self.geometry.n_dense_layers
        self._cut_from = self.state.n_tokens
        if block.rewind is not None:
            block.rewind.save(self.state)
        block.begin(ids)
        block.follow(first)
        for layer in self.geometry.moe_layers:
            sent = self._send_known(layer)
            block.share[layer - first].run()
            is_guessing = block.guess_next(layer) if layer in self._lacking else False
            start = time.perf_counter()
            block.was_chosen.wait()
            self.wait_device_s += time.perf_counter() - start
            self._bring(block, layer, sent, is_guessing=is_guessing)
        self.state.set_n_tokens(self.state.n_tokens + len(ids))
        self._is_cuttable = block.rewind is not None
        return block.logits[0]

    def keep(self, n_rows: int) -> None:
        """Forget the rows of the last step after its first n_rows: the state has the bits as if only these had been run.

        Needs a step with `can_cut`, and no other state since. The logits stay. What is left may be cut again.
        """
        assert 1 <= n_rows <= self.state.n_tokens - self._cut_from
        if n_rows == self.state.n_tokens - self._cut_from:
            return
        assert self._is_cuttable, "the last step was not one that can be cut"
        if n_rows not in self._replays:
            # Capturing runs the work, which does no harm: it begins by putting the former state back.
            segment = Segment(partial(self._replay, n_rows), self.device)
            segment.capture(self._pool, self._stream)
            self._replays[n_rows] = segment
        self._replays[n_rows].run()
        n_cut = self.state.n_tokens - self._cut_from - n_rows
        self.state.set_n_tokens(self._cut_from + n_rows)
        if self.on_cut is not None:
            self.on_cut(n_cut)

    @property
    def rewind_bytes(self) -> int:
        """Return the device memory that cutting takes, 0 until a block that can be cut was captured."""
        return self._rewind.n_bytes if self._rewind is not None else 0

    def _replay(self, n_rows: int) -> None:
        """Run the KDA recurrences of the last block again, for its first rows only."""
        assert self._rewind is not None
        self._rewind.restore(self.state)
        for layer, (products, z) in self._rewind.inputs.items():
            _kda_step(self.geometry, self.weights, self.state, layer, products[:, :n_rows], z[:, :n_rows])

    def device_seconds(self, n_rows: int, n_repeats: int) -> float:
        """Return the seconds of a step in which the device never waits for the host: every expert is at hand, and nothing is fetched.

        The state and the results are spoilt. CUDA only.
        """
        block, first = self.capture(n_rows), self.geometry.n_dense_layers
        self.known.fill_(self.records.address(0))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(n_repeats):
            for layer in self.geometry.moe_layers:
                block.choose[layer - first].run()
                block.share[layer - first].run()
            block.finish.run()
        end.record()
        end.synchronize()
        self._known_host.zero_()
        self.known.zero_()
        return begin.elapsed_time(end) / 1000 / n_repeats

    def _send_known(self, layer: int) -> np.ndarray:
        """Tell the device which of a layer's experts it has; return that."""
        host, addresses = self._known_host[layer].numpy(), self.records.addresses(layer)
        if not np.array_equal(addresses, host):
            host[:] = addresses
            self.known[layer].copy_(self._known_host[layer], non_blocking=True)
        return host

    def _bring(self, block: "_Block", layer: int, sent: np.ndarray, *, is_guessing: bool) -> None:
        """Have the chosen experts computed that the device did not have when the layer began, and what comes behind the last of them."""
        chosen = block.chosen_host[layer - self.geometry.n_dense_layers].numpy()[0]
        start, n_staged = time.perf_counter(), 0
        experts, passing = chosen[0].tolist(), list[int]()
        if len(chosen) > 1:
            numbers, n_uses = np.unique(chosen, return_counts=True)
            experts = numbers.tolist()
            if len(chosen) >= LEAST_RETAINING_ROWS:
                passing = numbers[n_uses < LEAST_USES_TO_STAY].tolist()
        n_left, arrived = len(experts), start
        guessed = _Once(partial(self._prefetch, block, layer + 1)) if is_guessing else None
        for group in self.records.fetch_groups(layer, experts, passing=passing, meanwhile=guessed):
            arrived = time.perf_counter()
            missing = [(expert, slot) for expert, slot in group if not sent[expert]]
            if missing:
                block.run_missing(layer, chosen, missing, n_staged)
                n_staged += len(missing)
            n_left -= len(group)
            # The device goes on before the host tidies up.
            if not n_left:
                block.follow(layer + 1)
        if guessed is not None:
            guessed()
        lacked = [expert for expert in experts if not sent[expert]]
        (self._lacking.add if lacked else self._lacking.discard)(layer)
        if self.on_layer is not None:
            self.on_layer(LayerFacts(layer, chosen.copy(), lacked, arrived - start))

    def _prefetch(self, block: "_Block", layer: int) -> bool:
        """Have what the device has not of the next layer's guesses read, if they are there by now; return whether they are."""
        if not block.was_guessed.has_passed():
            return False
        guesses = Counter(block.guessed_host[layer - self.geometry.n_dense_layers].flatten().tolist())
        known = self.records.addresses(layer)
        self.records.prefetch(layer, [expert for expert, _ in guesses.most_common() if not known[expert]][: self.n_prefetch])
        return True


class _Once:
    """Does something at each call until it says that it is done."""

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work, self._is_done = work, False

    def __call__(self) -> None:
        self._is_done = self._is_done or self._work()


class _Staged:
    """Groups that the host makes, in pinned memory, and their copy on the device."""

    def __init__(self, n: int, device: torch.device) -> None:
        is_cuda, n_bytes = device.type == "cuda", Groups.n_bytes(n)
        self._from = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._to = torch.zeros(n_bytes, dtype=torch.uint8, device=device) if is_cuda else self._from
        self._device, self._host, self._groups = device, Groups.within(self._from, n), Groups.within(self._to, n)
        # A layer's groups come in few sizes: each part is cut out once.
        self._parts: dict[tuple[int, int], tuple[GroupArrays, Groups]] = {}

    def part(self, begin: int, end: int) -> tuple[GroupArrays, Groups]:
        """Return some of the groups, to be made on the host, and where work on the device finds them once they are sent."""
        part = self._parts.get((begin, end))
        if part is None:
            groups = slice(begin, end)
            part = self._parts[begin, end] = self._host.part(groups).arrays(), self._groups.part(groups)
        return part

    def send(self) -> None:
        """Copy all groups, those sent before to what they are already: one small copy costs less than three smaller ones."""
        if self._device.type == "cuda":
            upload(self._to.data_ptr(), self._from.data_ptr(), self._from.numel(), raw_stream(self._device))


class _Block(RunningSum):
    """The buffers and the work of one number of rows; tensors are [1, rows, ...]."""

    def __init__(self, decoder: Decoder, n_rows: int, rewind: Rewind | None) -> None:
        g, device = decoder.geometry, decoder.device
        self._g, self._weights, self._layout, self._records = g, decoder.weights, decoder.layout, decoder.records
        self._state, self._known, self._routing, self.rewind = decoder.state, decoder.known, decoder.routing, rewind
        k, n_pairs, n_moe, is_cuda = g.n_experts_per_token, n_rows * g.n_experts_per_token, len(g.moe_layers), device.type == "cuda"

        def floats(*shape: int) -> Tensor:
            return torch.zeros(1, *shape, device=device)

        self.ids = torch.zeros(1, n_rows, dtype=torch.int64, device=device)
        self.h = floats(n_rows, g.hidden_size)
        self.bank = torch.zeros(-(-g.n_layers // g.residual_block_size), 1, n_rows, g.hidden_size, device=device)
        self.outputs = floats(n_rows, k, g.latent_size)
        self.hidden = torch.zeros(n_pairs, TILE_ROWS, g.expert_intermediate_size, device=device)
        self.resident = Groups.empty(n_pairs, device)
        # What one piece of work leaves for the next, by layer; a graph's results lie where they lay at its capture.
        self.x, self.experts, self.shares, self.z, self.shared = (dict[int, Tensor]() for _ in range(5))
        self.logits = floats(n_rows, g.vocab_size)
        self._offsets = torch.arange(n_rows, device=device)
        self._ids_host = torch.zeros(1, n_rows, dtype=torch.int64, pin_memory=is_cuda)
        # One row per layer: none is written again before the device is done with it.
        self.chosen_host = torch.zeros(n_moe, 1, n_rows, k, dtype=torch.int64, pin_memory=is_cuda)
        self._staged = [_Staged(n_pairs, device) for _ in range(n_moe)]
        self.was_chosen = Moment(device)
        self.choose = [Segment(partial(self._choose, layer), device) for layer in g.moe_layers]
        self.share = [Segment(partial(self._share, layer), device) for layer in g.moe_layers]
        self.finish = Segment(self._finish, device)
        # For the next layer's choice, before its attention: what the router would choose of what there is by then.
        self.n_guessed, self._guesses = n_guessed(g, decoder.n_prefetch), decoder.guesses
        self.guessed_host = torch.zeros(n_moe, n_rows, self.n_guessed, dtype=torch.int64, pin_memory=is_cuda)
        self.was_guessed = Moment(device)
        self.guess = [Segment(partial(self._guess, layer), device) for layer in g.moe_layers[1:]] if self.n_guessed else []

    def segments(self) -> list[Segment]:
        by_layer = zip_longest(self.choose, self.share, self.guess)
        return [*(segment for segments in by_layer for segment in segments if segment is not None), self.finish]

    def begin(self, ids: Sequence[int]) -> None:
        self._ids_host[0] = torch.tensor(ids)
        self.ids.copy_(self._ids_host, non_blocking=True)

    def follow(self, layer: int) -> None:
        """Run what comes behind the experts of the layer before: up to this layer's choice, or to the logits behind the last one."""
        if layer == self._g.n_layers:
            self.finish.run()
            return
        self.choose[layer - self._g.n_dense_layers].run()
        self.was_chosen.mark()

    def guess_next(self, layer: int) -> bool:
        """Guess what the next layer will choose, if that is asked for and there is one; return whether it is being done."""
        number = layer - self._g.n_dense_layers
        if number >= len(self.guess):
            return False
        self.guess[number].run()
        self.was_guessed.mark()
        return True

    def run_missing(self, layer: int, chosen: np.ndarray, missing: list[tuple[int, int]], n_staged: int) -> None:
        """Compute experts that have arrived, for the rows that chose them; n_staged of the layer's came before."""
        staged = self._staged[layer - self._g.n_dense_layers]
        made, groups = staged.part(n_staged, n_staged + len(missing))
        addresses = [self._records.address(slot) for _, slot in missing]
        groups_of(chosen, [expert for expert, _ in missing], addresses, out=made)
        staged.send()
        self._run_experts(layer, groups)

    def _run_experts(self, layer: int, groups: Groups) -> None:
        g = self._g
        run_experts(
            self.z[layer][0], *groups, self._layout, situ_beta=g.situ_beta, situ_linear_beta=g.situ_linear_beta,
            hidden=self.hidden, outputs=self.outputs[0].flatten(0, 1),
        )  # fmt: skip

    def _choose(self, layer: int) -> None:
        """Finish the layer before, attend, and choose this layer's experts; what lies between the embedding and the first choice too."""
        addends: tuple[Tensor, ...] = ()
        if layer == self._g.n_dense_layers:
            self.h.copy_(self._weights.rows("token_embd.weight", self.ids))
            for dense in range(layer):
                x = self._attend(dense, addends)
                addends = (self._situ_mlp(dense, self._product(dense, "ffn_in", x), "ffn_down"),)
        else:
            addends = self._combine(layer - 1)
        self.x[layer] = self._attend(layer, addends)
        self.experts[layer], self.shares[layer] = self._route(layer)
        self.chosen_host[layer - self._g.n_dense_layers].copy_(self.experts[layer], non_blocking=True)

    def _share(self, layer: int) -> None:
        """Compute what every token of the layer needs, and the chosen experts that are on the device."""
        y = self._product(layer, "ffn_in", self.x[layer])
        self.z[layer] = y[..., : self._g.latent_size].contiguous()
        self.shared[layer] = self._situ_mlp(layer, y[..., self._g.latent_size :], "ffn_down_shexp")
        group_resident(self.experts[layer][0], self._known[layer], self.resident)
        self._run_experts(layer, self.resident)

    def _guess(self, layer: int) -> None:
        """Choose this layer's likeliest experts by the running sum after the layer before, but for that one's routed experts."""
        g, number = self._g, layer - self._g.n_dense_layers
        n_done, gain = (layer - 1) // g.residual_block_size + 1, self._vector(layer, "ffn_norm.weight")
        h, score = self.h + self.shared[layer - 1], self._vector(layer, "ffn_res_score.weight")
        x = mix_and_norm(self.bank[:n_done], h, score, gain, eps=g.rms_norm_eps, is_tiled=True)[1]
        logits, bias = self._product(layer, "ffn_gate_inp", x), self._vector(layer, "exp_probs_b.bias")
        ids = route(logits, bias, self.n_guessed, scaling=1.0, is_tiled=True)[0]
        if self._guesses is not None:
            ids = self._guesses[:, number].index_select(0, self._state.n_past + self._offsets).unsqueeze(0)
        self.guessed_host[number].copy_(ids[0], non_blocking=True)

    def _combine(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return what a layer's routed and shared experts add to the running sum."""
        gain = self._vector(layer, "ffn_routed_norm.weight")
        y = combine_and_norm(self.outputs, self.shares[layer], gain, eps=self._g.rms_norm_eps, is_tiled=True)
        return self._product(layer, "ffn_routed_up", y), self.shared[layer]

    def _finish(self) -> None:
        score, gain = (self._weights.vector(f"output_{name}.weight") for name in ("res_score", "norm"))
        addends = self._combine(self._g.n_layers - 1)
        _, x = add_mix_and_norm_(self.bank, self.h, addends, score, gain, eps=self._g.rms_norm_eps)
        self.logits = self._weights.product("output.weight", x)

    def _kda(self, layer: int, x: Tensor) -> Tensor:
        g, products = self._g, self._product(layer, "attn_in", x)
        _, gate, low, _ = products.split(kda_input_sizes(g), dim=-1)
        z = self._product(layer, "ssm_f_b", low)
        if self.rewind is not None:
            self.rewind.keep_inputs(layer, products, z)
        o = _kda_step(g, self._weights, self._state, layer, products, z)
        gate = gate.unflatten(-1, (g.kda_n_heads, -1))
        o = rms_norm_gated(o, self._vector(layer, "ssm_norm.weight"), gate, eps=g.rms_norm_eps, is_tiled=True)
        return self._product(layer, "attn_output", o.flatten(-2))

    def _mla(self, layer: int, x: Tensor) -> Tensor:
        g, state = self._g, self._state.layers[layer]
        assert isinstance(state, MlaState)
        sizes = [g.q_lora_rank, g.kv_lora_rank + g.qk_rope_head_dim, g.n_heads * g.v_head_dim]
        low, kv, gate = self._product(layer, "attn_in", x).split(sizes, dim=-1)
        q = rms_norm(low, self._vector(layer, "attn_q_a_norm.weight"), eps=g.lora_norm_eps, is_tiled=True)
        positions = self._select(layer, x, q, state) if isinstance(state, IndexedMlaState) else None
        o = mla_decode_(
            self._product(layer, "attn_q_b", q)[0].unflatten(-1, (g.n_heads, -1)), kv[0], state.latent[0], state.k_rot[0], self._state.n_past,
            kv_b=self._weights.by_head(f"blk.{layer}.attn_kv_b.weight", g.n_heads), gain=self._vector(layer, "attn_kv_a_norm.weight"),
            eps=g.lora_norm_eps, gate=gate[0].unflatten(-1, (g.n_heads, -1)), positions=positions,
        )  # fmt: skip
        return self._product(layer, "attn_output", o.flatten(-2).unsqueeze(0))

    def _select(self, layer: int, x: Tensor, low: Tensor, cache: IndexedMlaState) -> Tensor:
        """Take the rows' index keys into the cache; return the positions that each row attends to."""
        assert self._g.indexer is not None
        self._append_index_keys(layer, x, cache, self._state.n_past)
        return select_in_cache(*self._index_queries(layer, x, low), cache.index_k[0], self._state.n_past, self._g.indexer.top_k)

    def _route(self, layer: int) -> tuple[Tensor, Tensor]:
        g, bias = self._g, self._vector(layer, "exp_probs_b.bias")
        logits = self._product(layer, "ffn_gate_inp", self.x[layer])
        ids, shares = route(logits, bias, g.n_experts_per_token, scaling=g.routed_scaling_factor, is_tiled=True)
        if self._routing is not None:
            positions = self._state.n_past + self._offsets
            ids = self._routing[:, layer - g.n_dense_layers].index_select(0, positions).unsqueeze(0)
        return ids, shares

    def _situ_mlp(self, layer: int, gate_up: Tensor, down: str) -> Tensor:
        y = situ_halves(gate_up, beta=self._g.situ_beta, linear_beta=self._g.situ_linear_beta)
        return self._product(layer, down, y)

    def _product(self, layer: int, name: str, x: Tensor) -> Tensor:
        return self._weights.product(f"blk.{layer}.{name}.weight", x)


def _kda_step(g: Geometry, weights: SpineWeights, state: FixedState, layer: int, products: Tensor, z: Tensor) -> Tensor:
    """Return a KDA layer's outputs [1, rows, heads, value size], and take the rows into its state.

    products  [1, rows, ...], of `attn_in`
    z         [1, rows, kda_size], of `ssm_f_b`
    """
    (u, *_, beta), kda = products.split(kda_input_sizes(g), dim=-1), state.layers[layer]
    assert isinstance(kda, KdaState)
    kernel, dt_bias, a_log = (weights.vector(f"blk.{layer}.{name}") for name in ("ssm_conv1d", "ssm_dt.bias", "ssm_a"))
    bound = g.kda_gate_lower_bound
    return kda_decode_(u, z, beta, kda.conv, kda.memory, kernel=kernel, dt_bias=dt_bias, a_log=a_log, lower_bound=bound)
