"""Uploads from pinned host memory to the GPU without a pause: the load beside which drives are measured. It reads no file and keeps no result."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from layout.direct import aligned_buffer
from manifests.errors import DeviceError, UsageError

# Several records under way, so that the link never waits for the host.
N_SLOTS = 8
N_STREAMS = 2


def upload_until_closed(
    input_fd: int, *, seconds: float, record_bytes: int, on_ready: Callable[[], None], device: str = "cuda"
) -> dict[str, int | float | str]:
    """Upload record-sized pieces until the other side of `input_fd` is closed or the time is over.

    on_ready  called once uploads run
    returns   `bytes` and `seconds` of the uploads that ended, `bytes_per_s`, and the `device` by name

    Raises DeviceError without a GPU or the memory for it, UsageError for a size or time that is none.
    """
    if record_bytes < 1 or not 0 < seconds < float("inf"):
        raise UsageError(f"uploads of {record_bytes} bytes for {seconds} s: both must be above zero")
    if not torch.cuda.is_available():
        raise DeviceError("there is no CUDA device to upload to; leave --with-uploads away, or measure on the machine with the GPU")
    is_closed = threading.Event()
    threading.Thread(target=_wait_for_end, args=(input_fd, is_closed), daemon=True).start()
    with ExitStack() as stack:
        slots = _pinned_slots(record_bytes, stack)
        targets = torch.empty((N_SLOTS, record_bytes), dtype=torch.uint8, device=device)
        streams = [torch.cuda.Stream(device) for _ in range(N_STREAMS)]
        events = [_upload(slots[n], targets[n], streams[n % N_STREAMS]) for n in range(N_SLOTS)]
        torch.cuda.synchronize(device)
        on_ready()
        start, n_uploaded = time.perf_counter(), 0
        events = [_upload(slots[n], targets[n], streams[n % N_STREAMS]) for n in range(N_SLOTS)]
        while not is_closed.is_set() and time.perf_counter() - start < seconds:
            n = n_uploaded % N_SLOTS
            events[n].synchronize()
            n_uploaded += 1
            events[n] = _upload(slots[n], targets[n], streams[n % N_STREAMS])
        torch.cuda.synchronize(device)
        elapsed, n_bytes = time.perf_counter() - start, (n_uploaded + N_SLOTS) * record_bytes
    return {"bytes": n_bytes, "seconds": elapsed, "bytes_per_s": n_bytes / elapsed, "device": torch.cuda.get_device_name(device)}


def _wait_for_end(fd: int, is_closed: threading.Event) -> None:
    # Not through sys.stdin, whose lock this thread would hold when the program ends.
    while os.read(fd, 4096):
        pass
    is_closed.set()


def _pinned_slots(record_bytes: int, stack: ExitStack) -> Tensor:
    """Return uint8 [N_SLOTS, record_bytes] of host memory, pinned until the stack is left."""
    buffer = aligned_buffer(N_SLOTS * record_bytes)
    slots = torch.frombuffer(buffer, dtype=torch.uint8, count=N_SLOTS * record_bytes).view(N_SLOTS, record_bytes)
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(slots.data_ptr(), len(buffer), 0))
    if code:
        raise DeviceError(f"{len(buffer)} bytes of host memory cannot be pinned (CUDA error {code}); raise the limit: ulimit -l unlimited")
    stack.callback(runtime.cudaHostUnregister, slots.data_ptr())
    return slots


def _upload(source: Tensor, target: Tensor, stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        event.record(stream)
    return event
