"""Pieces of work on buffers of fixed place: run as they are on a CPU, captured once and replayed as CUDA graphs on a GPU."""

from collections.abc import Callable
from typing import Any

import torch


class Segment:
    """One piece. On CUDA it must be captured before it runs, and then always does to the same buffers what it did at capture."""

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self._work, self._is_cuda = work, device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: Any, stream: torch.cuda.Stream | None) -> None:
        """Run the work once, so that its kernels are compiled, record it, and run the record, so that the next piece finds its results.

        pool  memory that all segments share: they run one after another, in the order of their capture
        """
        if not self._is_cuda:
            return
        assert stream is not None
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self._work()
            # Other threads may allocate or wait meanwhile (readers, a watchdog): only this thread is watched for calls that a graph cannot hold.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._work()
            finally:
                graph.capture_end()
            # What the record writes lies elsewhere than what the first run wrote, and the next piece may take indices from there.
            graph.replay()
        current.wait_stream(stream)
        self._graph = graph

    def run(self) -> None:
        if self._is_cuda:
            assert self._graph is not None, "a segment runs before it was captured"
            self._graph.replay()
        else:
            self._work()


class Moment:
    """A point in the device's work that the host can wait for; on a CPU it has always passed."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def mark(self) -> None:
        if self._event is not None:
            self._event.record()

    def has_passed(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
