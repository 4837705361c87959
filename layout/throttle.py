"""A drive slowed down to a rate: a directory can stand for a drive that is not there, in benchmarks and tests."""

import threading
import time


class Throttle:
    """Delays reads so that together they never exceed a rate, as a device would that serves one after another."""

    def __init__(self, bytes_per_s: float) -> None:
        assert bytes_per_s > 0
        self._bytes_per_s, self._lock, self._free_at = bytes_per_s, threading.Lock(), 0.0

    def delay(self, n_bytes: int, began: float) -> None:
        """Return when a read that began at `began`, in seconds of the performance counter, would have ended."""
        with self._lock:
            ends = self._free_at = max(self._free_at, began) + n_bytes / self._bytes_per_s
        if (left := ends - time.perf_counter()) > 0:
            time.sleep(left)
