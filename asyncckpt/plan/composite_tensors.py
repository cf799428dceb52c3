"""Composites: tensors of a class of its own whose values are in other tensors (format/composite.py).

A save takes one apart by the protocol of torch, `__tensor_flatten__`, and stores the inner tensors as any others. The
outer one is never touched: detach(), views and copies of it may change what it is. Layouts of torch: see layouts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.errors import CorruptError, UnsupportedError, Words
from asyncckpt.format.composite import INNER_TENSORS_MAX, Composite, encode_context
from asyncckpt.format.tree import Node, Path
from asyncckpt.format.values import COMPOSITE
from asyncckpt.model.sharded import Sharded
from asyncckpt.plan import layouts
from asyncckpt.plan.module_state import PLAIN_TENSORS
from asyncckpt.plan.state import STATE_DEPTH_MAX, FlatState, node_of, stored_key, too_deep

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
_KEPT = frozenset((bool, int, str, type(None), torch.dtype))
_KNOWN_MAX = 4096
_known: dict[object, tuple[Composite, str]] = {}


def is_composite(value: Any) -> bool:
    """Return whether a tensor is of a class that says what it is made of, or a DTensor over one that does.

    Not what a collective has yet to fill (AsyncCollectiveTensor).
    """
    kind = type(value)
    if not isinstance(value, torch.Tensor):
        return False
    if kind.__torch_dispatch__ is _PLAIN_DISPATCH:
        return bool(layouts.kind_of(value))
    if hasattr(kind, "device_mesh"):
        local = getattr(value, "_local_tensor", None)
        return type(local) not in PLAIN_TENSORS and is_composite(local)
    return (
        hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
        and not hasattr(kind, "trigger_wait")
    )


@dataclass(frozen=True)
class Parts:
    """What a composite is made of: its inner tensors by name, its context as it says it, and what is stored of it.

    The inner tensors of one that is spread are Sharded.
    """

    inner: Mapping[str, Any]
    context: Any
    facts: Composite
    text: str


OfComposite = tuple[Path, torch.Tensor, Parts]  # Where it is, and what it is made of.
Composites = list[OfComposite]


def flatten_composite(
    value: torch.Tensor, flat: FlatState, path: tuple[Any, ...], parents: list[int], like: Node | None
) -> Node:
    """Return the node of a composite, and take its inner tensors into a state. like: an earlier node of it."""
    if len(parents) > STATE_DEPTH_MAX:
        raise too_deep(path)
    parts = parts_of(value, ".".join(map(str, path)))
    if flat.composites is not None:
        flat.composites.append((tuple(stored_key(key, path) for key in path), value, parts))
    parents = [*parents, id(value)]
    children = [node_of(item, flat, (*path, name), parents, None) for name, item in parts.inner.items()]
    node = (COMPOSITE, tuple(parts.inner), tuple(children), parts.text)
    return like if like == node else node


def parts_of(tensor: torch.Tensor, name: str) -> Parts:
    """Take a composite apart. UnsupportedError for one whose class does not keep to the protocol."""
    if hasattr(type(tensor), "device_mesh"):
        from asyncckpt.plan.spread_composites import spread_parts

        return spread_parts(tensor, name)
    if kind := layouts.kind_of(tensor):
        inner, context = layouts.parts_of(tensor, kind)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), None if kind == "nested" else tuple(tensor.shape)
        facts = Composite(kind, "torch", dtype, shape, None, encode_context(context, owner=f"tensor {name!r}"))
        return Parts(inner, context, *_checked(facts, tensor, name))
    try:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        names = list(names)
        inner = {each: getattr(tensor, each) for each in names}
    except Exception as error:
        raise _unsupported(tensor, name, f"its __tensor_flatten__ failed: {error}") from error
    if not all(type(each) is str for each in names) or len(inner) != len(names) or len(names) > INNER_TENSORS_MAX:
        raise _unsupported(tensor, name, f"it names its inner tensors {names!r}")
    for each, value in inner.items():
        if not isinstance(value, torch.Tensor) or value is tensor:
            raise _unsupported(tensor, name, f"its {each!r} is no inner tensor")
    facts, text = _said_of(tensor, context, name)
    return Parts(inner, context, facts, text)


def _said_of(tensor: torch.Tensor, context: Any, name: str) -> tuple[Composite, str]:
    """Return the facts of a composite, and their text. Those of plain contexts are remembered."""
    kind: Any = type(tensor)
    with torch._C.DisableTorchFunctionSubclass():  # What a class does about these takes ten times as long.
        form = tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
    key = None
    if type(context) in (list, tuple) and _KEPT.issuperset(map(type, context)):
        key = kind, form, type(context), tuple(map(type, context)), tuple(context)
        if (known := _known.get(key)) is not None:  # At once: another thread may clear it.
            return known
    shape, strides = (item if all(type(size) is int for size in item) else None for item in form[1:])
    facts = Composite(
        kind=kind.__qualname__,
        module=kind.__module__,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=shape,  # Of a jagged tensor some are symbols.
        strides=None if shape is None else strides,
        context=encode_context(context, owner=f"tensor {name!r}"),
    )
    found = _checked(facts, tensor, name)
    if key is not None and shape is not None:
        if len(_known) >= _KNOWN_MAX:
            _known.clear()
        _known[key] = found
    return found


def _checked(facts: Composite, tensor: torch.Tensor, name: str) -> tuple[Composite, str]:
    """Return facts, and their text. UnsupportedError for what no reader would take."""
    text = facts.text()
    try:
        Composite.of(text)
    except CorruptError as error:
        raise _unsupported(tensor, name, str(error)) from error
    return facts, text


def _unsupported(tensor: torch.Tensor, name: str, why: str) -> UnsupportedError:
    kind = type(tensor)
    return UnsupportedError(
        f"tensor {name!r} cannot be taken apart: {why}", found=Words(f"{kind.__module__}.{kind.__qualname__}")
    )


def place_of(tensor: Any) -> object:
    """Return where a tensor is, or the inner tensors of a composite; an empty one is known by its identity."""
    if isinstance(tensor, Sharded):
        return tuple(piece.tensor.data_ptr() for piece in tensor.pieces)
    if not is_composite(tensor):
        return tensor.data_ptr()
    found = tuple(map(place_of, parts_of(tensor, type(tensor).__qualname__).inner.values()))
    return found if any(found) else id(tensor)


def on_device(tensor: Any, device: torch.device) -> Any:
    """Return a composite with its inner tensors on a device; itself if they are there. Others are moved as usual."""
    if type(tensor).__torch_dispatch__ is _PLAIN_DISPATCH or not is_composite(tensor):
        return tensor.to(device)
    if hasattr(tensor, "device_mesh"):  # It is where its mesh is.
        return tensor
    parts = parts_of(tensor, type(tensor).__qualname__)
    moved = {name: on_device(inner, device) for name, inner in parts.inner.items()}
    if all(moved[name] is inner for name, inner in parts.inner.items()):
        return tensor
    unflatten: Any = type(tensor).__tensor_unflatten__
    return unflatten(moved, parts.context, tensor.shape, tensor.stride())
