"""Plain values in JSON, exactly: what goes in comes back with the same type and the same bits.

JSON has no NaN, no -0.0 that every parser keeps, no bytes, no tuples and no integer keys. So:

    None, bool, str, int up to 2**53, list      themselves
    larger int                                  {"int": "123..."}
    float                                       {"float": "0x1.8p+1"}   (float.hex; nan, inf)
    complex                                     {"complex": [hex, hex]}
    bytes                                       {"bytes": base64}
    tuple                                       {"tuple": [...]}
    dict                                        {"dict": [[key, value], ...]}
    OrderedDict, Counter                        {"ordered": [[key, value], ...]}, {"counter": ...}
    defaultdict of a type that is named here    {"default list": ...}
    set, frozenset                              {"set": [item, ...]}, ...    in the order of the items' JSON
    slice, range                                {"slice": [start, stop, step]}, {"range": [...]}
    torch.dtype, torch.Size, torch.device       {"dtype": "float32"}, {"size": [2, 3]}, {"device": "cuda:0"}

A defaultdict of anything else is a dict in a checkpoint, as every other subclass: what makes its items is not stored.
All types are known here by their kind: no class is looked up by a name that a checkpoint holds.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from asyncckpt.errors import CorruptError, UnsupportedError, UsageError
from asyncckpt.format import limits
from asyncckpt.format.strict_json import Json, shown

if TYPE_CHECKING:  # Manifests are read without it: the command line starts at once.
    import torch


_PLAIN_INT_MAX = 2**53
_ONCE_THERE = frozenset((type(None), bool, int, float, complex, str, bytes))  # Equal items are one, before and after.
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}(:\d{1,3})?")
_BOUNDS = ("start", "stop", "step")
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    **{kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)},
    **{kind.__name__: kind for kind in (Counter, OrderedDict)},
    "None": None,
}
COMPOSITE = "composite"  # In trees alone: a tensor by its inner ones (composite.py).
# With what stands for them in the JSON of a tree.
MAPPINGS = {
    "dict": "d",
    "ordered": "o",
    "counter": "c",
    **{f"default {name}": f"default {name}" for name in _FACTORIES},
    COMPOSITE: COMPOSITE,
}
MAPPING_OF_TAG = {tag: kind for kind, tag in MAPPINGS.items()}
# A reader must know these by name.
TYPED_MAPPINGS = frozenset(MAPPINGS) - {"dict", "ordered", COMPOSITE}


def mapping_kind(value: Mapping[Any, Any]) -> str:
    """Return the kind of a mapping."""
    if isinstance(value, OrderedDict):
        return "ordered"
    if isinstance(value, Counter):
        return "counter"
    if isinstance(value, defaultdict):
        factory = value.default_factory
        return next((f"default {name}" for name, known in _FACTORIES.items() if known is factory), "dict")
    return "dict"


def made_mapping(kind: str, pairs: Iterable[tuple[Any, Any]]) -> Any:
    """Return a mapping of a kind."""
    if kind in ("dict", COMPOSITE):
        return dict(pairs)
    if kind == "ordered":
        return OrderedDict(pairs)
    if kind == "counter":
        return Counter(dict(pairs))
    return defaultdict(_FACTORIES[kind.removeprefix("default ")], pairs)


def holds_typed_mappings(value: Json) -> bool:
    """Return whether an encoded value, of any depth, is or holds a mapping that a reader must know."""
    left = [value]
    while left:
        item = left.pop()
        if type(item) is list:
            left += item
        elif type(item) is dict:
            if not TYPED_MAPPINGS.isdisjoint(item):
                return True
            left += [body for body in item.values() if type(body) is list]
    return False


def encode_values(values: Iterable[Any], *, owner: str) -> list[Json]:
    """Encode plain values. Most are ints of an optimizer, thousands of them."""
    return [
        value if type(value) is int and -_PLAIN_INT_MAX <= value <= _PLAIN_INT_MAX else encode_value(value, owner=owner)
        for value in values
    ]


def encode_value(value: Any, *, owner: str, _depth: int = 0) -> Json:
    """Encode one value; UsageError naming `owner` (the key path) when it is not plain."""
    if _depth > limits.VALUE_DEPTH_MAX:
        raise UsageError(f"value {owner} is nested too deeply (or contains itself)", expected=limits.VALUE_DEPTH_MAX)
    if value is None or type(value) is bool:
        return value
    if isinstance(value, str):
        return _text(value, owner)
    if type(value) is int:
        return value if abs(value) <= _PLAIN_INT_MAX else {"int": hex(value)}
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if type(value) is list:
        return [encode_value(item, owner=f"{owner}[{i}]", _depth=_depth + 1) for i, item in enumerate(value)]
    typed = _encode_typed(value, owner, _depth + 1)
    if typed is not None:
        _check_typed(value, typed, owner)
        return typed
    if isinstance(value, tuple):
        return {"tuple": [encode_value(v, owner=f"{owner}[{i}]", _depth=_depth + 1) for i, v in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = [
            [
                encode_value(key, owner=f"key of {owner}", _depth=_depth + 1),
                encode_value(item, owner=f"{owner}[{key!r}]", _depth=_depth + 1),
            ]
            for key, item in value.items()
        ]
        _check_keys(pairs, owner)
        return {mapping_kind(value): pairs}
    kinds = ("" if owner.startswith("metadata[") else "a tensor, ") + "a number, text, or a list or dict of these"
    hint = f"leave it out, or turn it into {kinds}"
    if (kind := type(value).__name__) == "Tensor":  # By its name: torch may not be imported.
        hint = "store a number, x.item(), or a list, x.tolist()"
    raise UsageError(f"{owner} has type {kind}, which cannot be saved: asyncckpt never pickles", hint=hint)


def decode_value(value: Json, *, owner: str, _depth: int = 0) -> Any:
    """Decode a value, the inverse of encode_value."""
    if _depth > limits.VALUE_DEPTH_MAX:
        raise CorruptError(f"{owner} holds a value nested too deeply", expected=f"{limits.VALUE_DEPTH_MAX} levels")
    if value is None or type(value) in (bool, str, int):
        return value
    if type(value) is list:
        return [decode_value(item, owner=owner, _depth=_depth + 1) for item in value]
    if type(value) is dict and len(value) == 1:
        ((kind, body),) = value.items()
        try:
            return _decode_tagged(kind, body, owner, _depth + 1)
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            raise CorruptError(f"{owner} holds a damaged {kind!r} value: {error}") from error
    raise CorruptError(f"{owner} holds a value of no known form", found=shown(value))


def _decode_tagged(kind: str, body: Json, owner: str, depth: int) -> Any:
    if kind == "int":
        return int(body, 16)
    if kind == "float":
        return float.fromhex(body)
    if kind == "complex":
        real, imag = body
        return complex(float.fromhex(real), float.fromhex(imag))
    if kind == "bytes":
        return base64.b64decode(body.encode("ascii"), validate=True)
    if kind == "tuple" and type(body) is list:
        return tuple(decode_value(item, owner=owner, _depth=depth) for item in body)
    if kind in _OF_ITEMS or kind in ("dtype", "device"):
        return _decode_typed(kind, body, owner, depth)
    if kind in MAPPINGS and kind != COMPOSITE and type(body) is list:
        pairs = (
            (decode_value(key, owner=owner, _depth=depth), decode_value(item, owner=owner, _depth=depth))
            for key, item in body
        )
        result = made_mapping(kind, pairs)
        if len(result) != len(body):
            raise CorruptError(f"{owner} holds a value with the same key twice", found=shown(body))
        return result
    raise CorruptError(f"{owner} holds a value of unknown kind", found=kind)


def _check_keys(pairs: list[list[Json]], owner: str) -> None:
    """UsageError unless the keys come back as keys: each once, and hashable."""
    if len({key for key, _ in pairs if type(key) is str}) == len(pairs):
        return  # By far the most frequent.
    try:
        decode_value({"dict": [[key, None] for key, _ in pairs]}, owner=f"value {owner}")
    except CorruptError as error:
        raise UsageError(f"value {owner} has keys that would not come back: {error}") from error


def _check_typed(value: Any, typed: Json, owner: str) -> None:
    """UsageError unless a set comes back, its items hashable and each once, and a device is one that torch parses."""
    kind = type(value)
    if kind is set or kind is frozenset:
        if _ONCE_THERE.issuperset(map(type, value)):
            return  # By far the most frequent.
    elif "device" not in typed:
        return
    try:
        decode_value(typed, owner=f"value {owner}")
    except (CorruptError, UnsupportedError) as error:
        raise UsageError(f"value {owner} would not come back: {error}", found=repr(value)[:80]) from error


def _text(value: str, owner: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"text {owner} is not valid Unicode: {error.reason}", found=value[:80]) from error
    return str.__str__(value)  # Of a str Enum too: its own str() would be another text.


def _encode_typed(value: Any, owner: str, depth: int) -> Json:
    """Encode a set, slice, range or type of torch; None for anything else."""

    def encode(part: Any, which: str) -> Json:
        return encode_value(part, owner=f"{which} of {owner}", _depth=depth)

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


def _decode_typed(kind: str, body: Json, owner: str, depth: int) -> Any:
    """Decode a value of one of these kinds. ValueError and the like for a damaged one.

    UnsupportedError for a dtype or device that this torch does not have.
    """
    if kind == "dtype" and type(body) is str:
        return _dtype(body)
    if kind == "device" and type(body) is str:
        return _device(body)
    if kind not in _OF_ITEMS or type(body) is not list:
        raise ValueError("it is of no known form")
    return _OF_ITEMS[kind]([decode_value(item, owner=owner, _depth=depth) for item in body])


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
        raise ValueError(f"{name!r} is not a device")
    return found


def _not_in_torch(what: str, name: str) -> Exception:
    import torch

    if not _NAME.fullmatch(name):
        return ValueError(f"{name!r} is not a {what}")
    return UnsupportedError(f"torch {torch.__version__} has no {what} {name!r}", hint="use the torch that saved it")


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
