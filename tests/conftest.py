"""Shared by all tests: the two tiny checkpoints, their extractions, and the real command lines."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

# Several test processes share few cores: idle torch threads that spin would cost more than they bring.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

DATA = Path(__file__).parent / "data"
MODELS = ("tiny-k3", "tiny-k3.1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--real-rows",
        metavar="FILE",
        help="safetensors file with weight_packed, weight_scale and expected of a released expert matrix (not shipped with the project)",
    )
    parser.addoption(
        "--router-trace",
        metavar="FILE",
        help="safetensors file with experts, int16 [token, layer, 16]: the routing of a real model (not shipped with the project)",
    )


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def command(name: str, *arguments: object, timeout: float = 120, cwd: Path | None = None) -> Outcome:
    """Run kprep or krun as a user does."""
    program = Path(sys.executable).with_name(name)
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, cwd=cwd)
    return Outcome(done.returncode, done.stdout, done.stderr)


def succeed(name: str, *arguments: object, timeout: float = 120) -> Outcome:
    """Run a command that must succeed."""
    outcome = command(name, *arguments, timeout=timeout)
    assert outcome.code == 0, outcome
    return outcome


# A shell that starts the suite in the background has interrupts ignored, and with it every process that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def signals_stay_as_they_were() -> Iterator[None]:
    """A command line that ran inside the test process leaves the requests to end ignored, and every process that is started later inherits that."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])


@pytest.fixture(params=["cpu", CUDA], scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=MODELS, scope="session")
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def extractions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both models, extracted once by the real command; not to be changed by a test."""
    root = tmp_path_factory.mktemp("extractions")
    for name in MODELS:
        succeed("kprep", "extract", DATA / name, root / name)
    return {name: root / name for name in MODELS}


@pytest.fixture(scope="session")
def extracted(extractions: dict[str, Path], model: str) -> Path:
    return extractions[model]


@pytest.fixture
def prepared_copy(extractions: dict[str, Path], tmp_path: Path) -> Path:
    """tiny-k3.1, extracted, for a test to damage."""
    return Path(shutil.copytree(extractions["tiny-k3.1"], tmp_path / "model"))


@pytest.fixture
def checkpoint_copy(tmp_path: Path) -> Iterator[Path]:
    """The tiny K3.1 checkpoint, for a test to damage."""
    yield Path(shutil.copytree(DATA / "tiny-k3.1", tmp_path / "checkpoint"))


@pytest.fixture
def python_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Python's threads read, for tests that make a read fail or wait within Python."""
    monkeypatch.setattr("layout.read_backends.native_library", lambda: (None, "the test looks into Python's threads"))
