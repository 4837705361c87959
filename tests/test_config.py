"""config.json: what the published file says, and a refusal of whatever contradicts itself or is not implemented."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from layout.config import K3, K31, ConfigFacts, end_ids_of, read_config
from manifests.errors import BadInputError
from manifests.geometry import Indexer, load_geometry

DATA = Path(__file__).parent / "data"
Config = dict[str, Any]
Change = Callable[[Config], object]

# The published K3 file, as far as it says anything of the architecture.
PUBLISHED: Config = {
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16", "bos_token_id": 163584,
    "eos_token_id": 163586, "pad_token_id": 163839, "ignore_index": -100, "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 7168, "num_hidden_layers": 93,
        "vocab_size": 163840, "max_position_embeddings": 1048576, "hidden_act": "situ", "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12, "rms_norm_eps": 1e-05, "intermediate_size": 33792,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2,
        "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True, "routed_scaling_factor": 1.0, "topk_method": "noaux_tc", "num_expert_group": 1, "topk_group": 1,
        "use_grouped_topk": True, "num_nextn_predict_layers": 0, "num_attention_heads": 96, "num_key_value_heads": 96, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
        "mla_use_output_gate": True, "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "initializer_range": 0.02,
        "use_cache": True, "tie_word_embeddings": False, "transformers_version": "4.56.2", "dtype": "bfloat16", "top_k": 50,
        "linear_attn_config": {
            "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True,
            "full_attn_layers": [*range(4, 93, 4), 93], "kda_layers": [n for n in range(1, 93) if n % 4],
        },
        "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    },
    "vision_config": {"patch_size": 14},
}  # fmt: skip
FULL = [4, 8, 10]
SHAPES: dict[str, tuple[int, ...]] = {
    "language_model.model.layers.3.self_attn.indexer.weights_proj.weight": (4, 128),
    "language_model.model.layers.3.self_attn.indexer.wk.weight": (32, 128),
}


def tiny(model: str = "tiny-k3.1") -> Config:
    config: Config = json.loads((DATA / model / "config.json").read_bytes())
    return config


def facts_after(change: Change, *, model: str = "tiny-k3.1", shapes: dict[str, tuple[int, ...]] = SHAPES) -> ConfigFacts:
    config = tiny(model)
    change(config)
    return read_config(config, shapes)


def fault_after(change: Change, *, model: str = "tiny-k3.1", shapes: dict[str, tuple[int, ...]] = SHAPES) -> str:
    with pytest.raises(BadInputError) as caught:
        facts_after(change, model=model, shapes=shapes)
    assert str(caught.value).startswith("config.json:")
    return str(caught.value)


def top(**values: object) -> Change:
    return lambda config: config.update(values)


def text(**values: object) -> Change:
    return lambda config: config["text_config"].update(values)


def linear(**values: object) -> Change:
    return lambda config: config["text_config"]["linear_attn_config"].update(values)


def dsa(**values: object) -> Change:
    """Replace the block of the indexer."""
    return text(dsa_config=values)


def without(*path: str) -> Change:
    def change(config: Config) -> None:
        for key in path[:-1]:
            config = config[key]
        del config[path[-1]]

    return change


def test_the_published_file_is_the_known_geometry() -> None:
    assert read_config(PUBLISHED, {}) == (K3, "kimi_k3", load_geometry("k3"), [])


def test_layers_count_from_one_in_the_file_and_from_zero_here() -> None:
    assert read_config(PUBLISHED, {}).geometry.full_attention_layers == (*range(3, 92, 4), 92)
    assert len(read_config(PUBLISHED, {}).geometry.full_attention_layers) == 24


def test_the_published_file_with_an_indexer_is_k31() -> None:
    config = PUBLISHED | {"architectures": [K31], "model_type": "kimi_k31", "dsa_config": {"n_heads": 32, "head_dim": 128, "topk": 2048}}
    assert read_config(config, {}) == (K31, "kimi_k31", load_geometry("k3.1"), [])


def test_a_file_without_a_gate_bound_has_none() -> None:
    assert facts_after(linear(gate_lower_bound=None)).geometry.kda_gate_lower_bound is None
    assert facts_after(without("text_config", "linear_attn_config", "gate_lower_bound")).geometry.kda_gate_lower_bound is None


def test_numbers_may_be_whole_where_the_published_ones_are_not() -> None:
    geometry = facts_after(text(activation_situ_beta=3, routed_scaling_factor=2)).geometry
    assert (geometry.situ_beta, geometry.routed_scaling_factor) == (3.0, 2.0) and isinstance(geometry.situ_beta, float)


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], [K3, K31], [], "KimiK3ForConditionalGeneration", None, [["x"]], {"a": 1}], ids=repr)
def test_another_architecture_is_refused(architectures: object) -> None:
    message = fault_after(top(architectures=architectures))
    assert f"architectures is {architectures!r} and model_type 'kimi_k31'; known are {K3}, {K31}: this program runs Kimi K3 and K3.1 only" in message


def test_a_strange_type_is_refused_of_k3_and_remarked_upon_of_k31() -> None:
    message = fault_after(top(model_type="kimi_k4"), model="tiny-k3")
    assert f"model_type is 'kimi_k4', but {K3} has 'kimi_k3': is this another model?" in message
    for strange in ("kimi_k4", "kimi_k3", None):
        facts = facts_after(top(model_type=strange))
        assert facts.geometry == facts_after(top()).geometry and facts.model_type == str(strange)
        assert facts.remarks == [f"model_type {str(strange)!r} of {K31} is unfamiliar; going by the architecture"]
    assert facts_after(top(model_type="kimi_k3_1")).remarks == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "other"),
        ("hidden_act", "silu"),
        ("hidden_act", None),
        ("moe_layer_freq", 2),
        ("latent_moe_use_norm", False),
        ("moe_router_activation_func", "softmax"),
        ("moe_renormalize", False),
        ("num_expert_group", 8),
        ("topk_group", 4),
        ("num_nextn_predict_layers", 1),
        ("mla_use_nope", False),
        ("mla_use_output_gate", False),
        ("tie_word_embeddings", True),
    ],
)
def test_what_is_not_implemented_is_refused(key: str, value: object) -> None:
    message = fault_after(text(**{key: value}))
    assert f"text_config.{key} is {value!r}, expected " in message and message.endswith("nothing else is implemented")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (text(num_key_value_heads=2), "text_config.num_key_value_heads is 2, expected 4 like num_attention_heads"),
        (linear(use_full_rank_gate=False), "linear_attn_config.use_full_rank_gate is False, expected true: nothing else is implemented"),
        (top(text_config=[]), "text_config is [], expected a mapping"),
        (without("text_config"), "text_config is None, expected a mapping"),
        (text(linear_attn_config=None), "text_config.linear_attn_config is None, expected a mapping"),
        (text(num_experts="8"), "text_config.num_experts is '8', expected a whole number"),
        (text(num_experts=8.0), "text_config.num_experts is 8.0, expected a whole number"),
        (text(num_experts=True), "text_config.num_experts is True, expected a whole number"),
        (without("text_config", "hidden_size"), "text_config.hidden_size is None, expected a whole number"),
        (text(rms_norm_eps="1e-5"), "text_config.rms_norm_eps is '1e-5', expected a number"),
        (text(rms_norm_eps=math.nan), "text_config.rms_norm_eps is nan, expected a number"),
        (linear(gate_lower_bound="low"), "linear_attn_config.gate_lower_bound is 'low', expected a number"),
        (linear(num_heads=None), "linear_attn_config.num_heads is None, expected a whole number"),
        (text(hidden_size=100), "model geometry: hidden_size is 100, expected a multiple of 32"),
        (text(num_experts_per_token=17), "n_experts_per_token is 17, but there are 16 experts"),
        (text(first_k_dense_replace=10), "n_dense_layers is 10, expected 0 to 9"),
        (linear(full_attn_layers="4"), "linear_attn_config.full_attn_layers is '4', expected a list of layer numbers"),
        (linear(kda_layers=[1, 2.0]), "linear_attn_config.kda_layers is [1, 2.0], expected a list of layer numbers"),
        (linear(full_attn_layers=[4, 8, 9, 10]), "contradict each other: in both [9], in neither [], outside 1..10 []"),
        (linear(full_attn_layers=[4, 10]), "contradict each other: in both [], in neither [8], outside 1..10 []"),
        (linear(full_attn_layers=[0, 3, 7, 9]), "in both [3, 7, 9], in neither [4, 8, 10], outside 1..10 [0]"),
        (linear(full_attn_layers=[4, 8, 10, 11]), "in both [], in neither [], outside 1..10 [11]"),
        (linear(full_attn_layers=[4, 8, 8, 10]), "contradict each other"),
        (text(num_hidden_layers=11), "in neither [11], outside 1..11 []"),
        (without("text_config", "linear_attn_config", "kda_layers"), "in neither [1, 2, 3, 5, 6, 7, 9]"),
    ],
)
def test_a_fault_is_told_by_its_key(change: Change, expected: str) -> None:
    assert expected in fault_after(change)


def test_all_faults_are_told_at_once() -> None:
    def change(config: Config) -> None:
        text(hidden_act="gelu", num_experts="many", num_key_value_heads=1, rms_norm_eps=None)(config)
        linear(full_attn_layers=[4, 8], num_heads=1.5)(config)
        dsa(n_heads=-1, full=[1])(config)

    message = fault_after(change)
    for part in ("hidden_act is", "num_experts is", "num_key_value_heads is", "rms_norm_eps is", "in neither [10]", "num_heads is 1.5", "n_heads=-1",
                 "dsa_config.full is [1]"):  # fmt: skip
        assert part in message
    assert len(message.splitlines()) == 1 + 8


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize(
    "block",
    [
        {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 512},
        {"n_heads": 4, "head_dim": 32, "topk": 512},
        {"num_heads": 4, "head_dim": 32, "top_k": 512},
        {"index_n_heads": 4, "n_heads": 4, "num_heads": 4, "index_head_dim": 32, "head_dim": 32, "top_k": 512, "layers": FULL, "types": "any"},
    ],
)
def test_the_indexer_is_read_under_any_of_its_names_and_in_either_place(block: Config, is_inside: bool) -> None:
    def change(config: Config) -> None:
        del config["text_config"]["dsa_config"]
        (config["text_config"] if is_inside else config)["dsa_config"] = block

    facts = facts_after(change, shapes={})
    assert facts.geometry.indexer == Indexer(n_heads=4, head_dim=32, top_k=512) and facts.remarks == []


def test_what_the_indexers_block_leaves_out_comes_from_the_tensors_and_is_remarked_upon() -> None:
    for change in (dsa(), without("text_config", "dsa_config")):
        facts = facts_after(change)
        assert facts.geometry.indexer == Indexer(n_heads=4, head_dim=32, top_k=2048)
        assert facts.remarks == [
            "dsa_config gives no n_heads; taken from weights_proj.weight: 4",
            "dsa_config gives no head_dim; taken from wk.weight: 32",
            "dsa_config gives no top_k; taken as 2048",
        ]
    facts = facts_after(dsa(head_dim=64, top_k=7))
    assert facts.geometry.indexer == Indexer(n_heads=4, head_dim=64, top_k=7) and len(facts.remarks) == 1


@pytest.mark.parametrize(
    ("block", "shapes", "expected"),
    [
        ({"n_heads": 4, "index_n_heads": 8}, SHAPES, "dsa_config: index_n_heads=8, n_heads=4: expected one positive whole number"),
        ({"topk": 2048, "top_k": 1024}, SHAPES, "dsa_config: top_k=1024, topk=2048: expected one positive whole number"),
        ({"head_dim": 0}, SHAPES, "dsa_config: head_dim=0: expected one positive whole number"),
        ({"head_dim": True}, SHAPES, "dsa_config: head_dim=True: expected one positive whole number"),
        ({"top_k": "2048"}, SHAPES, "dsa_config: top_k='2048': expected one positive whole number"),
        ({"top_k": [2048]}, SHAPES, "dsa_config: top_k=[2048]: expected one positive whole number"),
        ({"top_k": {}}, SHAPES, "dsa_config: top_k={}: expected one positive whole number"),
        ({"layers": [3, 7, 9]}, SHAPES, "dsa_config.layers is [3, 7, 9], expected the full-attention layers [4, 8, 10]"),
        ({"head_dim": 32}, {}, "dsa_config gives no n_heads (index_n_heads, n_heads, num_heads), and language_model.model.layers.3.self_attn."
                               "indexer.weights_proj.weight is not there to tell"),
        ({"n_heads": 4}, {}, "dsa_config gives no head_dim (index_head_dim, head_dim), and language_model.model.layers.3.self_attn.indexer.wk."),
    ],
)  # fmt: skip
def test_an_indexer_that_contradicts_itself_is_refused(block: Config, shapes: dict[str, tuple[int, ...]], expected: str) -> None:
    assert expected in fault_after(dsa(**block), shapes=shapes)


def test_blocks_in_both_places_must_agree() -> None:
    assert "dsa_config" in tiny()["text_config"]
    assert facts_after(top(dsa_config={"n_heads": 4})).geometry == facts_after(top()).geometry
    message = fault_after(top(dsa_config={"index_n_heads": 5}))
    assert "dsa_config: index_n_heads=4, index_n_heads=5: expected one positive whole number" in message


def test_k3_has_no_indexer() -> None:
    assert facts_after(top(), model="tiny-k3", shapes={}).geometry.indexer is None


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6)),
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (5,)),
        ({}, {"eos_token_id": 7, "text_config": {"eos_token_id": 8}}, (7,)),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": 8}}, (8,)),
        ({}, PUBLISHED, (163586,)),
    ],
)
def test_the_first_end_id_that_is_given_counts(generation: Config, config: Config, expected: tuple[int, ...]) -> None:
    assert end_ids_of(config, generation) == expected


@pytest.mark.parametrize("found", [[], "5", [5, "6"], 5.0, True, [None]])
def test_an_end_id_that_is_no_number_is_refused(found: object) -> None:
    with pytest.raises(BadInputError, match=r"eos_token_id is .*, expected a number or a list of numbers"):
        end_ids_of({"eos_token_id": 7}, {"eos_token_id": found})


def test_without_an_end_id_generation_would_never_stop() -> None:
    with pytest.raises(BadInputError, match=r"neither generation_config\.json nor config\.json holds an eos_token_id"):
        end_ids_of({}, {})
