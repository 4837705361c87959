"""What a text leaves behind for its next token: per layer a KDA memory or an MLA cache. Nothing here is changed in place."""

from dataclasses import dataclass

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
    """

    n_tokens: int
    n_past: Tensor
    layers: tuple[LayerState, ...]

    @classmethod
    def empty(cls, geometry: Geometry, context: int, device: torch.device) -> "FixedState":
        """Return the state before the first token, with room for `context` tokens."""
        layers = tuple(_with_room(layer, context) for layer in initial_state(geometry, 1, device).layers)
        return cls(0, torch.zeros(1, dtype=torch.int32, device=device), layers)

    def reset(self) -> None:
        """Return to the state before the first token."""
        for layer in self.layers:
            if isinstance(layer, KdaState):
                layer.memory.zero_()
                layer.conv.zero_()
        self.set_n_tokens(0)

    def load(self, state: State) -> None:
        """Take over a state of one text."""
        for mine, other in zip(self.layers, state.layers, strict=True):
            if isinstance(mine, MlaState):
                assert isinstance(other, MlaState) and other.latent.shape[1] <= mine.latent.shape[1]
                mine.latent[:, : other.latent.shape[1]].copy_(other.latent)
                mine.k_rot[:, : other.k_rot.shape[1]].copy_(other.k_rot)
            else:
                assert isinstance(other, KdaState)
                mine.memory.copy_(other.memory)
                mine.conv.copy_(other.conv)
        self.set_n_tokens(state.n_tokens)

    def set_n_tokens(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.n_past.fill_(n_tokens)

    def copied(self) -> State:
        """Return the state as one that nothing changes."""
        return State(self.n_tokens, tuple(self._copied(layer) for layer in self.layers))

    def _copied(self, layer: LayerState) -> LayerState:
        if isinstance(layer, MlaState):
            return MlaState(layer.latent[:, : self.n_tokens].clone(), layer.k_rot[:, : self.n_tokens].clone())
        return KdaState(layer.memory.clone(), layer.conv.clone())


def _with_room(layer: LayerState, context: int) -> LayerState:
    if isinstance(layer, KdaState):
        return layer
    latent, k_rot = layer.latent, layer.k_rot
    return MlaState(latent.new_zeros((1, context, latent.shape[-1])), k_rot.new_zeros((1, context, k_rot.shape[-1])))
