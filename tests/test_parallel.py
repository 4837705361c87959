"""run_parallel: every result once, the first error, an end of all threads, and no work beyond what was asked for."""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from itertools import count

import pytest

from layout.parallel import run_parallel


def doubling() -> Callable[[int], int]:
    return lambda n: 2 * n


def threads_after(before: set[threading.Thread]) -> set[threading.Thread]:
    return set(threading.enumerate()) - before


@pytest.mark.parametrize("n_workers", [1, 2, 7])
@pytest.mark.parametrize("n_items", [0, 1, 5, 500])
def test_every_item_has_its_result_once(n_items: int, n_workers: int) -> None:
    before = set(threading.enumerate())
    assert sorted(run_parallel(range(n_items), doubling, n_workers=n_workers)) == [2 * n for n in range(n_items)]
    assert threads_after(before) == set()


def test_items_are_worked_on_at_once_each_thread_with_a_worker_of_its_own() -> None:
    barrier, workers = threading.Barrier(3), []

    def make_worker() -> Callable[[int], int]:
        name = threading.current_thread().name
        workers.append(name)

        def work(item: int) -> int:
            # Passed only while three threads are in it together.
            barrier.wait(10)
            assert threading.current_thread().name == name
            return item

        return work

    assert sorted(run_parallel(range(9), make_worker, n_workers=3)) == list(range(9))
    assert len(set(workers)) == len(workers) == 3


def test_items_that_take_time_to_make_are_asked_for_by_one_thread_at_a_time() -> None:
    def items() -> Iterator[int]:
        # A generator that is entered twice at once raises.
        for n in range(20):
            time.sleep(0.002)
            yield n

    assert sorted(run_parallel(items(), doubling, n_workers=4)) == [2 * n for n in range(20)]


def test_results_come_as_they_are_ready() -> None:
    second_is_done = threading.Event()

    def make_worker() -> Callable[[int], int]:
        def work(item: int) -> int:
            assert item != 0 or second_is_done.wait(10)
            return item

        return work

    results = run_parallel(range(2), make_worker, n_workers=2)
    assert next(results) == 1
    second_is_done.set()
    assert list(results) == [0]


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt(), SystemExit(3), StopIteration("inside")], ids=lambda e: type(e).__name__)
def test_an_error_of_a_worker_is_raised_and_not_lost(error: BaseException) -> None:
    def make_worker() -> Callable[[int], int]:
        def work(item: int) -> int:
            if item == 5:
                raise error
            return item

        return work

    before = set(threading.enumerate())
    # A StopIteration cannot leave a generator as it is; what counts is that the item is not passed over.
    with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)):
        list(run_parallel(range(10), make_worker, n_workers=2))
    assert threads_after(before) == set()


def test_the_first_error_is_the_one_that_is_raised() -> None:
    first_is_raised = threading.Event()

    def make_worker() -> Callable[[int], int]:
        def work(item: int) -> int:
            if item == 0:
                first_is_raised.set()
                raise ValueError("first")
            assert first_is_raised.wait(10)
            time.sleep(0.05)
            raise ValueError("second")

        return work

    with pytest.raises(ValueError, match="first"):
        list(run_parallel(range(2), make_worker, n_workers=2))


def test_an_error_in_making_a_worker_is_raised() -> None:
    def make_worker() -> Callable[[int], int]:
        raise MemoryError("no buffer")

    with pytest.raises(MemoryError, match="no buffer"):
        list(run_parallel(range(3), make_worker, n_workers=2))


def test_an_error_in_the_items_is_raised_after_what_came_before() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the list ends here")

    done = []
    with pytest.raises(OSError, match="the list ends here"):
        for result in run_parallel(items(), doubling, n_workers=1):
            done.append(result)
    assert done == [2]


def test_after_an_error_no_more_items_are_taken_however_slow_the_caller_is() -> None:
    taken, has_failed, n_workers = count(), threading.Event(), 3

    def items() -> Iterator[int]:
        yield from taken

    def make_worker() -> Callable[[int], int]:
        def work(item: int) -> int:
            if item == 10:
                has_failed.set()
                raise ValueError("item 10")
            return item

        return work

    with pytest.raises(ValueError, match="item 10"):
        for _ in run_parallel(items(), make_worker, n_workers=n_workers):
            # The caller is at an early result while the error waits behind others.
            assert has_failed.wait(10)
            time.sleep(0.02)
    # Each thread may have been on one item when the error came, and in a hurry once more.
    assert next(taken) <= 10 + 2 * n_workers + 1


@pytest.mark.parametrize("how", ["exception", "close"])
def test_a_caller_that_stops_early_leaves_no_thread_behind(how: str) -> None:
    before, taken = set(threading.enumerate()), count()

    def make_worker() -> Callable[[int], int]:
        def work(item: int) -> int:
            time.sleep(0.001)
            return item

        return work

    results = run_parallel(taken, make_worker, n_workers=4)
    assert isinstance(results, Generator)
    next(results)
    assert len(threads_after(before)) == 4
    if how == "exception":
        with pytest.raises(KeyboardInterrupt):
            results.throw(KeyboardInterrupt())
    else:
        results.close()
    assert threads_after(before) == set()
    n_taken = next(taken)
    time.sleep(0.02)
    assert next(taken) == n_taken + 1


def test_nothing_begins_before_the_first_result_is_asked_for() -> None:
    taken = count()
    run_parallel(taken, doubling, n_workers=2)
    assert next(taken) == 0
