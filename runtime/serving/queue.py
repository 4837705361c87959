"""The one thing at a time that a server does: jobs in order of arrival, run on one thread, each of which can be given up.

Knows nothing of HTTP and nothing of models. A job's thread posts what becomes of it; whoever made the job decides where that goes.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from manifests.errors import KtierError


class QueueFull(Exception):
    """As many jobs wait as may wait."""


class QueueClosed(Exception):
    """No new jobs are taken: the server ends."""


class Cancelled(Exception):
    """Nobody waits for the job any more."""


class Failed(NamedTuple):
    """Posted last by a job that did not end well; Cancelled if it was given up."""

    error: Exception


@dataclass(slots=True, eq=False)
class Job:
    """Work for the thread, and where its results go.

    run   called on the thread; it calls check() often, and posts
    post  called on the thread with results, and once with Failed if run raised or the job never ran
    """

    run: "Callable[[Job], None]"
    post: Callable[[object], None]
    _is_cancelled: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise Cancelled if nobody waits any more."""
        if self._is_cancelled.is_set():
            raise Cancelled

    def give_up(self) -> None:
        self._is_cancelled.set()


class JobQueue:
    """Runs jobs one after another. At most n_most wait.

    on_fault  called on the thread with what only a fault of program or device can raise; no job runs after that
    """

    def __init__(self, n_most: int, *, on_fault: Callable[[Exception], None]) -> None:
        self.n_most, self.n_done, self.n_failed, self.n_cancelled, self.n_refused = n_most, 0, 0, 0, 0
        self._on_fault = on_fault
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._is_closed = self._is_over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="generation", daemon=True)
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return self._running is not None

    def put(self, job: Job) -> None:
        """Add a job at the end. Raises QueueFull or QueueClosed."""
        with self._changed:
            if self._is_closed:
                raise QueueClosed
            if len(self._waiting) + (self._running is not None) > self.n_most:
                self.n_refused += 1
                raise QueueFull
            self._waiting.append(job)
            self._changed.notify_all()

    def position(self, job: Job) -> int:
        """Return how many jobs come before this one; 0 if it runs or is over."""
        with self._changed:
            return self._waiting.index(job) + (self._running is not None) if job in self._waiting else 0

    def cancel(self, job: Job) -> None:
        """Give a job up: it leaves the queue at once, or ends within one step."""
        job.give_up()
        with self._changed:
            if job not in self._waiting:
                return
            self._waiting.remove(job)
            self.n_cancelled += 1
        job.post(Failed(Cancelled()))

    def close(self) -> None:
        """Take no new jobs; those that are there go on."""
        with self._changed:
            self._is_closed = True

    def cancel_all(self) -> None:
        """Take no new jobs and give up those that are there."""
        self.close()
        with self._changed:
            jobs = [*self._waiting, *([self._running] if self._running else [])]
        for job in jobs:
            self.cancel(job)

    def stop(self) -> None:
        """Give everything up and wait until the thread has ended."""
        self.cancel_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            fault = self._run(job)
            with self._changed:
                self._running = None
            if fault is not None:
                self._on_fault(fault)
                self.cancel_all()
                return

    def _next(self) -> Job | None:
        with self._changed:
            while not self._waiting and not self._is_over:
                self._changed.wait()
            self._running = self._waiting.popleft() if self._waiting else None
            return self._running

    def _run(self, job: Job) -> Exception | None:
        """Return what nobody could foresee, if that ended the job."""
        try:
            job.check()
            job.run(job)
        except Cancelled as error:
            self.n_cancelled += 1
            job.post(Failed(error))
        except KtierError as error:
            self.n_failed += 1
            job.post(Failed(error))
        except Exception as error:
            self.n_failed += 1
            job.post(Failed(error))
            return error
        else:
            self.n_done += 1
        return None
