"""What a checkpoint offers to the targets of a load, and what a load filter makes of it.

Names come first: earlier versions stored what was compiled, checkpointed or in DDP inside of a module under the names
of the wrappers, and a state dict that was taken by hand has them still. The targets name it without. Only names are
changed that fit nothing otherwise; where two would become the same, both stay, and do not fit.

A filter gets and returns RecIS' load information:

    {destination: {source: [columns]}}

A destination is a table or a dense leaf of the model, a source one of the checkpoint. Dense destinations have exactly
one source and no columns. The filter may drop destinations, rename sources, subset columns, and give a table several
sources.

As in RecIS, it gets every destination of the model. One that the checkpoint lacks stands there with a source of its own
name: left so, it is missing; given another source, it is loaded; dropped, it stays as it is. The sources of the
checkpoint, also those that no destination has, are beside it (`LoadInfo.sources`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

from asyncckpt.errors import UsageError
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import (
    Key,
    Node,
    Path,
    descend,
    mapping_node,
    module_metadata,
    path_name,
    state_dict_of,
    unique_names,
)
from asyncckpt.format.values import COMPOSITE, MAPPINGS
from asyncckpt.model.table import Table
from asyncckpt.plan.contents import Contents
from asyncckpt.plan.load_targets import DenseTargets, InPlace, Rebuilt
from asyncckpt.plan.wrapped_names import PlainNames, bare_name, has_wrappers, without_sure_parts

T = TypeVar("T")
Loads = dict[str, dict[str, list[str]]]


class LoadInfo(dict[str, dict[str, list[str]]]):
    """What a filter gets. sources: all that the checkpoint has, by name: the columns of a table, [] of a tensor."""

    def __init__(self, loads: Loads, sources: Mapping[str, list[str]]) -> None:
        super().__init__(loads)
        self.sources = sources


LoadFilter = Callable[[LoadInfo], Mapping[str, Mapping[str, list[str]]]]


@dataclass(frozen=True)
class Offer:
    """What could be loaded: every destination with its source.

    lacking    destinations that the checkpoint has not, with a source of their own name
    elsewhere  leaves that are not destinations unless a filter names them: the checkpoint has a tensor of their name,
               in a state nested otherwise
    absent     objects that the checkpoint has not
    """

    loads: Loads
    lacking: tuple[str, ...]
    elsewhere: tuple[str, ...]
    absent: tuple[Rebuilt, ...]
    contents: Contents
    targets: DenseTargets

    @staticmethod
    def of(contents: Contents, targets: DenseTargets, tables: Mapping[str, Table]) -> Offer:
        """Look which destination has a source of its name, or of its path."""
        loads: Loads = {}
        lacking = [name for name in tables if name not in contents.tables]
        for name, table in tables.items():
            columns = [column.name for column in table.schema().columns]
            stored = contents.tables.get(name)
            loads[name] = {name: columns if stored is None else [each for each in columns if each in stored.columns]}
        by_path = {item.path: item.name for item in contents.dense.values()}
        absent = [leaf.name for leaf in targets.in_place if leaf.path not in by_path]
        elsewhere = [name for name in absent if name in contents.dense]
        loads |= {leaf.name: {by_path.get(leaf.path, leaf.name): []} for leaf in targets.in_place}
        for name in elsewhere:
            del loads[name]
        taken = {*loads, *elsewhere}
        of_modules = contents.dense.values() if targets.has_modules else ()
        made = [item for item in of_modules if targets.extra_state(item.path) is not None]
        founds = [contents.below(item.path) for item in targets.rebuilt if not item.is_module]
        own = {leaf.path for leaf in targets.in_place}
        for found in (*founds, [item for item in made if item.path not in own and item.path in contents.prefixes]):
            names = unique_names((stored.name for stored in found), taken={*taken, *loads})
            loads |= {name: {stored.name: []} for name, stored in zip(names, found, strict=True)}
        return Offer(
            loads=loads,
            lacking=(*lacking, *(name for name in absent if name not in contents.dense)),
            elsewhere=tuple(elsewhere),
            absent=tuple(item for item in targets.rebuilt if not contents.has(item.path)),
            contents=contents,
            targets=targets,
        )

    def filtered(self, filter_func: LoadFilter | None) -> Loads:
        """Return the answer of a filter. UsageError where it raises, or answers nonsense."""
        if filter_func is None:
            return self.loads
        tables, dense = self.contents.tables, self.contents.dense
        sources = {**{name: list(stored.columns) for name, stored in tables.items()}, **{name: [] for name in dense}}
        loads = {name: {source: [*columns] for source, columns in item.items()} for name, item in self.loads.items()}
        try:
            answer = filter_func(LoadInfo(loads, sources))  # Copies: a filter may change what it gets.
            return {
                str(name): {str(source): [str(column) for column in columns] for source, columns in item.items()}
                for name, item in answer.items()
            }
        except Exception as error:
            raise UsageError(
                f"load filter raised or returned nonsense: {type(error).__name__}: {error}",
                expected="{destination: {source: [columns]}}",
            ) from error

    def settled(self, answer: Loads, *, strict: bool) -> tuple[Loads, list[str]]:
        """Return what is loaded of a filter's answer, and the names of what is missing."""
        unfound = {name: None for name in self.lacking if answer.get(name, {}).keys() == {name}}
        loads = {name: item for name, item in answer.items() if name not in unfound}
        if not strict:
            loads |= {name: self._there(name, loads[name]) for name in self.lacking if name in loads}
        unfound |= {name: None for name in self.elsewhere if name not in answer}
        missing = self._without_tied(unfound, loads) if unfound else []
        inside = self._leaves_of_absent_modules() if self.absent else {}
        for item in self.absent:  # Of a module, a filter may have renamed or dropped tensors.
            if {leaf.name for leaf in inside[item.path]} <= unfound.keys():
                missing.append(path_name(item.path))
        values = [path for path in self.targets.values if path not in self.contents.values]
        missing += [path_name(path) for path in values if not self._is_beyond(path)]
        return loads, missing

    def _is_beyond(self, path: Path) -> bool:
        """Return whether a value is in a list that was stored with fewer items: the caller gets that list."""
        stored = descend(self.contents.tree, path[:-1])
        return stored is not None and stored[0] in ("list", "tuple") and path[-1] >= ("int", len(stored[1]))

    def _there(self, name: str, sources: dict[str, list[str]]) -> dict[str, list[str]]:
        """Return sources that a filter gave to a table, without the offered columns which the checkpoint lacks: that
        passes as it does where the names are the same."""
        offered, tables = self.loads[name][name], self.contents.tables
        return {
            source: [c for c in columns if source not in tables or c in tables[source].columns or c not in offered]
            for source, columns in sources.items()
        }

    def _without_tied(self, unfound: Collection[str], loads: Loads) -> list[str]:
        """Return names without those of tied weights that are filled under another name."""
        leaves = {leaf.name: leaf for leaf in self.targets.in_place}
        filled = {leaf.memory() for name, leaf in leaves.items() if name in loads} - {None}
        return [name for name in unfound if name not in leaves or leaves[name].memory() not in filled]

    def _leaves_of_absent_modules(self) -> Mapping[Path, list[InPlace]]:
        found: dict[Path, list[InPlace]] = defaultdict(list)
        if any(item.is_module for item in self.absent):
            for leaf in self.targets.in_place:
                owner = self.targets.owner_of(leaf.path)
                if owner is not None:
                    found[owner.path].append(leaf)
        return found


# -- names without wrappers --------------------------------------------------------------------------------------------


def as_targets_name_it(contents: Contents, targets: DenseTargets, chain: Chain) -> Contents:
    """Return what a checkpoint holds under the names of modules in its targets."""
    if any(hasattr(type(item.owner), "same_on_ranks") for item in targets.rebuilt):
        from asyncckpt.plan.same_on_ranks import with_those_of_ranks  # Few states hold any.

        contents = with_those_of_ranks(contents, targets, chain)
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
    if node[0] not in MAPPINGS or node[0] == COMPOSITE:
        return node
    keys = [new.get((*path, key), key) for key in node[1]]
    children = [_renamed_tree(child, (*path, key), new, odd) for key, child in zip(node[1], node[2], strict=True)]
    metadata: Any = module_metadata(node) if len(node) > 3 else None
    if path in odd:
        metadata = OrderedDict(_plain_metadata(odd[path], metadata, _prefix(odd[path], node)))
    return mapping_node(node[0], keys, children, metadata)


def _plain_metadata(item: Rebuilt, metadata: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the facts of modules under the names that they have in a target; a wrapper is before what it wraps."""
    own: Mapping[str, Any] = module_metadata(item.tree) or {}
    names = PlainNames(item.owner)
    for stored, local in metadata.items():
        name = f"{stored}.".removeprefix(prefix)[:-1]
        plain = name if name in own else names.of_module(name)
        yield (without_sure_parts(f"{name}.")[:-1] if plain == name and name not in own else plain), local


def wrapped_hint(missing: list[str], unexpected: list[str]) -> str:
    """Return a hint if names differ from the stored ones only in what a wrapper of a module puts before them."""
    both = set(missing) & set(unexpected)
    if both:
        return f"{min(both)!r} is in a state nested otherwise: give objects and dicts as they were saved"
    bare = {bare_name(name) for name in missing} & {bare_name(name) for name in unexpected}
    if not bare:
        return ""
    return (
        "names differ only in 'module.' (DDP, dense_state_of) or '_orig_mod.' (torch.compile): pass the module that "
        "was wrapped, and dense_state_of(module) only where that was saved"
    )


def inside_modules(contents: Contents, targets: DenseTargets, unexpected: list[str]) -> Iterator[tuple[str, Path]]:
    """Return unexpected entries inside modules that are loaded, and parts of a TrainerState that it has no more, with
    paths; what nobody asked for is only reported.

    Nor is what only some of the ranks had: other ranks may want it now.
    """

    def is_inside(path: Path) -> bool:
        owner = targets.owner_of(path)
        return owner is not None and owner.is_module and path in contents.sure_paths

    paths = ((name, contents.dense[name].path) for name in unexpected if name in contents.dense)
    parts: dict[Path, list[Path]] = defaultdict(list)
    for path, names in targets.holders.items():
        for leaf in contents.sure_paths:
            if leaf[: len(path)] == path and len(leaf) > len(path) and leaf[len(path)] not in names:
                parts[leaf[: len(path) + 1]].append(leaf)
    left = {contents.dense[name].path for name in unexpected if name in contents.dense} if parts else ()
    # A part of which a filter takes a tensor is not gone.
    gone = (part for part, found in parts.items() if all(leaf in left or leaf in contents.values for leaf in found))
    return chain(((name, path) for name, path in paths if is_inside(path)), ((path_name(part), part) for part in gone))


def other_entries(contents: Contents, targets: DenseTargets, unexpected: list[str]) -> list[str]:
    """Return the entries and tables of the checkpoint that the state lacks: one may have another name now."""
    own = [leaf.path for leaf in targets.in_place] + [item.path for item in targets.rebuilt]
    known = {path[:1] for path in (*own, *targets.values, *targets.empty)}
    tops = {path[:1]: None for path in (*contents.leaf_paths, *contents.values)}
    return [path_name(path) for path in tops if path not in known] + [it for it in unexpected if it in contents.tables]
