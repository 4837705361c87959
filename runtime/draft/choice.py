"""Which drafter was asked for: what it needs is known before anything is loaded, and it starts when the rest is there."""

from dataclasses import dataclass
from pathlib import Path

import torch

from manifests.geometry import Geometry
from runtime.draft.bridge import BridgeDrafter, BridgeModel, check_room, drafter_command, examine_model
from runtime.draft.drafter import Drafter
from runtime.draft.gates import Gate
from runtime.draft.ngram import NgramDrafter
from runtime.kernels.rows import TILE_ROWS
from runtime.memory import available_device_bytes
from runtime.state import rewind_bytes
from runtime.tokens import Tokenizer

NGRAM = "ngram"


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """A drafter that may be started; without a model it is `ngram`."""

    model: BridgeModel | None

    def __str__(self) -> str:
        return NGRAM if self.model is None else str(self.model.path)

    def device_bytes(self, geometry: Geometry, device: torch.device) -> int:
        """Return the device memory that drafting takes: to cut blocks, and for the drafter's model. It belongs to no cache."""
        model_bytes = self.model.needed_bytes(is_gpu=device.type == "cuda") if self.model is not None else 0
        return rewind_bytes(geometry, TILE_ROWS) + model_bytes

    def start(self, tokenizer: Tokenizer, gate: Gate, device: torch.device) -> Drafter:
        """Start it. Raises DeviceError if its model does not fit into what is left of the device, BadInputError if its process does not get ready."""
        if self.model is None:
            return NgramDrafter()
        check_room(self.model, available_bytes=available_device_bytes(device), is_gpu=device.type == "cuda")
        return BridgeDrafter(drafter_command(self.model, device.type), tokenizer, gate)


def choose_drafter(asked: str) -> DrafterChoice:
    """Return what a flag's text means. Raises BadInputError or UsageError if it can be no drafter."""
    return DrafterChoice(None if asked == NGRAM else examine_model(Path(asked)))
