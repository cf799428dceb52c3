"""Refuse what is small in a file and endless when it is walked: containers that hold each other over and over.

A pickle of a few hundred bytes can name the same list ten times in another one, and that one ten times in a third: its
leaves are 10 to the power of its levels. So they are counted, each object once, before anything walks a value that a
foreign file holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncckpt.errors import UnsupportedError, Words
from asyncckpt.format import limits

_CONTAINERS = (Mapping, list, tuple, set, frozenset)


def check_tree_size(value: Any, *, owner: str) -> int:
    """Return how many bytes of text a value has. UnsupportedError for one of too many entries, too many levels or too
    much text, or one that holds itself."""
    sizes: dict[int, tuple[int, int]] = {}

    def size_of(item: Any, depth: int) -> tuple[int, int]:
        """Return how many entries and bytes of text."""
        if not isinstance(item, _CONTAINERS):
            return 1, len(item) if isinstance(item, (str, bytes)) else 0
        if id(item) in sizes:
            return sizes[id(item)]
        if depth > limits.TREE_DEPTH_MAX:
            raise UnsupportedError(f"{owner} is nested too deeply", expected=f"{limits.TREE_DEPTH_MAX} levels")
        sizes[id(item)] = limits.VALUES_MAX + 1, 0  # As long as it is not known: of one that holds itself.
        entries, text = 1, 0
        for child in _children(item):
            more, more_text = size_of(child, depth + 1)
            entries, text = entries + more, text + more_text
        if entries > limits.VALUES_MAX:
            raise UnsupportedError(
                f"{owner} holds containers that hold each other too often",
                found=Words(f"{entries} entries" if entries < 10**9 else "more than 10**9 entries"),
                expected=f"at most {limits.VALUES_MAX}",
            )
        sizes[id(item)] = entries, text
        return entries, text

    text = size_of(value, 0)[1]
    if text > limits.MANIFEST_BYTES_MAX:
        what = f"{owner} holds too much text, some of it perhaps many times"
        raise UnsupportedError(what, found=Words(f"{text} bytes"), expected=f"at most {limits.MANIFEST_BYTES_MAX}")
    return text


def _children(item: Any) -> Iterator[Any]:
    if isinstance(item, Mapping):
        yield from item.keys()
        yield from item.values()
        if hasattr(item, "_metadata"):  # The state dict of a module.
            yield item._metadata
    else:
        yield from item
