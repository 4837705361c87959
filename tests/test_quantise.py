"""Q8_0: the bytes of gguf-py's quantiser for every kind of value, and a spine written in pieces by threads that is what one plain loop gives."""

import contextlib
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from gguf import GGMLQuantizationType
from gguf.quants import quantize

import prep.extraction.spine
from layout.checkpoint import Checkpoint, open_checkpoint
from layout.config import K31
from layout.direct import BUFFERED, probe_directory
from layout.gguf_header import read_gguf_header
from layout.tensor_data import as_float32, read_float_tensor
from layout.tensors import SpineTensor
from manifests.errors import BadInputError, Interrupted
from manifests.geometry import load_geometry
from prep.extraction.quantise import Quantiser
from prep.extraction.spine import PIECE_BYTES, write_spine
from prep.tiny import make_checkpoint

O_DIRECT = 0o40000
# A block whose largest magnitude reaches this has a scale that float16 rounds to infinity.
LIMIT = 65520 * 127
RNG_SEED = 5


def bf16(values: np.ndarray) -> np.ndarray:
    """Cut float32 to the bytes of bfloat16."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def encoded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return values as a checkpoint's bytes."""
    return bf16(values) if dtype == "BF16" else values.astype(np.float16 if dtype == "F16" else np.float32).view(np.uint8)


def ours(raw: np.ndarray, dtype: str = "BF16", *, step: int = 64) -> bytes:
    """Quantise into memory that holds other bytes, with room behind; a warning is a failure."""
    n_blocks = len(raw) // {"BF16": 64, "F16": 64, "F32": 128}[dtype]
    out = np.full(n_blocks * 34 + 5, 0xA5, np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Quantiser(step=step).quantise(raw, dtype, out) == n_blocks * 34
    assert (out[n_blocks * 34 :] == 0xA5).all()
    return out[: n_blocks * 34].tobytes()


def theirs(raw: np.ndarray, dtype: str = "BF16") -> bytes:
    # Where 1/d overflows it multiplies by infinity and casts what comes of it; that is its result, but not without warnings.
    with np.errstate(all="ignore"):
        return quantize(as_float32(raw, dtype).reshape(-1, 32), GGMLQuantizationType.Q8_0).tobytes()


def block_of(*first: float, rest: float = 0.0) -> np.ndarray:
    return np.array([*first, *[rest] * (32 - len(first))], np.float32)


def patterns(arrangement: str) -> np.ndarray:
    """Every BF16 pattern that is finite and storable, in some block of 32, as uint16."""
    found = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    magnitudes = np.abs(as_float32(found.view(np.uint8), "BF16"))
    found = found[magnitudes < LIMIT]
    if arrangement == "by pattern":
        pass
    elif arrangement == "by magnitude":
        found = found[np.argsort(found & 0x7FFF, kind="stable")]
    else:
        found = np.random.default_rng(RNG_SEED).permutation(found)
    if arrangement == "under one large value":
        found = np.concatenate([np.r_[np.uint16(0x4000 + i % 128), part] for i, part in enumerate(np.array_split(found, len(found) // 31 + 1))])
    return np.resize(found, -(-len(found) // 32) * 32)


@pytest.mark.parametrize("arrangement", ["by pattern", "by magnitude", "mixed", "under one large value"])
def test_every_storable_bfloat16_gives_gguf_pys_bytes(arrangement: str) -> None:
    raw = patterns(arrangement).view(np.uint8)
    values = as_float32(raw, "BF16")
    assert len(np.unique(raw.view(np.uint16))) == 2 * 0x4AFE
    assert np.abs(values).max() < LIMIT <= 2 * np.abs(values).max()
    assert ours(raw) == theirs(raw)


def random_values(kind: str, rng: np.random.Generator) -> np.ndarray:
    n = 32 * 5000
    if kind == "normal":
        return rng.standard_normal(n, np.float32) * np.float32(0.02)
    if kind == "subnormal scales":
        return rng.standard_normal(n, np.float32) * np.exp2(rng.uniform(-28, -8, n // 32)).astype(np.float32).repeat(32)
    if kind == "heavy tails":
        return np.clip(rng.standard_cauchy(n), -60000, 60000).astype(np.float32)
    if kind == "all magnitudes":
        return (rng.choice([-1, 1], n) * np.exp2(rng.uniform(-149, 15.9, n))).astype(np.float32)
    # Multiples of a half under a largest value of 127: every second one is a tie.
    values = (rng.integers(-253, 254, n) / 2).astype(np.float32)
    values[::32] = rng.choice([-127, 127], n // 32)
    return values


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("kind", ["normal", "subnormal scales", "heavy tails", "all magnitudes", "ties"])
def test_random_values_of_every_source_type_give_gguf_pys_bytes(kind: str, dtype: str) -> None:
    raw = encoded(random_values(kind, np.random.default_rng(RNG_SEED)), dtype)
    assert ours(raw, dtype) == theirs(raw, dtype)


def test_halves_round_away_from_zero_and_just_below_a_half_rounds_to_zero() -> None:
    below = np.nextafter(np.float32(0.5), np.float32(0))
    values = block_of(127, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, below, -below, 126.5, -126.5, -0.0)
    stored = np.frombuffer(ours(encoded(values, "F32"), "F32"), np.int8)
    assert stored[:2].view(np.float16)[0] == 1
    assert stored[2:14].tolist() == [127, 1, -1, 2, -2, 3, -3, 0, 0, 127, -127, 0]
    assert not stored[14:].any()


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_block_of_zeros_is_34_zero_bytes(zero: float) -> None:
    assert ours(bf16(block_of(rest=zero))) == bytes(34)


def test_a_scale_below_float16_is_stored_as_zero_and_the_quants_stay() -> None:
    raw = bf16(block_of(1e-6, -1e-6, 5e-7))
    stored = np.frombuffer(ours(raw), np.int8)
    assert stored[:5].tolist() == [0, 0, 127, -127, 64]
    assert stored.tobytes() == theirs(raw)


@pytest.mark.parametrize(("n_halves", "expected"), [(1, 0), (3, 2), (5, 2), (2047, 1024), (2049, 1024)])
def test_a_scale_between_two_subnormal_float16_goes_to_the_even_one(n_halves: int, expected: int) -> None:
    raw = encoded(block_of(127 * n_halves * 2.0**-25), "F32")
    stored = ours(raw, "F32")
    assert stored[:2] == expected.to_bytes(2, "little")
    assert stored == theirs(raw, "F32")


@pytest.mark.parametrize("largest", [2.0**-149, 2.0**-133, 3e-39, 3.7e-37, 3.8e-37, 1.5e-36])
def test_denormal_blocks_give_gguf_pys_bytes(largest: float) -> None:
    raw = encoded(block_of(largest, -largest / 2, largest / 3, -0.0), "F32")
    assert ours(raw, "F32") == theirs(raw, "F32")


@pytest.mark.parametrize("place", [0, 1, 16, 30, 31])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_value_that_is_not_finite_is_refused_wherever_it_stands(dtype: str, value: float, place: int) -> None:
    values = np.ones(32 * 130, np.float32)
    values[32 * 129 + place] = value
    with pytest.raises(ValueError, match="holds values that are not finite"):
        ours(encoded(values, dtype), dtype)


def test_the_largest_scale_is_float16s_largest_and_more_is_refused() -> None:
    most = np.nextafter(np.float32(LIMIT), np.float32(0))
    stored = np.frombuffer(ours(encoded(block_of(1, most), "F32"), "F32"), np.uint8)
    assert stored[:2].view(np.float16)[0] == 65504
    for value in (LIMIT, -LIMIT, 3e38):
        with pytest.raises(ValueError, match=r"holds a value of magnitude \S+, and Q8_0 stores none from 8321040 on"):
            ours(encoded(block_of(1, value), "F32"), "F32")


@pytest.mark.parametrize("n_blocks", [1, 63, 64, 65, 200])
def test_blocks_do_not_depend_on_what_is_quantised_with_them_or_before(n_blocks: int) -> None:
    raw = encoded(random_values("normal", np.random.default_rng(RNG_SEED)), "BF16")[: n_blocks * 64]
    used, out = Quantiser(step=64), np.empty(n_blocks * 34, np.uint8)
    used.quantise(bf16(np.full(32 * 64, 1e6, np.float32)), "BF16", np.empty(64 * 34, np.uint8))
    used.quantise(raw, "BF16", out)
    assert out.tobytes() == ours(raw, step=1) == ours(raw, step=1000) == theirs(raw)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("lead", [1, 2, 3])
def test_a_source_at_an_odd_address_gives_the_same_bytes(lead: int, dtype: str) -> None:
    raw = encoded(random_values("heavy tails", np.random.default_rng(RNG_SEED)), dtype)
    moved = np.concatenate([np.zeros(lead, np.uint8), raw])[lead:]
    assert moved.ctypes.data % 4 == lead
    assert ours(moved, dtype) == ours(raw, dtype)


# The spine.


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A checkpoint whose embedding and head take two pieces each, the second one not full."""
    directory = tmp_path_factory.mktemp("wide") / "checkpoint"
    make_checkpoint(directory, replace(load_geometry("tiny"), vocab_size=100_000), architecture=K31, seed=3)
    checkpoint = open_checkpoint(directory)
    assert PIECE_BYTES < checkpoint.extent("language_model.lm_head.weight").n_bytes < 2 * PIECE_BYTES
    return checkpoint


def plain_bytes(checkpoint: Checkpoint, tensor: SpineTensor) -> bytes:
    """A spine tensor's bytes by way of the whole tensor and gguf-py."""
    path, offset, n_bytes = checkpoint.extent(tensor.sources[0].name)
    raw = np.frombuffer(path.read_bytes()[offset : offset + n_bytes], np.uint8)
    if tensor.storage == "shipped":
        return raw.tobytes()
    return theirs(raw) if tensor.storage == "Q8_0" else read_float_tensor(checkpoint, tensor).tobytes()


@pytest.mark.parametrize("mode", ["probed", "buffered"])
def test_a_spine_is_every_tensor_in_turn_padded_to_pages_each_with_its_hash(
    wide: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    if mode == "buffered":
        monkeypatch.setattr(prep.extraction.spine, "probe_directory", lambda directory: BUFFERED)
    path = tmp_path / "spine.gguf"
    spine = write_spine(wide, path, expert_directories=["experts"], on_progress=lambda *step: None)
    data, header = path.read_bytes(), read_gguf_header(path)
    at = header.data_offset
    for tensor in wide.spine_tensors():
        expected = plain_bytes(wide, tensor)
        assert header.tensors[tensor.name].offset == at
        assert data[at : at + len(expected)] == expected, tensor.name
        assert spine.tensors[tensor.name] == xxhash.xxh3_128_hexdigest(expected)
        n_padding = -len(expected) % 4096
        assert data[at + len(expected) : at + len(expected) + n_padding] == bytes(n_padding)
        at += len(expected) + n_padding
    assert (spine.n_bytes, spine.xxh3_128) == (at, xxhash.xxh3_128_hexdigest(data))
    assert len(data) == at
    assert list(spine.tensors) == list(header.tensors)


def open_flags(path: Path) -> list[int]:
    """The flags of this process's open files of that path."""
    flags = []
    for link in Path("/proc/self/fd").iterdir():
        # Other threads open and close files meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if str(link.readlink()) == str(path):
                lines = Path(f"/proc/self/fdinfo/{link.name}").read_text().splitlines()
                flags += [int(line.split()[1], 8) for line in lines if "flags" in line]
    return flags


def test_a_spine_is_written_past_the_page_cache_where_the_directory_allows_it(wide: Checkpoint, tmp_path: Path) -> None:
    if not probe_directory(tmp_path).is_direct:
        pytest.skip(f"the temporary directory is read {probe_directory(tmp_path)}")
    seen = []
    write_spine(wide, tmp_path / "s", expert_directories=["experts"], on_progress=lambda *step: seen.append(open_flags(tmp_path / "s.partial")))
    assert seen
    assert all(len(flags) == 1 and flags[0] & O_DIRECT for flags in seen)


def test_progress_counts_every_source_byte_once_and_ends_at_the_total(wide: Checkpoint, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    write_spine(wide, tmp_path / "s", expert_directories=["experts"], on_progress=lambda *step: seen.append(step))
    total = sum(wide.tensors[s.name].n_bytes for t in wide.spine_tensors() for s in t.sources)
    assert {step[2] for step in seen} == {total}
    counts = [step[1] for step in seen]
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (PIECE_BYTES, total)


@pytest.fixture
def interrupting_alarm() -> Iterator[None]:
    """SIGALRM raises Interrupted in the main thread, as Ctrl-C does under the real commands."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted("interrupted")

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("interrupting_alarm")
@pytest.mark.parametrize("after_s", [0.0005, 0.002, 0.005])
def test_an_interrupt_ends_all_threads_and_leaves_no_file(wide: Checkpoint, tmp_path: Path, after_s: float) -> None:
    threads = set(threading.enumerate())

    def on_progress(phase: str, done: int, total: int) -> None:
        if done == PIECE_BYTES:
            assert set(threading.enumerate()) > threads
            signal.setitimer(signal.ITIMER_REAL, after_s)

    with pytest.raises(Interrupted):
        write_spine(wide, tmp_path / "s", expert_directories=["experts"], on_progress=on_progress)
    assert set(threading.enumerate()) == threads
    assert list(tmp_path.iterdir()) == []


def set_nan(value: np.ndarray) -> None:
    value[:] = 0x7FC0


def set_too_large(value: np.ndarray) -> None:
    value[:] = 0xCB80


@pytest.mark.parametrize(
    ("damage", "reason"), [(set_nan, "holds values that are not finite"), (set_too_large, "holds a value of magnitude 1.678e+07")]
)
def test_a_value_that_cannot_be_stored_is_refused_by_name_and_leaves_no_file(
    checkpoint_copy: Path, tmp_path: Path, damage: Callable[[np.ndarray], None], reason: str
) -> None:
    checkpoint, name = open_checkpoint(checkpoint_copy), "language_model.model.layers.3.self_attn.o_proj.weight"
    path, offset, n_bytes = checkpoint.extent(name)
    damage(np.memmap(path, np.uint16, "r+", offset + n_bytes - 2, 1))
    threads = set(threading.enumerate())
    with pytest.raises(BadInputError) as caught:
        write_spine(checkpoint, tmp_path / "s", expert_directories=["experts"], on_progress=lambda *step: None)
    assert f"tensor {name} in {path.name} {reason}" in str(caught.value)
    assert set(threading.enumerate()) == threads
    assert not list(tmp_path.glob("s*"))
