"""The expert record: the bytes of one expert file, segment by segment.

A record is w1.packed, w1.scale, w2.packed, w2.scale, w3.packed, w3.scale, the checkpoint's bytes unchanged and without padding.
w1 is the gate, w3 the up, w2 the down projection.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from manifests.geometry import Geometry

SEGMENT_NAMES = ("w1.packed", "w1.scale", "w2.packed", "w2.scale", "w3.packed", "w3.scale")
LAYOUT_NAME = "+".join(SEGMENT_NAMES)
NIBBLE_ORDER = "low nibble is the even column"
SCALE_KIND = "E8M0, one per 32 columns"

_FILE_NAME = re.compile(r"L(\d+)-E(\d+)\.bin")


class Segment(NamedTuple):
    """A named part of a record: uint8 [rows, cols] at `offset`."""

    name: str
    offset: int
    n_rows: int
    n_cols: int

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.n_cols

    @property
    def end(self) -> int:
        return self.offset + self.n_bytes


@dataclass(frozen=True)
class RecordLayout:
    """Where the six segments of an expert lie for one expert shape."""

    latent_size: int
    intermediate_size: int

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        up, down = (self.intermediate_size, self.latent_size), (self.latent_size, self.intermediate_size)
        segments, offset = [], 0
        for name, (rows, cols) in zip(SEGMENT_NAMES, (up, up, down, down, up, up), strict=True):
            segment = Segment(name, offset, rows, cols // 2 if name.endswith("packed") else cols // 32)
            segments.append(segment)
            offset = segment.end
        return tuple(segments)

    @property
    def n_bytes(self) -> int:
        return self.segments[-1].end

    def segment(self, name: str) -> Segment:
        return self.segments[SEGMENT_NAMES.index(name)]

    @property
    def scale_segments(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.name.endswith("scale"))


def record_layout(geometry: Geometry) -> RecordLayout:
    """Return the record layout of a model's experts."""
    return RecordLayout(geometry.latent_size, geometry.expert_intermediate_size)


def expert_file_name(layer: int, expert: int) -> str:
    return f"L{layer}-E{expert}.bin"


def parse_expert_file_name(name: str) -> tuple[int, int] | None:
    """Return (layer, expert) of an expert file's name, or None if it is not one."""
    match = _FILE_NAME.fullmatch(name)
    if match is None or name != expert_file_name(int(match[1]), int(match[2])):
        return None
    return int(match[1]), int(match[2])
