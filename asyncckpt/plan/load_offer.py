"""RecIS' load information, which a load filter gets and returns:

    {destination: {source: [columns]}}

A destination is a table or a dense leaf of the model, a source one of the checkpoint. Dense destinations have exactly
one source and no columns. The filter may drop destinations, rename sources, subset columns, and give a table several
sources.

As in RecIS, it gets every destination of the model. One that the checkpoint lacks stands there with a source of its own
name: left so, it is missing; given another source, it is loaded; dropped, it stays as it is. The sources of the
checkpoint, also those that no destination has, are beside it (`LoadInfo.sources`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from asyncckpt.errors import UsageError
from asyncckpt.format.tree import Path, path_name, unique_names
from asyncckpt.model.table import Table
from asyncckpt.plan.contents import Contents
from asyncckpt.plan.load_targets import DenseTargets, InPlace, Rebuilt

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
    elsewhere  leaves that are no destinations unless a filter names them: the checkpoint has a tensor of their name,
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
        made = [item for item in contents.dense.values() if targets.extra_state(item.path) is not None]
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
        missing = self._without_tied(unfound, loads)
        inside = self._leaves_of_absent_modules()
        for item in self.absent:  # Of a module, a filter may have renamed or dropped tensors.
            if {leaf.name for leaf in inside[item.path]} <= unfound.keys():
                missing.append(path_name(item.path))
        missing += [path_name(path) for path in self.targets.values if path not in self.contents.values]
        return loads, missing

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
        if not unfound:
            return []
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
