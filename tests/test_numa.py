"""Where a run keeps its threads on a machine of several NUMA nodes."""

import os
import threading
from collections.abc import Callable

import pytest

from runtime.numa import stay_near

CORES = sorted(os.sched_getaffinity(0))
NODES = {0: frozenset(CORES[:1]), 1: frozenset(CORES[1:])}


def in_thread(work: Callable[[], object]) -> list[object]:
    """Return what work gave in a thread of its own, whose binding ends with it, and where a thread may run that this one starts afterwards."""
    found = list[object]()

    def run() -> None:
        found.append(work())
        later = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        later.start()
        later.join()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
@pytest.mark.parametrize("node", [0, 1])
def test_threads_that_start_later_run_on_the_gpu_s_node(node: int) -> None:
    said, cores = in_thread(lambda: stay_near(node, NODES))
    assert cores == NODES[node]
    assert isinstance(said, str) and f"on node {node}, the GPU's" in said and f"node 0: cores {CORES[0]}" in said
    assert os.sched_getaffinity(0) == set(CORES)


@pytest.mark.parametrize(
    ("node", "nodes", "says"),
    [
        (0, {0: frozenset(CORES)}, None),
        (None, NODES, "the kernel does not say"),
        (7, NODES, "the kernel does not say"),
        (2, {0: frozenset(CORES), 2: frozenset({4095})}, "may not run on node 2"),
    ],
)
def test_without_a_choice_nothing_is_bound(node: int | None, nodes: dict[int, frozenset[int]], says: str | None) -> None:
    said, cores = in_thread(lambda: stay_near(node, nodes))
    assert cores == set(CORES)
    assert said is None if says is None else isinstance(said, str) and says in said
