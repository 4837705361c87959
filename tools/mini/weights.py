"""The small model's parameters, under the names that a checkpoint gives them, and the views of them that the runtime's forward pass takes.

A routed expert's matrix is a slice of one parameter for all experts of its layer. What a pass sees is either the parameters as they are, or
what the exported checkpoint will say: experts in MXFP4, and bfloat16 wherever the checkpoint has it.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from layout.tensors import SpineTensor, expert_tensor_names, spine_tensors
from manifests.geometry import Geometry
from runtime.model import Model
from tools.mini.experts import BatchedExperts, Matrices
from tools.mini.rounding import as_bfloat16, as_mxfp4

MATRIX_NAMES = ("w1", "w2", "w3")
# A file of weights is kept below it, so that a run's results travel in pieces.
MOST_FILE_BYTES = 15_000_000
_F32_ENDS = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias", "k_norm.weight", "k_norm.bias")
# The selection biases have a rule of their own; the indexer's choice has no effect yet, and the first layer has nothing to mix.
_NOT_TRAINED = ("e_score_correction_bias", ".indexer.", ".layers.0.self_attention_res_")
# Deviation of a matrix times sqrt(columns), where it is not 1: branches begin by adding little, and all tokens are about equally likely.
_GAINS = {".o_proj.weight": 0.4, ".down_proj.weight": 0.4, ".routed_expert_up_proj.weight": 0.4, "lm_head.weight": 0.3}


@dataclass(frozen=True, slots=True)
class Parameters:
    """All parameters by name, float32 on one device.

    spine    by checkpoint name, in the checkpoint's shapes, without padding
    experts  "L<layer>.w1" to "w3": [experts, out, in]
    """

    geometry: Geometry
    spine: dict[str, Tensor]
    experts: dict[str, Tensor]

    @property
    def all(self) -> dict[str, Tensor]:
        return self.spine | self.experts

    @property
    def device(self) -> torch.device:
        return self.spine["language_model.model.norm.weight"].device

    @property
    def trained(self) -> dict[str, Tensor]:
        """Those that the loss depends on through gradients."""
        return {name: tensor for name, tensor in self.all.items() if not any(part in name for part in _NOT_TRAINED)}

    @property
    def biases(self) -> dict[int, Tensor]:
        """The selection biases by layer, [experts]."""
        return {n: self.spine[f"language_model.model.layers.{n}.block_sparse_moe.gate.e_score_correction_bias"] for n in self.geometry.moe_layers}


def is_float32(name: str) -> bool:
    """Return whether a published checkpoint holds this tensor of the spine in float32; the others are bfloat16."""
    return name.endswith(_F32_ENDS)


def initial_parameters(geometry: Geometry, seed: int) -> Parameters:
    """Return random parameters on the CPU; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    spine = {s.name: _initial(s.name, s.shape, generator) for t in spine_tensors(geometry) for s in t.sources}
    g = geometry
    shapes = {"w1": (g.expert_intermediate_size, g.latent_size), "w2": (g.latent_size, g.expert_intermediate_size)}
    shapes["w3"] = shapes["w1"]
    experts = {
        f"L{layer}.{name}": torch.randn(g.n_experts, *shape, generator=generator) / math.sqrt(shape[1])
        for layer in g.moe_layers
        for name, shape in shapes.items()
    }
    return Parameters(geometry, spine, experts)


def _initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("dt_bias"):
        # Spread so that memories of a token and of hundreds are there from the beginning.
        return torch.rand(shape, generator=generator) * 7 - 7.5
    if name.endswith(("e_score_correction_bias", "A_log", "norm.bias")):
        return torch.zeros(shape)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    values = torch.randn(shape, generator=generator)
    if name.endswith("res_proj.weight"):
        return values * 0.02
    if name.endswith("embed_tokens.weight"):
        return values * 0.3
    gain = next((gain for end, gain in _GAINS.items() if name.endswith(end)), 1.0)
    return values * (gain / math.sqrt(math.prod(shape[1:])))


def on_device(parameters: Parameters, device: torch.device) -> Parameters:
    """Return copies on a device, those that are trained with gradients."""
    trained = parameters.trained.keys()
    moved = {name: tensor.to(device).requires_grad_(name in trained) for name, tensor in parameters.all.items()}
    return Parameters(parameters.geometry, {n: moved[n] for n in parameters.spine}, {n: moved[n] for n in parameters.experts})


class SpineView:
    """The spine's tensors by their names there, made of the parameters: what `runtime.model` asks for."""

    def __init__(self, parameters: Parameters, *, is_rounded: bool) -> None:
        self._parameters, self._is_rounded = parameters, is_rounded
        self._tensors = {tensor.name: tensor for tensor in spine_tensors(parameters.geometry)}

    @property
    def device(self) -> torch.device:
        return self._parameters.device

    def matrix(self, name: str) -> Tensor:
        return self._source(self._tensors[name].sources[0].name)

    def vector(self, name: str) -> Tensor:
        return _folded(self._tensors[name], [self._source(source.name) for source in self._tensors[name].sources])

    def rows(self, name: str, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, self.matrix(name))

    def _source(self, name: str) -> Tensor:
        value = self._parameters.spine[name]
        return as_bfloat16(value) if self._is_rounded and not is_float32(name) else value


def _folded(tensor: SpineTensor, parts: list[Tensor]) -> Tensor:
    return parts[0] * parts[1].flatten() if tensor.rule == "fold" else parts[0]


def expert_matrices(parameters: Parameters, *, is_rounded: bool) -> dict[int, Matrices]:
    """Return the matrices of all layers, rounded to MXFP4 or as they are."""
    round_ = as_mxfp4 if is_rounded else lambda x: x
    return {n: Matrices(*(round_(parameters.experts[f"L{n}.{name}"]) for name in MATRIX_NAMES)) for n in parameters.geometry.moe_layers}


def model_of(parameters: Parameters, *, is_rounded: bool) -> tuple[Model, BatchedExperts]:
    """Return the runtime's model over the parameters as they are now, and its experts, which count their loads."""
    experts = BatchedExperts(parameters.geometry, expert_matrices(parameters, is_rounded=is_rounded))
    return Model(parameters.geometry, SpineView(parameters, is_rounded=is_rounded), experts), experts


def expert_sources(parameters: Parameters) -> dict[str, tuple[str, int]]:
    """Return for each packed expert tensor of a checkpoint the parameter and the expert's number in it; its scale has the next name."""
    return {
        name: (f"L{layer}.{MATRIX_NAMES[n]}", expert)
        for layer in parameters.geometry.moe_layers
        for expert in range(parameters.geometry.n_experts)
        for n, name in enumerate(expert_tensor_names(layer, expert)[::2])
    }


def save_parameters(parameters: Parameters, directory: Path) -> None:
    """Write weights-1.safetensors and so on, float32, none above MOST_FILE_BYTES unless one tensor is."""
    files: list[dict[str, Tensor]] = [{}]
    for name, tensor in parameters.all.items():
        if files[-1] and sum(x.nbytes for x in files[-1].values()) + tensor.nbytes > MOST_FILE_BYTES:
            files.append({})
        files[-1][name] = tensor.detach().cpu().contiguous()
    for old in directory.glob("weights-*.safetensors"):
        old.unlink()
    for number, tensors in enumerate(files, 1):
        save_file(tensors, directory / f"weights-{number}.safetensors")


def load_parameters(geometry: Geometry, directory: Path) -> Parameters:
    """Read what `save_parameters` wrote. Raises ValueError if it is not of this geometry."""
    found = {name: tensor for path in sorted(directory.glob("weights-*.safetensors")) for name, tensor in load_file(path).items()}
    if not found:
        raise ValueError(f"{directory}: holds no weights-*.safetensors; name the OUT of a training run")
    expected = initial_parameters(geometry, 0)
    differing = sorted(name for name in found.keys() | expected.all.keys() if _shape(found, name) != _shape(expected.all, name))
    if differing:
        raise ValueError(f"{directory}: the weights do not fit the geometry: {', '.join(differing[:5])}; {len(differing)} tensors differ")
    return Parameters(geometry, {n: found[n] for n in expected.spine}, {n: found[n] for n in expected.experts})


def _shape(tensors: dict[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None
