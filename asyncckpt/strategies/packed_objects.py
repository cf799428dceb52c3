"""Objects that ranks share or spread, as nested containers of what a checkpoint stores; nothing is ever pickled.

    {"value": <the object, special things in it replaced>, "kinds": [(path, kind), ...]}

    kind         stands in the value as
    BytesIO      uint8 tensor; comes back at its begin
    bytes        uint8 tensor, when it is long: a manifest should stay small
    Namespace    dict (argparse.Namespace)
    dtype        its name
    Size         tuple
    scalar       array without dimensions (a NumPy scalar)
    Enum         [module, class, member]; the class is looked up among the modules that are loaded, and never imported

Tensors, arrays, plain values, dicts, lists and tuples stand for themselves. Anything else is a UsageError.
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
from asyncckpt.format.values import encode_value
from asyncckpt.strategies.mapping import STATE_DEPTH_MAX, shown_path

BYTES_IN_MANIFEST_MAX = 256
Path = tuple[Any, ...]


def pack(value: Any, *, path: Path = ()) -> dict[str, Any]:
    """Pack one object; tensors and arrays in it are not copied. UsageError naming the path, behind `path`."""
    kinds: list[tuple[Path, str]] = []
    return {"value": _packed(value, (), path, kinds), "kinds": kinds}


def unpack(packed: Any, *, owner: str) -> Any:
    """Return the object; CorruptError naming `owner` for what `pack` does not make."""
    if not isinstance(packed, Mapping) or packed.keys() != {"value", "kinds"}:
        raise CorruptError(f"{owner} is no packed object", found=type(packed).__name__)
    try:
        kinds = {tuple(path): kind for path, kind in packed["kinds"]}
        return _unpacked(packed["value"], (), kinds)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{owner} is a damaged packed object: {error}") from error


def _packed(value: Any, at: Path, front: Path, kinds: list[tuple[Path, str]]) -> Any:
    if len(at) > STATE_DEPTH_MAX:
        what = f"value {shown_path((*front, *at[:8]))}... is nested too deeply, or contains itself"
        raise UsageError(what, expected=f"{STATE_DEPTH_MAX} levels")
    if isinstance(value, np.generic):
        kinds.append((at, "scalar"))
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value
    kind, plain = _as_plain(value)
    if kind is not None:
        kinds.append((at, kind))
    if isinstance(plain, Mapping):
        return {key: _packed(item, (*at, key), front, kinds) for key, item in plain.items()}
    if isinstance(plain, (list, tuple)):
        items = [_packed(item, (*at, index), front, kinds) for index, item in enumerate(plain)]
        return items if isinstance(plain, list) else tuple(items)
    if not isinstance(plain, torch.Tensor):
        encode_value(plain, owner=shown_path((*front, *at)))
    return plain


def _as_plain(value: Any) -> tuple[str | None, Any]:
    """Return (kind, what stands for it)."""
    if isinstance(value, io.BytesIO):
        return "BytesIO", _as_tensor(value.getvalue())
    if isinstance(value, bytes) and len(value) > BYTES_IN_MANIFEST_MAX:
        return "bytes", _as_tensor(value)
    if isinstance(value, argparse.Namespace):
        return "Namespace", vars(value)
    if isinstance(value, torch.dtype):
        return "dtype", str(value).removeprefix("torch.")
    if isinstance(value, torch.Size):
        return "Size", tuple(value)
    if isinstance(value, Enum):
        named = [type(value).__module__, type(value).__qualname__, value.name]
        # A member that could not be found again is refused like any object of a class.
        return ("Enum", named) if _member(named) is value else (None, value)
    return None, value


def _unpacked(value: Any, at: Path, kinds: Mapping[Path, str]) -> Any:
    if isinstance(value, Mapping):
        value = {key: _unpacked(item, (*at, key), kinds) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        items = [_unpacked(item, (*at, index), kinds) for index, item in enumerate(value)]
        value = items if isinstance(value, list) else tuple(items)
    return _as_kind(value, kinds.get(at))


def _as_kind(value: Any, kind: str | None) -> Any:
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
    if kind == "dtype" and isinstance(getattr(torch, value), torch.dtype):
        return getattr(torch, value)
    if kind == "Size":
        return torch.Size(value)
    if kind == "Enum":
        member = _member(value)
        if member is None:
            hint = "import its module before loading"
            raise NotFoundError("there is no such member of an enum", found=".".join(value), hint=hint)
        return member
    raise ValueError(f"{value!r} as {kind!r}")


def _member(named: Sequence[str]) -> Enum | None:
    """Return the member of an enum that is there already; looking it up runs no code."""
    module, path, name = named
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found.__members__.get(name) if isinstance(found, EnumMeta) else None


def _as_tensor(raw: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(raw), dtype=np.uint8))
