"""Plain values in the mappings and lists of a state, as objects that a load gives back to them.

Else a load leaves plain values to its caller.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from asyncckpt.adapters.named_parts import Values, filled, is_plain
from asyncckpt.format.tree import Node, Path, key_value
from asyncckpt.format.values import MAPPINGS
from asyncckpt.plan.state import stored_key


class _Place:
    """Where a value is.

    holder: what it is in: a mapping, a list, or the place of a tuple, which is made anew with another value. None: it
    is the state itself, which nobody can replace.
    """

    def __init__(self, holder: Any, key: Any, own: Any = None) -> None:
        self._holder, self._key, self._own = holder, key, own

    def is_fixed(self) -> bool:
        return self._holder.is_fixed() if isinstance(self._holder, _Place) else self._holder is None

    def has_value(self) -> bool:
        return self._holder is None or isinstance(self._holder, _Place) or _is_in(self._holder, self._key)

    def value(self) -> Any:
        if self._holder is None:
            return self._own
        return (self._holder.value() if isinstance(self._holder, _Place) else self._holder)[self._key]

    def put(self, value: Any) -> None:
        if isinstance(self._holder, _Place):
            own = self._holder.value()
            items = [value if at == self._key else each for at, each in enumerate(own)]
            self._holder.put(own._make(items) if hasattr(own, "_make") else tuple(items))
        elif isinstance(self._holder, list) and not self.has_value():
            self._holder.append(value)
        elif self._holder is not None:
            self._holder[self._key] = value


class PlainPart:
    """A place in a container where a plain value is, or will be. known: see `filled`."""

    def __init__(self, place: _Place, known: dict[int, Any]) -> None:
        self._place, self._known = place, known

    def load_state_dict(self, value: Any) -> None:
        """Put the value there."""
        self._place.put(filled(self._place.value(), value, self._known) if self._place.has_value() else value)


def plain_parts(own: Any, node: Node | None, path: Path, known: dict[int, Any]) -> Iterator[tuple[Path, PlainPart]]:
    """Return what is plain in a container, or was stored and is not there. node: of what was stored; None: nothing."""
    if isinstance(own, Values):
        own.known = known
    yield from _parts(_Place(None, None, own), node, path, known)


def _parts(at: _Place, node: Node | None, path: Path, known: dict[int, Any]) -> Iterator[tuple[Path, PlainPart]]:
    own, is_tuple = at.value(), isinstance(at.value(), tuple)
    while node is not None and node[0] == "state":
        node = node[1]
    if isinstance(own, MutableMapping):
        stored = dict(zip(node[1], node[2], strict=True)) if node is not None and node[0] in MAPPINGS else {}
        names = own.keys()  # What iterates over a TensorDict gets its rows.
        places = {**{key: key_value(key) for key in stored}, **{stored_key(key, path): key for key in names}}
    elif isinstance(own, (list, tuple)):
        is_same = node is not None and node[0] == ("tuple" if is_tuple else "list")
        stored = {("int", index): child for index, child in enumerate(node[1])} if node and is_same else {}
        places = {("int", index): index for index in range(len(own) if is_tuple else max(len(own), len(stored)))}
    else:
        return
    for key, name in places.items():
        if is_tuple and at.is_fixed() and not isinstance(own[name], (MutableMapping, list, tuple)):
            continue  # Nobody can put anything there.
        place = _Place(at if is_tuple else own, name)
        if not place.has_value() or is_plain(own[name]):
            yield (*path, key), PlainPart(place, known)
        else:
            yield from _parts(place, stored.get(key), (*path, key), known)


def _is_in(container: Any, key: Any) -> bool:
    there = range(len(container)) if isinstance(container, list) else container.keys()
    return key in there
