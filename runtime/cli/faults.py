"""A GPU that fails in mid-run: one sentence and an exit code, not a stack trace."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from manifests.errors import DeviceError


def with_faults_told(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with errors of the GPU turned into DeviceError; any other error stays what it is."""

    @functools.wraps(command)
    def run(*arguments: Any, **named: Any) -> None:
        try:
            command(*arguments, **named)
        except RuntimeError as error:
            if not is_device_fault(error):
                raise
            raise DeviceError(fault_text(error)) from error

    return run


def is_device_fault(error: RuntimeError) -> bool:
    """Return whether an error comes from the GPU: torch's own kinds, or a library's text that names CUDA."""
    return isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError) or "CUDA" in str(error) or "CUBLAS" in str(error)


def fault_text(error: RuntimeError) -> str:
    what = (str(error).strip().splitlines() or ["no reason given"])[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"the GPU's memory ran out: {what}; ask for a smaller --vram-cache or -c"
    return f"the GPU failed while running: {what}; the run is lost; start it again, and if it comes back see krun doctor, and dmesg for NVRM"
