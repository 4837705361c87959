"""The products of decode against float64: the plain forms, Triton's kernels under its interpreter, and, where there is a GPU, what runs on it."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreted import accept_numpy_2_4, run_interpreted
from torch import Tensor

from layout.q8_0 import decode_q8_0
from layout.record import RecordLayout
from runtime.kernels import bf16, cuda_library, expert, q8_0
from runtime.kernels.bf16 import bf16_product
from runtime.kernels.expert import expert_forward, run_experts
from runtime.kernels.launch import IS_INTERPRETED
from runtime.kernels.products_check import TOLERANCE, random_q8_0, random_record, self_test
from runtime.kernels.q8_0 import concat, pack_q8_0, q8_0_product

if IS_INTERPRETED:
    accept_numpy_2_4()

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu")
SITU = {"situ_beta": 4.0, "situ_linear_beta": 25.0}
TINY = RecordLayout(64, 96)
OTHERS = ("zero", "random", "nan", "inf")


@pytest.fixture
def source() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(7)


def normal(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=source, device=DEVICE)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert ((found - expected).abs().max() <= TOLERANCE * expected.pow(2).mean().sqrt()).item()


def raw_q8_0(rows: int, blocks: int) -> np.ndarray:
    """Any bytes, with scales that are finite and small."""
    raw = np.random.default_rng(rows).integers(0, 256, (rows, blocks, 34), dtype=np.uint8)
    raw[:, :, 1] &= 0xBB
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("rows", [1, 16, 35])
def test_a_packed_matrix_expands_to_the_values_of_its_file(rows: int) -> None:
    raw = raw_q8_0(rows, 3)
    w = pack_q8_0(torch.from_numpy(raw).to(DEVICE))
    assert w.expand().cpu().numpy().tobytes() == decode_q8_0(raw).tobytes()
    ids = torch.tensor([[rows - 1, 0], [rows // 2, 0]], device=DEVICE)
    assert torch.equal(w.rows(ids), w.expand()[ids])


def test_a_tile_lies_as_the_kernels_read_it() -> None:
    raw = raw_q8_0(16, 2).reshape(16, 2, 34)
    tile = pack_q8_0(torch.from_numpy(raw.reshape(16, -1)).to(DEVICE)).data[0, 1].cpu().numpy()
    g, t = 5, 2
    lane = tile[16 * (4 * g + t) :]
    assert lane[:8].tobytes() == (raw[g, 1, 2 + 8 * t : 10 + 8 * t] ^ 0x80).tobytes()
    assert lane[8:16].tobytes() == (raw[g + 8, 1, 2 + 8 * t : 10 + 8 * t] ^ 0x80).tobytes()
    assert tile[512 + 2 * 9 : 512 + 2 * 10].tobytes() == raw[9, 1, :2].tobytes()


@pytest.mark.parametrize("sizes", [(16, 32), (4, 17, 3)])
def test_concatenated_matrices_are_one_matrix_of_all_rows(sizes: tuple[int, ...], source: torch.Generator) -> None:
    parts = [random_q8_0(n, 64, source) for n in sizes]
    assert torch.equal(concat(parts).expand(), torch.cat([w.expand() for w in parts]))


@pytest.mark.parametrize(("n", "k"), [(4, 128), (35, 32), (40, 160 if IS_INTERPRETED else 2112)])
@pytest.mark.parametrize("rows", [1, 9, 16])
def test_q8_0_product_agrees_with_float64(n: int, k: int, rows: int, source: torch.Generator) -> None:
    w, x = random_q8_0(n, k, source), normal((rows, k), source)
    out = torch.full((rows, n), torch.nan, device=DEVICE)
    assert q8_0_product(x, w, out) is out
    assert_close(out, x.double() @ w.expand().double().T)


@pytest.mark.parametrize(("n", "k"), [(16, 128), (30, 96)])
def test_bf16_product_agrees_with_float64(n: int, k: int, source: torch.Generator) -> None:
    w, x = normal((n, k), source).bfloat16(), normal((5, k), source)
    out = torch.full((5, n), torch.nan, device=DEVICE)
    assert_close(bf16_product(x, w, out), x.double() @ w.double().T)


def run_group(z: Tensor, records: list[Tensor | None], rows: list[list[int]], layout: RecordLayout = TINY) -> Tensor:
    """Return outputs [n, 16, latent], NaN where the table names no row."""
    n = len(records)
    addresses = torch.tensor([0 if record is None else record.data_ptr() for record in records], device=DEVICE)
    table = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    places = torch.where(table >= 0, torch.arange(n * 16, device=DEVICE).view(n, 16), -1).int()
    outputs = torch.full((n * 16, layout.latent_size), torch.nan, device=DEVICE)
    hidden = torch.full((n, 16, layout.intermediate_size), torch.nan, device=DEVICE)
    run_experts(z, addresses, table, places, layout, **SITU, hidden=hidden, outputs=outputs)
    return outputs.view(n, 16, -1)


def among(places: dict[int, int]) -> list[int]:
    """A line of the table with rows at some places."""
    return [places.get(place, -1) for place in range(16)]


def test_every_row_and_expert_of_a_group_has_its_own_output(source: torch.Generator) -> None:
    first, second = random_record(TINY, source), random_record(TINY, source)
    z = normal((16, TINY.latent_size), source)
    found = run_group(z, [first, None, second], [among({0: 0, 3: 2, 15: 15}), [-1] * 16, among({12: 7})])
    for group, place, row, record in ((0, 0, 0, first), (0, 3, 2, first), (0, 15, 15, first), (2, 12, 7, second)):
        assert_close(found[group, place], expert_forward(record, TINY, z[row : row + 1].double(), **SITU, is_tiled=False)[0])
    assert found.isnan().all(-1).sum() == 3 * 16 - 4


@pytest.mark.parametrize("layout", [RecordLayout(32, 32), RecordLayout(160, 224)])
def test_experts_of_any_size_agree_with_float64(layout: RecordLayout, source: torch.Generator) -> None:
    record, z = random_record(layout, source), normal((16, layout.latent_size), source)
    found = run_group(z, [record], [list(range(16))], layout)[0]
    assert_close(found, expert_forward(record, layout, z.double(), **SITU, is_tiled=False))


@pytest.mark.parametrize(("scale", "size"), [(0, 2.0**-127), (1, 2.0**-126), (254, 2.0**127)])
def test_the_extreme_scales_are_exact_powers(scale: int, size: float, source: torch.Generator) -> None:
    # Two records that differ in the scales of w2 alone, and in them by a power of two. Nibbles of at most 1, so that 2**127 holds them.
    record = random_record(TINY, source)
    packed, scales = TINY.segment("w2.packed"), TINY.segment("w2.scale")
    record[packed.offset : packed.end] &= 0xAA
    extreme = record.clone()
    record[scales.offset : scales.end], extreme[scales.offset : scales.end] = 127, scale
    z = normal((3, TINY.latent_size), source) * (1e-6 if scale == 254 else 50)
    lines = [among({0: 0, 1: 1, 9: 2})]
    found, plain = run_group(z, [extreme], lines)[0, [0, 1, 9]], run_group(z, [record], lines)[0, [0, 1, 9]]
    expected = plain.double() * size
    # Below 2**-126 float32 has a fixed step.
    assert ((found.double() - expected).abs() <= 2e-6 * expected.abs().max() + 20 * 2.0**-149).all()
    assert found.abs().max() > 0


def test_a_scale_of_255_makes_its_row_nan_and_no_other(source: torch.Generator) -> None:
    record = random_record(TINY, source)
    record[TINY.segment("w2.scale").offset + 5 * 3 + 1] = 255
    found = run_group(normal((1, TINY.latent_size), source), [record], [among({0: 0})])[0, 0]
    assert found.isnan().nonzero().flatten().tolist() == [5]


def assert_rows_are_alone(product: Callable[[Tensor], Tensor], k: int, source: torch.Generator) -> None:
    """The bits of a row are the same for any number of rows, at any place, whatever the others are."""
    row = normal((k,), source)
    expected = product(row.unsqueeze(0))[0]
    assert expected.isfinite().all()
    for n_rows in (1, 2, 3, 5, 8, 13, 16):
        for place in {0, n_rows // 2, n_rows - 1}:
            for others in OTHERS:
                x = {"zero": 0.0, "random": 1.0, "nan": torch.nan, "inf": torch.inf}[others] * torch.ones(n_rows, k, device=DEVICE)
                x = normal((n_rows, k), source) if others == "random" else x
                x[place] = row
                assert torch.equal(product(x)[place], expected), (n_rows, place, others)


# numpy, which multiplies for the interpreter, does not keep rows apart.
keeps_rows_apart = pytest.mark.skipif(IS_INTERPRETED, reason="bits are those of numpy")


@keeps_rows_apart
def test_rows_of_a_q8_0_product_do_not_meet(source: torch.Generator) -> None:
    w = random_q8_0(24, 96, source)
    assert_rows_are_alone(lambda x: q8_0_product(x, w), 96, source)


@keeps_rows_apart
def test_rows_of_a_bf16_product_do_not_meet(source: torch.Generator) -> None:
    w = normal((24, 96), source).bfloat16()
    assert_rows_are_alone(lambda x: bf16_product(x, w), 96, source)


@keeps_rows_apart
def test_rows_of_an_expert_do_not_meet(source: torch.Generator) -> None:
    record = random_record(TINY, source)

    def product(x: Tensor) -> Tensor:
        return run_group(x, [record], [among({row: row for row in range(len(x))})])[0, : len(x)]

    assert_rows_are_alone(product, TINY.latent_size, source)


@keeps_rows_apart
def test_an_output_does_not_depend_on_its_group(source: torch.Generator) -> None:
    records = [random_record(TINY, source) for _ in range(3)]
    z = normal((16, TINY.latent_size), source)
    alone = run_group(z, [records[1]], [among({4: 4})])[0, 4]
    together = run_group(z, [records[2], None, records[1], records[0]], [list(range(16)), [-1] * 16, among({0: 9, 11: 4}), among({4: 4})])
    assert torch.equal(together[2, 11], alone)


@pytest.mark.skipif(IS_INTERPRETED, reason="this is the run under the interpreter")
def test_triton_kernels_pass_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.skipif(IS_INTERPRETED, reason="nothing is compiled under the interpreter")
@pytest.mark.parametrize("capability", [90, 120])
def test_triton_kernels_compile_for_a_gpu(capability: int) -> None:
    pytest.importorskip("triton")
    floats, precision = "*fp32", {"PRECISION": "bf16x6"}
    compile_for(capability, q8_0._product_kernel, [floats, "*u8", floats, "i32", "i32"], {"N_BLOCKS": 4, **precision})
    compile_for(capability, bf16._product_kernel, [floats, "*bf16", floats, "i32", "i32"], {"N_COLS": 128, **precision})
    segments = {"GATE": 0, "GATE_SCALE": 3072, "UP": 6528, "UP_SCALE": 9600, "K": 64, "N": 96, **precision}
    compile_for(capability, expert._hidden_kernel, [floats, "*i64", "*i32", floats, "fp32", "fp32"], segments)
    segments = {"DOWN": 3264, "DOWN_SCALE": 6336, "K": 96, "N": 64, **precision}
    compile_for(capability, expert._output_kernel, [floats, "*i64", "*i32", "*i32", floats], segments)


def compile_for(capability: int, kernel: object, types: list[str], constants: dict[str, object]) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict(zip(kernel.arg_names, [*types, *["constexpr"] * len(constants)], strict=True))
    compiled = triton.compile(ASTSource(kernel, signature, constexprs=constants), GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False})
    assert compiled.asm["cubin"]


@pytest.mark.skipif(IS_INTERPRETED or cuda_library.find_nvcc() is None, reason="nvcc is not installed")
def test_cuda_kernels_compile_once_into_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="compiling"):
        path = cuda_library.compiled("sm_90")
    library = cuda_library.load(path)
    assert library.ktier_error(2).decode() == "out of memory"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cuda_library.compiled("sm_90") == path
    assert [p.name for p in (tmp_path / "ktier").iterdir()] == [path.name]


def test_a_changed_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cuda_library.cached_path("sm_90")
    changed = tmp_path / "products.cu"
    changed.write_text(Path(shutil.copy(cuda_library.SOURCE, changed)).read_text() + "\n")
    monkeypatch.setattr(cuda_library, "SOURCE", changed)
    assert cuda_library.cached_path("sm_90") != before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_self_test_passes_on_this_gpu() -> None:
    assert [name for name, is_right, _ in self_test(torch.device("cuda", 0)) if not is_right] == []
