"""A run's numbers under their defined names, for programs and for people.

A decode step's time is the host's, and it is divided without a gap or an overlap: waiting for drives, waiting for uploads to free host slots, doing
nothing but wait for the GPU, and everything else, which is host time. On a CPU the model's arithmetic is host time.
"""

from typing import Any

from layout.reader import reader_name
from layout.sizes import counted, format_rate, format_size
from runtime.bench.rig import Run
from runtime.bench.runs import TIME_PARTS, drive_title
from runtime.bench.synthetic import SyntheticModel
from runtime.engine import Engine, Sample
from runtime.kernels.cuda_library import fallen_back
from runtime.stats import DriveCounts, ExpertCounts


def statistics(engine: Engine, *, n_generated: int, process_wall_s: float, flat_out: float | None) -> dict[str, Any]:
    """Return the numbers of a generate run under their defined names; null where there is nothing to divide."""
    timing, prompt, decode = engine.timing, engine.prompt_counts, engine.decode_counts
    times = timing.token_times or [timing.prompt_ended]
    prompt_s, decode_s, steady_s = timing.prompt_ended - timing.prompt_began, times[-1] - timing.prompt_ended, times[-1] - times[0]
    n_bytes = engine.prepared.record.n_bytes
    efficiency = decode.read_bytes / decode_s / flat_out if flat_out and decode_s > 0 and decode.read_bytes else None
    times_of_decode = divided_time(decode, seconds=steady_s, gpu_s=timing.decode_gpu_s)
    return {
        "steady_decode_tok_per_s": (n_generated - 1) / steady_s if n_generated > 1 else None,
        "generation_tok_per_s": n_generated / decode_s if n_generated > 1 else None,
        "prompt_pass_s": prompt_s,
        "prompt_pass_tok_per_s": timing.n_prompt / prompt_s,
        "prompt_arithmetic": engine.prompt_arithmetic,
        "prefill_chunk": engine.chunk,
        "n_prompt_computed": timing.n_prompt,
        "n_prompt_reused": timing.n_reused,
        "process_wall_s": process_wall_s,
        "expert_read_bytes": {"prompt_pass": prompt.read_bytes, "decode": decode.read_bytes},
        "storage_efficiency": efficiency,
        "flat_out_bytes_per_s": flat_out,
        "read_amplification": prompt.read_bytes / (len(prompt.needed) * n_bytes) if prompt.read_bytes else None,
        "token_time": token_time(times_of_decode, n_generated - 1),
        "phases": {"prompt_pass": phase_facts(prompt), "decode": {**phase_facts(decode), **times_of_decode}},
        "tiers": {
            tier: {"prompt_pass": _reads_of(prompt, prompt.tiers.get(tier)), "decode": _reads_of(decode, decode.tiers.get(tier))}
            for tier in sorted({drive.tier for drive in engine.prepared.manifest.drives})
        },
        "drives": [
            {
                "directory": str(directory),
                "tier": drive.tier,
                "prompt_pass": _reads_of(prompt, prompt.drives[n]),
                "decode": _reads_of(decode, decode.drives[n]),
            }
            for n, (drive, directory) in enumerate(zip(engine.prepared.manifest.drives, engine.prepared.drive_directories, strict=True))
        ],
        "samples": _plain(timing.samples),
        "reader": reader_name(),
        "products_fallen_back": fallen_back(),
        "device": str(engine.device),
        "vram_cache_slots": engine.store.n_device_slots,
        "host_pool_slots": engine.store.n_host_slots,
        "context": engine.context,
    }


def synthetic_statistics(run: Run, model: SyntheticModel, *, flat_out: float, flat_out_depth: int, device: str) -> dict[str, Any]:
    """Return the numbers of a run without a model's weights under the same names, as far as there are such numbers."""
    counts, n_steps, seconds = run.counts, len(run.step_s), run.seconds
    times = divided_time(counts, seconds=seconds, gpu_s=run.wait_device_s)
    return {
        "steady_decode_tok_per_s": n_steps * run.setting.n_rows / seconds,
        "expert_read_bytes": {"decode": counts.read_bytes},
        "storage_efficiency": counts.read_bytes / seconds / flat_out if counts.read_bytes and flat_out else None,
        "flat_out_bytes_per_s": flat_out,
        "flat_out_depth": flat_out_depth,
        "token_time": token_time(times, n_steps),
        "host_ms_per_layer": 1e3 * times["host_s"] / max(1, counts.n_layers),
        "phases": {"decode": {**phase_facts(counts), **times}},
        "tiers": {tier: {"decode": _reads_of(counts, reads)} for tier, reads in sorted(counts.tiers.items())},
        "drives": [
            {"directory": str(directory), "tier": drive.tier, "decode": _reads_of(counts, counts.drives[n])}
            for n, (drive, directory) in enumerate(zip(model.manifest.drives, model.drive_directories, strict=True))
        ],
        "samples": _plain(run.samples),
        "step_s": run.step_s,
        "rows_per_step": run.setting.n_rows,
        "logits_digest": run.digest,
        "reader": reader_name(),
        "products_fallen_back": fallen_back(),
        "device": device,
        "vram_cache_slots": run.setting.n_device_slots,
        "host_pool_slots": run.setting.n_host_slots,
    }


def divided_time(counts: ExpertCounts, *, seconds: float, gpu_s: float) -> dict[str, float]:
    """Return what the time of decode's steps went into: four parts that add up to `seconds`, and of the host's part what the store took."""
    host_s = max(0.0, seconds - counts.wait_s - counts.upload_wait_s - gpu_s)
    return {"wait_s": counts.wait_s, "upload_wait_s": counts.upload_wait_s, "gpu_s": gpu_s, "host_s": host_s, "store_host_s": counts.host_s}


def token_time(times: dict[str, float], n_steps: int) -> dict[str, float] | None:
    """Return the same for the mean step, None if there was none."""
    return {name: seconds / n_steps for name, seconds in times.items()} if n_steps > 0 else None


def phase_facts(counts: ExpertCounts) -> dict[str, Any]:
    """Return where the experts of a phase came from, and at what cost."""
    return {
        "n_experts_used": counts.n_device_hits + counts.n_host_hits + counts.n_records,
        "n_distinct_experts": len(counts.needed),
        "n_device_hits": counts.n_device_hits,
        "n_host_hits": counts.n_host_hits,
        "n_records_read": counts.n_records,
        "n_reads": counts.n_reads,
        "n_failed_reads": counts.n_failed,
        "n_verified": counts.n_verified,
        "read_bytes": counts.read_bytes,
        "uploaded_bytes": counts.uploaded_bytes,
        "wait_s": counts.wait_s,
        "n_waits": counts.n_waits,
        "upload_wait_s": counts.upload_wait_s,
        "store_host_s": counts.host_s,
        "ms_to_first_read": 1e3 * counts.to_first_read_s / max(1, counts.n_reading_layers),
        "ms_after_last_read": 1e3 * counts.after_last_read_s / max(1, counts.n_reading_layers),
        "n_prefetch_issued": counts.n_prefetch_issued,
        "n_prefetch_used": counts.n_prefetch_used,
        "n_prefetch_cancelled": counts.n_prefetch_cancelled,
        "n_prefetch_wasted": counts.n_prefetch_wasted,
        "by_layer": _by_layer(counts),
    }


def _by_layer(counts: ExpertCounts) -> dict[str, dict[str, int]]:
    hits = {"device_hits": counts.device_hits_by_layer, "host_hits": counts.host_hits_by_layer, "records_read": counts.records_by_layer}
    layers = sorted({layer for of_layer in hits.values() for layer in of_layer})
    return {str(layer): {name: of_layer[layer] for name, of_layer in hits.items()} for layer in layers}


def _reads_of(counts: ExpertCounts, reads: DriveCounts | None) -> dict[str, Any]:
    """Return what one drive or tier did in a phase; its share of being last is of all layers that waited for any drive."""
    reads = reads or DriveCounts()
    n_waited = sum(drive.n_last for drive in counts.drives)
    return {
        "n_reads": reads.n_reads,
        "read_bytes": reads.read_bytes,
        "n_failed_reads": reads.n_failed,
        "n_slow_reads": reads.n_slow,
        "n_pauses": reads.n_pauses,
        "busy_s": reads.busy_s,
        "bytes_per_s_while_busy": reads.read_bytes / reads.busy_s if reads.busy_s > 0 else None,
        "n_last": reads.n_last,
        "share_of_being_last": reads.n_last / n_waited if n_waited else None,
        "last_by_s": reads.last_by_s,
    }


def _plain(samples: list[Sample]) -> list[dict[str, Any]]:
    return [sample._asdict() for sample in samples]


def statistics_lines(stats: dict[str, Any]) -> list[str]:
    """Return the statistics as a person reads them."""
    decode, prompt = stats["phases"]["decode"], stats["phases"]["prompt_pass"]
    read = stats["expert_read_bytes"]
    flat = stats["flat_out_bytes_per_s"]
    steady, generation = stats["steady_decode_tok_per_s"], stats["generation_tok_per_s"]
    hits = f"{counted(decode['n_device_hits'], 'device hit')}, {counted(decode['n_host_hits'], 'host hit')}"
    return [
        f"steady decode {_number(steady, '.2f', ' tok/s')}, generation rate {_number(generation, '.2f', ' tok/s')}",
        f"prompt pass {stats['prompt_pass_s']:.3f} s, {stats['prompt_pass_tok_per_s']:.1f} tok/s, {read['prompt_pass']} expert bytes read, "
        f"read amplification {_number(stats['read_amplification'], '.2f')}",
        f"decode {read['decode']} expert bytes read, storage efficiency {_number(stats['storage_efficiency'], '.3f')}"
        + (f" of {format_rate(flat)} flat out" if flat else ""),
        f"experts in decode: {hits}, {counted(decode['n_reads'], 'read')}, "
        f"{counted(decode['n_failed_reads'] + prompt['n_failed_reads'], 'failed read')}{_prefetch_text(decode)}",
        *_draft_lines(stats.get("drafting")),
        *time_lines(stats),
        *drive_lines(stats),
        f"process wall {stats['process_wall_s']:.2f} s",
    ]


def _draft_lines(drafting: dict[str, Any] | None) -> list[str]:
    if drafting is None:
        return []
    accepted = f"{drafting['n_proposed']} proposed in {counted(drafting['n_blocks'], 'block')}, {drafting['n_accepted']} accepted"
    others = f"{counted(drafting['n_plain_steps'], 'plain step')}, {counted(drafting['n_pauses'], 'pause')}"
    return [f"drafts: {accepted}; {others}, {drafting['drafter_s']:.2f} s of drafting"]


def synthetic_lines(stats: dict[str, Any]) -> list[str]:
    """Return the numbers of a run without a model's weights as a person reads them."""
    decode, steps = stats["phases"]["decode"], sorted(stats["step_s"])
    n_used, flat = decode["n_experts_used"], stats["flat_out_bytes_per_s"]
    shares = (decode[name] / n_used for name in ("n_device_hits", "n_host_hits", "n_records_read"))
    on_device, on_host, from_drives = (f"{share:.1%}" for share in shares)
    return [
        f"{stats['steady_decode_tok_per_s']:.3f} tok/s; a step takes {sum(steps) / len(steps) * 1e3:.2f} ms "
        f"({steps[0] * 1e3:.2f} to {steps[-1] * 1e3:.2f}), rows in it {stats['rows_per_step']}",
        f"experts: {on_device} device hits, {on_host} host hits, {from_drives} from drives{_prefetch_text(decode)}",
        f"read {format_size(decode['read_bytes'])} at {format_rate(decode['read_bytes'] / sum(steps))}, "
        f"uploaded {format_size(decode['uploaded_bytes'])}; "
        f"storage efficiency {_number(stats['storage_efficiency'], '.3f')} of {format_rate(flat)} flat out at depth {stats['flat_out_depth']}",
        *time_lines(stats),
        f"host time {stats['host_ms_per_layer']:.3f} ms per layer",
        *drive_lines(stats),
    ]


def time_lines(stats: dict[str, Any]) -> list[str]:
    """Return where the mean step's time went."""
    if (times := stats["token_time"]) is None:
        return []
    parts = [f"{name} {times[key] * 1e3:.2f} ms" for name, key in TIME_PARTS.items() if times[key]]
    return [f"a decode step: {', '.join(parts)}"]


def drive_lines(stats: dict[str, Any]) -> list[str]:
    """Return what each drive did in decode."""
    lines = []
    for drive in stats["drives"]:
        reads = drive["decode"]
        rate, share = reads["bytes_per_s_while_busy"], reads["share_of_being_last"]
        text = f"{drive_title(drive)}: {counted(reads['n_reads'], 'read')}, {format_size(reads['read_bytes'])}"
        text += f", {format_rate(rate)} while busy" if rate else ""
        text += f", last in {share:.0%} of the layers that waited" if share is not None else ""
        lines.append(text + (f", {reads['n_failed_reads']} failed" if reads["n_failed_reads"] else ""))
    return lines


def _prefetch_text(decode: dict[str, Any]) -> str:
    issued, used, cancelled, wasted = (decode[f"n_prefetch_{name}"] for name in ("issued", "used", "cancelled", "wasted"))
    return f", {issued} prefetched ({used} used, {cancelled} given up, {wasted} read for nothing)" if issued else ""


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "none" if value is None else f"{value:{form}}{unit}"
