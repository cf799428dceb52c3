"""Plain values of Python and torch that JSON has no form for, beside those of values.py.

    set, frozenset      {"set": [item, ...]}, {"frozenset": [...]}    in the order of the items' JSON
    slice, range        {"slice": [start, stop, step]}, {"range": [...]}
    torch.dtype         {"dtype": "float32"}
    torch.Size          {"size": [2, 3]}
    torch.device        {"device": "cuda:0"}

All are known here by their kind: no class is looked up by a name that a checkpoint holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncckpt.errors import UnsupportedError
from asyncckpt.format.strict_json import Json

if TYPE_CHECKING:  # Manifests are read without it: the command line starts at once.
    import torch

Encode = Callable[[Any, str], Json]  # (value, what it is of its owner) -> its JSON
Decode = Callable[[Json], Any]
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}(:\d{1,3})?")
_BOUNDS = ("start", "stop", "step")


def encode_typed(value: Any, encode: Encode) -> Json:
    """Encode a value of one of these types; None for any other."""
    kind = type(value)
    if kind is set or kind is frozenset:
        return {kind.__name__: sorted((encode(item, "an item") for item in value), key=json.dumps)}
    if kind is slice or kind is range:
        return {kind.__name__: [encode(getattr(value, bound), bound) for bound in _BOUNDS]}
    if kind.__module__ != "torch":
        return None
    import torch

    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind is torch.Size:
        return {"size": [encode(size, "a size") for size in value]}
    if kind is torch.device:
        return {"device": str(value)}
    return None


def decode_typed(kind: str, body: Json, decode: Decode) -> Any:
    """Decode a value of one of these kinds. ValueError and the like for any other, or a damaged one.

    UnsupportedError for a dtype or device that this torch does not have.
    """
    if kind == "dtype" and type(body) is str:
        return _dtype(body)
    if kind == "device" and type(body) is str:
        return _device(body)
    if kind not in _OF_ITEMS or type(body) is not list:
        raise ValueError("it is of no known form")
    return _OF_ITEMS[kind]([decode(item) for item in body])


def is_typed(kind: str) -> bool:
    """Return whether values of such a kind are decoded here."""
    return kind in _OF_ITEMS or kind in ("dtype", "device")


def _dtype(name: str) -> torch.dtype:
    import torch

    found = vars(torch).get(name)  # Not getattr, for which torch would import modules.
    if not isinstance(found, torch.dtype):
        raise _not_in_torch("dtype", name)
    return found


def _device(name: str) -> torch.device:
    import torch

    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise _not_in_torch("device", name) from error
    if str(found) != name:  # torch makes cuda:300 cuda:44.
        raise ValueError(f"{name!r} is no device")
    return found


def _not_in_torch(what: str, name: str) -> Exception:
    import torch

    if not _NAME.fullmatch(name):
        return ValueError(f"{name!r} is no {what}")
    return UnsupportedError(
        f"torch {torch.__version__} has no {what} {name!r}", hint="load it with the torch that saved it"
    )


def _set(items: list[Any]) -> set[Any]:
    return set(_unique(items, len(set(items))))


def _frozenset(items: list[Any]) -> frozenset[Any]:
    return frozenset(_unique(items, len(set(items))))


def _unique(items: list[Any], count: int) -> list[Any]:
    if len(items) != count:
        raise ValueError("it has an item twice")
    return items


def _range(bounds: list[Any]) -> range:
    start, stop, step = _integers(bounds)
    return range(start, stop, step)


def _slice(bounds: list[Any]) -> slice:
    start, stop, step = bounds
    return slice(start, stop, step)


def _size(sizes: list[Any]) -> torch.Size:
    import torch

    if not all(-(2**63) <= size < 2**63 for size in _integers(sizes)):
        raise ValueError("a size has more than 64 bits")
    return torch.Size(sizes)


def _integers(numbers: list[Any]) -> list[int]:
    if not all(type(number) is int for number in numbers):
        raise ValueError("it holds something else than integers")
    return numbers


_OF_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "set": _set,
    "frozenset": _frozenset,
    "slice": _slice,
    "range": _range,
    "size": _size,
}
