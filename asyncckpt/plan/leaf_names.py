"""Display names of dense leaves: dotted paths, made unique.

A name is for people, for filters and for the shard's safetensors keys; a leaf is found again by its path.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncckpt.errors import UsageError
from asyncckpt.format.tree import VALUE, Node, leaves, path_name

_RESERVED_KEYS = ("__metadata__",)


def tensor_names(tree: Node, *, tables: Iterable[str] = ()) -> list[str]:
    """One unique name per tensor or array leaf, in leaf order; none of them is the name of a table."""
    return unique_names((path_name(path) for path, node in leaves(tree) if node is not VALUE), taken=tables)


def unique_names(names: Iterable[str], *, taken: Iterable[str] = ()) -> list[str]:
    """Give every second holder of a name a suffix: 'a', 'a#2', 'a#3'."""
    used = {*taken, *_RESERVED_KEYS}
    unique = []
    for name in names:
        check_name(name)
        candidate, count = name, 1
        while candidate in used:
            count += 1
            candidate = f"{name}#{count}"
        used.add(candidate)
        unique.append(candidate)
    return unique


def check_name(name: str) -> None:
    """UsageError for a name that UTF-8 cannot hold."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"name is not valid Unicode: {error.reason}", found=name[:80]) from error
