"""Times the product kernels on the GPU at hand beside a copy of device memory, with random weights of the sizes of K3.1.

    python benchmarks/kernels.py [--json FILE] [--variant small | --triton]

A rate is bytes of weights per second, its share that of the copy, which counts bytes read and written. Every figure is the median of graph
replays that go through more than a gigabyte of different weights, so that no cache helps. `--variant` takes the kernels that another GPU would
run: with less shared memory per block, or without bulk copies; their bits are the same.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layout.record import RecordLayout
from runtime.kernels.bf16 import bf16_product
from runtime.kernels.cuda_library import VARIANTS, Variant, find_library, reject, variant_of
from runtime.kernels.expert import run_experts
from runtime.kernels.products_check import random_q8_0, random_record, self_test
from runtime.kernels.q8_0 import q8_0_product
from runtime.kernels.rows import TILE_ROWS, forbid_tf32

WORKING_SET_BYTES = 1_500_000_000
ROW_COUNTS = (1, 2, 8, 9, 16)
# What decode multiplies at once: [rows of weights, columns].
Q8_0_SHAPES = {
    "KDA q k v g f_a beta": (4 * 12288 + 128 + 96, 7168),
    "KDA f_b": (12288, 128),
    "attention output": (7168, 12288),
    "MLA q_a kv_a gate": (1536 + 576 + 12288, 7168),
    "MLA q_b": (18432, 1536),
    "shared expert gate up": (12288, 7168),
    "shared expert down": (7168, 6144),
    "routed down": (3584, 7168),
    "routed up": (7168, 3584),
    "dense gate up": (67584, 7168),
    "dense down": (7168, 33792),
    "output": (163840, 7168),
}
GATE_SHAPE = (896, 7168)
RECORD = RecordLayout(3584, 3072)
BETA, LINEAR_BETA = 4.0, 25.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--triton", action="store_true", help="time the Triton kernels, which run where the CUDA C++ kernels cannot")
    parser.add_argument("--variant", choices=[variant.name for variant in VARIANTS], help="of the CUDA C++ kernels, if not the GPU's own")
    arguments = parser.parse_args()
    forbid_tf32()
    device = torch.device("cuda", torch.cuda.current_device())
    if arguments.triton:
        reject(device, "--triton")
    variant = next((variant for variant in VARIANTS if variant.name == arguments.variant), None)
    result = measure(device, variant)
    for line in table(result):
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


def measure(device: torch.device, variant: Variant | None) -> dict[str, Any]:
    """Return all figures: bytes/s of the copy, and for each product its rows, microseconds, and share of the copy's rate."""
    source = torch.Generator(device).manual_seed(0)
    warm_up(device)
    copy_rate = time_copy(device)
    products = [row for name, shape in Q8_0_SHAPES.items() for row in time_q8_0(name, shape, source, variant)]
    products += time_bf16(source, variant)
    products += [row for n in (1, 4, 16, 32) for row in time_experts(n, source, variant)]
    for row in products:
        row["share_of_copy"] = row["n_bytes"] / row["us"] * 1e6 / copy_rate
    # The rate is measured again: where the two differ, the machine was not quiet.
    return {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "kernels": (variant or variant_of(device)).name if find_library(device, variant) is not None else "triton",
        "copy_bytes_per_s": [copy_rate, time_copy(device)],
        "self_test": self_test(device),
        "products": products,
    }


def table(result: dict[str, Any]) -> list[str]:
    lines = [f"{result['device']}, torch {result['torch']}, kernels {result['kernels']}; copy {result['copy_bytes_per_s'][0] / 1e9:,.0f} GB/s"]
    for name, is_right, seconds, error, *_ in result["self_test"]:
        lines.append(f"  {name}: {'right' if is_right else 'WRONG'}, off by {error:.1e} ({seconds:.3f} s)")
    for row in result["products"]:
        lines.append(
            f"  {row['name']:28} {row['rows']:2} rows {row['us']:9.2f} us  {row['share_of_copy']:.3f} of the copy  {row['host_us']:5.1f} us of host"
        )
    return lines


def warm_up(device: torch.device, seconds: float = 1.5) -> None:
    """Keep the GPU busy until its clocks have risen."""
    a = torch.randn(4096, 4096, device=device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        a @ a
        torch.cuda.synchronize()


def time_copy(device: torch.device) -> float:
    """Return bytes read and written per second. Not in a graph, where a copy is slower."""
    n_bytes = 4 << 30
    a, b = (torch.empty(n_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * n_bytes / (elapsed_us(lambda: b.copy_(a)) * 1e-6)


def time_q8_0(name: str, shape: tuple[int, int], source: torch.Generator, variant: Variant | None) -> list[dict[str, Any]]:
    first = random_q8_0(*shape, source)
    matrices = [first] + [first._replace(data=first.data.clone()) for _ in range(min(200, WORKING_SET_BYTES // first.data.numel()))]
    rows = []
    for n_rows in ROW_COUNTS:
        x = torch.randn(n_rows, shape[1], generator=source, device=source.device)
        out = torch.empty(n_rows, shape[0], device=source.device)
        calls = [lambda w=w, x=x, out=out: q8_0_product(x, w, out, variant=variant) for w in matrices]
        rows.append(_row(name, n_rows, first.data.numel(), calls))
    return rows


def time_bf16(source: torch.Generator, variant: Variant | None) -> list[dict[str, Any]]:
    weights = [torch.randn(GATE_SHAPE, generator=source, device=source.device).bfloat16() for _ in range(100)]
    rows = []
    for n_rows in ROW_COUNTS:
        x = torch.randn(n_rows, GATE_SHAPE[1], generator=source, device=source.device)
        out = torch.empty(n_rows, GATE_SHAPE[0], device=source.device)
        calls = [lambda w=w, x=x, out=out: bf16_product(x, w, out, variant=variant) for w in weights]
        rows.append(_row("router gate", n_rows, weights[0].numel() * 2, calls))
    return rows


def time_experts(n: int, source: torch.Generator, variant: Variant | None) -> list[dict[str, Any]]:
    """Time groups of n experts, every one used by all rows."""
    device, n_groups = source.device, max(3, WORKING_SET_BYTES // (n * RECORD.n_bytes))
    records = [random_record(RECORD, source) for _ in range(n * n_groups)]
    addresses = [torch.tensor([r.data_ptr() for r in records[i * n : (i + 1) * n]], device=device) for i in range(n_groups)]
    hidden = torch.empty(n, TILE_ROWS, RECORD.intermediate_size, device=device)
    rows = []
    for n_rows in ROW_COUNTS:
        z = torch.randn(n_rows, RECORD.latent_size, generator=source, device=device)
        tables = expert_tables(n, n_rows, device)
        outputs = torch.empty(n * n_rows, RECORD.latent_size, device=device)

        def call(at: Tensor, z: Tensor = z, tables: tuple[Tensor, Tensor] = tables, outputs: Tensor = outputs) -> None:
            run_experts(z, at, *tables, RECORD, situ_beta=BETA, situ_linear_beta=LINEAR_BETA, hidden=hidden, outputs=outputs, variant=variant)

        rows.append(_row(f"experts, {n}", n_rows, n * RECORD.n_bytes, [lambda at=at, call=call: call(at) for at in addresses]))
    return rows


def expert_tables(n: int, n_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tables, rows and places, of n experts that n_rows rows all use."""
    row = torch.arange(TILE_ROWS, dtype=torch.int32, device=device)
    rows = torch.where(row < n_rows, row, -1).expand(n, -1).contiguous()
    places = rows * n + torch.arange(n, dtype=torch.int32, device=device).view(-1, 1)
    return rows, torch.where(rows >= 0, places, -1).int()


def _row(name: str, n_rows: int, n_bytes: int, calls: list[Callable[[], Any]]) -> dict[str, Any]:
    us, host_us = median_us(calls)
    return {"name": name, "rows": n_rows, "n_bytes": n_bytes, "us": us, "host_us": host_us}


def median_us(calls: list[Callable[[], Any]]) -> tuple[float, float]:
    """Return the microseconds of one call on the GPU, when all follow each other in a graph, and on the host, when called one by one."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for call in calls:
        call()
    host_us = (time.perf_counter() - start) / len(calls) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return elapsed_us(graph.replay) / len(calls), host_us


def elapsed_us(work: Callable[[], Any], n_times: int = 9) -> float:
    """Return the median microseconds of some work on the GPU, the first two times left out."""
    times = []
    for _ in range(n_times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
