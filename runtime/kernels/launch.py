"""What every Triton kernel here shares: when it runs, how it is compiled, and what it may be given.

A row's bits must not depend on the number of rows (1..16), its place or the other rows, so a kernel has one binary for all row counts:
counts of rows and positions are arguments that Triton may not specialise, everything else is a compile-time constant that follows from the
geometry, pointers are aligned to 16 bytes, sums have a fixed order, and nothing is tuned at run time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr, tensor
except ModuleNotFoundError:
    triton = tl = None
    constexpr = tensor = object

__all__ = [
    "DOT_PRECISION", "OPTIONS", "block_of", "constexpr", "is_ready", "jit", "ready", "rows_of", "runs_kernels", "runs_on", "tensor", "tl", "warps_of",
]  # fmt: skip

HAS_TRITON = triton is not None
# Triton's interpreter runs the kernels on a CPU, for tests.
IS_INTERPRETED = HAS_TRITON and bool(triton.knobs.runtime.interpret)
# Products and sums are rounded one by one, as torch rounds them; these kernels wait for memory, not for arithmetic.
OPTIONS = {"enable_fp_fusion": False}
# Every float32 factor as three bfloat16 on tensor cores, six products: 24 bits. The interpreter multiplies float32 itself.
DOT_PRECISION = "ieee" if IS_INTERPRETED else "bf16x6"
ALIGNMENT_BYTES = 16


def jit(*unspecialised: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a kernel with Triton; `unspecialised` names its counts of rows. Without Triton the function stays as it is, and never runs."""

    def compiled(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(unspecialised)) if HAS_TRITON else function

    return compiled


def runs_kernels(*tensors: Tensor) -> bool:
    """Return whether Triton kernels compute on these tensors: float32 on a GPU, and no gradient is asked of them.

    Kernels have no backward pass; whoever trains through decode arithmetic gets the plain form, which agrees within rounding.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return False
    return runs_on(*tensors) and all(x.dtype is torch.float32 for x in tensors)


def runs_on(*tensors: Tensor) -> bool:
    """Return whether Triton kernels compute where these tensors lie: on a GPU, or anywhere under the interpreter."""
    return HAS_TRITON and all(x.is_cuda or IS_INTERPRETED for x in tensors)


def ready(x: Tensor) -> Tensor:
    """Return x contiguous and aligned, copied only where it is not: Triton compiles another binary for an unaligned pointer."""
    x = x.contiguous()
    return x if is_ready(x) else x.clone()


def is_ready(x: Tensor) -> bool:
    """Return whether a kernel may write x in place: contiguous and aligned."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT_BYTES == 0


def rows_of(x: Tensor, n_dims: int) -> tuple[Tensor, int]:
    """Return x as rows of its last n_dims dimensions, and the elements from one row to the next.

    A part of a wider product, such as y[..., a:b], is taken as it lies; anything else that is not ready is copied. The distance is a
    constant of a kernel: it follows from the shapes of the model.
    """
    rows = x.flatten(0, -n_dims - 1)
    if not (rows[0].is_contiguous() and rows.data_ptr() % ALIGNMENT_BYTES == 0):
        rows = ready(rows)
    return rows, rows.stride(0)


def block_of(size: int, *, least: int = 1) -> int:
    """Return the power of two that holds `size` elements, at least `least`."""
    return max(least, 1 << (size - 1).bit_length())


def warps_of(block: int) -> int:
    """Return how many warps share one row of `block` elements: one for 256, at most 16."""
    return min(16, max(1, block // 256))
