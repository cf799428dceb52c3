"""Composites: tensors of a class of its own whose values are in other tensors (format/composite.py).

A save takes one apart by the protocol of torch, `__tensor_flatten__`, and stores the inner tensors as any others. The
outer one is never touched: detach(), views and copies of it may change what it is.

A load fills the inner tensors of a target in place. One that is not there yet, in the state of an optimizer that has
not stepped, is made by a class of the process: that of another composite of the same facts in this state, or one that
the process itself has told torch to be safe (torch.serialization.add_safe_globals). A name in a file is only compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from asyncckpt.errors import UnsupportedError, Words
from asyncckpt.format.composite import CONTEXT_BYTES_MAX, INNER_TENSORS_MAX, Composite, context_value, encode_context
from asyncckpt.format.tree import Compose, Path, composites, path_name

if TYPE_CHECKING:
    from asyncckpt.plan.contents import Contents, StoredDense
    from asyncckpt.plan.load_targets import DenseTargets, InPlace, Rebuilt

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
_KEPT = frozenset((bool, int, str, type(None), torch.dtype))
_KNOWN_MAX = 4096
_known: dict[object, tuple[Composite, str]] = {}


def is_composite(value: Any) -> bool:
    """Return whether a tensor is of a class that says what it is made of; DTensor does, too, and is asked first."""
    kind = type(value)
    return (
        isinstance(value, torch.Tensor)
        and kind.__torch_dispatch__ is not _PLAIN_DISPATCH
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
    )


@dataclass(frozen=True)
class Parts:
    """What a composite is made of: its inner tensors by name, its context as it says it, and what is stored of it."""

    inner: Mapping[str, torch.Tensor]
    context: Any
    facts: Composite
    text: str


OfComposite = tuple[Path, torch.Tensor, Parts]  # Where it is, and what it is made of.


def parts_of(tensor: torch.Tensor, name: str) -> Parts:
    """Take a composite apart. UnsupportedError for one whose class does not keep to the protocol."""
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
    if len(text) > CONTEXT_BYTES_MAX:
        raise _unsupported(tensor, name, f"its context takes {len(text)} characters, at most {CONTEXT_BYTES_MAX}")
    return Parts(inner, context, facts, text)


def _said_of(tensor: torch.Tensor, context: Any, name: str) -> tuple[Composite, str]:
    """Return the facts of a composite, and their text. Those of plain contexts are remembered."""
    kind: Any = type(tensor)
    with torch._C.DisableTorchFunctionSubclass():  # What a class does about these takes ten times as long.
        form = tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())
    key = None
    if type(context) in (list, tuple) and _KEPT.issuperset(map(type, context)):
        key = kind, form, type(context), tuple(map(type, context)), tuple(context)
        if key in _known:
            return _known[key]
    shape, strides = (item if all(type(size) is int for size in item) else None for item in form[1:])
    facts = Composite(
        kind=kind.__qualname__,
        module=kind.__module__,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=shape,  # Of a jagged tensor some are symbols.
        strides=None if shape is None else strides,
        context=encode_context(context, owner=f"tensor {name!r}"),
    )
    found = facts, facts.text()
    if key is not None and shape is not None:
        if len(_known) >= _KNOWN_MAX:
            _known.clear()
        _known[key] = found
    return found


def _unsupported(tensor: torch.Tensor, name: str, why: str) -> UnsupportedError:
    kind = type(tensor)
    return UnsupportedError(
        f"tensor {name!r} cannot be taken apart: {why}", found=Words(f"{kind.__module__}.{kind.__qualname__}")
    )


class CompositeLoads:
    """What a load does with composites. problems: why it cannot. compose: for objects that get a new state, by path.

    loads: all tensors that are loaded, with their sources.
    """

    def __init__(
        self,
        contents: Contents,
        targets: DenseTargets,
        objects: Iterable[Rebuilt],
        loads: Iterable[tuple[InPlace | None, StoredDense]],
    ) -> None:
        self.problems: list[str] = []
        self.compose: dict[Path, Compose] = {}
        self._stored = {path: Composite.of(node[3]) for path, node in composites(contents.tree)}
        self._own = {path: parts.facts for path, _, parts in targets.composites}
        self._check_targets(contents, targets, {target.path: source.path for target, source in loads if target})
        plain = {leaf.path for leaf in targets.in_place}.union(*(item.tensors for item in targets.rebuilt))
        self.problems += [
            f"{path_name(path)!r} is a plain tensor, a {facts.class_name} in the checkpoint"
            for path, facts in self._stored.items()
            if path in plain
        ]
        for item in objects:
            if not item.is_module:
                self._add_makers(item)

    def _check_targets(self, contents: Contents, targets: DenseTargets, sources: Mapping[Path, Path]) -> None:
        """Compare composites with what they are loaded from, as whole ones."""
        parts: dict[Path, list[Path | None]] = defaultdict(list)
        for leaf in targets.in_place:
            source = sources.get(leaf.path)
            for end in range(1, len(leaf.path)):
                if leaf.path[:end] in self._own:
                    is_same = source is not None and source[end - len(leaf.path) :] == leaf.path[end:]
                    at = source[: end - len(leaf.path)] if source is not None and is_same else None
                    parts[leaf.path[:end]].append(at)
        there = {item.path for item in contents.dense.values()}
        for path, facts in self._own.items():
            name, found = path_name(path), list(dict.fromkeys(parts.get(path, [path])))
            stored = self._stored.get(found[0] or ())
            if found == [None] and path in there:
                self.problems.append(f"{name!r} is a {facts.class_name}, a plain tensor in the checkpoint")
            elif found == [None]:
                stored = self._stored.get(path)
                if stored is not None and stored.kind != facts.kind:
                    self.problems.append(f"{name!r} is a {facts.class_name}, a {stored.class_name} in the checkpoint")
            elif len(found) > 1 or stored is None:
                self.problems.append(f"{name!r} is one tensor, and its parts would not be loaded from those of one")
            elif differences := list(facts.differences(stored)):
                self.problems.append(f"{name!r} is another tensor than in the checkpoint: {'; '.join(differences)}")

    def _add_makers(self, item: Rebuilt) -> None:
        makers = Makers(item)
        self.compose[item.path] = makers.make
        for path, facts in self._stored.items():
            if path[: len(item.path)] == item.path:
                try:
                    makers.find(facts)
                except UnsupportedError as error:
                    self.problems.append(f"{path_name(path)!r} cannot be made: {error}")


class Makers:
    """Makes composites for an object that gets a new state, by what there is of their classes."""

    def __init__(self, item: Rebuilt) -> None:
        self._known = {parts.text: (type(own), parts.context) for own, parts in item.composites.values()}

    def find(self, facts: Composite) -> tuple[type, Any]:
        """Return the class and the context to make one of. UnsupportedError: there is none."""
        text = facts.text()
        if text in self._known and '"opaque"' not in text:
            return self._known[text]
        kinds = [
            kind
            for kind in torch.serialization.get_safe_globals()
            if isinstance(kind, type) and issubclass(kind, torch.Tensor) and kind.__qualname__ == facts.kind
        ]
        same = [kind for kind in kinds if kind.__module__ == facts.module] or kinds  # A class may have moved.
        if len(same) != 1 or not hasattr(same[0], "__tensor_unflatten__") or facts.shape is None:
            raise UnsupportedError(
                f"there is no {facts.class_name} to load into, and none is registered",
                hint="make its state first, by a step with gradients of zero, or call "
                "torch.serialization.add_safe_globals([the class])",
            )
        return same[0], context_value(facts.context)

    def make(self, text: str, inner: Mapping[str, Any]) -> Any:
        """Return a composite of these facts and inner tensors."""
        facts = Composite.of(text)
        kind, context = self.find(facts)
        assert facts.shape is not None
        unflatten: Any = kind.__tensor_unflatten__  # type: ignore[attr-defined]
        return unflatten(dict(inner), context, torch.Size(facts.shape), facts.strides)
