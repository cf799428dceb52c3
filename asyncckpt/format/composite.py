"""What a checkpoint says of a composite: a tensor of a class of its own, whose values are in other tensors.

torch calls it a traceable wrapper subclass, such as quantized weights and 8-bit states of optimizers. In the tree it is
a mapping of its inner tensors by their names, with a text of these facts, the same text for the same facts:

    class, module      its class by name, which is only compared: nothing is imported, looked up or called by it
    dtype              the one that it shows, as torch names it
    shape, strides     as it shows them
    context            what the class needs beside the inner tensors, as a value (values.py) that may hold also
                           {"enum": [class, name]}
                           {"record": [class, [[field, value], ...]]}    a dataclass or a named tuple
                           {"opaque": class}                             anything else, which cannot be compared
    rows               of one that is spread over ranks (plan/spread_composites.py): names of inner tensors that are cut
                       with its rows

Of module "torch" are its own layouts: sparse_coo, sparse_csr and so on, quantized, nested (plan/layouts.py).
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Iterator
from typing import Any

from asyncckpt.errors import CorruptError, UnsupportedError, UsageError
from asyncckpt.format import limits
from asyncckpt.format.strict_json import Fields, Json, dumps, shown
from asyncckpt.format.values import decode_value, encode_value

CONTEXT_BYTES_MAX = 64 << 10
CONTEXT_DEPTH_MAX = 64
INNER_TENSORS_MAX = 16
_TAGS = frozenset(("enum", "record", "opaque"))
# Where a tensor is, and whether it is trained, is the target's own.
_OF_TARGETS = {'"device"': {"device", "NoneType"}, '"requires_grad"': {"bool"}}


@dataclasses.dataclass(frozen=True)
class Composite:
    """See the module. shape, strides: None of a jagged tensor, of which some are symbols. rows: None of one that is not
    spread over ranks.
    """

    kind: str
    module: str
    dtype: str
    shape: tuple[int, ...] | None
    strides: tuple[int, ...] | None
    context: Json
    rows: tuple[str, ...] | None = None

    def text(self) -> str:
        """Return the facts as the node of a tree has them."""
        found = {"class": self.kind, "module": self.module, "dtype": self.dtype, "context": self.context}
        numbers = {"shape": self.shape, "strides": self.strides}
        found |= {name: None if item is None else list(item) for name, item in numbers.items()}
        found |= {} if self.rows is None else {"rows": list(self.rows)}
        return json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)

    @staticmethod
    def of(text: str) -> Composite:
        return decode_composite(json.loads(text), owner="a composite")

    @property
    def is_renewed(self) -> bool:
        """Whether a load gives a tensor of this kind other inner tensors, and its context with them."""
        return self.module == "torch" and (self.kind == "quantized" or self.kind.startswith("sparse_"))

    @property
    def class_name(self) -> str:
        """As people read it."""
        return f"{self.module}.{self.kind}"

    def __str__(self) -> str:
        return f"{self.class_name} {self.dtype}" + ("" if self.shape is None else f" {list(self.shape)}")

    def differences(self, stored: Composite, *, in_place: bool = False) -> Iterator[str]:
        """Return where a target's facts differ from those stored; the module may. in_place: it is not renewed."""
        for what, own, theirs in (
            ("class", self.kind, stored.kind),
            ("dtype", self.dtype, stored.dtype),
            ("shape", self.shape, stored.shape),
        ):
            if own != theirs:
                yield f"its {what} is {own}, the checkpoint's {theirs}"
        if self.kind == stored.kind and (in_place or not self.is_renewed):
            own, theirs = self.context, stored.context
            if (self.rows is None) != (stored.rows is None):
                own, theirs = (of_any_shard(each.context) for each in (self, stored))
            yield from _differences(own, theirs, "context")


def decode_composite(value: Json, *, owner: str) -> Composite:
    """Decode the facts of a node; CorruptError."""
    fields = Fields(value, owner=owner, where="facts of a tensor")
    shape, strides = (
        None if fields.value(key) is None else fields.integers(key, count_max=limits.DIMENSIONS_MAX)
        for key in ("shape", "strides")
    )
    context = fields.value("context")
    if len(dumps(context)) > CONTEXT_BYTES_MAX or not _is_well_formed(context):
        raise CorruptError(f"{owner} has a context that is too large, nested too deeply or of no known form")
    rows = fields.members.get("rows")
    is_list = type(rows) is list and all(type(name) is str for name in rows)
    if rows is not None and (not is_list or fields.text("module") == "torch"):
        raise CorruptError(f"{owner} names no inner tensors that are cut", found=shown(rows))
    names = None if rows is None else tuple(rows)
    return Composite(fields.text("class"), fields.text("module"), fields.text("dtype"), shape, strides, context, names)


def _is_well_formed(value: Json) -> bool:
    """Return whether what is compared by its parts has them; level by level, which a deep one does not end."""
    level = [value]
    for _ in range(4 * CONTEXT_DEPTH_MAX + 4):
        level = [item for item in level if type(item) in (list, dict)]
        if not level:
            return True
        if not all(_has_form(item) for item in level if type(item) is dict):
            return False
        level = [child for item in level for child in (item.values() if type(item) is dict else item)]
    return False


def _has_form(item: dict[str, Json]) -> bool:
    if len(item) != 1:
        return False
    ((tag, body),) = item.items()
    if tag in ("record", "enum"):
        if type(body) is not list or len(body) != 2 or type(body[0]) is not str:
            return False
        body = body[1] if tag == "record" else []
    if tag == "opaque":
        return type(body) is str
    if tag == "tuple":
        return type(body) is list
    if tag in ("dict", "record"):
        return type(body) is list and all(type(pair) is list and len(pair) == 2 for pair in body)
    return True


def encode_context(value: Any, *, owner: str, _depth: int = 0) -> Json:
    """Encode a context. UnsupportedError for one that is nested too deeply, or has a tensor: it would not be saved."""
    if _depth > CONTEXT_DEPTH_MAX:
        what = f"{owner} has a context that is nested too deeply"
        raise UnsupportedError(what, expected=f"at most {CONTEXT_DEPTH_MAX} levels")
    if hasattr(type(value), "__torch_function__"):
        raise UnsupportedError(f"{owner} has a tensor in its context, which would not be saved", found=type(value))

    def inner(item: Any) -> Json:
        return encode_context(item, owner=owner, _depth=_depth + 1)

    kind = type(value)
    if isinstance(value, enum.Enum):  # First: one may be a text or a number, too.
        return {"enum": [kind.__qualname__, value.name]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {"record": [kind.__qualname__, [[name, inner(getattr(value, name))] for name in kind._fields]]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value) if hasattr(value, item.name)]
        return {"record": [kind.__qualname__, [[name, inner(getattr(value, name))] for name in names]]}
    if kind.__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "shape", ()):
        return {"record": [kind.__qualname__, [["value", inner(value.item())]]]}
    if isinstance(value, list):
        return [inner(item) for item in value]
    if kind is tuple:
        return {"tuple": [inner(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[inner(key), inner(item)] for key, item in value.items()]}
    try:
        return encode_value(value, owner=owner)
    except UsageError:
        return {"opaque": _name_of(value)}


def _name_of(value: Any) -> str:
    """Return what can be told of an object from process to process."""
    if isinstance(value, type):
        return f"class {value.__qualname__}"
    shown = repr(value)
    return type(value).__qualname__ + ("" if " at 0x" in shown or shown.startswith("<") else f" {shown}")


def of_any_shard(context: Json) -> Json:
    """Return a context without its whole numbers, which may be those of a shard: its shape, how many blocks it has."""
    if type(context) is int:
        return {"opaque": "a number of a shard"}
    if type(context) is list:
        return [of_any_shard(item) for item in context]
    if type(context) is dict and context.keys() <= {"tuple", "size", "dict", "record"}:
        ((tag, body),) = context.items()
        if tag in ("tuple", "size"):
            return {tag: of_any_shard(body)}
        pairs = [[key, of_any_shard(item)] for key, item in (body if tag == "dict" else body[1])]
        return {tag: pairs if tag == "dict" else [body[0], pairs]}
    return context


def context_value(context: Json) -> Any:
    """Return a context that holds plain values alone; UnsupportedError for any other, CorruptError."""
    left = [context]
    while left:
        item = left.pop()
        if type(item) is dict:
            if not _TAGS.isdisjoint(item):
                what, hint = "its context holds objects", "make its state first, by a step with gradients of zero"
                raise UnsupportedError(what, found=next(iter(item.values())), hint=hint)
            left += item.values()
        elif type(item) is list:
            left += item
    return decode_value(context, owner="the context of a tensor")


def _differences(own: Json, stored: Json, at: str) -> Iterator[str]:
    if _text(own) == _text(stored):
        return
    if type(own) is type(stored) is list and len(own) == len(stored):
        for index, pair in enumerate(zip(own, stored, strict=True)):
            yield from _differences(*pair, f"{at}[{index}]")
    elif (
        type(own) is type(stored) is dict and own.keys() == stored.keys() and own.keys() <= {"dict", "record", "tuple"}
    ):
        ((tag, mine),) = own.items()
        theirs = stored[tag]
        if tag == "tuple":
            yield from _differences(mine, theirs, at)
        elif tag == "dict":
            yield from _of_named(mine, theirs, at)
        elif mine[0] == theirs[0]:
            yield from _of_named(mine[1], theirs[1], at)
        else:
            yield f"{at} is a {mine[0]}, the checkpoint's a {theirs[0]}"
    else:
        yield f"{at} is {_text(own)[:80]}, the checkpoint's {_text(stored)[:80]}"


def _of_named(own: Json, stored: Json, at: str) -> Iterator[str]:
    mine, theirs = ({_text(key): item for key, item in pairs} for pairs in (own, stored))
    for key in {**mine, **theirs}:
        name = f"{at}.{json.loads(key)}"
        if key not in mine or key not in theirs:
            yield f"{name} is only {'in the checkpoint' if key in theirs else 'here'}"
        elif not (key in _OF_TARGETS and {_kind_of(mine[key]), _kind_of(theirs[key])} <= _OF_TARGETS[key]):
            yield from _differences(mine[key], theirs[key], name)


def _kind_of(value: Json) -> str:
    return next(iter(value)) if type(value) is dict else type(value).__name__


def _text(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
