"""krun serve: settings and one line per request to stderr."""

import socket
import stat
from pathlib import Path
from typing import Annotated

import typer

from layout.sizes import counted, format_size
from layout.terminal import note
from manifests.errors import UsageError
from runtime.cli.arguments import (
    HOST_OPTION,
    LONG_CONTEXT_OPTION,
    PREFETCH_OPTION,
    TIER_CAP_OPTION,
    VERIFY_EVERY,
    VERIFY_OPTION,
    VRAM_OPTION,
    ChunkOption,
    ContextOption,
    DeviceOption,
    ExactPrefillOption,
    ManifestOption,
    RequireDirectOption,
    is_long_context,
    parse_tier_caps,
)
from runtime.engine import DEFAULT_CHUNK, Options
from runtime.memory import AUTO
from runtime.serving.http import bind, is_loopback, listen
from runtime.serving.prefixes import ServingEngine
from runtime.serving.server import Server, ServerOptions
from runtime.tokens import load_tokenizer

LEAST_KEY_CHARS = 8


def serve_command(
    manifest: ManifestOption,
    host: Annotated[str, typer.Option(help="The address to listen on; any but this machine's own needs --api-key-file.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one and says which.")] = 8080,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="F", help="A file with API keys, one on each line; without one of them nobody is answered.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="The model's name in the API; without it that of the manifest's directory.")] = None,
    queue: Annotated[int, typer.Option(min=0, max=1000, help="How many requests may wait; one more is refused with 429.")] = 16,
    drain: Annotated[float, typer.Option(min=0, max=86400, metavar="SECONDS", help="How long a request to end waits for what runs.")] = 30.0,
    read_timeout: Annotated[float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="How long a client may take to send a request.")] = 30.0,
    keep_states: Annotated[
        int, typer.Option(min=0, max=1000, help="States of former texts to keep in host memory; a turn of a conversation leaves two.")
    ] = 4,
    context: ContextOption = None,
    device: DeviceOption = None,
    vram_cache: Annotated[str, VRAM_OPTION] = AUTO,
    host_pool: Annotated[str, HOST_OPTION] = AUTO,
    chunk: ChunkOption = DEFAULT_CHUNK,
    long_context: Annotated[str | None, LONG_CONTEXT_OPTION] = None,
    exact_prefill: ExactPrefillOption = False,
    verify_reads: Annotated[int, VERIFY_OPTION] = VERIFY_EVERY,
    prefetch: Annotated[int | None, PREFETCH_OPTION] = None,
    tier_cap: Annotated[list[str] | None, TIER_CAP_OPTION] = None,
    require_direct: RequireDirectOption = False,
) -> None:
    """Serve OpenAI's API, one answer at a time."""
    keys = _read_keys(api_key_file)
    _check_host(host)
    if model_name is not None and not model_name.strip():
        raise UsageError(f"--model-name {model_name!r}: holds no name; leave it out for that of the manifest's directory")
    if not keys and not is_loopback(host):
        raise UsageError(f"--host {host}: others could reach it, and anyone would be answered; give --api-key-file F, or listen on 127.0.0.1")
    options = Options(
        device=device, vram_cache=vram_cache, host_pool=host_pool, context=context, chunk=chunk, is_exact_prefill=exact_prefill,
        verify_reads=verify_reads, n_prefetch=prefetch, tier_caps=parse_tier_caps(tier_cap), is_direct_required=require_direct,
        is_long_context=is_long_context(long_context),
    )  # fmt: skip
    # Before the weights are read: that takes long where they are large.
    with bind(host, port) as listener, ServingEngine(manifest, options, n_kept=keep_states, on_remark=note) as engine:
        name = model_name or engine.prepared.path.resolve().parent.name
        served = ServerOptions(model_name=name, keys=keys, n_queue=queue, drain_s=drain, read_timeout_s=read_timeout)
        tokenizer = load_tokenizer(engine.prepared.tokenizer_directory, vocab_size=engine.geometry.vocab_size)
        server = Server(engine, tokenizer, served, on_remark=note)
        for line in engine.effective():
            note(line)
        each = format_size(engine.kept_bytes(engine.context))
        note(
            f"--keep-states {keep_states}: up to {each} of host memory each; --queue {queue}; --drain {drain:g} s; --read-timeout {read_timeout:g} s"
        )
        note(counted(len(keys), "API key") if keys else "no API key; this machine alone is answered")
        # From the line below on, who connects is answered.
        listen(listener)
        address = listener.getsockname()
        url = f"http://{f'[{host}]' if ':' in host else host}:{address[1]}"
        note(f"state and chat in a browser: {url}/")
        note(f"model {name!r} on {url}/v1")
        server.run(listener)
        if server.fault is not None:
            raise server.fault
    note("ended as asked")


def _check_host(host: str) -> None:
    """Raise UsageError if a host is neither an address nor a name that this machine knows."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # A name such as "a..b" is refused before anything is asked.
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not the name of a host"
        expected = "expected an address or a name of this machine, such as 127.0.0.1; for one that others can reach also give --api-key-file F"
        raise UsageError(f"--host {host}: {why}; {expected}") from None


def _read_keys(path: Path | None) -> frozenset[bytes]:
    """Return the keys in a file. Raises UsageError if it cannot be read or holds none that would do."""
    if path is None:
        return frozenset()
    try:
        lines = path.read_bytes().splitlines()
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(f"--api-key-file {path}: cannot be read: {error.strerror}") from None
    keys = {key: number for number, line in enumerate(lines, start=1) if (key := line.strip())}
    if not keys:
        raise UsageError(f"--api-key-file {path}: holds no key; write one on each line")
    for key, number in keys.items():
        if len(key) < LEAST_KEY_CHARS or not all(0x21 <= byte <= 0x7E for byte in key):
            expected = f"at least {LEAST_KEY_CHARS} visible ASCII characters on each line, and no comments"
            raise UsageError(f"--api-key-file {path}: line {number} is too short for a key, or not plain; expected {expected}")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        note(f"--api-key-file {path}: others may read it; chmod 600 keeps it to yourself")
    return frozenset(keys)
