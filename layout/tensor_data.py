"""The values of a checkpoint's spine tensors, read in bounded blocks and expanded to float32 exactly."""

from collections.abc import Iterator

import numpy as np

from layout.checkpoint import Checkpoint
from layout.direct import Extent, aligned_buffer, read_extent, span_bytes
from layout.tensors import SpineTensor
from manifests.errors import BadInputError

BLOCK_BYTES = 32 << 20


def as_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Expand BF16, F16 or F32 to float32, exactly. `raw` is uint8 [..., bytes of a row]."""
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def raw_blocks(checkpoint: Checkpoint, name: str, *, block_bytes: int = BLOCK_BYTES) -> Iterator[np.ndarray]:
    """Yield a tensor's bytes as uint8 [rows, row bytes], as many rows at a time as fit block_bytes; each is valid until the next."""
    tensor, extent = checkpoint.tensors[name], checkpoint.extent(name)
    n_rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    row_bytes = tensor.n_bytes // n_rows
    step = max(1, block_bytes // row_bytes)
    mode = checkpoint.read_mode
    buffer = aligned_buffer(span_bytes(min(step, n_rows) * row_bytes, mode.alignment))
    for row in range(0, n_rows, step):
        n_bytes = min(step, n_rows - row) * row_bytes
        block = read_extent(Extent(extent.path, extent.offset + row * row_bytes, n_bytes), buffer, mode)
        yield np.frombuffer(block, np.uint8).reshape(-1, row_bytes)


def float_blocks(checkpoint: Checkpoint, name: str) -> Iterator[np.ndarray]:
    """Yield a tensor as float32 [rows, cols] blocks. Raises BadInputError on values that are not finite."""
    for raw in raw_blocks(checkpoint, name):
        block = as_float32(raw, checkpoint.tensors[name].dtype)
        check_finite(block, checkpoint, name)
        yield block


def check_finite(values: np.ndarray, checkpoint: Checkpoint, name: str) -> None:
    """Raise BadInputError if a tensor holds infinities or NaN."""
    if not np.isfinite(values).all():
        raise BadInputError(f"tensor {name} in {checkpoint.extent(name).path.name} holds values that are not finite; fetch the file again")


def read_float_tensor(checkpoint: Checkpoint, tensor: SpineTensor) -> np.ndarray:
    """Return a whole spine tensor as float32, its rule applied, in the spine's shape.

    Raises BadInputError on values that are not finite and on A_log padding that is not zero.
    """
    values = [np.concatenate(list(float_blocks(checkpoint, s.name))).reshape(-1) for s in tensor.sources]
    if tensor.rule == "fold":
        return values[0] * values[1]
    if tensor.rule == "a_log":
        return _real_heads(values[0], tensor.shape[0], tensor.sources[0].name)
    return values[0].reshape(tensor.shape)


def _real_heads(values: np.ndarray, n_heads: int, name: str) -> np.ndarray:
    padding = values[n_heads:]
    if padding.any():
        raise BadInputError(
            f"tensor {name}: entries {n_heads}..{len(values) - 1} must be zero padding behind {n_heads} heads, but hold "
            f"{padding[padding != 0][0]}; this checkpoint means something else by them"
        )
    return values[:n_heads]
