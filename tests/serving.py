"""A real `krun serve` for the tests that ask it over HTTP."""

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai

KRUN = Path(sys.executable).with_name("krun")
STARTED = re.compile(r" on (http://\S+)/v1$", re.MULTILINE)


class Served(NamedTuple):
    """A server that runs; `log` is what it has written to stderr."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def openai(self, key: str = "none", timeout: float = 30) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=timeout)

    def post(self, path: str, body: Any = None, **named: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, **named)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def ended(self, timeout: float = 20) -> int:
        return self.process.wait(timeout)


@contextlib.contextmanager
def serving(model: Path, *flags: object, program: tuple[object, ...] = (KRUN,)) -> Iterator[Served]:
    """Run a server on a free port; end it afterwards if it has not ended."""
    log = model.with_name(f"{model.name}-{time.monotonic_ns()}.log")
    command = [*map(str, program), "serve", "-m", str(model), "--port", "0", *map(str, flags)]
    with log.open("wb") as err, subprocess.Popen(command, stderr=err, stdout=subprocess.DEVNULL) as process:
        try:
            yield Served(process, _address(process, log), log)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


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
