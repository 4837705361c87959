"""The routed experts as the model calls them: each row's experts computed as their records arrive, each output in its own place.

The order of arrival has no influence on the result: an output belongs to its row and expert, and the model sums in expert order.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from layout.checkpoint import Checkpoint
from layout.direct import aligned_buffer, round_up, span_bytes
from layout.gather import gather_record
from layout.record import RecordLayout
from manifests.geometry import Geometry
from runtime.kernels.expert import expert_forward


class Records(Protocol):
    """Where records come from, in whatever order suits the source."""

    def fetch(self, layer: int, experts: list[int]) -> Iterable[tuple[int, Tensor]]:
        """Yield (expert, record uint8 [n_bytes] on the device); a record is valid until the next is asked for."""
        ...


class StreamedExperts:
    """Runs experts over records that come one by one."""

    def __init__(self, geometry: Geometry, layout: RecordLayout, records: Records) -> None:
        self._geometry, self._layout, self._records = geometry, layout, records

    def run(self, layer: int, z: Tensor, ids: Tensor, is_tiled: bool) -> Tensor:
        chosen = ids.cpu().numpy()
        outputs = z.new_empty((*ids.shape, z.shape[-1]))
        for expert, record in self._records.fetch(layer, np.unique(chosen).tolist()):
            rows, ranks = (torch.from_numpy(places).to(z.device) for places in np.nonzero(chosen == expert))
            outputs[rows, ranks] = expert_forward(
                record,
                self._layout,
                z[rows],
                situ_beta=self._geometry.situ_beta,
                situ_linear_beta=self._geometry.situ_linear_beta,
                is_tiled=is_tiled,
            )
        return outputs


class CheckpointRecords:
    """Reads each expert from the checkpoint's shards when it is needed; one is in memory at a time."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint, self._device = checkpoint, device
        n_bytes = checkpoint.record.n_bytes
        self._incoming = aligned_buffer(span_bytes(n_bytes, checkpoint.read_mode.alignment))
        self._record = aligned_buffer(round_up(n_bytes, checkpoint.read_mode.alignment))

    def fetch(self, layer: int, experts: list[int]) -> Iterable[tuple[int, Tensor]]:
        for expert in experts:
            gather_record(self._checkpoint, layer, expert, incoming=self._incoming, outgoing=self._record)
            yield expert, torch.frombuffer(self._record, dtype=torch.uint8)[: self._checkpoint.record.n_bytes].to(self._device)
