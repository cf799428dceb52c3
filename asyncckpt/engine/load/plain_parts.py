"""Plain values in the mappings and lists of a state, as objects that a load gives back to them.

Else a load leaves plain values to its caller.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from asyncckpt.adapters.named_parts import Values, filled, is_plain
from asyncckpt.format.tree import MAPPINGS, Node, Path, key_value
from asyncckpt.plan.state import stored_key


class PlainPart:
    """A place in a container where a plain value is, or will be. known: see `filled`."""

    def __init__(self, container: Any, place: Any, known: dict[int, Any]) -> None:
        self._container, self._place, self._known = container, place, known

    def load_state_dict(self, value: Any) -> None:
        """Put the value there."""
        if isinstance(self._container, tuple):
            own = Values(self._container[self._place])
            own.known = self._known
            own.load_state_dict(value)
        elif _is_in(self._container, self._place):
            self._container[self._place] = filled(self._container[self._place], value, self._known)
        elif isinstance(self._container, list):
            self._container.append(value)
        else:
            self._container[self._place] = value


def plain_parts(own: Any, node: Node | None, path: Path, known: dict[int, Any]) -> Iterator[tuple[Path, PlainPart]]:
    """Return what is plain in a container, or was stored and is not there. node: of what was stored; None: nothing."""
    if isinstance(own, Values):
        own.known = known
    while node is not None and node[0] == "state":
        node = node[1]
    if isinstance(own, MutableMapping):
        stored = dict(zip(node[1], node[2], strict=True)) if node is not None and node[0] in MAPPINGS else {}
        places = {**{key: key_value(key) for key in stored}, **{stored_key(key, path): key for key in own}}
    elif isinstance(own, (list, tuple)):
        is_same = node is not None and node[0] == ("list" if isinstance(own, list) else "tuple")
        stored = {("int", index): child for index, child in enumerate(node[1])} if node and is_same else {}
        places = {("int", index): index for index in range(max(len(own), len(stored)))}
    else:
        return
    for key, place in places.items():
        is_there, is_fixed = _is_in(own, place), isinstance(own, tuple)
        if is_fixed and not (is_there and isinstance(own[place], (MutableMapping, list, tuple))):
            continue  # Nobody can put anything there.
        if not is_there or (is_plain(own[place]) and not (is_fixed and isinstance(own[place], tuple))):
            yield (*path, key), PlainPart(own, place, known)
        else:
            yield from plain_parts(own[place], stored.get(key), (*path, key), known)


def _is_in(container: Any, place: Any) -> bool:
    return place < len(container) if isinstance(container, (list, tuple)) else place in container
