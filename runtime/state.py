"""What a text leaves behind for its next token: per layer a KDA memory or an MLA cache.

`State` is never changed in place; `FixedState` is, by decode, and a `Rewind` takes it back into its last block.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from manifests.geometry import Geometry


@dataclass(frozen=True, slots=True)
class KdaState:
    """A KDA layer's state, of constant size.

    memory  float32 [batch, heads, key size, value size]
    conv    float32 [batch, kernel - 1, 3 * kda_size]: the last projections of q, k and v, before the convolution
    """

    memory: Tensor
    conv: Tensor


@dataclass(frozen=True, slots=True)
class MlaState:
    """An MLA layer's cache, which grows with the text.

    latent  float32 [batch, tokens, kv_lora_rank], normalised
    k_rot   float32 [batch, tokens, qk_rope_head_dim]
    """

    latent: Tensor
    k_rot: Tensor

    def extended(self, latent: Tensor, k_rot: Tensor) -> "MlaState":
        """Return the cache with the new tokens at its end."""
        return MlaState(torch.cat([self.latent, latent], dim=1), torch.cat([self.k_rot, k_rot], dim=1))


LayerState = KdaState | MlaState
_Layer = TypeVar("_Layer", KdaState, MlaState, LayerState)


def tensors_of(layer: LayerState) -> dict[str, Tensor]:
    """Return the tensors of a layer's state under their names; an MLA cache may have more than `MlaState` has."""
    return {f.name: getattr(layer, f.name) for f in fields(layer)}


def with_tensors(layer: _Layer, tensors: Mapping[str, Any]) -> _Layer:
    """Return a layer's state of the same kind with these tensors."""
    return replace(layer, **tensors)


@dataclass(frozen=True, slots=True)
class State:
    """The state of all layers after `n_tokens` tokens."""

    n_tokens: int
    layers: tuple[LayerState, ...]


def initial_state(geometry: Geometry, batch: int, device: torch.device) -> State:
    """Return the state before the first token of `batch` texts."""
    return State(0, tuple(_initial(geometry, layer, batch, device) for layer in range(geometry.n_layers)))


def _initial(g: Geometry, layer: int, batch: int, device: torch.device) -> LayerState:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(batch, *shape, dtype=torch.float32, device=device)

    if g.is_full_attention(layer):
        return MlaState(latent=zeros(0, g.kv_lora_rank), k_rot=zeros(0, g.qk_rope_head_dim))
    return KdaState(
        memory=zeros(g.kda_n_heads, g.kda_head_dim, g.kda_head_dim),
        conv=zeros(g.conv_kernel_size - 1, 3 * g.kda_size),
    )


@dataclass(slots=True)
class FixedState:
    """The state of one text in buffers of fixed place and capacity, which decode changes in place.

    n_tokens  tokens so far; `n_past` is the same number on the device, int32 [1], where kernels read it
    layers    as in `State` with one text; of an MLA layer's cache the first n_tokens positions are meant
    memory    float32 [KDA layers, 1, heads, key size, value size], of which the layers' memories are parts
    conv      float32 [KDA layers, 1, kernel - 1, 3 * kda_size], likewise
    """

    n_tokens: int
    n_past: Tensor
    layers: tuple[LayerState, ...]
    memory: Tensor
    conv: Tensor

    @classmethod
    def empty(cls, geometry: Geometry, context: int, device: torch.device, *, start: State | None = None) -> "FixedState":
        """Return the state before the first token, with room for `context` tokens.

        start  that state as one that nothing changes, on any device, if its MLA caches have more tensors than those of `initial_state`
        """
        memory, conv = _kda_buffers(geometry, device)
        kda = iter(zip(memory, conv, strict=True))
        start = initial_state(geometry, 1, torch.device("meta")) if start is None else start
        layers = [_with_room(layer, context, device) if isinstance(layer, MlaState) else KdaState(*next(kda)) for layer in start.layers]
        return cls(0, torch.zeros(1, dtype=torch.int32, device=device), tuple(layers), memory, conv)

    @property
    def n_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for layer in self.layers for x in tensors_of(layer).values())

    def reset(self) -> None:
        """Return to the state before the first token."""
        self.memory.zero_()
        self.conv.zero_()
        self.set_n_tokens(0)

    def load(self, state: State) -> None:
        """Take over a state of one text."""
        for mine, other in zip(self.layers, state.layers, strict=True):
            assert type(mine) is type(other)
            for buffer, tensor in zip(tensors_of(mine).values(), tensors_of(other).values(), strict=True):
                assert tensor.shape[1] <= buffer.shape[1]
                buffer[:, : tensor.shape[1]].copy_(tensor)
        self.set_n_tokens(state.n_tokens)

    def set_n_tokens(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.n_past.fill_(n_tokens)

    def copied(self) -> State:
        """Return the state as one that nothing changes."""
        return State(self.n_tokens, tuple(self._copied(layer) for layer in self.layers))

    def _copied(self, layer: LayerState) -> LayerState:
        seen = slice(self.n_tokens if isinstance(layer, MlaState) else None)
        return with_tensors(layer, {name: tensor[:, seen].clone() for name, tensor in tensors_of(layer).items()})


def _with_room(layer: MlaState, context: int, device: torch.device) -> MlaState:
    buffers = {name: torch.zeros(1, context, tensor.shape[-1], dtype=tensor.dtype, device=device) for name, tensor in tensors_of(layer).items()}
    return with_tensors(layer, buffers)


def kda_layers(g: Geometry) -> list[int]:
    return [layer for layer in range(g.n_layers) if not g.is_full_attention(layer)]


def kda_input_sizes(g: Geometry) -> list[int]:
    """Return the widths of the parts of a KDA layer's `attn_in` product: u of q, k and v, the gate, the low-rank input of the decay, beta."""
    return [3 * g.kda_size, g.kda_size, g.kda_head_dim, g.kda_n_heads]


def _kda_buffers(g: Geometry, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return zeros for the memory and the conv of all KDA layers, one behind the other."""
    n, size = len(kda_layers(g)), g.kda_head_dim
    memory = torch.zeros(n, 1, g.kda_n_heads, size, size, device=device)
    return memory, torch.zeros(n, 1, g.conv_kernel_size - 1, 3 * g.kda_size, device=device)


@dataclass(frozen=True, slots=True)
class Rewind:
    """What takes a text back into its last block: the KDA state before the block, and what the block's rows gave each KDA layer.

    A recurrence cannot be undone, but it can be run again for fewer rows. An MLA cache needs nothing: what lies beyond the text is written anew.

    memory, conv   as in `FixedState`, before the block
    inputs         by KDA layer: its `attn_in` product, float32 [1, rows, ...], and the decay's, float32 [1, rows, kda_size]
    """

    memory: Tensor
    conv: Tensor
    inputs: dict[int, tuple[Tensor, ...]]

    @classmethod
    def empty(cls, geometry: Geometry, n_rows: int, device: torch.device) -> "Rewind":
        """Return one with room for blocks of n_rows rows."""
        sizes = sum(kda_input_sizes(geometry)), geometry.kda_size
        inputs = {layer: tuple(torch.zeros(1, n_rows, size, device=device) for size in sizes) for layer in kda_layers(geometry)}
        return cls(*_kda_buffers(geometry, device), inputs)

    @property
    def n_bytes(self) -> int:
        tensors = [self.memory, self.conv, *(x for pair in self.inputs.values() for x in pair)]
        return sum(x.numel() * x.element_size() for x in tensors)

    def save(self, state: FixedState) -> None:
        """Remember the KDA state."""
        self.memory.copy_(state.memory)
        self.conv.copy_(state.conv)

    def restore(self, state: FixedState) -> None:
        """Put the remembered KDA state back."""
        state.memory.copy_(self.memory)
        state.conv.copy_(self.conv)

    def keep_inputs(self, layer: int, *inputs: Tensor) -> None:
        """Remember what a block's rows gave a layer, [1, rows, ...] each."""
        for target, source in zip(self.inputs[layer], inputs, strict=True):
            target[:, : source.shape[1]].copy_(source)


def rewind_bytes(geometry: Geometry, n_rows: int) -> int:
    """Return the size of a `Rewind` for blocks of n_rows rows."""
    return Rewind.empty(geometry, n_rows, torch.device("meta")).n_bytes
