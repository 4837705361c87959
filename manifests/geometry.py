"""The shape of a model: every number that the code needs to know about it, and nothing of where it lies."""

import math
import sys
from dataclasses import MISSING, asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from manifests.errors import BadInputError


@dataclass(frozen=True, slots=True)
class Indexer:
    """K3.1's lightning indexer: carried, and without effect while the context holds at most `top_k` tokens."""

    n_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """One model's shape. Layers and experts count from 0; sizes are in elements."""

    vocab_size: int
    hidden_size: int
    n_layers: int
    n_dense_layers: int
    dense_intermediate_size: int
    n_experts: int
    n_experts_per_token: int
    n_shared_experts: int
    expert_intermediate_size: int
    latent_size: int
    n_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kda_n_heads: int
    kda_head_dim: int
    conv_kernel_size: int
    kda_gate_lower_bound: float | None
    full_attention_layers: tuple[int, ...]
    residual_block_size: int
    rms_norm_eps: float
    lora_norm_eps: float
    situ_beta: float
    situ_linear_beta: float
    routed_scaling_factor: float
    max_position_embeddings: int
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        faults = _faults_of(self)
        if faults:
            raise BadInputError("model geometry: " + "; ".join(faults))

    @property
    def moe_layers(self) -> range:
        return range(self.n_dense_layers, self.n_layers)

    @property
    def n_routed_experts(self) -> int:
        """Experts of all layers together."""
        return len(self.moe_layers) * self.n_experts

    @property
    def kda_size(self) -> int:
        """Width of KDA's q, k and v: heads times head size."""
        return self.kda_n_heads * self.kda_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.n_shared_experts * self.expert_intermediate_size

    @property
    def max_context(self) -> int:
        """The longest context that is exact: dense attention equals K3.1's sparse one up to the indexer's top_k."""
        return min(self.max_position_embeddings, self.indexer.top_k) if self.indexer else self.max_position_embeddings

    def is_full_attention(self, layer: int) -> bool:
        return layer in self.full_attention_layers

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `geometry_from_dict` reads back."""
        values = asdict(self)
        values["full_attention_layers"] = list(self.full_attention_layers)
        return values


_IN_BLOCKS_OF_32 = (
    "hidden_size", "dense_intermediate_size", "expert_intermediate_size", "latent_size", "q_lora_rank", "kv_lora_rank", "kda_head_dim",
    "v_head_dim",
)  # fmt: skip
_AT_LEAST_ONE = (
    "vocab_size", "n_layers", "n_experts", "n_experts_per_token", "n_shared_experts", "n_heads", "kda_n_heads", "conv_kernel_size",
    "residual_block_size", "max_position_embeddings", "qk_nope_head_dim",
)  # fmt: skip
# Far beyond any model. What is a number of things is counted up to, which has to come to an end; a width is only multiplied.
_MOST, _WIDEST = 1 << 24, 1 << 40


def _faults_of(g: Geometry) -> list[str]:
    sizes = {f.name: getattr(g, f.name) for f in fields(g) if f.type is int}
    if g.indexer is not None:
        sizes |= {f"indexer.{name}": value for name, value in asdict(g.indexer).items()}
    most = {name: _WIDEST if name in _IN_BLOCKS_OF_32 else _MOST for name in sizes}
    faults = [f"{name} is {value}, expected at most {most[name]}" for name, value in sizes.items() if value > most[name]]
    if g.qk_rope_head_dim < 0:
        faults.append(f"qk_rope_head_dim is {g.qk_rope_head_dim}, expected at least 0")
    for name in ("rms_norm_eps", "lora_norm_eps"):
        if not 0 < getattr(g, name) < math.inf:
            faults.append(f"{name} is {getattr(g, name)}, expected a finite number above 0")
    for name in _IN_BLOCKS_OF_32:
        if getattr(g, name) < 32 or getattr(g, name) % 32:
            faults.append(f"{name} is {getattr(g, name)}, expected a multiple of 32 (Q8_0 and MXFP4 blocks)")
    faults += [f"{name} is {getattr(g, name)}, expected at least 1" for name in _AT_LEAST_ONE if getattr(g, name) < 1]
    if not 0 <= g.n_dense_layers < g.n_layers:
        faults.append(f"n_dense_layers is {g.n_dense_layers}, expected 0 to {g.n_layers - 1}")
    if g.n_experts_per_token > g.n_experts:
        faults.append(f"n_experts_per_token is {g.n_experts_per_token}, but there are {g.n_experts} experts")
    if g.indexer is not None and (g.indexer.n_heads < 1 or g.indexer.top_k < 1 or g.indexer.head_dim < 32 or g.indexer.head_dim % 32):
        faults.append(f"indexer is {g.indexer}, expected at least one head and position, and a head_dim that is a multiple of 32")
    layers = list(g.full_attention_layers)
    if layers != sorted(set(layers)) or any(not 0 <= n < g.n_layers for n in layers):
        faults.append(f"full_attention_layers {layers} must rise and lie in 0..{g.n_layers - 1}")
    return faults


def geometry_from_dict(values: dict[str, Any], *, where: str) -> Geometry:
    """Build a Geometry from plain values; `where` opens every message. Raises BadInputError on unknown, missing or mistyped keys."""
    values = dict(values)
    indexer = values.pop("indexer", None)
    _check_keys(Geometry, values, where, nested={"indexer"})
    if indexer is not None:
        if not isinstance(indexer, dict):
            raise BadInputError(f"{where}: indexer is {indexer!r}, expected a mapping")
        _check_keys(Indexer, indexer, f"{where}: indexer")
    layers = values["full_attention_layers"]
    if not isinstance(layers, list) or not all(type(n) is int for n in layers):
        raise BadInputError(f"{where}: full_attention_layers is {layers!r}, expected a list of layer numbers")
    values["full_attention_layers"] = tuple(layers)
    try:
        return Geometry(**values, indexer=Indexer(**indexer) if indexer is not None else None)
    except BadInputError as error:
        raise BadInputError(f"{where}: {error}") from None


def _check_keys(kind: type, values: dict[str, Any], where: str, *, nested: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    known = {f.name: f for f in fields(kind) if f.name not in nested}
    unknown = sorted(set(values) - set(known), key=str)
    missing = sorted(name for name, f in known.items() if f.default is MISSING and name not in values)
    if unknown or missing:
        raise BadInputError(f"{where}: unknown keys {unknown}, missing keys {missing}")
    for name, value in values.items():
        expected = known[name].type
        if expected is int and type(value) is not int:
            raise BadInputError(f"{where}: {name} is {value!r}, expected a whole number")
        is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
        if (expected is float and not is_number) or (expected == float | None and value is not None and not is_number):
            raise BadInputError(f"{where}: {name} is {value!r}, expected a number")


def known_geometries() -> list[str]:
    """Names of the geometries that ship with the package."""
    files = resources.files("manifests").joinpath("geometries").iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def load_geometry(name_or_path: str) -> Geometry:
    """Return a shipped geometry by name, or read one from a YAML file. Raises BadInputError."""
    if name_or_path in known_geometries():
        text = resources.files("manifests").joinpath("geometries", f"{name_or_path}.yaml").read_text()
    else:
        try:
            text = Path(name_or_path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"
            known = ", ".join(known_geometries())
            raise BadInputError(f"geometry {name_or_path}: neither one of {known} nor a file that can be read: {why}") from None
    try:
        values = yaml.safe_load(text)
    # Python reads no decimal number of more than 4300 digits.
    except (yaml.YAMLError, ValueError) as error:
        raise BadInputError(f"geometry {name_or_path}: not YAML: {error}") from None
    if not isinstance(values, dict):
        raise BadInputError(f"geometry {name_or_path}: expected a mapping")
    return geometry_from_dict(values, where=f"geometry {name_or_path}")
