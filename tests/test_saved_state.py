"""A text's state in a file: a run that goes on from it has the bits of one that never stopped, and whatever does not fit is refused."""

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import xxhash
from conftest import DATA
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from manifests.errors import BadInputError, DamagedDataError, KtierError
from manifests.load import load_manifest
from manifests.manifest import Manifest
from runtime.decode import LayerFacts
from runtime.engine import Engine, Options
from runtime.kernels.rows import Arithmetic
from runtime.model import IndexedMlaState, Model
from runtime.saved_state import SavedState, made_on, new_ids, on_device, read_state, write_state
from runtime.state import KdaState, MlaState, State
from runtime.storage.incoming import Phase

N_SAVED, N_PROMPT, N_REPLY = 21, 40, 12


def quiet(_: str) -> None: ...


def text_of(engine: Engine) -> list[int]:
    return torch.randint(0, engine.geometry.vocab_size, (N_PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()


@torch.inference_mode()
def decoded(engine: Engine, ids: list[int], n_rows: int = 16) -> Tensor:
    """Go on from the decoder's state; return the logits [tokens, vocabulary]."""
    engine.store.phase = Phase.DECODE
    return torch.cat([engine.decoder.step(ids[at : at + n_rows]).to("cpu", copy=True) for at in range(0, len(ids), n_rows)])


def replied(engine: Engine, logits: Tensor) -> list[int]:
    """Return the likeliest tokens that follow."""
    ids = [int(logits[-1].argmax())]
    while len(ids) < N_REPLY:
        ids.append(int(decoded(engine, ids[-1:])[-1].argmax()))
    return ids


def saved_by(engine: Engine, ids: list[int], arithmetic: Arithmetic = Arithmetic.DECODE) -> SavedState:
    engine.decoder.state.reset()
    logits = decoded(engine, ids)
    return SavedState(tuple(ids), engine.decoder.state.copied(), logits[-1], arithmetic, made_on(engine.device))


def tensors_of(state: State) -> dict[str, Tensor]:
    return {f"{n}.{f.name}": getattr(layer, f.name) for n, layer in enumerate(state.layers) for f in fields(layer)}


@pytest.fixture(scope="module")
def manifests(extractions: dict[str, Path]) -> dict[str, Manifest]:
    return {name: load_manifest(path / "manifest.yaml") for name, path in extractions.items()}


@pytest.fixture(scope="module")
def manifest(manifests: dict[str, Manifest]) -> Manifest:
    return manifests["tiny-k3.1"]


@pytest.fixture(scope="module")
def written(extractions: dict[str, Path], manifest: Manifest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state of tiny-k3.1 after N_SAVED tokens; not to be changed by a test."""
    path = tmp_path_factory.mktemp("states") / "state.safetensors"
    with Engine(extractions["tiny-k3.1"], Options(device="cpu"), on_remark=quiet) as engine:
        write_state(path, saved_by(engine, text_of(engine)[:N_SAVED]), manifest)
    return path


def read(path: Path, manifest: Manifest, *, context: int = 100, arithmetic: Arithmetic = Arithmetic.DECODE) -> SavedState:
    return read_state(path, manifest, context=context, arithmetic=arithmetic)


# Going on


@pytest.mark.parametrize("n_rows", [16, 5, 1])
def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(extracted: Path, device: str, n_rows: int, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with Engine(extracted, Options(device=device), on_remark=quiet) as engine:
        text, manifest = text_of(engine), engine.prepared.manifest
        whole = decoded(engine, text)
        reply = replied(engine, whole)
        write_state(path, saved_by(engine, text[:N_SAVED]), manifest)
    with Engine(extracted, Options(device=device, vram_cache="20slots", host_pool="8slots"), on_remark=quiet) as engine:
        facts: list[LayerFacts] = []
        engine.decoder.on_layer = facts.append
        saved = read(path, manifest)
        engine.decoder.begin(saved.state)
        rest = decoded(engine, new_ids(saved, text, where="here"), n_rows)
        assert sum(len(f.chosen) for f in facts) == (N_PROMPT - N_SAVED) * len(engine.geometry.moe_layers)
        assert torch.equal(saved.logits, whole[N_SAVED - 1]) and torch.equal(rest, whole[N_SAVED:])
        assert replied(engine, rest) == reply


def test_a_prompt_pass_goes_on_within_rounding(extracted: Path, device: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with Engine(extracted, Options(device=device), on_remark=quiet) as engine, torch.inference_mode():
        text = torch.tensor([text_of(engine)], device=device)
        whole, _ = engine.model.forward(text, engine.model.initial_state(1), arithmetic=Arithmetic.PROMPT)
        logits, state = engine.model.forward(text[:, :N_SAVED], engine.model.initial_state(1), arithmetic=Arithmetic.PROMPT)
        saved = SavedState(tuple(text[0, :N_SAVED].tolist()), state, logits[0, -1], Arithmetic.PROMPT, made_on(engine.device))
        write_state(path, saved, engine.prepared.manifest)
        found = on_device(read(path, engine.prepared.manifest, arithmetic=Arithmetic.PROMPT).state, engine.device)
        rest, _ = engine.model.forward(text[:, N_SAVED:], found, arithmetic=Arithmetic.PROMPT)
        same, _ = engine.model.forward(text[:, N_SAVED:], state, arithmetic=Arithmetic.PROMPT)
    assert torch.equal(rest, same) and (rest - whole[:, N_SAVED:]).abs().max() < 1e-4


def test_what_is_read_is_what_was_written(extractions: dict[str, Path], manifest: Manifest, tmp_path: Path) -> None:
    with Engine(extractions["tiny-k3.1"], Options(device="cpu"), on_remark=quiet) as engine:
        saved = saved_by(engine, text_of(engine)[:N_SAVED], Arithmetic.PROMPT)
    write_state(tmp_path / "state", saved, manifest)
    found = read(tmp_path / "state", manifest, arithmetic=Arithmetic.PROMPT)
    assert (found.ids, found.arithmetic, found.made_on) == (saved.ids, saved.arithmetic, saved.made_on)
    assert found.state.n_tokens == N_SAVED and torch.equal(found.logits, saved.logits)
    assert [type(layer) for layer in found.state.layers] == [type(layer) for layer in saved.state.layers]
    mine, other = tensors_of(found.state), tensors_of(saved.state)
    assert mine.keys() == other.keys() and all(torch.equal(mine[name], other[name]) for name in mine)


def test_index_keys_come_along_and_must_be_wanted(extractions: dict[str, Path], manifest: Manifest, written: Path, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with Engine(extractions["tiny-k3.1"], Options(device="cpu"), on_remark=quiet) as engine, torch.inference_mode():
        model = Model(engine.geometry, engine.weights, engine.model.experts, is_long_context=True)
        ids = text_of(engine)[:5]
        logits, state = model.forward(torch.tensor([ids]), model.initial_state(1), arithmetic=Arithmetic.DECODE)
    write_state(path, SavedState(tuple(ids), state, logits[0, -1], Arithmetic.DECODE, "cpu"), manifest)
    found = read_state(path, manifest, context=100, arithmetic=Arithmetic.DECODE, is_long_context=True).state
    assert {type(layer) for layer in found.layers} == {KdaState, IndexedMlaState}
    assert all(torch.equal(tensor, tensors_of(state)[name]) for name, tensor in tensors_of(found).items())
    with pytest.raises(BadInputError, match="holds index keys, .* give that flag"):
        read(path, manifest)
    with pytest.raises(BadInputError, match="holds no index keys, .* leave the flag out"):
        read_state(written, manifest, context=100, arithmetic=Arithmetic.DECODE, is_long_context=True)


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-k3.1"])
def test_a_file_s_size_is_that_of_the_state(extractions: dict[str, Path], manifests: dict[str, Manifest], name: str, tmp_path: Path) -> None:
    g, sizes = manifests[name].geometry, []
    with Engine(extractions[name], Options(device="cpu"), on_remark=quiet) as engine:
        for n_tokens in (1, 11, 31):
            write_state(tmp_path / "state", saved_by(engine, text_of(engine)[:n_tokens]), manifests[name])
            sizes.append((tmp_path / "state").stat().st_size)
    n_full = len(g.full_attention_layers)
    kda_floats = g.kda_n_heads * g.kda_head_dim**2 + (g.conv_kernel_size - 1) * 3 * g.kda_size
    fixed = 4 * ((g.n_layers - n_full) * kda_floats + g.vocab_size)
    per_token = 8 + 4 * n_full * (g.kv_lora_rank + g.qk_rope_head_dim)
    for n_tokens, size in zip((1, 11, 31), sizes, strict=True):
        assert 0 < size - fixed - n_tokens * per_token < 5000


# Refusals


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1])
def test_a_file_that_was_cut_short_is_refused(written: Path, manifest: Manifest, kept: float, tmp_path: Path) -> None:
    data = written.read_bytes()
    (tmp_path / "cut").write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(BadInputError, match="cannot be read as a saved state: .* make it again with --state-out"):
        read(tmp_path / "cut", manifest)


@pytest.mark.parametrize(("place", "what"), [("nothing", "missing"), ("directory", "a directory"), ("fifo", "a FIFO")])
def test_what_is_no_file_is_refused(manifest: Manifest, place: str, what: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    with pytest.raises(BadInputError, match=f"{place}: is {what}"):
        read(tmp_path / place, manifest)


def test_another_program_s_file_is_refused(manifest: Manifest) -> None:
    with pytest.raises(BadInputError, match="format is None, expected 'ktier state 1'"):
        read(DATA / "tiny-k3.1" / "golden.safetensors", manifest)


@pytest.mark.parametrize("at", [0.3, 0.6, 0.99])
def test_a_flipped_bit_is_damage(written: Path, manifest: Manifest, at: float, tmp_path: Path) -> None:
    data = bytearray(written.read_bytes())
    data[int(at * len(data))] ^= 1
    (tmp_path / "flipped").write_bytes(data)
    with pytest.raises(DamagedDataError, match="differs from .* make it again with --state-out"):
        read(tmp_path / "flipped", manifest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: replace(m, source=replace(m.source, digest="0" * 32)), "of another model: its source_digest is .*, the manifest's 0000"),
        (lambda m: replace(m, spine=replace(m.spine, xxh3_128="0" * 32)), "of another model: its spine_xxh3_128 is .*, the manifest's 0000"),
        (lambda m: replace(m, geometry=replace(m.geometry, lora_norm_eps=1e-5)), "of another model: its geometry is not the manifest's"),
    ],
    ids=["checkpoint", "spine", "geometry"],
)
def test_the_state_of_another_model_is_refused(written: Path, manifest: Manifest, change: Callable[[Manifest], Manifest], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        read(written, change(manifest))


def test_the_state_of_the_other_tiny_model_is_refused(written: Path, manifests: dict[str, Manifest]) -> None:
    with pytest.raises(BadInputError, match="is the state of another model: its source_digest"):
        read(written, manifests["tiny-k3"])


def test_a_longer_context_than_the_run_s_is_refused(written: Path, manifest: Manifest) -> None:
    assert read(written, manifest, context=N_SAVED).state.n_tokens == N_SAVED
    with pytest.raises(BadInputError, match=f"after {N_SAVED} tokens, but the context is {N_SAVED - 1}; give -c {N_SAVED + 1} or more"):
        read(written, manifest, context=N_SAVED - 1)


def changed(path: Path, to: Path, change: Callable[[dict[str, Tensor], dict[str, str]], None]) -> Path:
    """Write a copy whose tensors and metadata were changed, with a hash that is right."""
    with safe_open(path, framework="pt") as file:
        tensors, facts = {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118
    change(tensors, facts)
    if "xxh3_128" in facts:
        facts["xxh3_128"] = xxhash.xxh3_128_hexdigest(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors)))
    save_file(tensors, to, metadata=facts)
    return to


def with_value(name: str, value: float) -> Callable[[dict[str, Tensor], dict[str, str]], None]:
    def change(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
        tensors[name].flatten()[-1:].fill_(value)

    return change


def with_tensor(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], dict[str, str]], None]:
    def change(tensors: dict[str, Tensor], _: dict[str, str]) -> None:
        tensors[name] = function(tensors[name]).contiguous()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, f: None, None),
        (with_value("3.latent", torch.nan), "3.latent holds values that are no numbers"),
        (with_value("0.memory", torch.inf), "0.memory holds values that are no numbers"),
        (with_value("logits", torch.nan), "logits holds values that are no numbers"),
        (with_value("ids", 512), "ids holds 512, but token numbers go from 0 to 511"),
        (with_value("ids", -1), "ids holds -1"),
        (with_tensor("3.latent", lambda x: x[:, :-1]), "3.latent is F32 \\[1, 20, 32\\], expected F32 \\[1, 21, 32\\]; 1 fault in all"),
        (with_tensor("0.memory", lambda x: x.transpose(0, 1)), "0.memory is F32 \\[4, 1, 32, 32\\], expected F32 \\[1, 4, 32, 32\\]"),
        (with_tensor("0.memory", Tensor.half), "0.memory is F16 \\[1, 4, 32, 32\\], expected F32"),
        (with_tensor("logits", Tensor.double), "logits is F64 \\[512\\], expected F32"),
        (with_tensor("ids", Tensor.int), "ids is I32 \\[21\\], expected I64 \\[tokens\\]"),
        (with_tensor("ids", lambda x: x[None]), "ids is I64 \\[1, 21\\], expected I64 \\[tokens\\]"),
        (with_tensor("ids", lambda x: x[:0]), "ids is I64 \\[0\\], expected I64 \\[tokens\\]"),
        (lambda t, f: t.pop("ids"), "ids is nothing \\[\\], expected I64 \\[tokens\\]"),
        (lambda t, f: t.pop("9.k_rot"), "9.k_rot is missing; 1 fault in all"),
        (lambda t, f: t.update({"10.memory": t["0.memory"].clone()}), "10.memory is unknown; 1 fault in all"),
        (lambda t, f: f.update(format="ktier state 2"), "format is 'ktier state 2', expected 'ktier state 1'"),
        (lambda t, f: f.pop("xxh3_128"), "does not say how it was made"),
        (lambda t, f: f.pop("made_on"), "does not say how it was made"),
        (lambda t, f: f.update(arithmetic="other"), "does not say how it was made"),
        (lambda t, f: f.update(arithmetic="prompt"), "computed in prompt arithmetic, but decode arithmetic is asked for; .* --exact-prefill"),
        (lambda t, f: f.pop("geometry"), "of another model"),
    ],
)
def test_what_is_not_as_it_must_be_is_refused_by_name(
    written: Path, manifest: Manifest, change: Callable[[dict[str, Tensor], dict[str, str]], None], message: str | None, tmp_path: Path
) -> None:
    path = changed(written, tmp_path / "changed", change)
    if message is None:
        read(path, manifest)
        return
    with pytest.raises(BadInputError, match=message) as caught:
        read(path, manifest)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_decode_arithmetic_serves_a_run_in_prompt_arithmetic_too(written: Path, manifest: Manifest) -> None:
    assert read(written, manifest, arithmetic=Arithmetic.PROMPT).arithmetic is Arithmetic.DECODE


def test_only_what_follows_the_saved_tokens_is_new(written: Path, manifest: Manifest) -> None:
    saved = read(written, manifest)
    ids = list(saved.ids)
    assert new_ids(saved, [*ids, 7, 8], where="--state-in") == [7, 8]
    assert new_ids(saved, ids, where="--state-in") == []
    other = [*ids[:4], ids[4] + 1, *ids[5:], 7]
    with pytest.raises(BadInputError, match=f"^--state-in F: .* it has {ids[4] + 1} as number 5 where {ids[4]} was saved"):
        new_ids(saved, other, where="--state-in F")
    with pytest.raises(BadInputError, match="it has only 20"):
        new_ids(saved, ids[:20], where="--state-in F")
    with pytest.raises(BadInputError, match="it has only 0"):
        new_ids(saved, [], where="--state-in F")


def test_a_state_that_cannot_be_written_leaves_what_was_there(written: Path, manifest: Manifest, tmp_path: Path) -> None:
    saved = read(written, manifest)
    with pytest.raises(KtierError, match="cannot be written"):
        write_state(tmp_path / "nowhere" / "state", saved, manifest)
    path = tmp_path / "state"
    path.write_bytes(b"former")
    (tmp_path / "state.partial").mkdir()
    with pytest.raises(KtierError, match="cannot be written"):
        write_state(path, saved, manifest)
    assert path.read_bytes() == b"former"


def test_a_run_may_replace_the_file_that_it_went_on_from(written: Path, manifest: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(written.read_bytes())
    saved = read(path, manifest)
    longer = State(
        N_SAVED + 1,
        tuple(layer.extended(layer.latent[:, :1], layer.k_rot[:, :1]) if isinstance(layer, MlaState) else layer for layer in saved.state.layers),
    )
    write_state(path, replace(saved, ids=(*saved.ids, 1), state=longer), manifest)
    found = read(path, manifest).state
    assert all(torch.equal(tensor, tensors_of(longer)[name]) for name, tensor in tensors_of(found).items())
