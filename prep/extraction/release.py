"""Releasing shards: a shard is removed once everything that was taken from it has been read back from the drives and proved.

Before a shard goes, its header is saved beside the output, so that an interrupted extraction can still open the checkpoint. A shard with tensors that
were left out (vision) holds something that is nowhere else, and stays.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import xxhash

from layout.checkpoint import Checkpoint, header_bytes
from layout.direct import Extent, ReadMode, aligned_buffer, file_blocks, probe_directory, read_extent, span_bytes
from layout.gguf_header import read_gguf_header
from layout.hash_lists import xxh3_128_hex
from layout.sizes import counted, format_size
from layout.tensors import expert_tensor_names, is_vision
from layout.writer import sync_directory, write_bytes
from manifests.errors import DamagedDataError
from prep.extraction.journal import Journal, released_shards
from prep.extraction.room import can_release

HEADERS_DIRECTORY = "extract.headers"


def saved_headers(out: Path) -> Mapping[str, Path]:
    """Return the saved header of every shard that an unfinished extraction has released."""
    return {name: out / HEADERS_DIRECTORY / name for name in released_shards(out)}


class Releaser:
    """Knows what is still to be taken from each shard."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        out: Path,
        journal: Journal,
        record_path: Callable[[int, int], Path],
        *,
        spine_path: Path,
        is_releasing: bool,
        on_remark: Callable[[str], None],
    ) -> None:
        self._checkpoint, self._out, self._journal, self._record_path = checkpoint, out, journal, record_path
        self._spine_path, self._is_releasing, self._on_remark = spine_path, is_releasing, on_remark
        self._n_left: dict[int, int] = {}
        self._modes: dict[Path, ReadMode] = {}
        self.freed_bytes = 0

    def begin(self, missing: list[tuple[int, int]]) -> None:
        """Release what is releasable before the first expert is written: shards without experts, and those that were finished before."""
        if not self._is_releasing:
            return
        self._n_left = dict.fromkeys(range(len(self._checkpoint.shards)), 0)
        for place in missing:
            self._n_left[self._shard_of(*place)] += 1
        for number, n_left in self._n_left.items():
            if n_left == 0:
                self._release(number)

    def finished(self, layer: int, expert: int, *, before_release: Callable[[], None]) -> None:
        """Count an expert that was written; with the last of a shard, make the journal durable and release it."""
        number = self._shard_of(layer, expert)
        self._n_left[number] -= 1
        if self._n_left[number] == 0:
            before_release()
            self._release(number)

    def forget(self) -> None:
        """Remove the saved headers: the manifest describes the shards now."""
        folder = self._out / HEADERS_DIRECTORY
        if folder.is_dir():
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()

    def _shard_of(self, layer: int, expert: int) -> int:
        return self._checkpoint.tensors[expert_tensor_names(layer, expert)[0]].shard

    def _release(self, number: int) -> None:
        checkpoint, shard = self._checkpoint, self._checkpoint.shards[number]
        path = checkpoint.directory / shard.name
        names = [name for name, tensor in checkpoint.tensors.items() if tensor.shard == number]
        if not path.exists():
            return
        if not can_release(path):
            self._on_remark(f"{shard.name} stays: it is a link, or has another name; removing it would free nothing")
            return
        if any(map(is_vision, names)):
            self._on_remark(f"{shard.name} stays: it holds vision tensors, which were not taken over")
            return
        if shard.name not in self._journal.done.released:
            n_experts, n_tensors = self._prove(number, set(names))
            (self._out / HEADERS_DIRECTORY).mkdir(exist_ok=True)
            write_bytes(self._out / HEADERS_DIRECTORY / shard.name, header_bytes(path))
            self._journal.add_released(shard.name)
            self._on_remark(
                f"{shard.name}: {counted(n_experts, 'expert')} and {counted(n_tensors, 'spine tensor')} proved; {format_size(shard.n_bytes)} freed"
            )
        path.unlink()
        sync_directory(path.parent)
        self.freed_bytes += shard.n_bytes

    def _prove(self, number: int, names: set[str]) -> tuple[int, int]:
        """Read back, uncached, every expert and spine tensor that came from a shard. Raises DamagedDataError at the first difference."""
        places = self._experts_of(number)
        buffer = aligned_buffer(span_bytes(self._checkpoint.record.n_bytes, 65536))
        for layer, expert in places:
            path = self._record_path(layer, expert)
            payload = read_extent(Extent(path, 0, self._checkpoint.record.n_bytes), buffer, self._mode_of(path.parent))
            if xxh3_128_hex(payload) != self._journal.done.hashes.get(layer, expert):
                raise DamagedDataError(f"{path}: read back, it differs from what was written; {self._checkpoint.shards[number].name} is kept")
        tensors = [t for t in self._checkpoint.spine_tensors() if any(source.name in names for source in t.sources)]
        spine = self._journal.done.spine
        assert spine is not None
        header, mode = read_gguf_header(self._spine_path), self._mode_of(self._spine_path.parent)
        for tensor in tensors:
            place, state = header.tensors[tensor.name], xxhash.xxh3_128()
            for block in file_blocks(self._spine_path, place.offset, place.offset + place.n_bytes, mode):
                state.update(block)
            if state.hexdigest() != spine.tensors[tensor.name]:
                raise DamagedDataError(f"{self._spine_path}: {tensor.name}, read back, differs from what was written; the shard is kept")
        return len(places), len(tensors)

    def _mode_of(self, directory: Path) -> ReadMode:
        if directory not in self._modes:
            self._modes[directory] = probe_directory(directory)
        return self._modes[directory]

    def _experts_of(self, number: int) -> list[tuple[int, int]]:
        known = np.argwhere(self._journal.done.hashes.is_known).tolist()
        return [(layer, expert) for layer, expert in known if self._shard_of(layer, expert) == number]
