"""Triton's kernels are compiled for the cards, without one: what the interpreter takes, the compiler may not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from manifests.geometry import load_geometry
from runtime.bench.rig import Rig, Setting
from runtime.bench.synthetic import EmulatedDrive
from runtime.kernels.indexer import append_index_keys_, select_in_cache
from runtime.kernels.launch import HAS_TRITON, IS_INTERPRETED
from runtime.kernels.mla import mla_decode_

pytestmark = pytest.mark.skipif(not HAS_TRITON or IS_INTERPRETED, reason="needs Triton's compiler")


class Card:
    """A GPU that compiles and cannot run, as Triton's driver."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        # Of its own for each card: under it Triton remembers what it has compiled.
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """Have every launch compile its kernel and run nothing; return the PTX of each kernel's binaries, by the binary's hash."""
    from triton.runtime.jit import JITFunction

    real, binaries = JITFunction.run, dict[str, dict[str, str]]()

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        binary = real(kernel, *arguments, grid=grid, warmup=True, **options)
        binaries.setdefault(kernel.fn.__name__, {})[binary.hash] = binary.asm["ptx"]
        return binary

    monkeypatch.setattr(JITFunction, "run", compile_only)
    for module in ("launch", "groups"):
        monkeypatch.setattr(f"runtime.kernels.{module}.runs_on", lambda *tensors: True)
    monkeypatch.setattr("runtime.kernels.cuda_library.why_not", lambda *_: "there is no GPU")
    return binaries


def are_for(capability: int, binaries: dict[str, dict[str, str]]) -> bool:
    return all(f".target sm_{capability}" in ptx for by_hash in binaries.values() for ptx in by_hash.values())


@pytest.mark.filterwarnings("ignore:the CUDA C")
@pytest.mark.parametrize("capability", [90, 120])
def test_every_kernel_of_decode_compiles(
    capability: int, compiled: dict[str, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert are_for(capability, compiled)


@pytest.mark.parametrize("capability", [90, 120])
def test_the_indexer_s_kernels_compile_once_for_all_rows_and_rooms(
    capability: int, compiled: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.driver import driver

    monkeypatch.setattr(driver, "_active", Card(capability))
    g = load_geometry("k3.1")
    assert g.indexer is not None
    size, rope = g.indexer.head_dim, g.qk_rope_head_dim
    rows_of_kv_b, n_past, gain = g.qk_nope_head_dim + g.v_head_dim, torch.zeros(1, dtype=torch.int32), torch.zeros(size)
    quants = torch.zeros(g.n_heads, rows_of_kv_b, g.kv_lora_rank, dtype=torch.int8)
    kv_b = quants, quants[..., ::32].half().contiguous()
    for n_tok, room in ((1, 4096), (3, 5001), (16, 2049)):
        keys = torch.zeros(room, size)
        append_index_keys_(torch.zeros(n_tok, size), keys, n_past, gain=gain, bias=gain, eps=1e-5)
        q, weights = torch.zeros(n_tok, g.indexer.n_heads, size), torch.zeros(n_tok, g.indexer.n_heads)
        positions = select_in_cache(q, weights, keys, n_past, g.indexer.top_k)
        mla_decode_(
            torch.zeros(n_tok, g.n_heads, g.qk_nope_head_dim + rope), torch.zeros(n_tok, g.kv_lora_rank + rope), torch.zeros(room, g.kv_lora_rank),
            torch.zeros(room, rope), n_past, kv_b=kv_b, gain=torch.zeros(g.kv_lora_rank), eps=1e-6, positions=positions,
        )  # fmt: skip
    assert {name: len(binaries) for name, binaries in compiled.items()} == dict.fromkeys(
        ("_append_key_kernel", "_sort_keys_kernel", "_append_kernel", "_queries_kernel", "_attention_kernel", "_merge_kernel", "_values_kernel"), 1
    )
    assert not [name for name, binaries in compiled.items() for ptx in binaries.values() if "fma.rn" in ptx]
    assert are_for(capability, compiled)
