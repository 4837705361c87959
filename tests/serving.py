"""A server for the tests that ask over HTTP: a real `krun serve`, or the same on a thread where no process of its own is needed.

By hand, with a model that kprep prepared, for as many requests as wanted: python tests/serving.py MODEL 5000
"""

import concurrent.futures
import contextlib
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from runtime.engine import Options
from runtime.serving.http import bind
from runtime.serving.prefixes import ServingEngine
from runtime.serving.server import Server, ServerOptions
from runtime.tokens import load_tokenizer

# One for all, since each new one reads the certificates of the web first; and no connection twice, which may have been closed meanwhile.
HTTP = httpx.Client(timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
KRUN = Path(sys.executable).with_name("krun")
STARTED = re.compile(r" on (http://\S+)/v1$", re.MULTILINE)


@dataclass(frozen=True)
class Client:
    """Asks a server."""

    url: str

    def openai(self, key: str = "none", timeout: float = 30) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=timeout)

    def post(self, path: str, body: Any = None, **named: Any) -> httpx.Response:
        return HTTP.post(self.url + path, json=body, **named)

    def metrics(self) -> dict[str, float]:
        lines = HTTP.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


@dataclass(frozen=True)
class Served(Client):
    """A server that runs in a process of its own; `log` is what it has written to stderr."""

    process: subprocess.Popen[bytes]
    log: Path

    def ended(self, timeout: float = 20) -> int:
        return self.process.wait(timeout)


@contextlib.contextmanager
def serving(model: Path, *flags: object, program: tuple[object, ...] = (KRUN,)) -> Iterator[Served]:
    """Run a server on a free port; end it afterwards if it has not ended."""
    log = model.with_name(f"{model.name}-{time.monotonic_ns()}.log")
    command = [*map(str, program), "serve", "-m", str(model), "--port", "0", *map(str, flags)]
    with log.open("wb") as err, subprocess.Popen(command, stderr=err, stdout=subprocess.DEVNULL) as process:
        try:
            yield Served(_address(process, log), process, log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@contextlib.contextmanager
def serving_inside(model: Path, *, keys: frozenset[bytes] = frozenset(), **options: Any) -> Iterator[Client]:
    """Run a server on a free port and on a thread of this process, which has torch already. options: those of the engine."""
    asked = ServerOptions(model_name=model.name, keys=keys, n_queue=16, drain_s=0, read_timeout_s=30)
    with bind("127.0.0.1", 0) as listener, ServingEngine(model, Options(device="cpu", **options), n_kept=4, on_remark=print) as engine:
        server = Server(engine, load_tokenizer(engine.prepared.tokenizer_directory, vocab_size=engine.geometry.vocab_size), asked, on_remark=print)
        thread = threading.Thread(target=server.run, args=(listener,))
        thread.start()
        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}")
        try:
            eventually(lambda: _answers(client, thread))
            yield client
        finally:
            server.end()
            thread.join()


def _answers(client: Client, thread: threading.Thread) -> bool:
    assert thread.is_alive()
    try:
        return HTTP.get(f"{client.url}/health").status_code == 200
    except httpx.ConnectError:
        return False


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + 60
    while (found := STARTED.search(log.read_text())) is None:
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.02)
    return found[1]


def eventually(question: Any, timeout: float = 20) -> None:
    """Wait until something is true."""
    until = time.monotonic() + timeout
    while not question():
        assert time.monotonic() < until
        time.sleep(0.02)


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
N_AT_ONCE = 20
SHARE_CUT_OFF = 0.3
# What allocators keep for themselves.
MOST_GROWTH_BYTES = 48 * 2**20


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": 1} | fields


def cut_off(served: Client, n_lines: int, **more: Any) -> None:
    """Ask for a long stream and go after some lines."""
    body = text(max_tokens=1500, stream=True, **more)
    with HTTP.stream("POST", served.url + COMPLETION, json=body) as answer:
        lines = answer.iter_lines()
        for _ in range(n_lines):
            next(lines)


def resources(served: Served) -> tuple[int, int, int]:
    """Threads, descriptors, and resident bytes."""
    process = Path(f"/proc/{served.process.pid}")
    pages = int((process / "statm").read_text().split()[1])
    return len(os.listdir(process / "task")), len(os.listdir(process / "fd")), pages * os.sysconf("SC_PAGE_SIZE")


def storm(served: Client, numbers: range, rng: random.Random) -> None:
    """Ask much at once; some go while they wait, some while they are answered. All others must be answered."""

    def ask(n: int, n_lines: int) -> None:
        if n_lines:
            return cut_off(served, n_lines, prompt=f"cut {n}")
        if n % 5 == 0:
            answer = served.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
        else:
            answer = served.post(COMPLETION, text(prompt=f"{n % 7}", max_tokens=1 + n % 2, stream=n % 3 == 0))
        assert answer.status_code == 200, answer.text

    plan = [rng.randrange(1, 4) if rng.random() < SHARE_CUT_OFF else 0 for _ in numbers]
    with concurrent.futures.ThreadPoolExecutor(N_AT_ONCE) as pool:
        list(pool.map(ask, numbers, plan))
    eventually(lambda: HTTP.get(f"{served.url}/health").json()["running"] == 0)


def outlast_storms(served: Served, *, n_before: int, n: int) -> None:
    """See that a server is after n requests what it was after the first n_before: those bring threads and the memory of allocators."""
    asked = text(prompt="the same before and after", max_tokens=6, temperature=0, return_token_ids=True)
    rng, first = random.Random(1), served.post(COMPLETION, asked).json()["choices"]
    storm(served, range(n_before), rng)
    before = resources(served)
    storm(served, range(n_before, n_before + n), rng)
    eventually(lambda: resources(served)[1] <= before[1])
    after = resources(served)
    print(f"threads, descriptors, bytes: {before} before, {after} after {n} requests")
    assert after[0] <= before[0] and after[2] < before[2] + MOST_GROWTH_BYTES
    assert served.post(COMPLETION, asked).json()["choices"] == first
    metrics = served.metrics()
    assert metrics['ktier_queue{state="waiting"}'] == 0 and metrics["ktier_kept_states"] == 4


if __name__ == "__main__":
    with serving(Path(sys.argv[1]), "--queue", 25) as served:
        outlast_storms(served, n_before=200, n=int(sys.argv[2]))
