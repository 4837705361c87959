"""Triton's kernels are compiled for the cards, without one: what the interpreter takes, the compiler may not."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.geometry import load_geometry
from runtime.bench.rig import Rig, Setting
from runtime.bench.synthetic import EmulatedDrive
from runtime.kernels.launch import HAS_TRITON, IS_INTERPRETED

pytestmark = pytest.mark.skipif(not HAS_TRITON or IS_INTERPRETED, reason="needs Triton's compiler")


class Card:
    """A GPU that compiles and cannot run, as Triton's driver."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Have every launch compile its kernel and run nothing; count the launches by kernel."""
    from triton.runtime.jit import JITFunction

    real, launches = JITFunction.run, Counter[str]()

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        launches[kernel.fn.__name__] += 1
        return real(kernel, *arguments, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "run", compile_only)
    for module in ("launch", "groups"):
        monkeypatch.setattr(f"runtime.kernels.{module}.runs_on", lambda *tensors: True)
    monkeypatch.setattr("runtime.kernels.cuda_library.why_not", lambda *_: "there is no GPU")
    return launches


@pytest.mark.filterwarnings("ignore:the CUDA C")
@pytest.mark.parametrize("capability", [90, 120])
def test_every_kernel_of_decode_compiles(capability: int, compiled: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.driver import driver

    monkeypatch.setattr(driver, "_active", Card(capability))
    drive = EmulatedDrive(tmp_path, None, 1.0)
    rig = Rig(load_geometry("tiny"), torch.device("cpu"), [drive], 4)
    rig.run(Setting((drive,), 40, 64, n_tokens=1, n_warm=0))
    kernels = {
        "_rms_kernel", "_product_kernel", "_prepare_kernel", "_steps_kernel", "_score_kernel", "_mix_kernel", "_situ_kernel", "_route_kernel",
        "_group_kernel", "_hidden_kernel", "_output_kernel", "_combine_kernel", "_append_kernel", "_queries_kernel", "_attention_kernel",
        "_merge_kernel", "_values_kernel",
    }  # fmt: skip
    assert set(compiled) == kernels
