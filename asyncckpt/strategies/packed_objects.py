"""Objects that ranks share or spread, as nested containers of what a checkpoint stores; nothing is ever pickled.

    {"value": <the object, special things in it replaced>, "kinds": [(path, kind), ...]}

    kind         stands in the value as
    BytesIO      uint8 tensor; comes back at its start
    bytes        uint8 tensor, when it is long: a manifest should stay small
    Namespace    dict (argparse.Namespace)
    scalar       array without dimensions (a NumPy scalar)
    Enum         [module, class, member]
    [module, class] of a named tuple    dict of its fields

Tensors, arrays, plain values, dicts, lists and tuples stand for themselves. Anything else is a UsageError. The classes
of enums and named tuples are looked up among the modules that are loaded: nothing is imported, and none of their code
is run.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping, Sequence
from enum import Enum, EnumMeta
from typing import Any

import numpy as np
import torch

from asyncckpt.errors import CorruptError, NotFoundError, UsageError
from asyncckpt.format.tree import metadata_in, with_metadata
from asyncckpt.format.values import encode_value, made_mapping, mapping_kind
from asyncckpt.strategies.mapping import STATE_DEPTH_MAX, shown_path

BYTES_IN_MANIFEST_MAX = 256
Path = tuple[Any, ...]
Kind = str | Sequence[str]


def pack(value: Any, *, path: Path = ()) -> dict[str, Any]:
    """Pack one object; tensors and arrays in it are not copied. UsageError naming the path, after `path`."""
    kinds: list[tuple[Path, Kind]] = []
    return {"value": _packed(value, (), path, kinds), "kinds": kinds}


def unpack(packed: Any, *, owner: str) -> Any:
    """Return the object; CorruptError naming `owner` for what `pack` does not make."""
    if not isinstance(packed, Mapping) or packed.keys() != {"value", "kinds"}:
        raise CorruptError(f"{owner} is not a packed object", found=type(packed))
    try:
        kinds = {tuple(path): kind for path, kind in packed["kinds"]}
        return _unpacked(packed["value"], (), kinds)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{owner} is a damaged packed object: {error}") from error


def _packed(value: Any, at: Path, front: Path, kinds: list[tuple[Path, Kind]]) -> Any:
    if len(at) > STATE_DEPTH_MAX:
        what = f"value {shown_path((*front, *at[:8]))}... is nested too deeply, or contains itself"
        raise UsageError(what, expected=f"{STATE_DEPTH_MAX} levels")
    if isinstance(value, np.generic):
        kinds.append((at, "scalar"))
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value
    kind, plain = _as_plain(value, (*front, *at))
    if kind is not None:
        kinds.append((at, kind))
    if isinstance(plain, Mapping):
        pairs = [(key, _packed(item, (*at, key), front, kinds)) for key, item in plain.items()]
        return _like(plain, pairs)
    if isinstance(plain, (list, tuple)) and type(plain) is not torch.Size:
        items = [_packed(item, (*at, index), front, kinds) for index, item in enumerate(plain)]
        return items if isinstance(plain, list) else tuple(items)
    if not isinstance(plain, torch.Tensor):
        encode_value(plain, owner=shown_path((*front, *at)))
    return plain


def _like(value: Mapping[Any, Any], pairs: Sequence[tuple[Any, Any]]) -> Any:
    metadata = metadata_in(value)
    return made_mapping(mapping_kind(value), pairs) if metadata is None else with_metadata(pairs, metadata)


def _as_plain(value: Any, path: Path) -> tuple[Kind | None, Any]:
    """Return (kind, what stands for it); UsageError for a member or named tuple whose class would not be found."""
    if isinstance(value, io.BytesIO):
        return "BytesIO", _as_tensor(value.getvalue())
    if isinstance(value, bytes) and len(value) > BYTES_IN_MANIFEST_MAX:
        return "bytes", _as_tensor(value)
    if isinstance(value, argparse.Namespace):
        return "Namespace", vars(value)
    named = [type(value).__module__, type(value).__qualname__]
    if isinstance(value, Enum):
        if _member([*named, value.name]) is not value:
            raise _not_found_again(path, named)
        return "Enum", [*named, value.name]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        if _tuple_class(named, value._fields) is not type(value):
            raise _not_found_again(path, named)
        return named, dict(zip(value._fields, value, strict=True))
    return None, value


def _not_found_again(path: Path, named: Sequence[str]) -> UsageError:
    what = f"value {shown_path(path)} would not come back as what it is"
    hint = "its class has to be in a module, under its own name"
    return UsageError(what, found=".".join(named), hint=hint)


def _unpacked(value: Any, at: Path, kinds: Mapping[Path, Kind]) -> Any:
    if isinstance(value, Mapping):
        pairs = [(key, _unpacked(item, (*at, key), kinds)) for key, item in value.items()]
        value = _like(value, pairs)
    elif isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        items = [_unpacked(item, (*at, index), kinds) for index, item in enumerate(value)]
        value = items if isinstance(value, list) else tuple(items)
    return _as_kind(value, kinds.get(at))


def _as_kind(value: Any, kind: Kind | None) -> Any:
    if kind is None:
        return value
    if kind == "BytesIO":
        return io.BytesIO(value.numpy().tobytes())
    if kind == "bytes":
        return value.numpy().tobytes()
    if kind == "Namespace":
        return argparse.Namespace(**value)
    if kind == "scalar":
        return value[()]
    hint = "import its module before loading"
    if kind == "Enum":
        member = _member(value)
        if member is None:
            raise NotFoundError("there is no such member of an enum", found=".".join(value), hint=hint)
        return member
    if type(kind) is list:
        found = _tuple_class(kind, tuple(value))
        if found is None:
            fields = ", ".join(value)
            raise NotFoundError(f"there is no such named tuple of {fields}", found=".".join(kind), hint=hint)
        return tuple.__new__(found, value.values())  # Not by its own __new__, which may be anything.
    raise ValueError(f"{value!r} as {kind!r}")


def _member(named: Sequence[str]) -> Enum | None:
    """Return the member of an enum that is there already; looking it up runs no code."""
    *of_class, name = named
    found = _loaded_class(of_class)
    return found.__dict__["_member_map_"].get(name) if isinstance(found, EnumMeta) else None


def _tuple_class(named: Sequence[str], fields: tuple[str, ...]) -> type[tuple[Any, ...]] | None:
    """Return the class of named tuples with these fields that is there already, in the same way."""
    found = _loaded_class(named)
    is_tuple = isinstance(found, type) and issubclass(found, tuple)
    return found if is_tuple and any(base.__dict__.get("_fields") == fields for base in found.__mro__) else None


def _loaded_class(named: Sequence[str]) -> Any:
    module, path = named
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _as_tensor(raw: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(raw), dtype=np.uint8))
