"""A part of what a checkpoint holds: what has some names, or what is under one name, as if it had been saved alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from asyncckpt.errors import UsageError, nearest
from asyncckpt.format.tree import (
    VALUE,
    Node,
    Path,
    composites,
    containers,
    descend,
    key_value,
    leaves,
    mapping_node,
    module_metadata,
    path_name,
    state_dict_of,
    unique_names,
)
from asyncckpt.format.values import COMPOSITE, MAPPINGS
from asyncckpt.plan.contents import Contents
from asyncckpt.plan.stored_tables import StoredTable

T = TypeVar("T")


def chosen(contents: Contents, only: Collection[str]) -> Contents:
    """Return what has one of these names, or begins with one up to a dot, or is like a pattern (`model.*.bias`).

    A list keeps its length, with None for what is left out. Tables stay. UsageError for a name of nothing.
    """
    left, names = set(only), set(only)
    nodes = (*leaves(contents.tree), *containers(contents.tree))
    patterns = {one for one in only if not {*"*?["}.isdisjoint(one)} - {path_name(path) for path, _ in nodes}

    def is_chosen(path: Path) -> bool:
        name = path_name(path)
        begins = {name[:end] for end in range(1, len(name) + 1) if name[end : end + 1] in ("", ".")}
        found = (begins & names) | {one for one in patterns if fnmatchcase(name, one)}
        left.difference_update(found)
        return bool(found)

    kept = {path for path, _ in leaves(contents.tree) if is_chosen(path)}
    kept |= {path for path, node in containers(contents.tree) if not node[1] and path and is_chosen(path)}
    for whole, node in composites(contents.tree):
        inner = {path for path, _ in leaves(node, whole)}
        kept |= inner if kept & inner or is_chosen(whole) else set()
    in_tree = {*contents.leaf_paths}
    kept |= {item.path for item in contents.dense.values() if item.path not in in_tree and is_chosen(item.path)}
    if left:
        paths = (*contents.leaf_paths, *contents.values)
        there = sorted({path_name(path[:end]) for path in paths for end in range(1, len(path) + 1)}, key=len)
        name = min(left)
        raise UsageError(f"there is nothing called {name!r}", expected=there[:16], hint=nearest(name, there) or None)
    return _with(contents, kept.__contains__, lambda path: path, _pruned(contents.tree, (), kept) or ("dict", (), ()))


def inside(contents: Contents, name: str) -> Contents:
    """Return what is in the mapping or object of this name, without it in names; of another thing, this under its key.

    Tables are those of this name, and those whose names begin with it up to a dot, which they lose. UsageError.
    """
    found = [path for path, _ in (*containers(contents.tree), *leaves(contents.tree)) if path_name(path) == name]
    tables: dict[str, StoredTable] = {}
    for key, table in sorted(contents.tables.items()):
        if key == name or key.startswith(f"{name}."):
            new = key.removeprefix(f"{name}.")
            tables[new if new not in tables else key] = replace(table, name=new if new not in tables else key)
    if not found and (module := _submodule(contents, name)) is not None:
        return replace(module, tables=tables)
    path = found[0] if found else None
    node = state_dict_of(descend(contents.tree, path) or VALUE) if path is not None else VALUE
    if not tables and not path:
        tops = [str(key_value(key)) for key in contents.tree[1]] if contents.tree[0] in MAPPINGS else []
        there = sorted({*tops, *contents.tables})
        raise UsageError(f"there is nothing called {name!r}", expected=there[:16], hint=nearest(name, there) or None)
    if path is None:
        return replace(_with(contents, lambda _: False, lambda path: path, ("dict", (), ())), tables=tables)
    is_whole = node[0] in MAPPINGS and node[0] != COMPOSITE and all(isinstance(key, str) for key in node[1])
    cut = len(path) if is_whole else len(path) - 1
    text = () if is_whole else (path_name(path[-1:]),)
    tree = node if is_whole else mapping_node("dict", text, (descend(contents.tree, path) or VALUE,))
    made = _with(
        contents, lambda other: other[: len(path)] == path, lambda other: (*text, *other[cut + len(text) :]), tree
    )
    return replace(made, tables=tables)


def _submodule(contents: Contents, name: str) -> Contents | None:
    """Return what is in a part of a module, which is so called in its state dict; None where there is none."""
    for path, node in containers(contents.tree):
        before = f"{path_name(path)}." if path else ""
        begin = f"{name.removeprefix(before)}."
        if node[0] in MAPPINGS and name.startswith(before):
            own = {key: child for key, child in zip(node[1], node[2], strict=True) if str(key).startswith(begin)}
            if own:
                return _of_submodule(contents, path, begin, own, module_metadata(node) or {})
    return None


def _of_submodule(
    contents: Contents, path: Path, begin: str, own: Mapping[Any, Node], said: Mapping[str, Any]
) -> Contents:
    """Return what is in entries of a mapping, without what their keys begin with. said: the `_metadata`."""
    at = len(path)
    metadata = {name[len(begin) :]: facts for name, facts in said.items() if f"{name}.".startswith(begin)} or None
    return _with(
        contents,
        lambda other: other[:at] == path and len(other) > at and other[at] in own,
        lambda other: (other[at].removeprefix(begin), *other[at + 1 :]),
        mapping_node("ordered", [key.removeprefix(begin) for key in own], list(own.values()), metadata),
    )


def _with(contents: Contents, is_kept: Callable[[Path], bool], moved: Callable[[Path], Path], tree: Node) -> Contents:
    """Return contents with the things at some paths alone, and with these where they are now."""

    def those(found: Mapping[Path, T]) -> dict[Path, T]:
        return {moved(path): item for path, item in found.items() if is_kept(path)}

    dense = [replace(item, path=moved(item.path)) for item in contents.dense.values() if is_kept(item.path)]
    names = unique_names(path_name(item.path) for item in dense)
    there = {path_name(path) for path in contents.leaf_paths if is_kept(path)}
    shared = [(size, those(views)) for size, views in contents.shared]
    return replace(
        contents,
        dense={name: replace(item, name=name) for name, item in zip(names, dense, strict=True)},
        values=those(contents.values),
        leaf_paths=tuple(map(moved, filter(is_kept, contents.leaf_paths))),
        sure_paths=frozenset(map(moved, filter(is_kept, contents.sure_paths))),
        tree=tree,
        unreadable={name: dtype for name, dtype in contents.unreadable.items() if name in there},
        shared=tuple((size, views) for size, views in shared if views),
        classes={path: found for path, found in those(contents.classes).items() if path},
    )


def _pruned(node: Node, path: Path, kept: Collection[Path]) -> Node | None:
    """Return a node with what is kept alone; None: nothing is."""
    if len(node) == 1 or not node[1]:
        return node if path in kept else None
    if node[0] == "state":
        below = _pruned(node[1], path, kept)
        return None if below is None else ("state", below)
    if node[0] in MAPPINGS:
        found: list[tuple[Any, Node]] = []
        for key, child in zip(node[1], node[2], strict=True):
            if (below := _pruned(child, (*path, key), kept)) is not None:
                found.append((key, below))
        if node[0] == COMPOSITE:
            return node if found else None
        keys, children = [key for key, _ in found], [child for _, child in found]
        return mapping_node(node[0], keys, children, module_metadata(node)) if found else None
    items = [_pruned(item, (*path, ("int", index)), kept) for index, item in enumerate(node[1])]
    return (node[0], tuple(VALUE if item is None else item for item in items)) if any(items) else None
