"""Run the prompt pass at a full geometry without its weights: what it reads and takes, what its parts take alone, and how exact its products are.

usage: python benchmarks/prompt_pass.py OUT.json DIRECTORY [--geometry k3.1] [--files N] [--tokens N] [--slots N] [--routing KIND]
                                        [--device cuda] [--only NAME,...]

DIRECTORY should be backed by RAM (/dev/shm/...). `--geometry tiny --device cpu --tokens 40 --files 8 --slots 16` rehearses it on any machine.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from layout.record import record_layout
from manifests.geometry import Geometry, load_geometry
from runtime.bench.rig import PromptRun, Rig, Setting
from runtime.bench.synthetic import EmulatedDrive, record_name
from runtime.entry import SWITCH_INTERVAL_S
from runtime.kernels.expert import expert_forward, run_experts
from runtime.kernels.kda import kda_chunked, kda_decode_, log_decay, short_conv
from runtime.kernels.mla import attend_expanded
from runtime.kernels.norms import l2_norm
from runtime.kernels.prompt_mla import attend_by_heads
from runtime.kernels.prompt_q8_0 import q8_0_product_of_many
from runtime.kernels.q8_0 import Q8Matrix, expand_q8_0
from runtime.kernels.rows import TILE_ROWS
from runtime.kernels.sigmoid import sigmoid, silu
from runtime.prompt import MOST_ROWS, prompt_bytes, sort_uses
from runtime.state import kda_input_sizes

# Records on the device in the pass that reads nothing: more than a GPU's cache holds.
N_RESIDENT = 24
# Rows of a matrix that are compared in float64 at a time.
COMPARED_AT_ONCE = 4096
N_REPEATS = 5
# What three or four NVMe drives reach together.
USUAL_BYTES_PER_S = 25e9


class Setup(NamedTuple):
    """The rig, what was asked for, and what has been found so far."""

    rig: Rig
    setting: Setting
    found: dict[str, Any]

    @property
    def geometry(self) -> Geometry:
        return self.rig.geometry

    def normal(self, *shape: int) -> Tensor:
        generator = torch.Generator(self.rig.device).manual_seed(1)
        return torch.randn(shape, generator=generator, device=self.rig.device)

    def tell(self, name: str, facts: dict[str, Any]) -> None:
        self.found[name] = facts
        print(name, {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in facts.items()}, flush=True)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Return the mean time of some calls after a first one."""
    work()
    _wait(device)
    began = time.perf_counter()
    for _ in range(N_REPEATS):
        work()
    _wait(device)
    return (time.perf_counter() - began) / N_REPEATS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a share of the expected values' root mean square."""
    return ((found - expected).abs().max() / expected.pow(2).mean().sqrt()).item()


@torch.inference_mode()
def products(setup: Setup) -> None:
    """Every Q8_0 product of a KDA, an MLA, an MoE and a dense layer: time, and error against float64 beside that of a float32 product."""
    g = setup.geometry
    mla = g.full_attention_layers[0]
    kda = next(layer for layer in g.moe_layers if not g.is_full_attention(layer))
    names = [f"blk.{kda}.{name}.weight" for name in ("attn_in", "ssm_f_b", "attn_output", "ffn_in", "ffn_down_shexp", "ffn_routed_up")]
    names += [f"blk.{mla}.{name}.weight" for name in ("attn_in", "attn_q_b")]
    names += [f"blk.0.{name}.weight" for name in ("ffn_in", "ffn_down")] if g.n_dense_layers else []
    for name in names:
        w = setup.rig.weights.quantised(name)
        # The dense block is computed some rows at a time.
        x = setup.normal(setup.setting.n_tokens if not name.startswith("blk.0.") else min(512, setup.setting.n_tokens), w.n_cols)
        found = q8_0_product_of_many(x, w)
        errors = [_errors(x, found, w, start) for start in range(0, w.n_rows, COMPARED_AT_ONCE)]
        seconds = seconds_of(lambda x=x, w=w: q8_0_product_of_many(x, w), x.device)
        operations = 2 * x.numel() * w.n_rows
        facts = {"shape": [len(x), w.n_rows, w.n_cols], "ms": 1e3 * seconds, "tflops_of_the_product": operations / seconds / 1e12}
        setup.tell(f"product {name}", facts | {"error": max(e[0] for e in errors), "float32_error": max(e[1] for e in errors)})


def _errors(x: Tensor, found: Tensor, w: Q8Matrix, start: int) -> tuple[float, float]:
    end = min(start + COMPARED_AT_ONCE, w.n_rows)
    tiles = slice(start // TILE_ROWS, -(-end // TILE_ROWS))
    matrix = Q8Matrix(w.data[tiles], end - start, w.n_cols).expand()
    expected = x.double() @ matrix.double().T
    return difference(found[:, start:end], expected), difference(x @ matrix.T, expected)


@torch.inference_mode()
def experts(setup: Setup) -> None:
    """One expert alone, for few and for many rows."""
    g, layout, device = setup.geometry, setup.rig.layout, setup.rig.device
    path = setup.setting.drives[0].directory / record_name(0)
    record = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).to(device)
    situ = {"situ_beta": g.situ_beta, "situ_linear_beta": g.situ_linear_beta}
    for n_rows in (27, 300):
        z = setup.normal(n_rows, g.latent_size)
        # Row n's result goes to place n.
        rows = torch.from_numpy(sort_uses(np.zeros((n_rows, 1), np.int64)).pairs).to(device)
        addresses = torch.full((len(rows),), record.data_ptr(), dtype=torch.int64, device=device)
        outputs, hidden = torch.empty_like(z), torch.empty(len(rows), TILE_ROWS, g.expert_intermediate_size, device=device)
        run = partial(run_experts, z, addresses, rows, rows, layout, **situ, hidden=hidden, outputs=outputs)
        seconds = seconds_of(run, device)
        expected = expert_forward(record, layout, z.double(), **situ, is_tiled=False)
        plain = expert_forward(record, layout, z, **situ, is_tiled=False)
        facts = {"ms": 1e3 * seconds, "error": difference(outputs, expected), "float32_error": difference(plain, expected)}
        setup.tell(f"expert of {n_rows} rows", facts)


@torch.inference_mode()
def attention(setup: Setup) -> None:
    """MLA and KDA alone against float64."""
    g, n, device = setup.geometry, setup.setting.n_tokens, setup.rig.device
    size = g.qk_nope_head_dim + g.qk_rope_head_dim
    q, latent, k_rot = setup.normal(n, g.n_heads, size), setup.normal(n, g.kv_lora_rank), setup.normal(n, g.qk_rope_head_dim)
    kv_b = setup.rig.weights.by_head(f"blk.{g.full_attention_layers[0]}.attn_kv_b.weight", g.n_heads)
    found = attend_by_heads(q, latent, k_rot, kv_b)
    few = slice(0, 2)
    q_nope, q_rot = q[None, :, few].double().split([g.qk_nope_head_dim, g.qk_rope_head_dim], dim=-1)
    matrix = expand_q8_0(*(part[few].flatten(0, 1) for part in kv_b)).double().unflatten(0, (2, -1))
    expected = attend_expanded(q_nope, q_rot, latent[None].double(), k_rot[None].double(), matrix)[0]
    seconds = seconds_of(lambda: attend_by_heads(q, latent, k_rot, kv_b), device)
    setup.tell("attention MLA", {"ms": 1e3 * seconds, "error": difference(found[:, few], expected)})

    u, _, _, beta = (setup.normal(1, n, columns) for columns in kda_input_sizes(g))
    z = setup.normal(1, n, g.kda_size)
    kernel, a_log = setup.normal(3 * g.kda_size, g.conv_kernel_size) / 2, setup.normal(g.kda_n_heads) / 4
    past = torch.zeros(1, g.conv_kernel_size - 1, 3 * g.kda_size, device=device)
    memory = torch.zeros(1, g.kda_n_heads, g.kda_head_dim, g.kda_head_dim, device=device)
    bound, no_bias = g.kda_gate_lower_bound, torch.zeros(g.kda_size, device=device)

    def run_kda() -> Tensor:
        return kda_decode_(u, z, beta, past.clone(), memory.clone(), kernel=kernel, dt_bias=no_bias, a_log=a_log, lower_bound=bound)

    found = run_kda()
    seconds = seconds_of(run_kda, device)
    by_head = (g.kda_n_heads, g.kda_head_dim)
    y, _ = short_conv(u.double(), kernel.double(), past.double())
    q, k, v = (part[:, :, few] for part in silu(y).unflatten(-1, (3, *by_head)).unbind(2))
    q, k = l2_norm(q, is_tiled=False) * g.kda_head_dim**-0.5, l2_norm(k, is_tiled=False)
    decay = log_decay(z.double().unflatten(-1, by_head), a_log.double(), lower_bound=bound)[:, :, few]
    expected, _ = kda_chunked(q, k, v, decay, sigmoid(beta.double())[:, :, few], memory.double()[:, few])
    setup.tell("attention KDA", {"ms": 1e3 * seconds, "error": difference(found[:, :, few], expected)})


def resident(setup: Setup) -> None:
    """The pass with every expert on the device: what a layer's work takes alone, in groups and one expert at a time."""
    g, n_records, digests = setup.geometry, min(N_RESIDENT, setup.found["n_files"]), set()
    for n_at_once in (64, 1):
        # The first one compiles and warms up.
        setup.rig.resident_prompt(setup.setting, n_records=n_records, n_at_once=n_at_once)
        run = setup.rig.resident_prompt(setup.setting, n_records=n_records, n_at_once=n_at_once)
        first = g.n_dense_layers
        digests.add(run.digest)
        # From a layer's experts to the next layer's: the next layer's attention is in it.
        of = {kind: [s for n, s in enumerate(run.layer_s, first + 1) if g.is_full_attention(n) == (kind == "mla")] for kind in ("kda", "mla")}
        means = {f"{kind}_layer_s": sum(times) / len(times) if times else None for kind, times in of.items()}
        setup.tell(f"resident, {n_at_once} at once", {"seconds": run.seconds, **means, "peak_bytes": run.peak_bytes})
    setup.tell("resident, same bits", {"is_so": len(digests) == 1})


def memory(setup: Setup) -> None:
    """The most tokens at a time: the device memory that they take, and what is stated for them."""
    setting = replace(setup.setting, n_tokens=MOST_ROWS)
    run = setup.rig.resident_prompt(setting, n_records=min(N_RESIDENT, setup.found["n_files"]), n_at_once=64)
    budget = prompt_bytes(setup.geometry, MOST_ROWS, MOST_ROWS)
    setup.tell(
        f"{MOST_ROWS} tokens", {"seconds": run.seconds, "peak_bytes": run.peak_bytes, "budget_bytes": budget, "is_within": run.peak_bytes <= budget}
    )


def whole(setup: Setup) -> None:
    """The pass as it is, and with other caches from a drive of 25 GB/s: bytes, seconds, and their ratio to the same reader flat out."""
    # Compiles and warms up, if no stage before did.
    setup.rig.resident_prompt(setup.setting, n_records=min(N_RESIDENT, setup.found["n_files"]), n_at_once=64)
    budget = prompt_bytes(setup.geometry, setup.setting.n_tokens, setup.setting.n_tokens)
    slowed = tuple(drive._replace(bytes_per_s=USUAL_BYTES_PER_S) for drive in setup.setting.drives)
    n_slots = setup.setting.n_device_slots
    few = replace(setup.setting, drives=slowed, n_device_slots=max(1, n_slots // 8), n_host_slots=max(1, n_slots // 4))
    runs = list[PromptRun]()
    for name, setting in (("prompt", setup.setting), ("prompt, usual drives, few slots", few)):
        rate, depth = setup.rig.flat_out(setting.drives, seconds=1.5, n_slots=setting.n_host_slots)
        runs.append(setup.rig.prompt(setting, on_remark=print))
        more = {"flat_out_depth": depth, "device_slots": setting.n_device_slots, "budget_bytes": budget}
        setup.tell(name, _pass_facts(setup, runs[-1], rate) | more)
    facts = {"same_bits": len({run.digest for run in runs}) == 1, "is_within_budget": all(run.peak_bytes <= budget for run in runs)}
    setup.tell("both", facts)


def _pass_facts(setup: Setup, run: PromptRun, rate: float) -> dict[str, Any]:
    counts = run.counts
    distinct_bytes = len(counts.needed) * setup.rig.layout.n_bytes
    return {
        "seconds": run.seconds,
        "tok_per_s": setup.setting.n_tokens / run.seconds,
        "read_bytes": counts.read_bytes,
        "read_amplification": counts.read_bytes / distinct_bytes,
        "flat_out_bytes_per_s": rate,
        "bytes_over_rate_s": counts.read_bytes / rate,
        "ratio": run.seconds / (counts.read_bytes / rate),
        "wait_drives_s": counts.wait_s,
        "wait_uploads_s": counts.upload_wait_s,
        "store_host_s": counts.host_s,
        "mean_layer_s": sum(run.layer_s) / len(run.layer_s),
        "to_first_read_s": counts.to_first_read_s / max(1, counts.n_reading_layers),
        "after_last_read_s": counts.after_last_read_s / max(1, counts.n_reading_layers),
        "peak_bytes": run.peak_bytes,
        "digest": run.digest,
    }


STAGES = (products, experts, attention, resident, memory, whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--geometry", default="k3.1")
    parser.add_argument("--files", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1533)
    parser.add_argument("--slots", type=int, default=256, help="on the device, and as many in host memory")
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default=",".join(stage.__name__ for stage in STAGES))
    asked = parser.parse_args()
    # As in krun.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    device, drives = torch.device(asked.device), (EmulatedDrive(asked.directory, None, 1.0),)
    began = time.perf_counter()
    rig = Rig(load_geometry(asked.geometry), device, drives, asked.files)
    setting = Setting(drives, asked.slots, asked.slots, routing=asked.routing, n_tokens=asked.tokens)
    facts = {"geometry": asked.geometry, "n_tokens": asked.tokens, "n_files": asked.files, "routing": asked.routing, "torch": torch.__version__}
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    setup = Setup(rig, setting, facts | {"device": name, "setup_s": time.perf_counter() - began, "spine_bytes": rig.weights.n_bytes})
    setup.found["record_bytes"] = record_layout(rig.geometry).n_bytes
    print(setup.found, flush=True)
    for stage in STAGES:
        if stage.__name__ in asked.only.split(","):
            stage(setup)
            asked.out.write_text(json.dumps(setup.found, indent=1, default=float))


if __name__ == "__main__":
    main()
