"""A checkpoint whose names still have the wrappers of modules in them, as its targets name it: without.

Earlier versions stored what was compiled, checkpointed or in DDP inside of a module under the names of the wrappers,
and a state dict that was taken by hand has them still. Only names are changed that fit nothing otherwise; where two
would become the same, both stay, and do not fit.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from asyncckpt.format.tree import Key, Node, Path, descend, mapping_node, module_metadata, state_dict_of
from asyncckpt.format.values import MAPPINGS
from asyncckpt.plan.contents import Contents
from asyncckpt.plan.load_targets import DenseTargets, Rebuilt
from asyncckpt.plan.wrapped_names import PlainNames, has_wrappers, without_sure_parts

T = TypeVar("T")


def as_targets_name_it(contents: Contents, targets: DenseTargets) -> Contents:
    """Return what a checkpoint holds under the names of modules in its targets."""
    new: dict[Path, Key] = {}
    odd: dict[Path, Rebuilt] = {}
    for item in targets.rebuilt:
        stored = descend(contents.tree, item.path) if item.is_module else None
        if stored is not None:
            new |= dict(_new_names(item, stored))
            if has_wrappers(module_metadata(stored) or ()):
                odd[item.path] = item
    if not new and not odd:
        return contents

    def renamed(path: Path) -> Path:
        end = next((end for end in range(1, len(path) + 1) if path[:end] in new), 0)
        return (*path[: end - 1], new[path[:end]], *path[end:]) if end else path

    def by_new(found: Mapping[Path, T]) -> dict[Path, T]:
        return {renamed(path): value for path, value in found.items()}

    return replace(
        contents,
        dense={name: replace(item, path=renamed(item.path)) for name, item in contents.dense.items()},
        values=by_new(contents.values),
        leaf_paths=tuple(map(renamed, contents.leaf_paths)),
        sure_paths=frozenset(map(renamed, contents.sure_paths)),
        tree=_renamed_tree(contents.tree, (), new, odd),
        shared=tuple((size, by_new(views)) for size, views in contents.shared),
    )


def _new_names(item: Rebuilt, stored: Node) -> Iterator[tuple[Path, Key]]:
    """Yield the paths of entries that a module has under other names, with these."""
    own, stored = state_dict_of(item.tree), state_dict_of(stored)
    if stored[0] not in MAPPINGS or own[0] not in MAPPINGS:
        return
    wanted, there = set(own[1]), set(stored[1])
    plain_of = {wrapped: plain for plain, wrapped in item.wrapped.items()}
    prefix = _prefix(item, stored)
    bare = {key: key.removeprefix(prefix) for key in stored[1] if isinstance(key, str) and key not in wanted}
    found = {key: plain_of[name] if name in plain_of else without_sure_parts(name) for key, name in bare.items()}
    count = Counter(found.values())
    for key, plain in found.items():
        if plain != key and plain in wanted and plain not in there and count[plain] == 1:
            yield (*item.path, key), plain


def _prefix(item: Rebuilt, stored: Node) -> str:
    """Return what the names of a checkpoint have before them, as the state dict of the wrapper around a module has."""
    own, stored = state_dict_of(item.tree), state_dict_of(stored)
    return "" if item.prefix and not set(own[1]).isdisjoint(stored[1]) else item.prefix


def _renamed_tree(node: Node, path: Path, new: Mapping[Path, Key], odd: Mapping[Path, Rebuilt]) -> Node:
    if node[0] == "state":
        return ("state", _renamed_tree(node[1], path, new, odd))
    if node[0] in ("list", "tuple"):
        children = [_renamed_tree(child, (*path, ("int", index)), new, odd) for index, child in enumerate(node[1])]
        return (node[0], tuple(children))
    if node[0] not in MAPPINGS:
        return node
    keys = [new.get((*path, key), key) for key in node[1]]
    children = [_renamed_tree(child, (*path, key), new, odd) for key, child in zip(node[1], node[2], strict=True)]
    metadata: Any = module_metadata(node) if len(node) > 3 else None
    if path in odd:
        metadata = OrderedDict(_plain_metadata(odd[path], metadata, _prefix(odd[path], node)))
    return mapping_node(node[0], keys, children, metadata)


def _plain_metadata(item: Rebuilt, metadata: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield what is said of modules under the names that they have in a target; a wrapper is before what it wraps."""
    own: Mapping[str, Any] = module_metadata(item.tree) or {}
    names = PlainNames(item.owner)
    for stored, local in metadata.items():
        name = f"{stored}.".removeprefix(prefix)[:-1]
        plain = name if name in own else names.of_module(name)
        yield (without_sure_parts(f"{name}.")[:-1] if plain == name and name not in own else plain), local
