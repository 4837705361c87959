"""A run's numbers under their defined names, for programs and for people."""

from typing import Any

from layout.reader import NAME
from layout.sizes import format_rate
from runtime.engine import Engine
from runtime.stats import ExpertCounts


def statistics(engine: Engine, *, n_generated: int, process_wall_s: float, flat_out: float | None) -> dict[str, Any]:
    """Return the numbers of a generate run under their defined names; null where there is nothing to divide."""
    timing, prompt, decode = engine.timing, engine.prompt_counts, engine.decode_counts
    times = timing.token_times or [timing.prompt_ended]
    prompt_s, decode_s, steady_s = timing.prompt_ended - timing.prompt_began, times[-1] - timing.prompt_ended, times[-1] - times[0]
    n_bytes = engine.prepared.record.n_bytes
    efficiency = decode.read_bytes / decode_s / flat_out if flat_out and decode_s > 0 and decode.read_bytes else None
    return {
        "steady_decode_tok_per_s": (n_generated - 1) / steady_s if n_generated > 1 else None,
        "generation_tok_per_s": n_generated / decode_s if n_generated > 1 else None,
        "prompt_pass_s": prompt_s,
        "prompt_pass_tok_per_s": timing.n_prompt / prompt_s,
        "process_wall_s": process_wall_s,
        "expert_read_bytes": {"prompt_pass": prompt.read_bytes, "decode": decode.read_bytes},
        "storage_efficiency": efficiency,
        "flat_out_bytes_per_s": flat_out,
        "read_amplification": prompt.read_bytes / (len(prompt.needed) * n_bytes) if prompt.read_bytes else None,
        "phases": {"prompt_pass": _phase(prompt), "decode": _phase(decode)},
        "drives": [
            {"directory": str(directory), "tier": drive.tier, "prompt_pass": _drive(prompt, n), "decode": _drive(decode, n)}
            for n, (drive, directory) in enumerate(zip(engine.prepared.manifest.drives, engine.prepared.drive_directories, strict=True))
        ],
        "reader": NAME,
        "device": str(engine.device),
        "vram_cache_slots": engine.store.n_device_slots,
        "host_pool_slots": engine.store.n_host_slots,
        "context": engine.context,
    }


def _phase(counts: ExpertCounts) -> dict[str, Any]:
    n_used = counts.n_device_hits + counts.n_host_hits + counts.n_records
    return {
        "n_experts_used": n_used,
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
        "store_host_s": counts.host_s,
        "n_prefetch_issued": counts.n_prefetch_issued,
        "n_prefetch_used": counts.n_prefetch_used,
        "n_prefetch_cancelled": counts.n_prefetch_cancelled,
    }


def _drive(counts: ExpertCounts, number: int) -> dict[str, Any]:
    drive = counts.drives[number]
    return {
        "n_reads": drive.n_reads,
        "read_bytes": drive.read_bytes,
        "n_failed_reads": drive.n_failed,
        "read_s": drive.busy_s,
        "n_last": drive.n_last,
    }


def statistics_lines(stats: dict[str, Any]) -> list[str]:
    """Return the statistics as a person reads them."""

    def number(value: float | None, form: str, unit: str = "") -> str:
        return "none" if value is None else f"{value:{form}}{unit}"

    decode, prompt = stats["phases"]["decode"], stats["phases"]["prompt_pass"]
    read = stats["expert_read_bytes"]
    flat = stats["flat_out_bytes_per_s"]
    steady, generation = stats["steady_decode_tok_per_s"], stats["generation_tok_per_s"]
    return [
        f"steady decode {number(steady, '.2f', ' tok/s')}, generation rate {number(generation, '.2f', ' tok/s')}",
        f"prompt pass {stats['prompt_pass_s']:.3f} s, {stats['prompt_pass_tok_per_s']:.1f} tok/s, {read['prompt_pass']} expert bytes read, "
        f"read amplification {number(stats['read_amplification'], '.2f')}",
        f"decode {read['decode']} expert bytes read, storage efficiency {number(stats['storage_efficiency'], '.3f')}"
        + (f" of {format_rate(flat)} flat out" if flat else ""),
        f"experts in decode: {decode['n_device_hits']} device hits, {decode['n_host_hits']} host hits, {decode['n_reads']} reads, "
        f"{decode['n_failed_reads'] + prompt['n_failed_reads']} failed reads",
        f"process wall {stats['process_wall_s']:.2f} s",
    ]
