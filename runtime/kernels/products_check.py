"""The self-test of the kernels that decode uses: each against its plain form, on the GPU at hand and with the sizes of no model.

`CHECKS` is the table of all of them: the weight products here, the rest in steps_check.py.
"""

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from layout.q8_0 import BLOCK_BYTES, BLOCK_SIZE
from layout.record import RecordLayout
from runtime.kernels.bf16 import bf16_product
from runtime.kernels.cuda_library import find_library, reject
from runtime.kernels.expert import expert_forward, run_experts
from runtime.kernels.launch import IS_INTERPRETED
from runtime.kernels.prompt_q8_0 import q8_0_product_of_many, reject_prompt_products
from runtime.kernels.q8_0 import Q8Matrix, pack_q8_0, q8_0_product
from runtime.kernels.rows import TILE_ROWS
from runtime.kernels.steps_check import IMPRECISE, STEP_CHECKS, TOLERANCE, Check, randn

__all__ = ["CHECKS", "TOLERANCE", "KernelTest", "random_q8_0", "random_record", "self_test"]

_LAYOUT = RecordLayout(160, 224)
_BETA, _LINEAR_BETA = 4.0, 25.0
# Rows that use an expert: the compiled kernel has forms of its own for 4 rows and for 8, and goes twice over the weights for more.
_ROWS_OF_GROUPS = (1, 4, 5, 8, 9, TILE_ROWS)


class KernelTest(NamedTuple):
    """One kernel against its plain form on the actual device: the seconds it took, and how far it is off; `why` says what it raised.

    is_usable  whether it is right or no more than imprecise, or something else can do what it does
    """

    name: str
    is_right: bool
    seconds: float
    error: float = math.inf
    why: str = ""
    is_usable: bool = False

    def __str__(self) -> str:
        if self.is_right:
            return f"{self.name} right"
        is_finite = math.isfinite(self.error)
        how = self.why or (f"off by {self.error:.1e}" if is_finite else "")
        return f"{self.name} {'imprecise' if self.is_usable and is_finite else 'WRONG'}{f' ({how})' if how else ''}"


def self_test(device: torch.device) -> list[KernelTest]:
    """Return how every kernel does beside its plain form.

    If a product in CUDA C++ is wrong here, that is said, Triton's are used on this device from now on, and the products are tested again. If the
    prompt's product is wrong, plain torch runs prompts on this device from now on.
    """
    has_library = device.type == "cuda" and not IS_INTERPRETED and find_library(device) is not None
    results = [_result(check, device) for check in CHECKS]
    for check, result in zip(CHECKS, results, strict=True):
        if check.is_prompt and (math.isinf(result.error) or result.error > IMPRECISE):
            reject_prompt_products(device, result.why or f"their product is off by {result.error:.1e} on it")
    wrong = [check.name for check, result in zip(CHECKS, results, strict=True) if check.is_product and not result.is_right]
    if not (has_library and wrong):
        return results
    reject(device, f"they gave wrong results on it: {', '.join(wrong)}")
    # It warns, the first time, that Triton's run.
    find_library(device)
    return [_result(check, device) if check.is_product else result for check, result in zip(CHECKS, results, strict=True)]


def _result(check: Check, device: torch.device) -> KernelTest:
    start, error, why = time.perf_counter(), math.inf, ""
    try:
        error = check.error(device)
    except Exception as caught:
        # It could not be compiled, or the GPU refused the launch; nothing was computed.
        why = f"{type(caught).__name__}: {str(caught).strip().splitlines()[0] if str(caught).strip() else 'no more is known'}"
    is_right = error <= check.tolerance
    is_usable = is_right or check.is_prompt or (not check.is_product and check.tolerance > 0.0 and error <= IMPRECISE)
    return KernelTest(check.name, is_right, time.perf_counter() - start, error, why, is_usable)


def _q8_0_inputs(source: torch.Generator) -> tuple[Tensor, Q8Matrix]:
    # Several chunks of columns, a last tile that is not full.
    return randn(source, TILE_ROWS, 2592), random_q8_0(200, 2592, source)


def _run_q8_0(x: Tensor, w: Q8Matrix) -> tuple[Tensor, Tensor]:
    y = q8_0_product(x, w)
    return y, q8_0_product(x[:1], w) - y[:1]


def _expect_q8_0(x: Tensor, w: Q8Matrix) -> tuple[Tensor, Tensor]:
    y = x @ w.expand().double().T
    return y, torch.zeros_like(y[:1])


def _prompt_inputs(source: torch.Generator) -> tuple[Tensor, Q8Matrix]:
    return randn(source, 2 * TILE_ROWS + 1, 4096), random_q8_0(200, 4096, source)


def _run_prompt(x: Tensor, w: Q8Matrix) -> tuple[Tensor]:
    return (q8_0_product_of_many(x, w),)


def _expect_prompt(x: Tensor, w: Q8Matrix) -> tuple[Tensor]:
    return (x @ w.expand().double().T,)


def _bf16_inputs(source: torch.Generator) -> tuple[Tensor, Tensor]:
    return randn(source, TILE_ROWS, 736), randn(source, 72, 736).bfloat16()


def _run_bf16(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = bf16_product(x, w)
    return y, bf16_product(x[:1], w) - y[:1]


def _expect_bf16(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w.double().T
    return y, torch.zeros_like(y[:1])


def _expert_inputs(source: torch.Generator) -> tuple[Tensor, ...]:
    return randn(source, TILE_ROWS, _LAYOUT.latent_size), *(random_record(_LAYOUT, source) for _ in range(2))


def _run_experts(z: Tensor, *records: Tensor) -> tuple[Tensor, ...]:
    """Return the outputs of one group for each number of rows, the records in turns, and how two rows differ from the same in a larger group."""
    n, device, row = len(_ROWS_OF_GROUPS), z.device, torch.arange(TILE_ROWS, dtype=torch.int32, device=z.device)
    addresses = torch.tensor([records[i % len(records)].data_ptr() for i in range(n)], device=device)
    rows = torch.stack([torch.where(row < n_rows, row, -1) for n_rows in _ROWS_OF_GROUPS])
    places = torch.where(rows >= 0, rows + TILE_ROWS * torch.arange(n, dtype=torch.int32, device=device).view(-1, 1), -1).int()
    hidden = torch.empty(n, TILE_ROWS, _LAYOUT.intermediate_size, device=device)
    outputs = torch.full((n * TILE_ROWS, _LAYOUT.latent_size), torch.nan, device=device)
    run_experts(z, addresses, rows, places, _LAYOUT, situ_beta=_BETA, situ_linear_beta=_LINEAR_BETA, hidden=hidden, outputs=outputs)
    groups = [y[:n_rows] for y, n_rows in zip(outputs.view(n, TILE_ROWS, -1), _ROWS_OF_GROUPS, strict=True)]
    return *groups, groups[0][0] - groups[4][0], groups[1][0] - groups[5][0]


def _expect_experts(z: Tensor, *records: Tensor) -> tuple[Tensor, ...]:
    every = [
        expert_forward(record, _LAYOUT, z, situ_beta=_BETA, situ_linear_beta=_LINEAR_BETA, is_tiled=False) for record in records
    ]  # fmt: skip
    groups = [every[i % len(every)][:n_rows] for i, n_rows in enumerate(_ROWS_OF_GROUPS)]
    return *groups, torch.zeros_like(groups[0][0]), torch.zeros_like(groups[0][0])


def random_q8_0(n_rows: int, n_cols: int, source: torch.Generator) -> Q8Matrix:
    """Return a matrix of uniform quants, -127..127, and scales of about 0.001."""
    n_blocks, device = n_cols // BLOCK_SIZE, source.device
    quants = torch.randint(-127, 128, (n_rows, n_blocks, BLOCK_SIZE), generator=source, device=device, dtype=torch.int8).view(torch.uint8)
    scales = (torch.rand(n_rows, n_blocks, 1, generator=source, device=device) * 1e-3 + 5e-4).half().view(torch.uint8)
    return pack_q8_0(torch.cat([scales, quants], dim=-1).view(n_rows, n_blocks * BLOCK_BYTES))


def random_record(layout: RecordLayout, source: torch.Generator) -> Tensor:
    """Return uint8 [layout.n_bytes]: uniform nibbles, scales of 2^-7..2^-4."""
    record = torch.randint(0, 256, (layout.n_bytes,), generator=source, device=source.device, dtype=torch.uint8)
    for segment in layout.scale_segments:
        record[segment.offset : segment.end] = record[segment.offset : segment.end] % 4 + 120
    return record


CHECKS = (
    Check("Q8_0 product", _q8_0_inputs, _run_q8_0, _expect_q8_0, is_product=True),
    Check("bfloat16 product", _bf16_inputs, _run_bf16, _expect_bf16, is_product=True),
    Check("grouped MXFP4 experts", _expert_inputs, _run_experts, _expect_experts, is_product=True),
    # Tensor cores cut bits off in a sum of 3,072 products.
    Check("Q8_0 product of many rows", _prompt_inputs, _run_prompt, _expect_prompt, tolerance=3e-5, is_prompt=True),
    *STEP_CHECKS,
)
