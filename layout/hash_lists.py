"""`experts.xxh128`: the XXH3-128 hash of every expert file, in the format of the standard tool: `xxhsum -c` checks a directory by it.

One line per file, `<32 lower-case hex digits>  <bare file name>`, sorted by layer, then expert.
"""

import re
from collections.abc import Mapping
from io import StringIO
from itertools import islice
from pathlib import Path

import numpy as np
import xxhash

from layout.direct import file_blocks, probe_directory
from layout.record import expert_file_name, parse_expert_file_name
from manifests.errors import BadInputError, DamagedDataError, listed

HASH_LIST_NAME = "experts.xxh128"
N_HASH_BYTES = 16

_LINE = re.compile(r"([0-9a-f]{32})  (L(0|[1-9][0-9]{0,8})-E(0|[1-9][0-9]{0,8})\.bin)\n", re.ASCII)

Buffer = bytes | bytearray | memoryview | np.ndarray


def xxh3_128_hex(buffer: Buffer) -> str:
    """Return the XXH3-128 hash of a contiguous buffer's bytes as 32 hex digits, most significant first, as `xxhsum -H128` prints it."""
    return xxhash.xxh3_128_hexdigest(buffer.data if isinstance(buffer, np.ndarray) else buffer)


def xxh3_128_of_file(path: Path, n_bytes: int) -> str:
    """Return the hash of a large file, read past the page cache. Raises DamagedDataError if it has another size than n_bytes."""
    found = path.stat().st_size
    if found != n_bytes:
        raise DamagedDataError(f"has {found} bytes, expected {n_bytes}")
    state = xxhash.xxh3_128()
    for block in file_blocks(path, 0, n_bytes, probe_directory(path.parent)):
        state.update(block)
    return state.hexdigest()


def format_hash_list(hashes: Mapping[tuple[int, int], str]) -> str:
    """Return the hash list of the experts {(layer, expert): 32 hex digits}."""
    return "".join(f"{hashes[key]}  {expert_file_name(*key)}\n" for key in sorted(hashes))


def parse_hash_list(text: str | bytes, *, where: str) -> dict[tuple[int, int], str]:
    """Read a hash list, in any order of its lines: {(layer, expert): 32 hex digits}, in the order of the list.

    Raises BadInputError, naming `where` and the lines, if any line is not exactly of the format or a file is named twice.
    """
    if isinstance(text, bytes):
        # Bytes that are not ASCII become characters that no line may hold, and so are reported with their line.
        text = text.decode("ascii", "replace")
    matches = _LINE.findall(text)
    hashes = {(int(layer), int(expert)): digest for digest, _, layer, expert in matches}
    # findall skips what does not match, so the lengths tell whether anything was skipped.
    n_chars = 35 * len(matches) + sum(len(name) for _, name, _, _ in matches)
    if n_chars != len(text) or len(hashes) != len(matches):
        raise BadInputError(listed(_faults(text), f"{where}: not a list of expert hashes as kprep writes it:"))
    return hashes


def _faults(text: str) -> list[str]:
    faults, line_of_name = [], dict[str, int]()
    # Not splitlines(): it ends lines at more characters than the line feed, and the numbers would not be the editor's.
    for number, line in enumerate(StringIO(text), start=1):
        match = _LINE.fullmatch(line)
        name = match[2] if match else None
        if name is None:
            faults.append(f"line {number}: {_fault_of_line(line)}")
        elif name in line_of_name:
            faults.append(f"line {number}: {name} was already named in line {line_of_name[name]}")
        else:
            line_of_name[name] = number
    return faults


def _fault_of_line(line: str) -> str:
    digest, _, name = line.partition("  ")
    if not line.endswith("\n"):
        return f"{line[:100]!r} has no end of line: the file was cut off"
    if re.fullmatch("[0-9a-f]{32}", digest) and parse_expert_file_name(name.removesuffix("\n")) is None:
        return f"{name[:100]!r} is not the name of an expert file, such as {expert_file_name(1, 0)}"
    return f"{line[:100]!r}, expected 32 lower-case hex digits, two spaces and the name of an expert file"


class ExpertHashes:
    """The hashes of a model's experts, as far as they are known.

    digests   uint8 [n_layers, n_experts, 16]; meaningless where not known
    is_known  bool [n_layers, n_experts]
    """

    __slots__ = ("digests", "is_known")

    def __init__(self, n_layers: int, n_experts: int) -> None:
        self.digests = np.zeros((n_layers, n_experts, N_HASH_BYTES), np.uint8)
        self.is_known = np.zeros((n_layers, n_experts), np.bool_)

    @classmethod
    def from_text(cls, text: str | bytes, n_layers: int, n_experts: int, where: str) -> "ExpertHashes":
        """Read a hash list. Raises BadInputError as `parse_hash_list` does, and for an expert that the model does not have."""
        listed_hashes = parse_hash_list(text, where=where)
        hashes = cls(n_layers, n_experts)
        if not listed_hashes:
            return hashes
        layer, expert = np.array(list(listed_hashes)).T
        _check_range(layer, expert, n_layers, n_experts, listed_hashes, where)
        hashes.digests[layer, expert] = np.frombuffer(bytes.fromhex("".join(listed_hashes.values())), np.uint8).reshape(-1, N_HASH_BYTES)
        hashes.is_known[layer, expert] = True
        return hashes

    def get(self, layer: int, expert: int) -> str | None:
        """Return an expert's hash as 32 hex digits, or None if it is not known."""
        return self.digests[layer, expert].tobytes().hex() if self.is_known[layer, expert] else None

    def set(self, layer: int, expert: int, hex_digest: str) -> None:
        self.digests[layer, expert] = np.frombuffer(bytes.fromhex(hex_digest), np.uint8)
        self.is_known[layer, expert] = True

    def to_text(self, holds: np.ndarray | None = None) -> str:
        """Return the hash list of all experts that are known, or of those that a drive holds.

        holds  bool [n_layers, n_experts]; every expert in it must be known, or the list would pass over a file in silence
        """
        assert holds is None or not (holds & ~self.is_known).any(), "a drive holds an expert whose hash is not known"
        keys = np.argwhere(self.is_known if holds is None else holds).tolist()
        return format_hash_list({(layer, expert): self.digests[layer, expert].tobytes().hex() for layer, expert in keys})


def _check_range(
    layer: np.ndarray, expert: np.ndarray, n_layers: int, n_experts: int, listed_hashes: Mapping[tuple[int, int], str], where: str
) -> None:
    outside = np.flatnonzero((layer >= n_layers) | (expert >= n_experts))
    if outside.size:
        line = int(outside[0])
        name = expert_file_name(*next(islice(listed_hashes, line, None)))
        has = f"layers 0 to {n_layers - 1} and experts 0 to {n_experts - 1}"
        raise BadInputError(f"{where}: line {line + 1}: {name}, but the model has {has}")
