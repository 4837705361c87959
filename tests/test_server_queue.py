"""The queue of the server: one at a time, in order, bounded, and each job can be given up at any moment."""

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from serving import eventually

from manifests.errors import DamagedDataError
from runtime.serving.queue import Cancelled, Failed, Job, JobQueue, QueueClosed, QueueFull


class Watched:
    """Jobs that say what they do, and wait where told to."""

    def __init__(self) -> None:
        self.began, self.go_on, self.posted = SimpleQueue[str](), threading.Event(), SimpleQueue[tuple[str, Any]]()

    def job(self, name: str, error: Exception | None = None, *, waits: bool = True) -> Job:
        def run(job: Job) -> None:
            self.began.put(name)
            if waits:
                self.go_on.wait(10)
            job.check()
            if error is not None:
                raise error
            job.post("done")

        return Job(run, lambda event: self.posted.put((name, event)))

    def next(self) -> tuple[str, Any]:
        return self.posted.get(timeout=10)

    def next_error(self) -> tuple[str, type[Exception]]:
        name, event = self.next()
        assert isinstance(event, Failed)
        return name, type(event.error)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def faults() -> list[Exception]:
    return []


@pytest.fixture
def queue(watched: Watched, faults: list[Exception]) -> Iterator[JobQueue]:
    queue = JobQueue(2, on_fault=faults.append)
    yield queue
    watched.go_on.set()
    queue.stop()
    assert not any(thread.name == "generation" for thread in threading.enumerate())


def begin(queue: JobQueue, watched: Watched) -> Job:
    """A job that runs and waits."""
    queue.put(job := watched.job("first"))
    assert watched.began.get(timeout=10) == "first"
    return job


def test_jobs_run_one_at_a_time_in_order(queue: JobQueue, watched: Watched) -> None:
    begin(queue, watched)
    for name in ("second", "third"):
        queue.put(watched.job(name))
    assert watched.began.empty()
    watched.go_on.set()
    assert [watched.next() for _ in range(3)] == [(name, "done") for name in ("first", "second", "third")]


def test_no_more_wait_than_may_and_each_knows_its_place(queue: JobQueue, watched: Watched) -> None:
    first = begin(queue, watched)
    waiting = [watched.job("second"), watched.job("third")]
    for job in waiting:
        queue.put(job)
    with pytest.raises(QueueFull):
        queue.put(watched.job("fourth"))
    assert [queue.position(job) for job in (first, *waiting)] == [0, 1, 2] and queue.n_refused == 1
    queue.cancel(waiting[0])
    assert watched.next_error() == ("second", Cancelled) and queue.position(waiting[1]) == 1
    queue.put(watched.job("fourth"))


def test_a_queue_of_none_runs_one_and_refuses_the_next(watched: Watched) -> None:
    queue = JobQueue(0, on_fault=print)
    begin(queue, watched)
    with pytest.raises(QueueFull):
        queue.put(watched.job("second"))
    watched.go_on.set()
    queue.stop()


def test_a_job_that_runs_ends_at_its_next_check(queue: JobQueue, watched: Watched) -> None:
    queue.cancel(begin(queue, watched))
    watched.go_on.set()
    assert watched.next_error() == ("first", Cancelled)
    queue.put(watched.job("second", waits=False))
    assert watched.next() == ("second", "done")
    # What is posted last comes before it is counted.
    eventually(lambda: (queue.n_cancelled, queue.n_done) == (1, 1))


def test_an_error_that_can_be_foreseen_ends_one_job_and_not_the_queue(queue: JobQueue, watched: Watched, faults: list[Exception]) -> None:
    queue.put(watched.job("bad", DamagedDataError("an expert is lost"), waits=False))
    queue.put(watched.job("good", waits=False))
    assert watched.next_error() == ("bad", DamagedDataError) and watched.next() == ("good", "done")
    assert not faults and queue.n_failed == 1


def test_a_fault_ends_the_queue_and_all_who_wait(queue: JobQueue, watched: Watched, faults: list[Exception]) -> None:
    fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    queue.put(watched.job("bad", fault))
    assert watched.began.get(timeout=10) == "bad"
    queue.put(watched.job("waiting"))
    watched.go_on.set()
    assert watched.next_error() == ("bad", RuntimeError) and watched.next_error() == ("waiting", Cancelled)
    assert faults == [fault] and watched.began.empty()
    with pytest.raises(QueueClosed):
        queue.put(watched.job("late"))


def test_a_closed_queue_finishes_what_it_has_and_takes_nothing_new(queue: JobQueue, watched: Watched) -> None:
    begin(queue, watched)
    queue.put(watched.job("second"))
    queue.close()
    with pytest.raises(QueueClosed):
        queue.put(watched.job("third"))
    watched.go_on.set()
    assert [watched.next() for _ in range(2)] == [("first", "done"), ("second", "done")]


def test_all_can_be_given_up_at_once(queue: JobQueue, watched: Watched) -> None:
    begin(queue, watched)
    queue.put(watched.job("second"))
    queue.cancel_all()
    watched.go_on.set()
    assert {watched.next_error(), watched.next_error()} == {("first", Cancelled), ("second", Cancelled)}
    assert watched.began.empty()
