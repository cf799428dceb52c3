"""Kinds of mappings that come back as what they were: dict, OrderedDict, Counter, and defaultdict of a type named here.

A defaultdict of anything else is a dict in a checkpoint, as every other subclass: what makes its items is not stored.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asyncckpt.format.strict_json import Json

_FACTORIES: dict[str, Callable[[], Any] | None] = {
    **{kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)},
    **{kind.__name__: kind for kind in (Counter, OrderedDict)},
    "None": None,
}
# With what stands for them in the JSON of a tree.
MAPPINGS = {
    "dict": "d",
    "ordered": "o",
    "counter": "c",
    **{f"default {name}": f"default {name}" for name in _FACTORIES},
}
MAPPING_OF_TAG = {tag: kind for kind, tag in MAPPINGS.items()}
# A reader must know these by name.
TYPED_MAPPINGS = frozenset(MAPPINGS) - {"dict", "ordered"}


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
    if kind == "dict":
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
