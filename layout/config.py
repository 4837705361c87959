"""From a checkpoint's config.json to a Geometry, refusing whatever this code does not implement."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from layout.tensors import MODEL_PREFIX
from manifests.errors import BadInputError, listed
from manifests.geometry import Geometry, Indexer

K3 = "KimiK3ForConditionalGeneration"
K31 = "KimiK31ForConditionalGeneration"
ARCHITECTURES = (K3, K31)
# K3.1's model_type has not been seen in a published file: dispatch goes by architecture, and an unfamiliar type is only remarked upon.
MODEL_TYPES = {K3: ("kimi_k3",), K31: ("kimi_k31", "kimi_k3_1")}
DEFAULT_TOP_K = 2048
# The author's code builds the two low-rank norms with its default epsilon, not with rms_norm_eps.
LORA_NORM_EPS = 1e-6

# Values that the forward pass is written for; anything else would be computed wrongly in silence.
_TEXT_REQUIREMENTS: dict[str, Any] = {
    "model_type": "kimi_linear",
    "hidden_act": "situ",
    "moe_layer_freq": 1,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "tie_word_embeddings": False,
}
_DSA_KEYS = {
    "n_heads": ("index_n_heads", "n_heads", "num_heads"),
    "head_dim": ("index_head_dim", "head_dim"),
    "top_k": ("index_topk", "topk", "top_k"),
}

_INT_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_dense_layers": "first_k_dense_replace",
    "dense_intermediate_size": "intermediate_size",
    "n_experts": "num_experts",
    "n_experts_per_token": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "expert_intermediate_size": "moe_intermediate_size",
    "latent_size": "routed_expert_hidden_size",
    "n_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "residual_block_size": "attn_res_block_size",
    "max_position_embeddings": "max_position_embeddings",
}
_FLOAT_FIELDS = {
    "rms_norm_eps": "rms_norm_eps",
    "situ_beta": "activation_situ_beta",
    "situ_linear_beta": "activation_situ_linear_beta",
    "routed_scaling_factor": "routed_scaling_factor",
}


class ConfigFacts(NamedTuple):
    """What config.json says: the architecture, the geometry, and remarks for the user."""

    architecture: str
    model_type: str
    geometry: Geometry
    remarks: list[str]


class _Faults(list[str]):
    def number(self, values: Mapping[str, Any], key: str, kinds: tuple[type, ...], where: str) -> Any:
        value = values.get(key)
        if value is None or type(value) not in kinds or not math.isfinite(value):
            self.append(f"{where}.{key} is {value!r}, expected a {'whole number' if kinds == (int,) else 'number'}")
            return 0
        return value


def read_config(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ConfigFacts:
    """Return the facts of a K3 or K3.1 config.json.

    shapes  the checkpoint's tensor shapes by name; they give what `dsa_config` leaves out

    Raises BadInputError that lists every fault at once.
    """
    architecture, model_type, remarks = _architecture(config)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise BadInputError(f"config.json: text_config is {text!r}, expected a mapping")
    faults = _Faults()
    for key, expected in _TEXT_REQUIREMENTS.items():
        if text.get(key, expected) != expected:
            faults.append(f"text_config.{key} is {text[key]!r}, expected {expected!r}: nothing else is implemented")
    numbers: dict[str, Any] = {field: faults.number(text, key, (int,), "text_config") for field, key in _INT_FIELDS.items()}
    numbers |= {field: float(faults.number(text, key, (int, float), "text_config")) for field, key in _FLOAT_FIELDS.items()}
    n_kv_heads = text.get("num_key_value_heads", numbers["n_heads"])
    if n_kv_heads != numbers["n_heads"]:
        faults.append(f"text_config.num_key_value_heads is {n_kv_heads!r}, expected {numbers['n_heads']} like num_attention_heads")
    numbers |= _linear_attention(text, numbers["n_layers"], faults)
    indexer = None
    if architecture == K31:
        indexer, indexer_remarks = _indexer(config, text, numbers["full_attention_layers"], shapes, faults)
        remarks += indexer_remarks
    if faults:
        raise BadInputError(listed(faults, "config.json:"))
    try:
        geometry = Geometry(**numbers, lora_norm_eps=LORA_NORM_EPS, indexer=indexer)
    except BadInputError as error:
        raise BadInputError(f"config.json: {error}") from None
    return ConfigFacts(architecture, model_type, geometry, remarks)


def end_ids_of(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids at which generation stops: generation_config.json's if it has any, else config.json's."""
    for values in (generation_config, config, config.get("text_config", {})):
        found = values.get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if found is not None:
            if not ids or not all(type(i) is int for i in ids):
                raise BadInputError(f"eos_token_id is {found!r}, expected a number or a list of numbers")
            return tuple(ids)
    raise BadInputError("neither generation_config.json nor config.json holds an eos_token_id: generation would never stop")


def _architecture(config: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    found = config.get("architectures")
    model_type = str(config.get("model_type"))
    architecture = found[0] if isinstance(found, list) and len(found) == 1 else None
    if architecture not in ARCHITECTURES:
        raise BadInputError(
            f"config.json: architectures is {found!r} and model_type {model_type!r}; known are {', '.join(ARCHITECTURES)}: "
            "this program runs Kimi K3 and K3.1 only"
        )
    known = MODEL_TYPES[architecture]
    if model_type in known:
        return architecture, model_type, []
    if architecture == K3:
        raise BadInputError(f"config.json: model_type is {model_type!r}, but {K3} has {known[0]!r}: is this another model?")
    return architecture, model_type, [f"model_type {model_type!r} of {K31} is unfamiliar; going by the architecture"]


def _linear_attention(text: Mapping[str, Any], n_layers: int, faults: _Faults) -> dict[str, Any]:
    linear = text.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        faults.append(f"text_config.linear_attn_config is {linear!r}, expected a mapping")
        linear = {}
    where = "text_config.linear_attn_config"
    full, kda = (_layer_list(linear, key, where, faults) for key in ("full_attn_layers", "kda_layers"))
    if linear and sorted([*full, *kda]) != list(range(1, n_layers + 1)):
        both, neither = sorted(set(full) & set(kda)), sorted(set(range(1, n_layers + 1)) - set(full) - set(kda))
        beyond = sorted(n for n in {*full, *kda} if not 1 <= n <= n_layers)
        faults.append(
            f"{where}: full_attn_layers and kda_layers contradict each other: in both {both}, in neither {neither}, outside 1..{n_layers} {beyond}"
        )
    if linear.get("use_full_rank_gate", True) is not True:
        faults.append(f"{where}.use_full_rank_gate is {linear['use_full_rank_gate']!r}, expected true: nothing else is implemented")
    bound = linear.get("gate_lower_bound")
    return {
        "kda_n_heads": faults.number(linear, "num_heads", (int,), where),
        "kda_head_dim": faults.number(linear, "head_dim", (int,), where),
        "conv_kernel_size": faults.number(linear, "short_conv_kernel_size", (int,), where),
        "kda_gate_lower_bound": None if bound is None else float(faults.number(linear, "gate_lower_bound", (int, float), where)),
        "full_attention_layers": tuple(n - 1 for n in sorted(set(full))),
    }


def _layer_list(values: Mapping[str, Any], key: str, where: str, faults: _Faults) -> list[int]:
    found = values.get(key, [])
    if not isinstance(found, list) or not all(type(n) is int for n in found):
        faults.append(f"{where}.{key} is {found!r}, expected a list of layer numbers")
        return []
    return found


def _indexer(
    config: Mapping[str, Any], text: Mapping[str, Any], full_layers: Iterable[int], shapes: Mapping[str, tuple[int, ...]], faults: _Faults
) -> tuple[Indexer, list[str]]:
    blocks = [block for block in (config.get("dsa_config"), text.get("dsa_config")) if isinstance(block, Mapping)]
    remarks = []
    found: dict[str, int] = {}
    for field, keys in _DSA_KEYS.items():
        given = {f"{key}={block[key]!r}" for block in blocks for key in keys if key in block}
        values = [block[key] for block in blocks for key in keys if key in block]
        if not all(type(v) is int and v > 0 and v == values[0] for v in values):
            faults.append(f"dsa_config: {', '.join(sorted(given))}: expected one positive whole number")
        elif values:
            found[field] = values[0]
    first = next(iter(full_layers), None)
    prefix = f"{MODEL_PREFIX}layers.{first}.self_attn.indexer."
    for field, tensor in (("n_heads", "weights_proj.weight"), ("head_dim", "wk.weight")):
        if field not in found and prefix + tensor in shapes:
            found[field] = shapes[prefix + tensor][0]
            remarks.append(f"dsa_config gives no {field}; taken from {tensor}: {found[field]}")
        elif field not in found:
            faults.append(f"dsa_config gives no {field} ({', '.join(_DSA_KEYS[field])}), and {prefix + tensor} is not there to tell")
    if "top_k" not in found:
        found["top_k"] = DEFAULT_TOP_K
        remarks.append(f"dsa_config gives no top_k; taken as {DEFAULT_TOP_K}")
    expected = [n + 1 for n in full_layers]
    for block in blocks:
        for key, value in block.items():
            if isinstance(value, list) and value != expected:
                faults.append(f"dsa_config.{key} is {value}, expected the full-attention layers {expected}")
    return Indexer(found.get("n_heads", 1), found.get("head_dim", 1), found["top_k"]), remarks
