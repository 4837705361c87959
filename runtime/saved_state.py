"""The state of one text together with what it belongs to, in memory or in a file: another run goes on from there.

A safetensors file: `ids` int64 [tokens], `logits` float32 [vocabulary] after the last of them, and per layer `N.memory` and `N.conv`, or
`N.latent`, `N.k_rot` and perhaps `N.index_k`, float32, as in state.py. Its metadata names the model, the arithmetic and a hash of all this.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor

from layout.sizes import counted
from layout.writer import replaced_file
from manifests.errors import BadInputError, DamagedDataError
from manifests.geometry import Geometry
from manifests.manifest import Manifest
from runtime.kernels.rows import Arithmetic
from runtime.model import initial_indexed_state
from runtime.state import MlaState, State, initial_state, tensors_of, with_tensors
from runtime.tensor_files import opened

FORMAT = "ktier state 1"
_AGAIN = "make it again with --state-out"
_DTYPES = {torch.int64: "I64", torch.float32: "F32"}
# A tensor's dtype as safetensors names it, and its shape.
_Shapes = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a run leaves after a text.

    ids         the text's tokens
    state       after the last of them; of one text
    logits      float32 [vocabulary], after the last of them
    arithmetic  of the run; DECODE only if all tokens were computed so
    made_on     the device and torch for which the bits hold
    """

    ids: tuple[int, ...]
    state: State
    logits: Tensor
    arithmetic: Arithmetic
    made_on: str


def made_on(device: torch.device) -> str:
    """Return what a state's bits hold for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{name}, torch {torch.__version__}"


def write_state(path: Path, saved: SavedState, manifest: Manifest) -> None:
    """Write a state, whole or not at all. Raises NoSpaceError or KtierError."""
    assert len(saved.ids) == saved.state.n_tokens
    tensors = {"ids": torch.tensor(saved.ids), "logits": saved.logits}
    for number, layer in enumerate(saved.state.layers):
        tensors |= {f"{number}.{name}": tensor for name, tensor in tensors_of(layer).items()}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    facts = {"format": FORMAT, **_model_facts(manifest), "arithmetic": saved.arithmetic.value, "made_on": saved.made_on}
    _write(path, tensors, {**facts, "xxh3_128": _hash_of(tensors)})


def read_state(path: Path, manifest: Manifest, *, context: int, arithmetic: Arithmetic, is_long_context: bool = False) -> SavedState:
    """Return the state in a file, in host memory, for a run of this model, context and arithmetic.

    Raises BadInputError if it is no state of this model or does not suit the run, DamagedDataError if its bytes are not those that were written.
    """
    try:
        with opened(path, "pt") as file:
            facts = file.metadata() or {}
            _check_facts(path, facts, manifest, arithmetic)
            found = {name: _shape_of(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (the file object is no mapping)
            start = (initial_indexed_state if is_long_context else initial_state)(manifest.geometry, 1, torch.device("meta"))
            n_tokens = _check_length(path, found, context)
            _check_shapes(path, found, _shapes(manifest.geometry, start, n_tokens))
            tensors = {name: file.get_tensor(name) for name in found}
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"{path}: cannot be read as a saved state: {error}; if it was cut short, {_AGAIN}") from None
    _check_values(path, tensors, facts, manifest.geometry)
    layers = (with_tensors(layer, {name: tensors[f"{number}.{name}"] for name in tensors_of(layer)}) for number, layer in enumerate(start.layers))
    state, made = State(n_tokens, tuple(layers)), Arithmetic(facts["arithmetic"])
    return SavedState(tuple(tensors["ids"].tolist()), state, tensors["logits"], made, facts["made_on"])


def on_device(state: State, device: torch.device) -> State:
    """Return a state in the memory of a device."""
    layers = (with_tensors(layer, {name: tensor.to(device) for name, tensor in tensors_of(layer).items()}) for layer in state.layers)
    return State(state.n_tokens, tuple(layers))


def new_ids(saved: SavedState, ids: Sequence[int], *, where: object) -> list[int]:
    """Return the tokens of a prompt that come behind the saved ones; there may be none.

    Raises BadInputError, which `where` opens, if the prompt does not begin with the saved ones.
    """
    n_saved = len(saved.ids)
    if tuple(ids[:n_saved]) == saved.ids:
        return list(ids[n_saved:])
    at = next((n for n, (mine, other) in enumerate(zip(ids, saved.ids, strict=False)) if mine != other), None)
    found = f"has only {len(ids)}" if at is None else f"has {ids[at]} as number {at + 1} where {saved.ids[at]} was saved"
    raise BadInputError(
        f"{where}: holds the state after {counted(n_saved, 'token')}, with which the prompt must begin, but it {found}; "
        "a text that goes on may be split into other tokens where it was cut: cut it at the end of a line, or use --ids"
    )


def _write(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str]) -> None:
    """Write a safetensors file tensor by tensor: its own package would hold all of it in memory twice more."""
    header: dict[str, Any] = {"__metadata__": dict(facts)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replaced_file(path) as partial, partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(_bytes_of(tensor))


def _model_facts(manifest: Manifest) -> dict[str, str]:
    geometry = json.dumps(manifest.geometry.to_dict(), sort_keys=True)
    return {"source_digest": manifest.source.digest, "spine_xxh3_128": manifest.spine.xxh3_128, "geometry": geometry}


def _check_facts(path: Path, facts: Mapping[str, str], manifest: Manifest, arithmetic: Arithmetic) -> None:
    if facts.get("format") != FORMAT:
        raise BadInputError(f"{path}: format is {facts.get('format')!r}, expected {FORMAT!r}: it is no state that this program saved; {_AGAIN}")
    for name, expected in _model_facts(manifest).items():
        if facts.get(name) != expected:
            compared = "its geometry is not the manifest's" if name == "geometry" else f"its {name} is {facts.get(name)}, the manifest's {expected}"
            raise BadInputError(f"{path}: is the state of another model: {compared}; {_AGAIN}, with this manifest")
    if facts.get("arithmetic") not in [a.value for a in Arithmetic] or not {"made_on", "xxh3_128"} <= facts.keys():
        raise BadInputError(f"{path}: does not say how it was made: its metadata has {', '.join(sorted(facts))}; {_AGAIN}")
    if arithmetic is Arithmetic.DECODE and facts["arithmetic"] != arithmetic.value:
        raise BadInputError(f"{path}: was computed in prompt arithmetic, but decode arithmetic is asked for; {_AGAIN} and --exact-prefill")


def _shape_of(part: Any) -> tuple[str, tuple[int, ...]]:
    return part.get_dtype(), tuple(part.get_shape())


def _check_length(path: Path, found: _Shapes, context: int) -> int:
    """Return the number of tokens."""
    dtype, shape = found.get("ids", ("nothing", ()))
    if dtype != "I64" or len(shape) != 1 or shape[0] == 0:
        raise BadInputError(f"{path}: ids is {dtype} {list(shape)}, expected I64 [tokens]; {_AGAIN}")
    if shape[0] > context:
        raise BadInputError(
            f"{path}: holds the state after {counted(shape[0], 'token')}, but the context is {context}; give -c {shape[0] + 1} or more"
        )
    return shape[0]


def _shapes(geometry: Geometry, start: State, n_tokens: int) -> _Shapes:
    """Return the dtype and shape of every tensor of a state like `start` after n_tokens tokens."""
    shapes: _Shapes = {"ids": ("I64", (n_tokens,)), "logits": ("F32", (geometry.vocab_size,))}
    for number, layer in enumerate(start.layers):
        for name, tensor in tensors_of(layer).items():
            batch, size, *rest = tensor.shape
            shapes[f"{number}.{name}"] = ("F32", (batch, n_tokens if isinstance(layer, MlaState) else size, *rest))
    return shapes


def _check_shapes(path: Path, found: _Shapes, expected: _Shapes) -> None:
    strange, missing = sorted(found.keys() - expected.keys()), sorted(expected.keys() - found.keys())
    if {name.partition(".")[2] for name in strange + missing} == {"index_k"}:
        has, cure = ("index keys", "give that flag") if strange else ("no index keys", f"{_AGAIN} and that flag, or leave the flag out")
        raise BadInputError(f"{path}: holds {has}, which --long-context makes and needs; {cure}")
    faults = [f"{name} is unknown" for name in strange] + [f"{name} is missing" for name in missing]
    wrong = [name for name in expected if name in found and found[name] != expected[name]]
    faults += [f"{name} is {found[name][0]} {list(found[name][1])}, expected {expected[name][0]} {list(expected[name][1])}" for name in wrong]
    if faults:
        raise BadInputError(f"{path}: no state of this model: {'; '.join(faults[:5])}; {counted(len(faults), 'fault')} in all; {_AGAIN}")


def _check_values(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str], geometry: Geometry) -> None:
    if (found := _hash_of(tensors)) != facts["xxh3_128"]:
        raise DamagedDataError(f"{path}: xxh3-128 {found} differs from {facts['xxh3_128']}, which was written; {_AGAIN}")
    strays = [i for i in tensors["ids"].tolist() if not 0 <= i < geometry.vocab_size]
    if strays:
        raise BadInputError(f"{path}: ids holds {strays[0]}, but token numbers go from 0 to {geometry.vocab_size - 1}; {_AGAIN}")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise BadInputError(f"{path}: {name} holds values that are no numbers (NaN or infinite); {_AGAIN}")


def _hash_of(tensors: Mapping[str, Tensor]) -> str:
    state = xxhash.xxh3_128()
    for name in sorted(tensors):
        state.update(_bytes_of(tensors[name]))
    return state.hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.numpy().reshape(-1).view(np.uint8).data
