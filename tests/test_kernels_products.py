"""The products of decode against float64: the plain forms, Triton's kernels under its interpreter, and, where there is a GPU, what runs on it."""

import shutil
import subprocess
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
from runtime.kernels.cuda_library import VARIANTS, Variant, fallen_back, find_library, variant_of
from runtime.kernels.expert import expert_forward, run_experts
from runtime.kernels.launch import IS_INTERPRETED
from runtime.kernels.products_check import TOLERANCE, random_q8_0, random_record
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


def run_group(z: Tensor, records: list[Tensor | None], rows: list[list[int]], layout: RecordLayout = TINY, variant: Variant | None = None) -> Tensor:
    """Return outputs [n, 16, latent], NaN where the table names no row."""
    n = len(records)
    addresses = torch.tensor([0 if record is None else record.data_ptr() for record in records], device=DEVICE)
    table = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    places = torch.where(table >= 0, torch.arange(n * 16, device=DEVICE).view(n, 16), -1).int()
    outputs = torch.full((n * 16, layout.latent_size), torch.nan, device=DEVICE)
    hidden = torch.full((n, 16, layout.intermediate_size), torch.nan, device=DEVICE)
    run_experts(z, addresses, table, places, layout, **SITU, hidden=hidden, outputs=outputs, variant=variant)
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


@pytest.mark.skipif(DEVICE.type == "cpu" and not IS_INTERPRETED, reason="on a CPU nothing falls back")
def test_experts_too_large_for_the_cuda_kernels_run_with_a_remark_and_are_counted(source: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert, "MOST_COLUMNS", 95)
    record, z, before = random_record(TINY, source), normal((2, TINY.latent_size), source), fallen_back().get(expert.WHAT, 0)
    with pytest.warns(RuntimeWarning, match="grouped experts: slower Triton kernels run.*64 x 96 are too large for them, which hold at most 95 col"):
        found = run_group(z, [record], [among({0: 0, 9: 1})])
    assert_close(found[0, [0, 9]], expert_forward(record, TINY, z.double(), **SITU, is_tiled=False))
    assert fallen_back()[expert.WHAT] == before + 1


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


@pytest.mark.skipif(IS_INTERPRETED or cuda_library.find_nvcc() is None, reason="nvcc is not installed")
def test_the_cuda_kernels_are_accepted_for_gpus_with_less_shared_memory_and_without_bulk_copies(tmp_path: Path) -> None:
    # Their generation's instructions are checked by ptxas; nothing is optimised.
    quick = ["-O0", "-Xptxas", "-O0", "-std=c++17", "-cubin"]
    runs = []
    for architecture, name in (("80", "medium"), ("120", "small")):
        (variant,) = (v for v in VARIANTS if v.name == name)
        target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
        command = [cuda_library.find_nvcc() or "", *quick, *variant.flags, target, "-o", str(tmp_path / name), str(cuda_library.SOURCE)]
        runs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    for run in runs:
        output, _ = run.communicate(timeout=300)
        assert run.returncode == 0, output


OF_K3 = RecordLayout(3584, 3072)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
class TestVariants:
    """What a GPU with less shared memory, or without bulk copies, computes: the bits of the largest variant that runs here."""

    def own(self, variant: Variant) -> Variant:
        """Return this GPU's variant, if it can also run the other."""
        device = torch.device("cuda", torch.cuda.current_device())
        if find_library(device) is None:
            pytest.skip("the CUDA C++ kernels do not run here")
        own = variant_of(device)
        if variant.shared_bytes > own.shared_bytes or variant.has_bulk_copies > own.has_bulk_copies:
            pytest.skip(f"this GPU's variant is {own.name}")
        return own

    # Several chunks over the two blocks of a cluster; more tiles than a group has; one chunk; a last tile that is not full.
    @pytest.mark.parametrize(("n", "k"), [(7168, 12288), (49376, 7168), (12288, 128), (200, 2592), (35, 32)])
    def test_q8_0_products_have_the_same_bits(self, variant: Variant, n: int, k: int, source: torch.Generator) -> None:
        own, w, x = self.own(variant), random_q8_0(n, k, source), normal((16, k), source)
        for rows in (1, 5, 8, 9, 16):
            out = torch.full((rows, n), torch.nan, device=DEVICE)
            assert torch.equal(q8_0_product(x[:rows], w, out, variant=variant), q8_0_product(x[:rows], w, variant=own)), rows
        assert_close(out, x.double() @ w.expand().double().T)

    @pytest.mark.parametrize("layout", [OF_K3, RecordLayout(3072, 3584), TINY, RecordLayout(160, 224), RecordLayout(32, 32)])
    def test_experts_have_the_same_bits(self, variant: Variant, layout: RecordLayout, source: torch.Generator) -> None:
        own, records = self.own(variant), [random_record(layout, source) for _ in range(6)]
        z, lines = normal((16, layout.latent_size), source), [among({r: r for r in range(rows)}) for rows in (1, 4, 5, 8, 9, 16)]
        expected, found = (run_group(z, [*records], lines, layout, which) for which in (own, variant))
        assert torch.equal(found.nan_to_num(), expected.nan_to_num()) and torch.equal(found.isnan(), expected.isnan())
        for n, record in enumerate(records):
            rows = sum(row >= 0 for row in lines[n])
            assert_close(found[n, :rows], expert_forward(record, layout, z[:rows].double(), **SITU, is_tiled=False))

    def test_bf16_products_have_the_same_bits(self, variant: Variant, source: torch.Generator) -> None:
        own, w, x = self.own(variant), normal((896, 7168), source).bfloat16(), normal((16, 7168), source)
        assert torch.equal(bf16_product(x, w, variant=variant), bf16_product(x, w, variant=own))

    def test_rows_do_not_meet(self, variant: Variant, source: torch.Generator) -> None:
        self.own(variant)
        w, record = random_q8_0(100, 2592, source), random_record(OF_K3, source)
        assert_rows_are_alone(lambda x: q8_0_product(x, w, variant=variant), 2592, source)

        def of_expert(x: Tensor) -> Tensor:
            return run_group(x, [record], [among({row: row for row in range(len(x))})], OF_K3, variant)[0, : len(x)]

        assert_rows_are_alone(of_expert, OF_K3.latent_size, source)
