"""An expert's record, brought together from a checkpoint's shards."""

import numpy as np

from layout.checkpoint import Checkpoint
from layout.direct import read_extent
from layout.mxfp4 import NAN_SCALE
from layout.tensors import expert_tensor_names
from manifests.errors import BadInputError


def gather_record(checkpoint: Checkpoint, layer: int, expert: int, *, incoming: memoryview, outgoing: memoryview) -> None:
    """Bring an expert's record into `outgoing`, its bytes unchanged.

    incoming, outgoing  aligned buffers of at least span_bytes and the rounded record size

    Raises BadInputError if a scale byte is 255, E8M0's NaN.
    """
    record, at = checkpoint.record, 0
    for extent in checkpoint.expert_extents(layer, expert):
        payload = read_extent(extent, incoming, checkpoint.read_mode)
        outgoing[at : at + len(payload)] = payload
        at += len(payload)
    values = np.frombuffer(outgoing, np.uint8)
    for segment in record.scale_segments:
        if (values[segment.offset : segment.end] == NAN_SCALE).any():
            name = expert_tensor_names(layer, expert)[record.segments.index(segment)]
            raise BadInputError(
                f"tensor {name} in {checkpoint.extent(name).path.name}: a scale byte is 255, which E8M0 defines as NaN; "
                "the checkpoint is damaged: fetch the shard again"
            )
