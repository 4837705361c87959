"""Multi-head latent attention without rotation: keys and values are projections of one cached latent per token.

    score[h,t,s] = (q_nope[t,h] . k_nope[s,h] + q_rot[t,h] . k_rot[s]) * (N + R)^-0.5, causal;    o = sum_s softmax(score)_s v[s,h]
    k_nope[s,h] = W_k[h] latent[s];    v[s,h] = W_v[h] latent[s];    kv_b[h] = [W_k[h]; W_v[h]]

The R "rope" elements exist and count in the scale, but the model never rotates them.

Shapes: B batch, T new tokens, S tokens in all (the T new ones last), H heads, N nope size, R rope size, V value size, L latent size.

    q_nope   [B, T, H, N]
    q_rot    [B, T, H, R]
    latent   [B, S, L], normalised
    k_rot    [B, S, R]
    kv_b     [H, N + V, L]
    returns  [B, T, H, V]
"""

import math

import torch
from torch import Tensor

from runtime.kernels.rows import by_rows


def attend_absorbed(q_nope: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, kv_b: Tensor) -> Tensor:
    """Attend in the space of the latents, row by row: a row's shapes depend on its position alone, and so do its bits."""
    n_nope = q_nope.shape[-1]
    w_k, w_v = kv_b[:, :n_nope], kv_b[:, n_nope:]
    scale = (n_nope + q_rot.shape[-1]) ** -0.5
    q_latent = by_rows(lambda rows: torch.einsum("...hn,hnl->...hl", rows, w_k), q_nope, is_tiled=True)
    n_past = latent.shape[1] - q_nope.shape[1]
    outputs = []
    for t in range(q_nope.shape[1]):
        known, known_rot = latent[:, : n_past + t + 1], k_rot[:, : n_past + t + 1]
        scores = q_latent[:, t] @ known.transpose(1, 2) + q_rot[:, t] @ known_rot.transpose(1, 2)  # [B, H, n_past + t + 1]
        outputs.append(torch.softmax(scores * scale, -1) @ known)
    return by_rows(lambda rows: torch.einsum("...hl,hvl->...hv", rows, w_v), torch.stack(outputs, dim=1), is_tiled=True)


def attend_expanded(q_nope: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, kv_b: Tensor, *, n_query_rows: int = 256) -> Tensor:
    """Attend with keys and values written out, `n_query_rows` queries at a time: the scores take B * H * n_query_rows * S floats."""
    n_nope = q_nope.shape[-1]
    scale = (n_nope + q_rot.shape[-1]) ** -0.5
    k_nope, v = torch.einsum("bsl,hnl->bhsn", latent, kv_b).split([n_nope, kv_b.shape[1] - n_nope], dim=-1)
    q_nope, q_rot = q_nope.transpose(1, 2), q_rot.transpose(1, 2)  # [B, H, T, ...]
    n_tok, n_past = q_nope.shape[2], latent.shape[1] - q_nope.shape[2]
    outputs = []
    for start in range(0, n_tok, n_query_rows):
        end = min(start + n_query_rows, n_tok)
        n_known = n_past + end
        scores = q_nope[:, :, start:end] @ k_nope[:, :, :n_known].transpose(-1, -2)
        scores = (scores + q_rot[:, :, start:end] @ k_rot[:, None, :n_known].transpose(-1, -2)) * scale
        is_future = torch.ones(end - start, n_known, dtype=torch.bool, device=scores.device).triu(n_past + start + 1)
        outputs.append(torch.softmax(scores.masked_fill(is_future, -math.inf), -1) @ v[:, :, :n_known])
    return torch.cat(outputs, dim=2).transpose(1, 2)
