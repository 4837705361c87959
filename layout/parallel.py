"""Work over many items in a few threads, with results as they come and a clean end on the first error or on Ctrl-C."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import TypeVar

from layout.early_exit import REQUESTS_TO_END

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_parallel(items: Iterable[Item], make_worker: Callable[[], Callable[[Item], Result]], *, n_workers: int) -> Iterator[Result]:
    """Yield the result of every item, in the order of completion.

    make_worker is called once per thread, so that each can hold buffers of its own. The first exception of a worker ends the work and is raised
    here. When the caller stops early, every thread ends after the item that it is on.
    """
    waiting, lock, done = iter(items), threading.Lock(), SimpleQueue[tuple[str, object]]()
    is_stopped, end = threading.Event(), object()

    def serve() -> None:
        try:
            work = make_worker()
            while not is_stopped.is_set():
                with lock:
                    item = next(waiting, end)
                if item is end:
                    break
                done.put(("result", work(item)))  # type: ignore[arg-type]
        except BaseException as error:
            is_stopped.set()
            done.put(("error", error))
        done.put(("end", None))

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(n_workers)]
    n_running = n_workers
    try:
        # Within the try: an interrupt right after the start must wait for the threads, too.
        start_threads(threads)
        while n_running:
            kind, value = done.get()
            if kind == "error":
                assert isinstance(value, BaseException)
                raise value
            if kind == "end":
                n_running -= 1
            else:
                yield value  # type: ignore[misc]
    finally:
        is_stopped.set()
        for thread in threads:
            if thread.is_alive():
                thread.join()


def start_threads(threads: Iterable[threading.Thread]) -> None:
    """Start all threads, Ctrl-C held back meanwhile: in the middle of a start it would leave a thread that nobody can wait for."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS_TO_END)
    try:
        for thread in threads:
            thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
