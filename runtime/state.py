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
