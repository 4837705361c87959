"""NUMA: on which cores this process runs, and so where its memory lies, as seen from the GPU.

What a GPU takes from the memory of another node crosses the link between processors, which is slower than its own and shared.
"""

import os
from collections.abc import Mapping
from pathlib import Path

SYS_ROOT = Path("/sys")


def numa_nodes(sys_root: Path = SYS_ROOT) -> dict[int, frozenset[int]]:
    """Return the cores of each NUMA node that has any."""
    lists = (sys_root / "devices/system/node").glob("node[0-9]*/cpulist")
    nodes = {int(path.parent.name.removeprefix("node")): _numbers(path.read_text().strip()) for path in lists}
    return {number: cores for number, cores in sorted(nodes.items()) if cores}


def nodes_text(nodes: Mapping[int, frozenset[int]]) -> str:
    return ", ".join(f"node {number}: cores {_spans(cores)}" for number, cores in nodes.items())


def stay_near(gpu_node: int | None, nodes: Mapping[int, frozenset[int]]) -> str | None:
    """Keep this thread, and those that it starts from now on, on the GPU's node, where their memory then lies too while there is room.

    A process that was confined to other cores stays there. Returns what to say, None on a machine of one node.
    """
    if len(nodes) < 2:
        return None
    where = nodes_text(nodes)
    if gpu_node is None or gpu_node not in nodes:
        return f"NUMA: not bound, the kernel does not say on which node the GPU is; {where}"
    near = os.sched_getaffinity(0) & nodes[gpu_node]
    if not near:
        return f"NUMA: not bound, this process may not run on node {gpu_node}, the GPU's; {where}"
    os.sched_setaffinity(0, near)
    return f"NUMA: threads that read and the host pool are on node {gpu_node}, the GPU's; {where}"


def _numbers(spans: str) -> frozenset[int]:
    """Read the kernel's `0-3,8`."""
    ends = [span.split("-") for span in spans.split(",") if span]
    return frozenset(n for pair in ends for n in range(int(pair[0]), int(pair[-1]) + 1))


def _spans(numbers: frozenset[int]) -> str:
    begins = sorted(n for n in numbers if n - 1 not in numbers)
    ends = sorted(n for n in numbers if n + 1 not in numbers)
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in zip(begins, ends, strict=True))
