"""Reads a manifest, strictly: what is unknown, missing, mistyped, doubled or not canonical is an error that names its place.

It judges the text alone. Whether the files that it names are there, and have their sizes, is for layout to see.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import is_dataclass
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
import yaml

from manifests.errors import BadInputError
from manifests.geometry import Geometry, geometry_from_dict
from manifests.manifest import SCHEMA, Drive, Manifest, check_base, may_be_absent
from manifests.ranges import format_ranges, parse_ranges
from manifests.seal import check_seal

try:
    from yaml import CSafeLoader as _YamlLoader
except ImportError:
    from yaml import SafeLoader as _YamlLoader  # type: ignore[assignment]

_Reader = Callable[[Any, str], Any]


def load_manifest(path: Path) -> Manifest:
    """Return the manifest at `path`. Raises BadInputError with the path, the place in it and what was expected there."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        is_checkpoint = (path.parent / "config.json").is_file()
        cure = f"{path.parent} is a checkpoint: kprep extract {path.parent} OUT makes a manifest of it" if is_checkpoint else ""
        raise BadInputError(f"{path}: no such file, expected a manifest as kprep extract writes it" + (f"; {cure}" if cure else "")) from None
    except IsADirectoryError:
        raise BadInputError(f"{path}: is a directory, expected the manifest file in it, such as {path / 'manifest.yaml'}") from None
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: byte {error.start} is not UTF-8, expected a YAML text file") from None
    return parse_manifest(text, where=str(path))


def parse_manifest(text: str, *, where: str) -> Manifest:
    """Return the manifest in `text`, its base tiers complete; `where` opens every message. Raises BadInputError."""
    try:
        manifest = _manifest(_yaml_values(text))
        check_base(manifest)
        check_seal(text)
    except BadInputError as error:
        raise BadInputError(f"{where}: {error}") from None
    return manifest


class _StrictLoader(_YamlLoader):
    """YAML's plain types only. A doubled key, a merge (`<<`), and names beside numbers as keys are errors."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            fault = _key_fault(key, values)
            if fault:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} {fault}", problem_mark=key_node.start_mark)
            values[key] = self.construct_object(value_node, deep=deep)
        return values


def _whole_number(loader: _StrictLoader, node: Any) -> int:
    """Read a whole number. Raises ValueError if it is too long to be named in a message: one in hex digits can be."""
    number: int = loader.construct_yaml_int(node)
    str(number)
    return number


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def _key_fault(key: object, earlier: dict[Any, Any]) -> str | None:
    if type(key) not in (str, int):
        return "is neither a name nor a number"
    if key in earlier:
        return "is there twice"
    return "is a name among numbers, or the reverse" if earlier and type(key) is not type(next(iter(earlier))) else None


def _yaml_values(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise BadInputError(f"{at}{error.problem or error.context}; undo the edit, or take the latest file of manifest.history/") from None
    except yaml.reader.ReaderError as error:
        line = text.encode()[: error.position].count(b"\n") + 1
        raise BadInputError(f"line {line}: a character that YAML does not allow: {error.reason}") from None
    # YAML makes dates and numbers of bare words, and fails so at a 13th month.
    except ValueError as error:
        raise BadInputError(f"a bare value is no date or number: {error}; put texts in double quotes") from None


def _manifest(values: Any) -> Manifest:
    schema = _mapping(values, "the file").get("schema", SCHEMA)
    if schema != SCHEMA:
        raise BadInputError(f"schema: is {schema!r}, this ktier reads {SCHEMA}; use the ktier that wrote this manifest or a newer one")
    _check_names(Manifest, values, "the file")
    geometry = geometry_from_dict(_mapping(values["geometry"], "geometry"), where="geometry")
    manifest: Manifest = _facts(Manifest, values, "", geometry=lambda *_: geometry, drives=partial(_drives, geometry))
    return manifest


def _drives(geometry: Geometry, values: Any, place: str) -> tuple[Drive, ...]:
    read = partial(_facts, Drive, holds=partial(_holds, geometry))
    return tuple(read(value, f"{place}[{i}]") for i, value in enumerate(_list(values, place)))


def _holds(geometry: Geometry, value: Any, place: str) -> npt.NDArray[np.bool_]:
    layers, moe = _mapping(value, place), geometry.moe_layers
    unknown = [layer for layer in layers if layer not in moe]
    missing = np.array([layer in moe and layer not in layers for layer in range(geometry.n_layers)])
    if unknown or missing.any():
        raise BadInputError(
            f"{place}: unknown layers {unknown}, missing layers {format_ranges(missing) or 'none'}; "
            f'expected one line for each layer of {moe.start}-{moe.stop - 1}, "" where nothing is held'
        )
    held = np.zeros((geometry.n_layers, geometry.n_experts), dtype=np.bool_)
    for layer, text in layers.items():
        where = f"{place}[{layer}]"
        if not isinstance(text, str):
            example = text if type(text) is int else "0-15,17"
            raise BadInputError(f'{where}: is {text!r}, expected ranges in double quotes, such as "{example}"')
        held[layer] = parse_ranges(text, geometry.n_experts, where=where)
    held.setflags(write=False)
    return held


def _facts(kind: Any, value: Any, place: str, **read: _Reader) -> Any:
    """Build the dataclass `kind` from a mapping with its fields and no others; `read` has the fields that their types do not explain."""
    values = _mapping(value, place)
    _check_names(kind, values, place)
    readers = {name: read.get(name) or partial(_value, hint, name) for name, hint in _hints(kind).items()}
    return kind(**{name: reader(values[name], f"{place}.{name}" if place else name) for name, reader in readers.items() if name in values})


def _check_names(kind: Any, values: dict[Any, Any], place: str) -> None:
    unknown = [name for name in values if name not in _hints(kind)]
    missing = [name for name in _hints(kind) if name not in values and name not in may_be_absent(kind)]
    if unknown or missing:
        raise BadInputError(f"{place}: unknown keys {unknown}, missing keys {missing}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(kind: Any, name: str, value: Any, place: str) -> Any:
    if get_origin(kind) is tuple:
        return tuple(_value(get_args(kind)[0], name, item, f"{place}[{i}]") for i, item in enumerate(_list(value, place)))
    if NoneType in get_args(kind):
        inner = get_args(kind)[0]
        # An empty text is what some drives give as their serial number.
        return value if value is None or (inner is str and value == "") else _value(inner, name, value, place)
    return _facts(kind, value, place) if is_dataclass(kind) else _scalar(kind, name, value, place)


def _scalar(kind: type, name: str, value: Any, place: str) -> Any:
    types, expected = _SCALARS[kind]
    if type(value) not in types:
        raise BadInputError(f"{place}: is {value!r}, expected {expected}")
    is_good, expected = _RULES.get(name, _RULE_OF_TYPE[kind])
    if not is_good(value):
        raise BadInputError(f"{place}: is {value!r}, expected {expected}")
    return value


def _mapping(value: Any, place: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise BadInputError(f"{place}: is {value!r:.60}, expected keys with values")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadInputError(f"{place}: is {value!r:.60}, expected a list")
    return value


def _is_date(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


_SCALARS: dict[type, tuple[tuple[type, ...], str]] = {
    str: ((str,), "a text in double quotes"),
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
}
_Rule = tuple[Callable[[Any], bool], str]
_RULE_OF_TYPE: dict[type, _Rule] = {
    str: (bool, "a text that is not empty"),
    bool: (lambda _: True, ""),
    int: (lambda n: n >= 0, "a number from 0 on"),
    float: (lambda x: 0 <= x <= sys.float_info.max, "a finite number from 0 on"),
}
_HASH: _Rule = (lambda text: bool(re.fullmatch("[0-9a-f]{32}", text)), "32 lower-case hex digits")
_FROM_ONE: _Rule = (lambda n: n >= 1, "a number from 1 on")
# Fields, by name, that their type does not narrow enough.
_RULES: dict[str, _Rule] = {
    "xxh3_128": _HASH,
    "header_xxh3_128": _HASH,
    "digest": (lambda text: bool(re.fullmatch("[0-9a-f]+", text)), "lower-case hex digits"),
    "created": (lambda text: "T" in text and _is_date(text), 'a date with a time, such as "2026-11-05T10:00:00Z"'),
    "date": (_is_date, 'a date, such as "2026-11-05"'),
    "generation": _FROM_ONE,
    "depth": _FROM_ONE,
    # The kernel says -1 where a machine has no NUMA nodes.
    "numa_node": (lambda n: n >= -1, "a number from -1 on"),
}
