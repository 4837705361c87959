"""Q8_0 in torch: the exact values of layout.q8_0, on the device where the quants lie."""

import torch
from torch import Tensor

from layout.q8_0 import BLOCK_SIZE


def expand_q8_0(quants: Tensor, scales: Tensor) -> Tensor:
    """Expand Q8_0 to float32: scale times quant, as float32 multiplies them.

    quants   int8 [rows, cols]
    scales   float16 [rows, cols/32]
    returns  float32 [rows, cols]
    """
    blocks = quants.unflatten(-1, (-1, BLOCK_SIZE)).to(torch.float32)
    return (blocks * scales.to(torch.float32).unsqueeze(-1)).flatten(1)
