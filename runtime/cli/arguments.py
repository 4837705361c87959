"""Flags that several of krun's commands share, and what is true of flags before any work."""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from manifests.errors import UsageError
from manifests.manifest import TIERS
from runtime.sampler import Sampler
from runtime.tensor_files import check_writable

ManifestOption = Annotated[Path, typer.Option("-m", "--manifest", metavar="MANIFEST", help="manifest.yaml, or the directory that holds it.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda; without it cuda where there is one.")]
ChunkOption = Annotated[int, typer.Option("--prefill-chunk", "--chunk", min=1, help="The most tokens the prompt pass takes at a time.")]
ContextOption = Annotated[
    int | None,
    typer.Option("-c", "--context", help="Most tokens of the whole text, prompt and reply; without it 4096, or as many as are exact for the model."),
]
ExactPrefillOption = Annotated[bool, typer.Option("--exact-prefill", help="Use the decode arithmetic in the prompt pass too.")]
RequireDirectOption = Annotated[bool, typer.Option("--require-direct", help="Fail rather than read experts through the page cache.")]
VERIFY_EVERY = 16
VRAM_OPTION = typer.Option(metavar="SIZE", help="Records kept on the device: 27.5GB, 512MB, 16slots, or auto.")
HOST_OPTION = typer.Option(metavar="SIZE", help="Records kept in host memory, on their way and after: a size, or auto.")
VERIFY_OPTION = typer.Option(metavar="N", min=0, help="Check the hash of every Nth record that is read; 0 for none.")
PREFETCH_OPTION = typer.Option(
    metavar="N", min=0, max=2, help="Experts of the next layer to guess and read behind each layer's reads; without it 2 on a GPU, else 0."
)
LONG_CONTEXT_OPTION = typer.Option(metavar="unverified", help="Go beyond what is exact, with K3.1's indexer, whose form nobody has verified.")
TIER_CAP_OPTION = typer.Option("--tier-cap", metavar="C=2", help="Most requests in flight on all drives of a tier together; may be repeated.")


def parse_tier_caps(texts: Sequence[str] | None) -> dict[str, int]:
    """Read `C=2` and the like: tier to requests in flight. Raises UsageError."""
    caps: dict[str, int] = {}
    for text in texts or ():
        tier, _, number = text.partition("=")
        if len(tier) != 1 or tier not in TIERS or not re.fullmatch("[0-9]{1,4}", number) or not 1 <= int(number) <= 1024:
            raise UsageError(f"--tier-cap {text}: expected a tier, {', '.join(TIERS)}, and a number of requests from 1 to 1024, such as C=2")
        if tier in caps:
            raise UsageError(f"--tier-cap {text}: tier {tier} has one already; give each tier once")
        caps[tier] = int(number)
    return caps


def new_sampler(temp: float, top_p: float, seed: int | None) -> Sampler:
    """Return what the flags ask for. Raises UsageError for what is out of range, and for flags that would do nothing."""
    sampler = Sampler(temp, top_p, seed)
    idle = [flag for flag, is_given in (("--top-p", top_p != 1.0), ("--seed", seed is not None)) if is_given]
    if temp == 0 and idle:
        raise UsageError(f"{', '.join(idle)}: without effect at temperature 0, which draws nothing; give --temp, or leave it out")
    return sampler


def is_long_context(text: str | None) -> bool:
    """Read --long-context. Raises UsageError unless it says `unverified` or nothing."""
    if text not in (None, "unverified"):
        raise UsageError(f"--long-context {text}: expected the word unverified, since nobody has compared it with the released model")
    return text is not None


def check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Raise UsageError if a file that a flag names cannot be made, or if two flags name the same: known before the work, not after it."""
    seen: dict[str, str] = {}
    for flag, path in paths.items():
        if path is None:
            continue
        check_writable(path, flag=flag)
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise UsageError(f"{flag} {path}: no file can be made in {path.parent}: {error.strerror}; name another place") from None
        if (other := seen.setdefault(os.path.realpath(path), flag)) != flag:
            raise UsageError(f"{other} and {flag} both name {path}: give each a file of its own")
