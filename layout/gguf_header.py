"""Reading a GGUF v3 header: keys, tensor types, shapes and places. Tensor data is left where it is."""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from manifests.errors import BadInputError

MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# Type number -> name, elements per block, bytes per block; the types that a spine may hold.
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 8: ("Q8_0", 32, 34), 30: ("BF16", 1, 2)}


class GgufTensor(NamedTuple):
    """A tensor's type, shape (slowest dimension first), and place in the file, in bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class GgufHeader(NamedTuple):
    """What a GGUF file says of itself; tensors in file order."""

    keys: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data_offset: int
    alignment: int


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        if self.at + n > len(self.data):
            raise BadInputError("the file ends inside the header")
        self.at += n
        return self.data[self.at - n : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        return self.take(self.scalar("<Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            of, n = self.scalar("<I"), self.scalar("<Q")
            return [self.value(of) for _ in range(n)]
        if kind not in _SCALARS:
            raise BadInputError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])


def read_gguf_header(path: Path, *, most_bytes: int = 64 << 20) -> GgufHeader:
    """Parse the header of a GGUF v3 file. Raises BadInputError if it is none, is cut short, or holds a type a spine cannot have."""
    try:
        with path.open("rb") as file:
            n_file = file.seek(0, 2)
            file.seek(0)
            cursor = _Cursor(file.read(most_bytes))
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return _parse(cursor, n_file)
    except (BadInputError, UnicodeDecodeError, ValueError) as error:
        raise BadInputError(f"{path}: not a usable GGUF file of {n_file} bytes: {error}") from None


def _parse(cursor: _Cursor, n_file: int) -> GgufHeader:
    if cursor.take(4) != MAGIC or cursor.scalar("<I") != 3:
        raise BadInputError("it does not begin with the mark of GGUF version 3")
    n_tensors, n_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    keys = {cursor.text(): cursor.value(cursor.scalar("<I")) for _ in range(n_keys)}
    alignment = keys.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise BadInputError(f"general.alignment is {alignment!r}, expected a positive whole number")
    infos = [_tensor_info(cursor) for _ in range(n_tensors)]
    data_offset = -(-cursor.at // alignment) * alignment
    tensors = {t.name: t._replace(offset=data_offset + t.offset) for t in infos}
    end = max((t.offset + t.n_bytes for t in tensors.values()), default=data_offset)
    if end > n_file:
        raise BadInputError(f"its tensors need {end} bytes: {end - n_file} are missing")
    return GgufHeader(keys, tensors, data_offset, alignment)


def _tensor_info(cursor: _Cursor) -> GgufTensor:
    name = cursor.text()
    shape = tuple(reversed([cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]))
    number, offset = cursor.scalar("<I"), cursor.scalar("<Q")
    if number not in TYPES:
        raise BadInputError(f"tensor {name} has the type number {number}; known are {sorted(TYPES)}")
    kind, block, block_bytes = TYPES[number]
    return GgufTensor(name, kind, shape, offset, math.prod(shape) // block * block_bytes)
