"""Time what decode computes besides its weight products, on one GPU at K3.1's shapes, inside captured CUDA graphs.

usage: python benchmarks/small_kernels.py [ROWS ...]      (default 1 8)

Each operation is captured N_CALLS times in a row, over state and weights of so many layers that the L2 cache does not hold them, as in a
real step. One JSON document: microseconds per call, the median of N_REPEATS replays, and the sums for one KDA and one MLA layer.
"""

import json
import statistics
import sys
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from manifests.geometry import Geometry, load_geometry
from runtime.kernels.kda import kda_decode_
from runtime.kernels.mla import mla_decode_
from runtime.kernels.norms import rms_norm, rms_norm_gated
from runtime.kernels.residual import mix_and_norm
from runtime.kernels.router import combine_and_norm, route
from runtime.kernels.situ import situ_halves

N_CALLS = 24
N_REPEATS = 20
# Of 6.3 MB of memory, or 13 MB of kv_b and 5 MB of cache, each.
N_LAYERS = 16
N_BANK = 5
POSITIONS = (100, 1000, 2000)
Work = Callable[[int], object]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def microseconds(work: Work) -> float:
    """Return the time of one call of work(layer) in a graph of N_CALLS."""
    work(0)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for n in range(N_CALLS):
            work(n % N_LAYERS)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(N_REPEATS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / N_CALLS)
    return round(statistics.median(times[2:]), 2)


def common_work(g: Geometry, n_rows: int) -> dict[str, Work]:
    """Return what every MoE layer does; mix_and_norm is done twice."""
    bank, h, gain, score = randn(N_BANK, 1, n_rows, g.hidden_size), randn(1, n_rows, g.hidden_size), randn(g.hidden_size), randn(g.hidden_size)
    logits, bias = randn(1, n_rows, g.n_experts), randn(g.n_experts)
    gate_up = randn(1, n_rows, 2 * g.shared_intermediate_size)
    outputs, weights = randn(1, n_rows, g.n_experts_per_token, g.latent_size), randn(1, n_rows, g.n_experts_per_token).abs()
    routed_gain, eps = randn(g.latent_size), g.rms_norm_eps
    return {
        "mix_and_norm": lambda layer: mix_and_norm(bank, h, score, gain, eps=eps, is_tiled=True),
        "route": lambda layer: route(logits, bias, g.n_experts_per_token, scaling=g.routed_scaling_factor, is_tiled=True),
        "situ_halves": lambda layer: situ_halves(gate_up, beta=g.situ_beta, linear_beta=g.situ_linear_beta),
        "combine_and_norm": lambda layer: combine_and_norm(outputs, weights, routed_gain, eps=eps, is_tiled=True),
    }


def kda_work(g: Geometry, n_rows: int) -> dict[str, Work]:
    n_heads, size, width = g.kda_n_heads, g.kda_head_dim, g.kda_size
    wide = randn(1, n_rows, 4 * width + size + n_heads)
    u, gate, _, beta = wide.split([3 * width, width, size, n_heads], dim=-1)
    z, dt_bias, a_log = randn(1, n_rows, width), randn(width), randn(n_heads)
    kernels = [randn(3 * width, g.conv_kernel_size) for _ in range(N_LAYERS)]
    past = [randn(1, g.conv_kernel_size - 1, 3 * width) for _ in range(N_LAYERS)]
    memory = [randn(1, n_heads, size, size) for _ in range(N_LAYERS)]
    o, gain = randn(1, n_rows, n_heads, size), randn(size)

    def step(layer: int) -> object:
        return kda_decode_(
            u, z, beta, past[layer], memory[layer],
            kernel=kernels[layer], dt_bias=dt_bias, a_log=a_log, lower_bound=g.kda_gate_lower_bound,
        )  # fmt: skip

    gates = gate.unflatten(-1, (n_heads, size))
    return {"kda_decode_": step, "rms_norm_gated": lambda layer: rms_norm_gated(o, gain, gates, eps=g.rms_norm_eps, is_tiled=True)}


def mla_work(g: Geometry, n_rows: int, n_past: int) -> dict[str, Work]:
    n_heads, latents, rope = g.n_heads, g.kv_lora_rank, g.qk_rope_head_dim
    rows = g.qk_nope_head_dim + g.v_head_dim
    wide = randn(1, n_rows, g.q_lora_rank + latents + rope + n_heads * g.v_head_dim)
    q_a, kv, gate = wide.split([g.q_lora_rank, latents + rope, n_heads * g.v_head_dim], dim=-1)
    q, past = randn(n_rows, n_heads, g.qk_nope_head_dim + rope), torch.tensor([n_past], dtype=torch.int32, device="cuda")
    latent, k_rot = ([randn(g.max_context, size) for _ in range(N_LAYERS)] for size in (latents, rope))
    quants = [torch.randint(-127, 128, (n_heads, rows, latents), dtype=torch.int8, device="cuda") for _ in range(N_LAYERS)]
    scales = [torch.rand(n_heads, rows, latents // 32, device="cuda").half() / 100 for _ in range(N_LAYERS)]
    gain, q_gain, gates = randn(latents), randn(g.q_lora_rank), gate[0].unflatten(-1, (n_heads, g.v_head_dim))

    def step(layer: int) -> object:
        return mla_decode_(
            q, kv[0], latent[layer], k_rot[layer], past, kv_b=(quants[layer], scales[layer]), gain=gain, eps=g.lora_norm_eps, gate=gates
        )

    return {"rms_norm": lambda layer: rms_norm(q_a, q_gain, eps=g.lora_norm_eps, is_tiled=True), f"mla_decode_ after {n_past}": step}


def timed(work: dict[str, Work]) -> dict[str, float]:
    return {name: microseconds(one) for name, one in work.items()}


def measure(g: Geometry, n_rows: int) -> dict[str, object]:
    common, kda = timed(common_work(g, n_rows)), timed(kda_work(g, n_rows))
    mla = {n_past: timed(mla_work(g, n_rows, n_past)) for n_past in POSITIONS}
    shared = sum(common.values()) + common["mix_and_norm"]
    return {
        "us": common | kda | {name: us for one in mla.values() for name, us in one.items()},
        "us_per_kda_layer": round(shared + sum(kda.values()), 1),
        "us_per_mla_layer": {n_past: round(shared + sum(one.values()), 1) for n_past, one in mla.items()},
    }


def main() -> None:
    rows = [int(argument) for argument in sys.argv[1:]] or [1, 8]
    geometry = load_geometry("k3.1")
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "n_bank": N_BANK}
    print(json.dumps(facts | {"rows": {n_rows: measure(geometry, n_rows) for n_rows in rows}}, indent=2))


if __name__ == "__main__":
    main()
