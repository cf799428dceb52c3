"""The states of several ranks as one, for a reader that is none of these ranks.

Where ranks differ, the lower rank counts: of mappings, and of the states of objects, every key that some rank has, in
the order of the lower rank; anything else is taken as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from asyncckpt.format.manifest import RankPart
from asyncckpt.format.strict_json import Json
from asyncckpt.format.tree import VALUE, Node, Path, leaves


def joined_tree(trees: Sequence[Node]) -> Node:
    """The tree of all ranks, in their order."""
    first, *others = trees
    for other in others:
        first = _joined(first, other)
    return first


def _joined(first: Node, second: Node) -> Node:
    if first == second or first[0] != second[0]:
        return first
    if first[0] == "state":
        return ("state", _joined(first[1], second[1]))
    if first[0] != "dict":
        return first
    theirs = dict(zip(second[1], second[2], strict=True))
    children = [
        _joined(child, theirs[key]) if key in theirs else child for key, child in zip(first[1], first[2], strict=True)
    ]
    known = frozenset(first[1])
    new = [key for key in second[1] if key not in known]
    return ("dict", (*first[1], *new), (*children, *(theirs[key] for key in new)))


def tensor_paths(tree: Node) -> list[Path]:
    """The paths of tensors and arrays, by the numbers of their leaves."""
    return [path for path, node in leaves(tree) if node is not VALUE]


def paths_by_part(parts: Iterable[RankPart]) -> Iterator[list[Path]]:
    """The paths of every part's tensors. Most ranks have the same tree: then it is the same list."""
    tree: Node | None = None
    paths: list[Path] = []
    for part in parts:
        if part.tree != tree:
            tree, paths = part.tree, tensor_paths(part.tree)
        yield paths


def joined_values(parts: Iterable[RankPart]) -> dict[Path, tuple[int, Json]]:
    """Every plain value by its path, of the lowest rank that has it, with that rank."""
    found: dict[Path, tuple[int, Json]] = {}
    for part in parts:
        own = (path for path, node in leaves(part.tree) if node is VALUE)
        for path, value in zip(own, part.values, strict=True):
            found.setdefault(path, (part.rank, value))
    return found
