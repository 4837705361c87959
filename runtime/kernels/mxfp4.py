"""MXFP4 in torch: the exact values of layout.mxfp4, on the device where the bytes lie."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from layout.mxfp4 import BLOCK_SIZE, E2M1_VALUES, NAN_SCALE


def decode_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Expand MXFP4 to float32, exactly.

    packed   uint8 [rows, cols/2]; the low nibble is the even column
    scale    uint8 [rows, cols/32]; E8M0, value 2**(s - 127); 255 gives NaN (it is refused at extraction)
    returns  float32 [rows, cols]
    """
    pairs, scales = _tables(packed.device)
    values = F.embedding(packed.int(), pairs).view(packed.shape[0], -1, BLOCK_SIZE)
    return (values * F.embedding(scale.int(), scales)).flatten(1)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two values of every byte [256, 2] and the value of every scale [256, 1]."""
    byte = np.arange(256)
    pairs = np.stack([E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]], axis=1)
    # A table, as exp2 need not be exact on a GPU.
    scales = np.full((256, 1), np.nan, np.float32)
    scales[:NAN_SCALE, 0] = np.ldexp(np.float32(1), byte[:NAN_SCALE] - 127)
    return torch.from_numpy(pairs).to(device), torch.from_numpy(scales).to(device)
