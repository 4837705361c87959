"""A running generation in one short line."""

from layout.sizes import format_rate
from runtime.engine import PromptProgress


def prompt_line(progress: PromptProgress) -> str:
    """Return how far a prompt pass is: `prompt 37 of 92 layers  40%  41.9GB/s  21 s left`."""
    parts = [f"prompt {progress.n_done} of {progress.n_due} layers", f"{progress.n_done / progress.n_due:.0%}"]
    if progress.seconds > 0 and progress.read_bytes:
        parts.append(format_rate(progress.read_bytes / progress.seconds))
    if progress.left_s is not None:
        parts.append(f"{progress.left_s:.0f} s left")
    return "  ".join(parts)


def live_line(*, n_tokens: int, seconds: float, read_bytes: int, n_device_hits: int, n_host_hits: int, n_reads: int) -> str:
    """Return tokens so far, tokens and read bytes per second, and where the experts came from.

    `12 tok  2.31 tok/s  27.4GB/s  VRAM 41%  host 22%  drives 37%`

    n_tokens, seconds  of decode so far
    read_bytes and the counts, likewise; a part that has nothing to be divided by is left out
    """
    parts = [f"{n_tokens} tok"]
    if seconds > 0:
        parts += [f"{n_tokens / seconds:.2f} tok/s", format_rate(read_bytes / seconds)]
    if n_used := n_device_hits + n_host_hits + n_reads:
        parts += [f"{name} {n / n_used:.0%}" for name, n in (("VRAM", n_device_hits), ("host", n_host_hits), ("drives", n_reads))]
    return "  ".join(parts)
