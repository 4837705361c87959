"""The self-test before a run: every kernel of decode beside its plain form, and what becomes of one that is wrong.

On a CPU this sees the plain forms; `test_kernels_under_the_interpreter` runs the file once more with Triton's kernels, and a GPU runs them as they are.
"""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from interpreted import accept_numpy_2_4, run_interpreted

from layout.record import RecordLayout
from manifests.errors import DeviceError
from runtime.doctor import kernel_test_finding
from runtime.kernels import bf16, cuda_library, expert, groups, indexer, kda, mla, norms, products_check, prompt_q8_0, q8_0, residual, router, situ
from runtime.kernels.cuda_library import VARIANTS, choose_variant, fall_back, fallen_back, find_library, reject, why_not
from runtime.kernels.expert import MOST_COLUMNS, why_not_compiled
from runtime.kernels.launch import HAS_TRITON, IS_INTERPRETED
from runtime.kernels.products_check import CHECKS, KernelTest, self_test
from runtime.kernels.prompt_q8_0 import why_no_prompt_products
from runtime.kernels.steps_check import STEP_CHECKS, Check, exact
from runtime.start import checked_kernels

if IS_INTERPRETED:
    accept_numpy_2_4()

CPU = torch.device("cpu")
named = pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
only_cpu = pytest.mark.skipif(IS_INTERPRETED, reason="starts the interpreter, or has nothing to do with it")
only_interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="needs Triton's kernels on a CPU")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available() or IS_INTERPRETED, reason="needs a CUDA device")
# Each kernel with the check that goes wrong if it is.
STEP_KERNELS: list[tuple[ModuleType, str, str]] = [
    (norms, "_rms_kernel", "RMS norm"),
    (norms, "_rms_kernel", "gated RMS norm"),
    (residual, "_score_kernel", "residual mix"),
    (residual, "_mix_kernel", "residual mix"),
    (router, "_route_kernel", "router"),
    (router, "_combine_kernel", "sum of experts"),
    (situ, "_situ_kernel", "SiTU"),
    (kda, "_prepare_kernel", "KDA step"),
    (kda, "_steps_kernel", "KDA step"),
    (mla, "_append_kernel", "MLA step"),
    (mla, "_queries_kernel", "MLA step"),
    (mla, "_attention_kernel", "MLA step"),
    (mla, "_merge_kernel", "MLA step"),
    (mla, "_values_kernel", "MLA step"),
    (indexer, "_append_key_kernel", "index selection"),
    (indexer, "_sort_keys_kernel", "index selection"),
    (groups, "_group_kernel", "resident groups"),
]
# Of the same modules, but not for a step of decode.
OTHER_KERNELS = {"_l2_kernel"}


@pytest.fixture(autouse=True)
def _fills_what_is_empty_with_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _forgets() -> Iterator[None]:
    """What a test makes the process remember of a device is forgotten."""
    before = dict(cuda_library._rejected)
    yield
    cuda_library._rejected.clear()
    cuda_library._rejected.update(before)
    cuda_library._n_fallen_back.clear()
    cuda_library.say_once.cache_clear()
    find_library.cache_clear()


@only_cpu
def test_kernels_under_the_interpreter() -> None:
    run_interpreted(__file__)


@only_cpu
def test_every_check_passes_with_the_plain_forms() -> None:
    results = self_test(CPU)
    assert [result for result in results if not result.is_right] == []
    assert [result.name for result in results] == [check.name for check in CHECKS] and len({result.name for result in results}) == len(results)


@only_cpu
@named
def test_a_check_sees_one_element_that_is_off_and_a_nan(check: Check) -> None:
    def spoilt(by: float) -> Check:
        def run(*arguments: Any) -> tuple[torch.Tensor, ...]:
            *others, last = check.run(*arguments)
            last.view(-1)[-1] += by
            return *others, last

        return check._replace(run=run)

    *_, last = check.expected(*(exact(x) for x in check.inputs(torch.Generator().manual_seed(1))))
    size = last.double().pow(2).mean().sqrt().item()
    assert not spoilt(max(2 * check.tolerance * size, 1e-6)).agrees(CPU) and not spoilt(torch.nan).agrees(CPU)


@only_cpu
def test_a_kernel_that_the_gpu_refuses_is_wrong() -> None:
    def refuse(*_: Any) -> Any:
        raise DeviceError("the GPU refused a product")

    result = products_check._result(CHECKS[0]._replace(run=refuse), CPU)
    assert (result.name, result.is_right, result.is_usable, result.why) == (CHECKS[0].name, False, False, "DeviceError: the GPU refused a product")


@only_cpu
def test_a_step_that_is_a_little_off_is_said_and_a_broken_one_ends_the_run() -> None:
    (check,) = (check for check in CHECKS if check.name == "SiTU")

    def off(by: float) -> KernelTest:
        return products_check._result(check._replace(run=lambda x: tuple(y * (1 + by) for y in check.run(x))), CPU)

    assert off(0.0).is_right
    a_little, broken = off(1e-4), off(1e-2)
    assert not a_little.is_right and a_little.is_usable and re.fullmatch(r"SiTU imprecise \(off by .*e-04\)", str(a_little))
    assert kernel_test_finding([off(0.0), a_little], "here").level == "note"
    assert not broken.is_usable and re.fullmatch(r"SiTU WRONG \(off by .*e-0[12]\)", str(broken))
    assert kernel_test_finding([a_little, broken], "here").level == "bad"


@only_cpu
@pytest.mark.usefixtures("_forgets")
def test_prompts_do_without_a_product_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no such type\nand more")

    checks = tuple(check._replace(run=fail) if check.is_prompt else check for check in CHECKS)
    monkeypatch.setattr(products_check, "CHECKS", checks)
    monkeypatch.setattr(prompt_q8_0, "_rejected", {})
    assert why_no_prompt_products(CPU) is None
    (result,) = (result for result in self_test(CPU) if not result.is_right)
    assert result.is_usable and kernel_test_finding([result], "here").level == "note"
    assert why_no_prompt_products(CPU) == "ValueError: no such type"


@only_interpreted
@pytest.mark.parametrize("check", STEP_CHECKS, ids=[check.name for check in STEP_CHECKS])
def test_every_step_s_kernels_agree_with_float64(check: Check) -> None:
    assert check.agrees(CPU)


class _Short:
    """A kernel whose last program along the first axis does not run."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.kernel[(grid[0] - 1, *grid[1:])]


@only_interpreted
@pytest.mark.parametrize(("module", "name", "of"), STEP_KERNELS, ids=[f"{of}: {name}" for _, name, of in STEP_KERNELS])
def test_a_kernel_that_leaves_its_last_part_out_is_found(module: ModuleType, name: str, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, _Short(getattr(module, name)))
    (check,) = (check for check in CHECKS if check.name == of)
    assert not check.agrees(CPU)


@only_cpu
@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_no_kernel_of_decode_is_without_a_check() -> None:
    modules = {module for module, *_ in STEP_KERNELS}
    there = {(m.__name__, name) for m in modules for name, x in vars(m).items() if name.endswith("_kernel") and x.__module__ == m.__name__}
    assert {(name, kernel) for name, kernel in there if kernel not in OTHER_KERNELS} == {(m.__name__, name) for m, name, _ in STEP_KERNELS}
    assert {of for *_, of in STEP_KERNELS} == {check.name for check in STEP_CHECKS}
    assert sum(check.is_product for check in CHECKS) == len([bf16, expert, q8_0])


@only_cpu
@pytest.mark.usefixtures("_forgets")
def test_rejected_kernels_do_not_run_and_that_is_said_once() -> None:
    device = torch.device("cuda", 63)
    reject(device, "they gave wrong results on it: Q8_0 product")
    assert why_not(device) == "they gave wrong results on it: Q8_0 product"
    with pytest.warns(RuntimeWarning, match="slower Triton kernels do: they gave wrong results on it: Q8_0 product"):
        assert find_library(device) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_library(device, VARIANTS[-1]) is None


@only_cpu
@pytest.mark.usefixtures("_forgets")
def test_a_product_that_falls_back_is_said_once_and_counted() -> None:
    reason = why_not_compiled(RecordLayout(MOST_COLUMNS + 32, 64))
    assert reason is not None and why_not_compiled(RecordLayout(MOST_COLUMNS, MOST_COLUMNS)) is None
    with pytest.warns(RuntimeWarning, match="grouped experts: slower Triton kernels run.*3616 x 64 are too large.*at most 3584 columns"):
        fall_back(expert.WHAT, reason)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fall_back(expert.WHAT, reason)
    assert fallen_back() == {"grouped experts": 2}


@only_cpu
@pytest.mark.parametrize(
    ("capability", "shared_kb", "name"),
    [
        ((9, 0), 227, "large"), ((10, 0), 227, "large"), ((10, 3), 227, "large"), ((11, 0), 227, "large"), ((12, 0), 99, "small"),
        ((12, 1), 99, "small"), ((8, 0), 163, "medium"), ((8, 7), 163, "medium"), ((8, 6), 99, "small-plain"), ((8, 9), 99, "small-plain"),
    ],
)  # fmt: skip
def test_every_generation_has_its_variant(capability: tuple[int, int], shared_kb: int, name: str) -> None:
    assert choose_variant(capability, shared_kb * 1024).name == name


@pytest.mark.gpu
@needs_gpu
def test_every_check_passes_on_this_gpu() -> None:
    assert [result for result in self_test(torch.device("cuda", 0)) if not result.is_right] == []


@pytest.mark.gpu
@needs_gpu
@pytest.mark.usefixtures("_forgets")
def test_a_wrong_cuda_kernel_is_left_to_triton_with_a_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, remarks = torch.device("cuda", torch.cuda.current_device()), list[str]()
    if why_not(device) is not None:
        pytest.skip(f"the CUDA C++ kernels do not run here: {why_not(device)}")
    right = "fmaf(c[i][j], scale[i][j / 2], sum[i][j])"
    source = cuda_library.SOURCE.read_text()
    assert source.count(right) == 1
    wrong = tmp_path / "products.cu"
    wrong.write_text(source.replace(right, right.replace("scale[i][j / 2]", "1.001f * scale[i][j / 2]")))
    monkeypatch.setattr(cuda_library, "SOURCE", wrong)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find_library.cache_clear()
    text = checked_kernels(device, remarks.append)
    assert any("slower Triton kernels do: they gave wrong results on it: grouped MXFP4 experts" in remark for remark in remarks), remarks
    assert text.startswith("Triton; the CUDA C++ kernels do not run: they gave wrong results") and "grouped MXFP4 experts right" in text


@pytest.mark.gpu
@needs_gpu
def test_a_wrong_triton_kernel_ends_the_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda, "_steps_kernel", _Short(kda._steps_kernel))
    with pytest.raises(DeviceError, match="kernel self-test: .*KDA step WRONG"):
        checked_kernels(torch.device("cuda"), list[str]().append)
