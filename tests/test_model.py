"""The whole model on the tiny checkpoints: golden logits of the author's code, splits of a text, independence of rows, gradients."""

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from layout.q8_0 import split_q8_0
from layout.record import record_layout
from layout.tensors import SpineTensor, expert_tensor_names, spine_tensors
from manifests.geometry import Geometry, Indexer
from runtime.kernels.expert import expert_forward
from runtime.kernels.q8_0 import expand_q8_0
from runtime.kernels.rows import Arithmetic, forbid_tf32
from runtime.model import Layer, Model, attention
from runtime.state import KdaState, MlaState, State, initial_state

DATA = Path(__file__).parent / "data"
CHECKPOINTS = ["tiny-k3", "tiny-k3.1"]
TOLERANCE = 5e-5  # The author's code differs from itself in float64 by up to 2.2e-5; 2e-4 would be wrong.
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]),
]


@pytest.fixture(autouse=True)
def _real_float32_without_gradients() -> Iterator[None]:
    forbid_tf32()
    n_threads = torch.get_num_threads()
    # On a busy machine threads that wait for each other make these small products 50 times slower.
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(n_threads)


@cache
def tiny_geometry(name: str) -> Geometry:
    """Return what the checkpoint's config.json says."""
    config = json.loads((DATA / name / "config.json").read_text())
    text, dsa = config["text_config"], config.get("dsa_config")
    linear = text["linear_attn_config"]
    return Geometry(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        n_layers=text["num_hidden_layers"],
        n_dense_layers=text["first_k_dense_replace"],
        dense_intermediate_size=text["intermediate_size"],
        n_experts=text["num_experts"],
        n_experts_per_token=text["num_experts_per_token"],
        n_shared_experts=text["num_shared_experts"],
        expert_intermediate_size=text["moe_intermediate_size"],
        latent_size=text["routed_expert_hidden_size"],
        n_heads=text["num_attention_heads"],
        q_lora_rank=text["q_lora_rank"],
        kv_lora_rank=text["kv_lora_rank"],
        qk_nope_head_dim=text["qk_nope_head_dim"],
        qk_rope_head_dim=text["qk_rope_head_dim"],
        v_head_dim=text["v_head_dim"],
        kda_n_heads=linear["num_heads"],
        kda_head_dim=linear["head_dim"],
        conv_kernel_size=linear["short_conv_kernel_size"],
        kda_gate_lower_bound=linear["gate_lower_bound"],
        full_attention_layers=tuple(n - 1 for n in linear["full_attn_layers"]),
        residual_block_size=text["attn_res_block_size"],
        rms_norm_eps=text["rms_norm_eps"],
        lora_norm_eps=1e-6,
        situ_beta=text["activation_situ_beta"],
        situ_linear_beta=text["activation_situ_linear_beta"],
        routed_scaling_factor=text["routed_scaling_factor"],
        max_position_embeddings=text["max_position_embeddings"],
        indexer=Indexer(dsa["index_n_heads"], dsa["index_head_dim"], dsa["index_topk"]) if dsa else None,
    )


@cache
def checkpoint(name: str) -> dict[str, Tensor]:
    return {key: value for path in sorted((DATA / name).glob("model-*.safetensors")) for key, value in load_file(path).items()}


@cache
def golden(name: str) -> dict[str, Tensor]:
    return load_file(DATA / name / "golden.safetensors")


def rounded_to_q8_0(matrix: Tensor) -> Tensor:
    quants, scales = split_q8_0(gguf.quants.quantize(matrix.numpy(), gguf.GGMLQuantizationType.Q8_0))
    return expand_q8_0(torch.from_numpy(quants), torch.from_numpy(scales))


def spine_value(tensor: SpineTensor, source: dict[str, Tensor], *, is_q8: bool) -> Tensor:
    parts = [source[s.name].float() for s in tensor.sources]
    value = parts[0]
    if tensor.rule == "fold":
        value = parts[0] * parts[1].flatten()
    elif tensor.rule == "a_log":
        value = value.flatten()[: tensor.shape[0]]
    assert value.shape == tensor.shape
    return rounded_to_q8_0(value) if is_q8 and tensor.storage == "Q8_0" else value


class MemoryWeights:
    """The spine's tensors in a dictionary."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    @property
    def device(self) -> torch.device:
        return self.tensors["output.weight"].device

    def matrix(self, name: str) -> Tensor:
        assert self.tensors[name].dim() == 2
        return self.tensors[name]

    def vector(self, name: str) -> Tensor:
        assert self.tensors[name].dim() != 2
        return self.tensors[name]

    def rows(self, name: str, ids: Tensor) -> Tensor:
        return self.tensors[name][ids]


class MemoryExperts:
    """The records of all experts in a dictionary."""

    def __init__(self, geometry: Geometry, records: dict[tuple[int, int], Tensor]) -> None:
        self.geometry, self.records = geometry, records

    def run(self, layer: int, z: Tensor, ids: Tensor, is_tiled: bool) -> Tensor:
        g = self.geometry
        outputs = torch.full((*ids.shape, z.shape[1]), torch.nan, device=z.device)
        for expert in ids.unique().tolist():
            row, place = (ids == expert).nonzero(as_tuple=True)
            y = expert_forward(
                self.records[layer, expert],
                record_layout(g),
                z[row],
                situ_beta=g.situ_beta,
                situ_linear_beta=g.situ_linear_beta,
                is_tiled=is_tiled,
            )
            outputs = outputs.index_put((row, place), y)
        return outputs


@cache
def tiny_weights(name: str, is_q8: bool, device: str) -> dict[str, Tensor]:
    return {t.name: spine_value(t, checkpoint(name), is_q8=is_q8).to(device) for t in spine_tensors(tiny_geometry(name))}


@cache
def tiny_experts(name: str, device: str) -> MemoryExperts:
    g, source = tiny_geometry(name), checkpoint(name)
    records = {
        (layer, expert): torch.cat([source[part].flatten() for part in expert_tensor_names(layer, expert)]).to(device)
        for layer in g.moe_layers
        for expert in range(g.n_experts)
    }
    return MemoryExperts(g, records)


def tiny_model(name: str, *, is_q8: bool = False, device: str = "cpu") -> Model:
    return Model(tiny_geometry(name), MemoryWeights(tiny_weights(name, is_q8, device)), tiny_experts(name, device))


def run_in_blocks(model: Model, ids: Tensor, n_rows: int, arithmetic: Arithmetic) -> tuple[Tensor, State]:
    """Return the logits of a text [batch, tokens] given n_rows tokens at a time, and the state after it."""
    state = initial_state(model.geometry, ids.shape[0], ids.device)
    logits = []
    for block in ids.split(n_rows, dim=1):
        block_logits, state = model.forward(block, state, arithmetic=arithmetic)
        logits.append(block_logits)
    return torch.cat(logits, dim=1), state


def state_tensors(state: State) -> list[Tensor]:
    return [tensor for layer in state.layers for tensor in (getattr(layer, f.name) for f in dataclasses.fields(layer))]


def random_ids(n_tok: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 480, (1, n_tok), generator=torch.Generator().manual_seed(seed))


# Golden logits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arithmetic", list(Arithmetic))
@pytest.mark.parametrize("precision", ["exact", "q8"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_golden(name: str, precision: str, arithmetic: Arithmetic, device: str, record_property) -> None:
    model = tiny_model(name, is_q8=precision == "q8", device=device)
    for text in range(3):
        ids, expected = golden(name)[f"{text}.ids"][None].to(device), golden(name)[f"{precision}.{text}.logits"][None]
        logits, _ = run_in_blocks(model, ids, ids.shape[1], arithmetic)
        difference = (logits.cpu() - expected).abs().max().item()
        record_property(f"max_difference_{text}", difference)
        assert difference < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_continuation_is_golden(name: str, device: str) -> None:
    model, ids = tiny_model(name, is_q8=True, device=device), golden(name)["0.ids"][None].to(device)
    logits, state = model.forward(ids, initial_state(model.geometry, 1, ids.device), arithmetic=Arithmetic.PROMPT, is_last_only=True)
    chosen = []
    for _ in golden(name)["q8.0.greedy"]:
        chosen.append(logits[0, -1].argmax().item())
        logits, state = model.forward(torch.tensor([[chosen[-1]]], device=device), state, arithmetic=Arithmetic.DECODE)
    assert chosen == golden(name)["q8.0.greedy"].tolist()


# Splits and rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_decode_has_the_same_bits_for_any_split(name: str, device: str) -> None:
    model, ids = tiny_model(name, is_q8=True, device=device), golden(name)["2.ids"][None].to(device)
    whole, whole_state = run_in_blocks(model, ids, ids.shape[1], Arithmetic.DECODE)
    for n_rows in (1, 5, 7, 16):
        logits, state = run_in_blocks(model, ids, n_rows, Arithmetic.DECODE)
        assert torch.equal(logits, whole), f"blocks of {n_rows}"
        assert state.n_tokens == whole_state.n_tokens == ids.shape[1]
        assert all(torch.equal(a, b) for a, b in zip(state_tensors(state), state_tensors(whole_state), strict=True))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_prompt_pass_agrees_for_any_split_and_leaves_the_same_state(name: str) -> None:
    model, ids = tiny_model(name, is_q8=True), golden(name)["2.ids"][None]
    expected, expected_state = run_in_blocks(model, ids, 16, Arithmetic.DECODE)
    for n_rows in (1, 7, 16, ids.shape[1]):
        logits, state = run_in_blocks(model, ids, n_rows, Arithmetic.PROMPT)
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
        for found, wanted in zip(state_tensors(state), state_tensors(expected_state), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
def test_decode_bits_of_a_row_do_not_depend_on_later_rows(device: str) -> None:
    model = tiny_model("tiny-k3.1", is_q8=True, device=device)
    _, state = run_in_blocks(model, random_ids(9).to(device), 9, Arithmetic.DECODE)
    block = random_ids(16, seed=1).to(device)
    expected, _ = model.forward(block, state, arithmetic=Arithmetic.DECODE)
    for n_kept in (1, 2, 6, 11, 15):
        for n_rows in (n_kept, 16):
            other = torch.cat([block[:, :n_kept], random_ids(n_rows - n_kept, seed=n_kept).to(device)], dim=1)
            logits, _ = model.forward(other, state, arithmetic=Arithmetic.DECODE)
            assert torch.equal(logits[:, :n_kept], expected[:, :n_kept])


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_texts_of_a_batch_do_not_mix(arithmetic: Arithmetic) -> None:
    model, ids = tiny_model("tiny-k3"), torch.cat([random_ids(19, seed=seed) for seed in (1, 2, 3)])
    together, _ = run_in_blocks(model, ids, 10, arithmetic)
    alone = torch.cat([run_in_blocks(model, text[None], 10, arithmetic)[0] for text in ids])
    torch.testing.assert_close(together, alone, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_forward_changes_neither_state_nor_weights(arithmetic: Arithmetic) -> None:
    model = tiny_model("tiny-k3")
    _, state = run_in_blocks(model, random_ids(6), 6, arithmetic)
    before = [x.clone() for x in (*state_tensors(state), *tiny_weights("tiny-k3", False, "cpu").values())]
    first, _ = model.forward(random_ids(5, seed=1), state, arithmetic=arithmetic)
    second, _ = model.forward(random_ids(5, seed=1), state, arithmetic=arithmetic)
    assert torch.equal(first, second)
    after = (*state_tensors(state), *tiny_weights("tiny-k3", False, "cpu").values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_last_only_gives_the_last_row(arithmetic: Arithmetic) -> None:
    model, ids = tiny_model("tiny-k3"), random_ids(6)
    state = initial_state(model.geometry, 1, ids.device)
    every, _ = model.forward(ids, state, arithmetic=arithmetic)
    last, _ = model.forward(ids, state, arithmetic=arithmetic, is_last_only=True)
    assert last.shape == (1, 1, model.geometry.vocab_size)
    torch.testing.assert_close(last, every[:, -1:], rtol=0, atol=0 if arithmetic.is_tiled else 1e-5)


def test_initial_state_has_one_entry_of_the_right_kind_per_layer() -> None:
    state = initial_state(tiny_geometry("tiny-k3"), 3, torch.device("cpu"))
    assert [type(layer) for layer in state.layers] == [KdaState, KdaState, KdaState, MlaState, KdaState, MlaState]
    assert [tuple(x.shape) for x in state_tensors(state)[4:8]] == [(3, 4, 32, 32), (3, 3, 384), (3, 0, 32), (3, 0, 16)]
    assert state.n_tokens == 0 and all(not x.any() for x in state_tensors(state))


# What the golden logits do not decide


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_lora_norms_have_their_own_eps(arithmetic: Arithmetic) -> None:
    g = tiny_geometry("tiny-k3")
    tensors = {name: value.double() for name, value in tiny_weights("tiny-k3", False, "cpu").items()}
    # So small that the mean squares before both norms are near 1e-6.
    x = 1e-3 * torch.randn(1, 5, g.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer = Layer(g, MemoryWeights(tensors), 3, arithmetic.is_tiled)
    past = MlaState(torch.zeros(1, 0, g.kv_lora_rank).double(), torch.zeros(1, 0, g.qk_rope_head_dim).double())
    _, new = attention(layer, x, past)
    latent = x @ tensors["blk.3.attn_kv_a_mqa.weight"][: g.kv_lora_rank].T

    def normed(eps: float) -> Tensor:
        return latent / (latent.square().mean(-1, keepdim=True) + eps).sqrt() * tensors["blk.3.attn_kv_a_norm.weight"]

    torch.testing.assert_close(new.latent, normed(1e-6))
    assert not torch.allclose(normed(1e-6), normed(1e-5), rtol=0.1)

    def output(**eps: float) -> Tensor:
        return attention(layer._replace(geometry=dataclasses.replace(g, **eps)), x, past)[0]

    # The query's norm shows in the output only.
    assert torch.equal(output(), output(rms_norm_eps=1.0))


def test_first_layers_residual_score_is_never_read() -> None:
    model = tiny_model("tiny-k3")
    tensors = {name: value for name, value in tiny_weights("tiny-k3", False, "cpu").items() if name != "blk.0.attn_res_score.weight"}
    ids = random_ids(5)
    expected, _ = run_in_blocks(model, ids, 5, Arithmetic.DECODE)
    found, _ = run_in_blocks(Model(model.geometry, MemoryWeights(tensors), model.experts), ids, 5, Arithmetic.DECODE)
    assert torch.equal(found, expected)


def test_gate_without_a_bound_follows_the_same_state_in_both_arithmetics() -> None:
    bounded = tiny_model("tiny-k3")
    model = Model(dataclasses.replace(bounded.geometry, kda_gate_lower_bound=None), bounded.weights, bounded.experts)
    ids = random_ids(20)
    decoded, _ = run_in_blocks(model, ids, 16, Arithmetic.DECODE)
    prompted, _ = run_in_blocks(model, ids, 20, Arithmetic.PROMPT)
    torch.testing.assert_close(decoded, prompted, rtol=0, atol=TOLERANCE)
    assert not torch.allclose(decoded, run_in_blocks(bounded, ids, 16, Arithmetic.DECODE)[0], atol=1e-2)


# Gradients


def gradients(arithmetic: Arithmetic) -> dict[str, Tensor | None]:
    """Return the gradient of a loss over 18 tokens in two blocks for every tensor of the spine."""
    with torch.enable_grad():
        model = tiny_model("tiny-k3.1")
        tensors = {name: value.clone().requires_grad_() for name, value in tiny_weights("tiny-k3.1", False, "cpu").items()}
        ids = random_ids(19)
        logits, _ = run_in_blocks(Model(model.geometry, MemoryWeights(tensors), model.experts), ids[:, :-1], 10, arithmetic)
        torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).backward()
    return {name: value.grad for name, value in tensors.items()}


def test_gradients_reach_every_tensor_and_agree_between_the_arithmetics() -> None:
    decode, prompt = gradients(Arithmetic.DECODE), gradients(Arithmetic.PROMPT)
    unused = {name for name in decode if "indexer" in name or "exp_probs_b" in name} | {"blk.0.attn_res_score.weight"}
    for name in decode.keys() - unused:
        found, expected = decode[name], prompt[name]
        assert found is not None and expected is not None and found.isfinite().all() and found.any(), name
        atol = 1e-4 * expected.abs().max().item() + 1e-7
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    assert all(decode[name] is None for name in unused)
