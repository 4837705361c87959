"""ggml's Q8_0, decoded exactly with numpy: blocks of 34 bytes, a float16 scale and 32 signed bytes."""

import numpy as np

BLOCK_SIZE = 32
BLOCK_BYTES = 34


def split_q8_0(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Separate the quants from the scales.

    raw      uint8 [rows, cols/32*34]
    returns  int8 [rows, cols], float16 [rows, cols/32]
    """
    blocks = raw.reshape(raw.shape[0], -1, BLOCK_BYTES)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(raw.shape[0], -1), scales


def decode_q8_0(raw: np.ndarray) -> np.ndarray:
    """Expand Q8_0 to float32: scale times quant, exactly as float32 multiplies them.

    raw      uint8 [rows, cols/32*34]
    returns  float32 [rows, cols]
    """
    quants, scales = split_q8_0(raw)
    blocks = quants.reshape(*scales.shape, BLOCK_SIZE).astype(np.float32) * scales.astype(np.float32)[..., None]
    return blocks.reshape(quants.shape)
