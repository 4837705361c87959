"""Q8_0 from a checkpoint's floats, bit for bit what gguf-py's quantiser gives, at a speed that keeps up with drives.

Per block of 32 values: d = max|x| / 127 in float32, quants = x * (1 / d) rounded with halves away from zero, stored scale = d as float16.
"""

from typing import Any

import numpy as np

from layout.q8_0 import BLOCK_BYTES, BLOCK_SIZE

# Blocks worked on at a time: few enough for the 2.5 MB of scratch to stay in cache, many enough that threads seldom meet at Python's lock,
# which numpy takes again after every call.
_STEP = 8192
_PAIRS = BLOCK_SIZE // 2
_BLOCK = np.dtype([("scale", "<u2"), ("quants", f"V{BLOCK_SIZE}")])
_SOURCE_DTYPES: dict[str, np.dtype[Any]] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
_SIGN, _MAGNITUDE, _UPPER_HALF = np.uint32(1 << 31), np.uint32((1 << 31) - 1), np.uint32(0xFFFF0000)
# The largest float32 below one half. Adding it, with the value's sign, and cutting off rounds halves away from zero, exactly; adding one half
# itself would turn 0.49999997 into 1.
_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0)).view(np.uint32)
# From here on a float32 becomes infinity as a float16.
_FLOAT16_OVERFLOW = 65520.0
_FLOAT16_NORMAL, _HALF = np.float32(2**-14), np.float32(0.5)


class Quantiser:
    """Quantises any number of values, a cache-sized step at a time. Its scratch arrays serve one thread at a time."""

    def __init__(self, *, step: int = _STEP) -> None:
        self._step = step
        # [even or odd column, pair]: a BF16 word of 32 bits splits into its two values without moving anything sideways.
        self._values = np.empty((2, step * _PAIRS), np.float32)
        self._work = np.empty((2, step * _PAIRS), np.uint32)
        self._packed = np.empty(step * _PAIRS, np.uint16)

    def quantise(self, raw: np.ndarray, dtype: str, out: np.ndarray) -> int:
        """Fill the beginning of `out` with the Q8_0 blocks of the values in `raw`, and return how many bytes they are.

        raw    uint8 [n * 32 * bytes of a value], contiguous; whole rows or not, as rows are whole blocks
        dtype  BF16, F16 or F32, as safetensors names it
        out    uint8 [n * 34 or more], contiguous

        Raises ValueError on a value that is not finite, and on one so large that its block's scale overflows float16.
        """
        values = raw.view(_SOURCE_DTYPES[dtype]).reshape(-1, BLOCK_SIZE)
        n_bytes = len(values) * BLOCK_BYTES
        blocks = out[:n_bytes].view(_BLOCK)
        with np.errstate(divide="ignore", over="ignore"):
            for at in range(0, len(blocks), self._step):
                self._quantise_step(values[at : at + self._step].reshape(-1), blocks[at : at + self._step])
        return n_bytes

    def _quantise_step(self, source: np.ndarray, blocks: np.ndarray) -> None:
        n_pairs = len(source) // 2
        values, work, packed = self._values[:, :n_pairs], self._work[:, :n_pairs], self._packed[:n_pairs]
        _split(source, values)
        scales = _largest(values, work) / np.float32(127)
        _refuse_unstorable(scales)
        inverses = 1 / scales
        # Where 1/d overflows, gguf-py's quants are inf or NaN cast to int8, which is 0 as for d = 0; the stored scale is 0 all the same.
        np.copyto(inverses, 0, where=np.isinf(inverses))
        values *= np.repeat(inverses, _PAIRS)
        np.bitwise_and(values.view(np.uint32), _SIGN, out=work)
        work |= _BELOW_HALF
        values += work.view(np.float32)
        quants = work.view(np.int32)
        np.copyto(quants, values, casting="unsafe")
        # The even column's byte below the odd one's.
        quants[0] &= 0xFF
        quants[1] <<= 8
        quants[0] |= quants[1]
        np.copyto(packed, work[0], casting="unsafe")
        blocks["scale"] = _float16_bits(scales)
        blocks["quants"] = packed.view(_BLOCK["quants"])


def _split(source: np.ndarray, values: np.ndarray) -> None:
    """Expand [2 * n] values to float32 [even or odd, n]; BF16 comes as uint16."""
    if source.dtype == np.uint16:
        words, bits = source.view(np.uint32), values.view(np.uint32)
        np.left_shift(words, 16, out=bits[0])
        np.bitwise_and(words, _UPPER_HALF, out=bits[1])
    else:
        values[:] = source.reshape(-1, 2).T


def _largest(values: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of every block, float32 [n_blocks]; NaN and infinity count as larger than any number.

    values  float32 [even or odd, n_blocks * 16]
    work    uint32, the same shape, overwritten

    Positive floats compare like their bits. Each pass takes the larger of an element and the one so many places on, over the whole array in
    one go: only the first element of each block is right at the end, but whole arrays are far cheaper for numpy than many short rows.
    """
    np.bitwise_and(values.view(np.uint32), _MAGNITUDE, out=work)
    here, there = work
    np.maximum(here, there, out=here)
    n = len(here)
    for places in (8, 4, 2, 1):
        n -= places
        np.maximum(here[:n], here[places : n + places], out=there[:n])
        here, there = there, here
    return here[::_PAIRS].copy().view(np.float32)


def _refuse_unstorable(scales: np.ndarray) -> None:
    largest = scales.max()
    if not np.isfinite(largest):
        raise ValueError("holds values that are not finite")
    if largest >= _FLOAT16_OVERFLOW:
        raise ValueError(f"holds a value of magnitude {largest * 127:.4g}, and Q8_0 stores none from {_FLOAT16_OVERFLOW * 127:.0f} on")


def _float16_bits(scales: np.ndarray) -> np.ndarray:
    """Round float32 [n], from 0 up to where float16 ends, to float16, ties to even, and return the bits as uint16.

    numpy's own cast needs over ten times as long for what becomes subnormal, and small weights have such scales throughout.
    """
    normal = np.maximum(scales, _FLOAT16_NORMAL).astype(np.float16).view(np.uint16)
    # Behind one half float32 counts in steps of 2**-24, as subnormal float16 does: this addition is the rounding.
    subnormal = ((scales + _HALF).view(np.uint32) - _HALF.view(np.uint32)).astype(np.uint16)
    return np.where(scales < _FLOAT16_NORMAL, subnormal, normal)
