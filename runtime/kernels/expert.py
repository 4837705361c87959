"""Routed experts: w2(SiTU(w1 z, w3 z)), their weights decoded from the bytes of their records.

`expert_forward` is one expert in plain torch. `run_experts` computes a group of experts in two launches, w1 + w3 + SiTU and then w2, from a
table of where their records lie. The result of a (row, expert) has the same bits whatever else is in the table, and in whatever order.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from layout.record import SEGMENT_NAMES, RecordLayout
from runtime.kernels.cuda_library import Variant, check, fall_back, find_library
from runtime.kernels.driver import raw_stream
from runtime.kernels.launch import DOT_PRECISION, IS_INTERPRETED, OPTIONS, constexpr, jit, runs_kernels, tensor, tl
from runtime.kernels.mxfp4 import decode_mxfp4, mxfp4_tile
from runtime.kernels.rows import TILE_ROWS, by_rows
from runtime.kernels.situ import situ, situ_f32

# What the compiled kernels hold: entries of a table, and columns of a matrix.
MOST_GROUPS = 256
MOST_COLUMNS = 3584
# As remarks name it.
WHAT = "grouped experts"
# Records must start at a multiple of it.
RECORD_ALIGNMENT_BYTES = 16


def expert_forward(record: Tensor, layout: RecordLayout, z: Tensor, *, situ_beta: float, situ_linear_beta: float, is_tiled: bool) -> Tensor:
    """Return the expert's output for each row.

    record   uint8 [layout.n_bytes], on the device of z
    z        float32 [rows, latent]; float64 gives a reference
    returns  float32 [rows, latent]
    """
    gate, down, up = (_matrix(record, layout, name).to(z.dtype) for name in ("w1", "w2", "w3"))

    def run(rows: Tensor) -> Tensor:
        return situ(rows @ gate.T, rows @ up.T, beta=situ_beta, linear_beta=situ_linear_beta) @ down.T

    return by_rows(run, z.unsqueeze(0), is_tiled=is_tiled).squeeze(0)


def run_experts(
    z: Tensor, addresses: Tensor, rows: Tensor, places: Tensor, layout: RecordLayout,
    *, situ_beta: float, situ_linear_beta: float, hidden: Tensor, outputs: Tensor, variant: Variant | None = None,
) -> None:  # fmt: skip
    """Write the output of every (row, expert) of the table to its place; other places stay as they are.

    z          float32 [M, latent]
    addresses  int64 [n], n in 1..256: where each expert's record lies on the device, a multiple of 16
    rows       int32 [n, 16]: the rows of z that use the expert, -1 for none; an entry without rows costs nothing, whatever its address
    places     int32 [n, 16]: where in outputs each result goes
    hidden     float32 [n or more, 16, intermediate], scratch
    outputs    float32 [places, latent]
    variant    of the compiled kernels, if not the device's own
    """
    n = addresses.numel()
    assert 1 <= n <= MOST_GROUPS and rows.shape == places.shape == (n, TILE_ROWS) and hidden.shape[0] >= n
    assert all(x.is_contiguous() for x in (z, addresses, rows, places, hidden, outputs))
    if not runs_kernels(z):
        _run_plain(z, addresses, rows, places, layout, situ_beta, situ_linear_beta, outputs)
        return
    library = _find_kernels(layout, z.device, variant)
    if library is None:
        _run_triton(z, addresses, rows, places, layout, situ_beta, situ_linear_beta, hidden, outputs)
        return
    stream = raw_stream(z.device)
    tables = (z.data_ptr(), addresses.data_ptr(), rows.data_ptr(), places.data_ptr())
    sizes = (layout.latent_size, layout.intermediate_size, _offsets(layout))
    buffers, constants = (hidden.data_ptr(), outputs.data_ptr()), (situ_beta, situ_linear_beta, True)
    check(library, library.ktier_experts(stream, z.device.index, *tables, n, *buffers, *sizes, *constants), "a group of experts")


def why_not_compiled(layout: RecordLayout) -> str | None:
    """Return why the compiled kernels do not take experts of this size, or None if they do."""
    if max(layout.latent_size, layout.intermediate_size) <= MOST_COLUMNS:
        return None
    return f"experts of {layout.latent_size} x {layout.intermediate_size} are too large for them, which hold at most {MOST_COLUMNS} columns"


def _find_kernels(layout: RecordLayout, device: torch.device, variant: Variant | None) -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if Triton's must do; if that is because of the size it is said and counted."""
    if (reason := why_not_compiled(layout)) is not None:
        fall_back(WHAT, reason)
        return None
    return None if IS_INTERPRETED else find_library(device, variant)


def _run_plain(
    z: Tensor, addresses: Tensor, rows: Tensor, places: Tensor, layout: RecordLayout, beta: float, linear_beta: float, outputs: Tensor
) -> None:
    """The same on a CPU, expert by expert."""
    for address, expert_rows, expert_places in zip(addresses.tolist(), rows, places, strict=True):
        used = expert_rows >= 0
        if used.any():
            record = torch.frombuffer((ctypes.c_uint8 * layout.n_bytes).from_address(address), dtype=torch.uint8)
            y = expert_forward(record, layout, z[expert_rows[used].long()], situ_beta=beta, situ_linear_beta=linear_beta, is_tiled=True)
            outputs[expert_places[used].long()] = y


def _run_triton(
    z: Tensor, addresses: Tensor, rows: Tensor, places: Tensor, layout: RecordLayout,
    beta: float, linear_beta: float, hidden: Tensor, outputs: Tensor,
) -> None:  # fmt: skip
    n, at = addresses.numel(), [layout.segment(name).offset for name in SEGMENT_NAMES]
    latent, intermediate, options = layout.latent_size, layout.intermediate_size, {"num_warps": 2, **OPTIONS}
    _hidden_kernel[(intermediate // 32, n)](
        z, addresses, rows, hidden, beta, linear_beta, at[0], at[1], at[4], at[5], latent, intermediate, DOT_PRECISION, **options
    )
    _output_kernel[(latent // 32, n)](hidden, addresses, rows, places, outputs, at[2], at[3], intermediate, latent, DOT_PRECISION, **options)


@jit()
def _hidden_kernel(
    z: tensor, addresses: tensor, rows: tensor, hidden: tensor, beta: tensor, linear_beta: tensor,
    GATE: constexpr, GATE_SCALE: constexpr, UP: constexpr, UP_SCALE: constexpr, K: constexpr, N: constexpr, PRECISION: constexpr,
) -> None:  # fmt: skip
    """32 rows of w1 and of w3 of one expert, and SiTU."""
    group, m, n = tl.program_id(1), tl.arange(0, 16), tl.program_id(0) * 32 + tl.arange(0, 32)
    row = tl.load(rows + group * 16 + m)
    if tl.max(row, 0) >= 0:
        record = tl.load(addresses + group).to(tl.pointer_type(tl.uint8))
        gate = mxfp4_tile(z, row, record + GATE, record + GATE_SCALE, n, K, PRECISION)
        up = mxfp4_tile(z, row, record + UP, record + UP_SCALE, n, K, PRECISION)
        at = (group * 16 + m[:, None]) * N + n[None, :]
        tl.store(hidden + at, situ_f32(gate, up, beta, linear_beta), mask=(row >= 0)[:, None] & (n < N)[None, :])


@jit()
def _output_kernel(
    hidden: tensor, addresses: tensor, rows: tensor, places: tensor, outputs: tensor,
    DOWN: constexpr, DOWN_SCALE: constexpr, K: constexpr, N: constexpr, PRECISION: constexpr,
) -> None:  # fmt: skip
    """32 rows of w2 of one expert."""
    group, m, n = tl.program_id(1), tl.arange(0, 16), tl.program_id(0) * 32 + tl.arange(0, 32)
    row = tl.load(rows + group * 16 + m)
    if tl.max(row, 0) >= 0:
        record = tl.load(addresses + group).to(tl.pointer_type(tl.uint8))
        total = mxfp4_tile(hidden, tl.where(row >= 0, group * 16 + m, -1), record + DOWN, record + DOWN_SCALE, n, K, PRECISION)
        place = tl.load(places + group * 16 + m).to(tl.int64)
        tl.store(outputs + place[:, None] * N + n[None, :], total, mask=(row >= 0)[:, None] & (n < N)[None, :])


@cache
def _offsets(layout: RecordLayout) -> Any:
    """Return the segments' offsets as a C array, kept for as long as the process lives."""
    return (ctypes.c_int64 * len(SEGMENT_NAMES))(*(layout.segment(name).offset for name in SEGMENT_NAMES))


def _matrix(record: Tensor, layout: RecordLayout, name: str) -> Tensor:
    segments = (layout.segment(f"{name}.{part}") for part in ("packed", "scale"))
    return decode_mxfp4(*(record[s.offset : s.end].view(s.n_rows, s.n_cols) for s in segments))
