"""Attention of many new tokens over a latent cache, some heads and some queries at a time, so that its memory does not grow with their number.

The formula is that of mla.py with keys and values written out; `mla.attend_expanded` is its reference. float32 throughout.
"""

import math

import torch
from torch import Tensor

from runtime.kernels.q8_0 import expand_q8_0

# For the scores of what is computed at a time, once before and once after the softmax.
SCORE_BYTES = 100_000_000
MOST_QUERIES = 512
MOST_HEADS = 16


def attend_by_heads(q: Tensor, latent: Tensor, k_rot: Tensor, kv_b: tuple[Tensor, Tensor], *, score_bytes: int = SCORE_BYTES) -> Tensor:
    """Return what the T last of S tokens attend to.

    q        float32 [T, H, N + R]
    latent   float32 [S, L], normalised, and k_rot float32 [S, R]: the new tokens are in them
    kv_b     int8 [H, N + V, L] and float16 [H, N + V, L/32]
    returns  float32 [T, H, V]
    """
    (n_tok, n_heads, size), n_rope, n_seen = q.shape, k_rot.shape[-1], latent.shape[0]
    n_nope = size - n_rope
    n_values = kv_b[0].shape[1] - n_nope
    n_queries, n_at_once = block_sizes(n_tok, n_seen, n_heads, score_bytes)
    o = torch.empty(n_tok, n_heads, n_values, dtype=q.dtype, device=q.device)
    for first in range(0, n_heads, n_at_once):
        heads = slice(first, min(first + n_at_once, n_heads))
        matrix = expand_q8_0(*(part[heads].flatten(0, 1) for part in kv_b)).to(q.dtype)
        k_nope, values = (latent @ matrix.T).unflatten(1, (-1, n_nope + n_values)).transpose(0, 1).split([n_nope, n_values], dim=-1)
        keys = torch.cat([k_nope, k_rot.expand(len(k_nope), -1, -1)], dim=-1)  # [heads, S, N + R]
        _attend(q[:, heads].transpose(0, 1) * size**-0.5, keys, values, n_queries, o[:, heads].transpose(0, 1))
    return o


def _attend(q: Tensor, keys: Tensor, values: Tensor, n_queries: int, out: Tensor) -> None:
    """Write softmax(q keys^T) values of some heads, [heads, T, V], `n_queries` rows at a time: a query sees the positions up to its own."""
    n_tok, n_past = q.shape[1], keys.shape[1] - q.shape[1]
    for start in range(0, n_tok, n_queries):
        end = min(start + n_queries, n_tok)
        scores = q[:, start:end] @ keys[:, : n_past + end].transpose(1, 2)
        # Only among the positions of these queries themselves is there a future.
        is_future = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
        scores[:, :, n_past + start :].masked_fill_(is_future, -math.inf)
        out[:, start:end] = torch.softmax(scores, -1) @ values[:, : n_past + end]


def block_sizes(n_tok: int, n_seen: int, n_heads: int, score_bytes: int) -> tuple[int, int]:
    """Return how many queries and how many heads are computed at a time: their scores, float32 twice, fit, or it is 16 queries of one head."""
    n_fitting = max(16, score_bytes // (2 * 4 * n_seen))
    n_queries = min(n_tok, MOST_QUERIES, n_fitting)
    return n_queries, max(1, min(n_heads, MOST_HEADS, n_fitting // n_queries))


def attention_bytes(n_tok: int, n_seen: int, n_heads: int, *, n_nope: int, n_rope: int, n_values: int, n_latents: int) -> int:
    """Return the device memory that `attend_by_heads` takes beside its arguments and its result."""
    n_queries, n_at_once = block_sizes(n_tok, n_seen, n_heads, SCORE_BYTES)
    # Keys and values before and after they are joined, the queries, the matrix with what it is expanded from, and scores.
    rows = n_seen * (2 * n_nope + n_rope + n_values) + n_tok * (n_nope + n_rope) + 3 * (n_nope + n_values) * n_latents
    return 4 * n_at_once * (rows + n_queries * (2 * n_seen + 2 * n_values))
