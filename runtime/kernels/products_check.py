"""The self-test of the product kernels: each against its plain form, on the GPU at hand and with the sizes of no model."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from layout.q8_0 import BLOCK_BYTES, BLOCK_SIZE
from layout.record import RecordLayout
from runtime.kernels.bf16 import bf16_product
from runtime.kernels.expert import expert_forward, run_experts
from runtime.kernels.q8_0 import Q8Matrix, pack_q8_0, q8_0_product
from runtime.kernels.rows import TILE_ROWS

# Of a float32 sum of some hundred products whose signs vary, relative to the root mean square of the outputs.
TOLERANCE = 1e-5
_SITU = {"situ_beta": 4.0, "situ_linear_beta": 25.0}


def self_test(device: torch.device) -> list[tuple[str, bool, float]]:
    """Return (kernel, whether it agrees with its plain form, seconds) of every product kernel."""
    results = []
    for name, run in _checks(device):
        start = time.perf_counter()
        is_right = run()
        results.append((name, is_right, time.perf_counter() - start))
    return results


def _checks(device: torch.device) -> Iterator[tuple[str, Callable[[], bool]]]:
    source = torch.Generator(device).manual_seed(1)
    yield "Q8_0 product", lambda: _check_q8_0(source)
    yield "bfloat16 product", lambda: _check_bf16(source)
    yield "grouped MXFP4 experts", lambda: _check_experts(source)


def _check_q8_0(source: torch.Generator) -> bool:
    # Several chunks of columns, a last tile that is not full.
    w, x = random_q8_0(200, 2592, source), _normal((TILE_ROWS, 2592), source)
    return _agree(q8_0_product(x, w), x.double() @ w.expand().double().T) and torch.equal(q8_0_product(x[:1], w)[0], q8_0_product(x, w)[0])


def _check_bf16(source: torch.Generator) -> bool:
    w, x = _normal((72, 736), source).bfloat16(), _normal((TILE_ROWS, 736), source)
    return _agree(bf16_product(x, w), x.double() @ w.double().T) and torch.equal(bf16_product(x[:1], w)[0], bf16_product(x, w)[0])


def _check_experts(source: torch.Generator) -> bool:
    layout, n, device = RecordLayout(160, 224), 3, source.device
    records = [random_record(layout, source) for _ in range(n)]
    z = _normal((TILE_ROWS, layout.latent_size), source)
    addresses = torch.tensor([record.data_ptr() for record in records], device=device)
    rows = torch.arange(TILE_ROWS, dtype=torch.int32, device=device).expand(n, -1).contiguous()
    places = torch.arange(n * TILE_ROWS, dtype=torch.int32, device=device).view(n, TILE_ROWS)
    hidden = torch.empty(n, TILE_ROWS, layout.intermediate_size, device=device)
    outputs = torch.full((n * TILE_ROWS, layout.latent_size), torch.nan, device=device)
    run_experts(z, addresses, rows, places, layout, **_SITU, hidden=hidden, outputs=outputs)
    expected = torch.cat([expert_forward(record, layout, z.double(), **_SITU, is_tiled=False) for record in records])
    return _agree(outputs, expected)


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


def _normal(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=source, device=source.device)


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Return whether no output is off by more than the tolerance; a NaN is."""
    return bool(((found - expected).abs().max() <= TOLERANCE * expected.pow(2).mean().sqrt()).item())
