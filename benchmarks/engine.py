"""Run the engine at a full geometry without its weights, and set every figure beside what its parts reach alone in the same process.

usage: python benchmarks/engine.py OUT.json DIRECTORY [--geometry k3.1] [--files N] [--tokens N] [--only NAME,...] [--device cuda]

DIRECTORY should be backed by RAM (/dev/shm/...): directories below it stand for drives. Needs a GPU with room for the spine and 52 GB of experts.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layout.makespan import Servers, makespan
from manifests.geometry import load_geometry
from runtime.bench.rig import Rig, Run, Setting
from runtime.bench.synthetic import EmulatedDrive, make_records
from runtime.draft.ngram import NgramDrafter
from runtime.entry import SWITCH_INTERVAL_S
from runtime.speculate import Drafting

GB = 1e9
# The cards and pools of the comparison: 27.5 GB in VRAM, 30 GB in host memory.
VRAM_BYTES, POOL_BYTES = 27.5 * GB, 30 * GB
USUAL_BYTES_PER_S = 25 * GB
# Of the text that drafts are made for.
PERIOD = 41


class Bench:
    """The rig, what has been measured so far, and the digest that all runs must share."""

    def __init__(self, root: Path, geometry: str, n_files: int, n_tokens: int, device: str) -> None:
        self.directories = [root / name for name in "abc"]
        started = time.perf_counter()
        drives = [EmulatedDrive(d, None, 1.0) for d in self.directories]
        self.rig = Rig(load_geometry(geometry), torch.device(device), drives, n_files, period=PERIOD)
        self.n_tokens, self.n_files, self.found = n_tokens, n_files, {"geometry": geometry, "setup_s": time.perf_counter() - started}
        self.found["spine_bytes"] = self.rig.weights.n_bytes
        self.n_record, g = self.rig.layout.n_bytes, self.rig.geometry
        self.k, self.n_all = g.n_experts_per_token, len(g.moe_layers) * g.n_experts_per_token

    def drives(self, *shares: float, rates: tuple[float | None, ...] = (None, None, None)) -> tuple[EmulatedDrive, ...]:
        return tuple(EmulatedDrive(d, r, s) for d, s, r in zip(self.directories, shares, rates, strict=False))

    def slots(self, n_bytes: float) -> int:
        return min(int(n_bytes / self.n_record), len(self.rig.geometry.moe_layers) * self.rig.geometry.n_experts)

    def among(self, n: int) -> str:
        """Return the routing among n experts of each layer, or all if there are fewer."""
        return f"among:{min(n, self.rig.geometry.n_experts)}"

    def lose_second(self, step: int, _: Run) -> None:
        """Have the second directory fail in mid-run."""
        if step == 5:
            for path in self.directories[1].iterdir():
                path.unlink()

    def run(self, name: str, drives: tuple[EmulatedDrive, ...], device: int, host: int, **more: Any) -> Run:
        on_step = more.pop("on_step", None)
        setting = Setting(drives, device, host, **{"routing": "zipf", "n_tokens": self.n_tokens, **more})
        began = time.perf_counter()
        run = self.rig.run(setting, on_step=on_step)
        if on_step is not None:
            make_records(self.rig.layout, self.directories, self.n_files, seed=0)
        facts = {**run.facts(), "whole_s": time.perf_counter() - began}
        facts["step_s"] = [round(s, 5) for s in facts["step_s"]]
        self.found[name] = facts
        shown = (
            "mean_step_s",
            "tok_per_s",
            "device_hit_share",
            "host_hit_share",
            "wait_drives_s",
            "wait_device_s",
            "host_ms_per_layer",
            "ms_to_first_read",
            "ms_after_last_read",
            "digest",
        )
        print(name, {key: round(value, 4) if isinstance(value := facts[key], float) else value for key in shown}, flush=True)
        return run

    def over_slowest(self, run: Run, drive_bytes_per_s: float) -> dict[str, float]:
        """Return the time of the slowest of drives and uploads with the device's own time behind it, and how far over it a step is."""
        parts, n_steps = self.found["parts"], len(run.step_s)
        slowest_s = max(run.counts.read_bytes / drive_bytes_per_s, run.counts.uploaded_bytes / parts["upload_bytes_per_s"]) / n_steps
        ideal_s = slowest_s + parts["device_step_s"]
        return {"ideal_step_s": ideal_s, "over_ideal": run.seconds / n_steps / ideal_s}


def copy_rate(n_bytes: int = 1 << 32) -> float:
    """Return what a copy within the device moves, bytes read and written."""
    source, target = (torch.empty(n_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * n_bytes / cuda_seconds(lambda: target.copy_(source), 10)


def upload_rate(n_bytes: int, n_repeats: int = 100) -> float:
    """Return what uploads of pinned records reach."""
    source = torch.empty((8, n_bytes), dtype=torch.uint8).pin_memory()
    target = torch.empty((8, n_bytes), dtype=torch.uint8, device="cuda")
    return n_repeats * n_bytes / cuda_seconds(lambda: [target[n % 8].copy_(source[n % 8], non_blocking=True) for n in range(n_repeats)], 1)


def cuda_seconds(work: Callable[[], Any], n_repeats: int) -> float:
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(n_repeats):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / n_repeats


def parts(bench: Bench) -> None:
    """What the parts reach alone."""
    # Into as few host slots as a run without caches has, and into many.
    rate, depth = bench.rig.flat_out(bench.drives(1.0), seconds=1.5, n_slots=2 * bench.k)
    bench.found["parts"] = {
        "flat_out_bytes_per_s": rate,
        "flat_out_depth": depth,
        "flat_out_into_many_bytes_per_s": bench.rig.flat_out(bench.drives(1.0), seconds=1.5, n_slots=bench.slots(POOL_BYTES))[0],
        "copy_bytes_per_s": copy_rate(),
        "upload_bytes_per_s": upload_rate(bench.n_record),
        "device_step_s": device_seconds(bench, 1),
    }
    print("parts", bench.found["parts"], flush=True)


@torch.inference_mode()
def device_seconds(bench: Bench, n_rows: int) -> float:
    setting = Setting(bench.drives(1.0), bench.k * n_rows, 64, n_rows=n_rows)
    store = bench.rig.open_store(bench.rig.model(setting.drives), setting, Run(setting))
    try:
        return bench.rig.open_decoder(store, setting, 128).device_seconds(n_rows, 4)
    finally:
        store.close()


@torch.inference_mode()
def kernels(bench: Bench) -> None:
    """What each kernel takes of a step in which the device never waits."""
    setting, n_steps = Setting(bench.drives(1.0), bench.k, 64, n_rows=1), 3
    store = bench.rig.open_store(bench.rig.model(setting.drives), setting, Run(setting))
    try:
        decoder = bench.rig.open_decoder(store, setting, 128)
        decoder.device_seconds(1, 2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            decoder.device_seconds(1, n_steps)
    finally:
        store.close()
    rows = [(event.key, event.count / n_steps, event.device_time_total / n_steps / 1e6) for event in profile.key_averages()]
    rows.sort(key=lambda row: -row[2])
    bench.found["kernels"] = {name: {"launches": n, "seconds": seconds} for name, n, seconds in rows[:60]}
    for name, n, seconds in rows[:40]:
        print(f"{1000 * seconds:8.3f} ms  {n:7.1f}  {name[:110]}")
    print(f"{1000 * sum(row[2] for row in rows):8.3f} ms  {sum(row[1] for row in rows):7.1f}  in all", flush=True)


def no_cache(bench: Bench, name: str = "no_cache", **more: Any) -> None:
    run = bench.run(name, bench.drives(1.0), bench.k, more.pop("host_slots", 2 * bench.k), **more)
    # Only what was computed with counts: all of it is uploaded, none of it is kept.
    bench.found[name]["storage_efficiency"] = run.counts.uploaded_bytes / run.seconds / bench.found["parts"]["flat_out_bytes_per_s"]
    print(name, bench.found[name]["storage_efficiency"], flush=True)


def large_cache(bench: Bench, name: str = "large_cache", **more: Any) -> None:
    """27.5 GB in VRAM and 30 GB of host memory, against the slowest part."""
    run = bench.run(name, bench.drives(1.0), bench.slots(VRAM_BYTES), bench.slots(POOL_BYTES), **more)
    bench.found[name] |= bench.over_slowest(run, bench.found["parts"]["flat_out_into_many_bytes_per_s"])
    print(name, bench.found[name]["over_ideal"], flush=True)


def all_resident(bench: Bench) -> None:
    """Thirty-two experts of each layer, all in VRAM."""
    n_slots = 32 * len(bench.rig.geometry.moe_layers)
    run = bench.run("all_resident", bench.drives(1.0), n_slots, 64, routing="among:32", n_warm=40)
    n_bytes = bench.found["spine_bytes"] + bench.n_all * bench.n_record
    ideal = n_bytes / bench.found["parts"]["copy_bytes_per_s"]
    bench.found["all_resident"] |= {"ideal_step_s": ideal, "share_of_copy_rate": ideal / (run.seconds / len(run.step_s))}


def three_drives(bench: Bench, slow: float = 1.0, name: str = "three_drives", **more: Any) -> None:
    """Emulated 14, 7 and 3.5 GB/s, A and B full, C half; `slow` is what the first one reaches of its profile."""
    rates = (14 * GB, 7 * GB, 3.5 * GB)
    drives = bench.drives(1.0, 1.0, 0.5, rates=rates)
    drives = (drives[0]._replace(bytes_per_s=rates[0] * slow, profile_bytes_per_s=rates[0]), *drives[1:])
    run = bench.run(name, drives, bench.k, 4 * bench.k, **more)
    holds = [drive.holds for drive in bench.rig.model(drives).manifest.drives]
    servers = Servers(tuple(d.bytes_per_s or 0.0 for d in drives), (0, 1, 2))
    masks = servers.masks(holds)
    layers = [facts for facts in run.layers if len(facts.missing) == bench.k]
    drawn = np.array([masks[facts.layer, facts.missing] for facts in layers])
    bound = makespan(servers, drawn, record_bytes=bench.n_record).seconds
    waits = np.array([facts.seconds for facts in layers])
    bench.found[name] |= {"mean_layer_s": waits.mean(), "bound_layer_s": bound.mean(), "over_bound": waits.mean() / bound.mean()}
    print(name, bench.found[name]["over_bound"], flush=True)


def slow_drive(bench: Bench) -> None:
    three_drives(bench, slow=0.6, name="slow_drive")


def usual_drives(bench: Bench) -> None:
    """The same without and with caches from one emulated drive of 25 GB/s, which is what three or four NVMe drives reach together."""
    drives = bench.drives(1.0, rates=(USUAL_BYTES_PER_S,))
    rate, _ = bench.rig.flat_out(drives, seconds=1.0)
    slots = {"usual_no_cache": (bench.k, 2 * bench.k), "usual_large_cache": (bench.slots(VRAM_BYTES), bench.slots(POOL_BYTES))}
    for name, (device, host) in slots.items():
        run = bench.run(name, drives, device, host)
        efficiency = run.counts.read_bytes / run.seconds / rate
        bench.found[name] |= {"flat_out_bytes_per_s": rate, "storage_efficiency": efficiency, **bench.over_slowest(run, rate)}
        print(name, efficiency, bench.found[name]["over_ideal"], flush=True)


def guesses(bench: Bench) -> None:
    """The same with one and two guesses of the next layer's experts, of which a share is right as on the small model: what is the default to be?"""
    for n_prefetch in (1, 2):
        no_cache(bench, f"no_cache_guess_{n_prefetch}", host_slots=4 * bench.k, n_prefetch=n_prefetch)
        large_cache(bench, f"large_cache_guess_{n_prefetch}", n_prefetch=n_prefetch)
        drives = bench.drives(1.0, rates=(USUAL_BYTES_PER_S,))
        bench.run(f"usual_guess_{n_prefetch}", drives, bench.slots(VRAM_BYTES), bench.slots(POOL_BYTES), n_prefetch=n_prefetch)
    three_drives(bench, name="three_drives_guess_2", n_prefetch=2)


def blocks(bench: Bench) -> None:
    """Blocks of rows against as many plain steps, nothing kept between steps.

    The measured routing of K3 has 16, 30, 53, 86 and 109 experts for 1, 2, 4, 8 and 12 rows; 16 among 147 by lot are 16, 30, 54, 89 and 110,
    and 124 for 16 rows.
    """
    slots = {"device": 160, "host": 192, "routing": bench.among(147)}
    plain = bench.run("sixteen_plain_steps", bench.drives(1.0), **slots, n_tokens=16)
    for n_rows in (2, 4, 8, 16):
        block = bench.run(f"block_of_{n_rows}", bench.drives(1.0), **slots, n_rows=n_rows, n_tokens=4)
        facts = bench.found[f"block_of_{n_rows}"]
        step_s, plain_s = facts["mean_step_s"], bench.found["sixteen_plain_steps"]["mean_step_s"]
        facts["over_plain_steps"] = step_s / (n_rows * plain_s)
        facts["read_over_plain"] = block.counts.read_bytes / 4 / (n_rows * plain.counts.read_bytes / 16)
        print(f"block of {n_rows}: {facts['over_plain_steps']:.3f} of plain steps' time, {facts['read_over_plain']:.3f} of their bytes", flush=True)


def drafting(bench: Bench) -> None:
    """A text that repeats itself, plainly and with drafts of what it said before: with all experts on the device, and with none kept."""
    cases = {"resident": (32 * len(bench.rig.geometry.moe_layers), 64, bench.among(32), 512), "streamed": (160, 192, bench.among(147), 64)}
    for name, (device, host, routing, n_tokens) in cases.items():
        setting = Setting(bench.drives(1.0), device, host, routing, n_tokens)
        plain = bench.rig.write(setting)
        drafts = Drafting(NgramDrafter(), bench.rig.geometry.vocab_size, print)
        drafted = bench.rig.write(setting, drafting=drafts)
        facts = bench.found[f"drafting_{name}"] = {
            "n_tokens": n_tokens,
            "period": PERIOD,
            "is_periodic": plain.ids == [(1 + n) % PERIOD for n in range(n_tokens)],
            "is_equal": (plain.ids, plain.digest) == (drafted.ids, drafted.digest),
            "plain_tok_per_s": (n_tokens - 1) / plain.seconds,
            "drafted_tok_per_s": (n_tokens - 1) / drafted.seconds,
            "read_bytes": [plain.counts.read_bytes, drafted.counts.read_bytes],
            **drafts.statistics(),
        }
        print(f"drafting, {name}:", {key: round(value, 3) if isinstance(value, float) else value for key, value in facts.items()}, flush=True)


def two_hundred(bench: Bench) -> None:
    """The same bits over 200 tokens: no caches; large ones, two directories, a guess; small ones and three, one slow, one failing."""
    n, k, slots = 200, bench.k, bench.slots(VRAM_BYTES)
    # Without the third one, every read would be the slow one's once the second is lost: 20 minutes.
    three = bench.drives(1.0, 1.0, 1.0, rates=(4 * GB, None, None))
    runs = [
        bench.run("plain_200", bench.drives(1.0), k, 2 * k, n_tokens=n),
        bench.run("large_200", bench.drives(0.6, 0.6), slots, bench.slots(POOL_BYTES), n_tokens=n, n_prefetch=1),
        bench.run("failing_200", three, slots // 4, 400, n_tokens=n, n_prefetch=2, on_step=bench.lose_second),
    ]
    bench.found["same_bits_200"] = len({run.digest for run in runs}) == 1
    print("same bits over 200 tokens:", bench.found["same_bits_200"], flush=True)


def same_bits(bench: Bench) -> None:
    """Every configuration of one routing must give the same logits."""
    small, large = bench.k, bench.slots(VRAM_BYTES)
    bench.run("two_directories", bench.drives(0.6, 0.6), large // 4, 400)
    bench.run("three_directories", bench.drives(0.6, 0.6, 0.5), small, 2 * small)
    bench.run("prefetch_1", bench.drives(1.0), small, 4 * small, n_prefetch=1)
    bench.run("prefetch_2", bench.drives(1.0), small, 4 * small, n_prefetch=2)
    bench.run("throttled_to_a_tenth", bench.drives(1.0, 1.0, rates=(None, 4 * GB)), large // 4, 400)

    bench.run("directory_fails", bench.drives(1.0, 1.0), small, 4 * small, on_step=bench.lose_second)
    digests = {name: facts["digest"] for name, facts in bench.found.items() if isinstance(facts, dict) and facts.get("routing") == "zipf"}
    bench.found["same_bits"] = {"is_equal": len(set(digests.values())) == 1, "digests": digests}
    print("same bits:", bench.found["same_bits"]["is_equal"], flush=True)


STAGES = (parts, kernels, no_cache, large_cache, all_resident, three_drives, slow_drive, usual_drives, guesses, blocks, drafting, same_bits)
# Only if asked for: each takes minutes.
MORE_STAGES = (two_hundred,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--geometry", default="k3.1")
    parser.add_argument("--files", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--only", default=",".join(stage.__name__ for stage in STAGES))
    # On a CPU, with a small geometry, the stages that do not measure a GPU can be rehearsed.
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    # As in krun.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    bench = Bench(asked.directory, asked.geometry, asked.files, asked.tokens, asked.device)
    bench.found |= {"torch": torch.__version__, "device": torch.cuda.get_device_name() if asked.device == "cuda" else asked.device}
    print({k: v for k, v in bench.found.items()}, flush=True)
    for stage in (*STAGES, *MORE_STAGES):
        if stage.__name__ in asked.only.split(","):
            stage(bench)
            asked.out.write_text(json.dumps(bench.found, indent=1, default=float))


if __name__ == "__main__":
    main()
