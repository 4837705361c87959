"""MXFP4 as the checkpoint ships it (compressed-tensors, mxfp4-pack-quantized), decoded exactly with numpy."""

import numpy as np

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
BLOCK_SIZE = 32
NAN_SCALE = 255


def decode_mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Expand MXFP4 to float32, exactly.

    packed   uint8 [rows, cols/2]; the low nibble is the even column
    scale    uint8 [rows, cols/32]; E8M0, value 2**(s - 127); 255 is NaN and refused
    returns  float32 [rows, cols]

    Raises ValueError if the shapes do not fit each other or a scale is 255.
    Source: OCP Microscaling Formats v1.0, E2M1 elements with E8M0 scales.
    """
    rows, n_packed = packed.shape
    if n_packed * 2 % BLOCK_SIZE or scale.shape != (rows, n_packed * 2 // BLOCK_SIZE):
        raise ValueError(f"packed {packed.shape} and scale {scale.shape} do not fit: expected one scale per {BLOCK_SIZE} columns")
    if (scale == NAN_SCALE).any():
        raise ValueError("a scale byte is 255, which E8M0 defines as NaN")
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1, BLOCK_SIZE)
    factor = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
    return (E2M1_VALUES[nibbles] * factor[..., None]).reshape(rows, -1)
