"""What was stored for an optimizer, as one of a changed model takes it. Of loads that are not strict, rename or resize.

An optimizer of tables takes it by their names: a group the numbers of the group that its first stored table was in, and
each table its steps, if all slots of it are loaded. An optimizer of torch takes it by the numbers of parameters, or by
their names where these are stored (`param_names`) and the parameters are others, in another order or in other groups.
A parameter without a state of its shape has none; one that is resized has its moments resized with it, zero where there
were none.

Nothing is made to fit where parameters are spread over ranks or states have composites. What does not fit then is left
as it is in a load that is not strict, and told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.errors import UsageError, must_be
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import descend, kinds_in, leaves, path_name
from asyncckpt.format.values import COMPOSITE
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.load_targets import DenseTargets, InPlace, Rebuilt
from asyncckpt.plan.object_checks import is_optimizer_state, loads_as, memory_of
from asyncckpt.plan.rename import Names
from asyncckpt.plan.wrapped_names import bare_name

Fit = Callable[[Any], Any]


@dataclass(frozen=True)
class Changes:
    """What of a model has another name, or may have another shape, than what was stored. See Loader."""

    names: Names
    resized: frozenset[str]

    @staticmethod
    def of(rename: Mapping[str, str], resize: Collection[str], chain: Chain) -> Changes:
        """Check them. UsageError. What a checkpoint has under its new name already is not renamed."""
        named = Names.of(rename).new
        there = {path_name(path) for part in chain.newest.parts for path, _ in leaves(part.tree)}
        begins = _begins({*there, *(facts.name for part in chain.newest.parts for facts in part.tables)})
        if isinstance(resize, str) or not all(isinstance(name, str) for name in resize):
            raise must_be("resize", "names of tables and tensors", resize)
        kept = {old: new for old, new in named.items() if old in begins or new not in begins}
        return Changes(Names(kept), frozenset(resize))

    def check_known(self, names: Collection[str]) -> None:
        """Raise UsageError for a resize of what no table and no tensor of the model begins with."""
        if unknown := sorted(self.resized - _begins(names)):
            raise UsageError(
                "resize has names that the model does not have", found=unknown, expected=sorted(names)[:16]
            )

    def resizes(self, name: str) -> bool:
        """Return whether a name, or what it begins with up to a dot, may have another shape."""
        return not self.resized.isdisjoint(_begins([name]))


def _begins(names: Collection[str]) -> set[str]:
    """Return what names begin with, up to a dot or to their end."""
    return {name[:end] for name in names for end in range(1, len(name) + 1) if name[end : end + 1] in ("", ".")}


class ChangedStates:
    """Makes the states of one load fit. missing: gets what has no state then, as a report has it.

    loads: its tensors, each with its source. absent: the columns of tables that are not loaded, `table@column`.
    """

    def __init__(
        self,
        contents: Contents,
        targets: DenseTargets,
        loads: Sequence[tuple[InPlace | None, StoredDense]],
        changes: Changes | None,
        absent: Collection[str],
        strict: bool,
        missing: dict[str, None],
    ) -> None:
        self._missing = missing
        self.is_strict = strict
        self._contents, self._names = contents, Names() if changes is None else changes.names
        self._absent = frozenset(absent)
        self._sources: dict[object, StoredDense] = {}
        self._known_as: dict[object, list[str]] = {}
        self._modules = [path_name(item.path) for item in targets.rebuilt if item.is_module]
        for target, source in loads:
            if target is not None and target.pieces:
                self._sources[memory_of(target.pieces[0].tensor)] = source
        for leaf in targets.in_place:
            owner = targets.owner_of(leaf.path)
            if owner is not None and owner.is_module and leaf.pieces:
                at = memory_of(leaf.pieces[0].tensor)
                self._known_as.setdefault(at, []).append(bare_name(path_name(leaf.path[len(owner.path) :])))

    def of(self, item: Rebuilt) -> Fit | None:
        """Return what makes the stored state of an object fit; None: it stays as it is."""
        own, node = item.owner, descend(self._contents.tree, item.path)
        if item.is_module or node is None:
            return None
        if hasattr(type(own), "_check_state") and all(
            "tables" in group for group in getattr(own, "param_groups", [{}])
        ):
            return lambda state: self._of_tables(own, state) if is_optimizer_state(state) else state
        is_torchs = loads_as(torch.optim.Optimizer, own) and not own._optimizer_load_state_dict_pre_hooks
        parameters = [parameter for group in own.param_groups for parameter in group["params"]] if is_torchs else []
        if not parameters or COMPOSITE in kinds_in(node) or any(hasattr(each, "device_mesh") for each in parameters):
            return None
        places = list(map(memory_of, parameters))  # A module that is loaded may put its parameters elsewhere.
        return lambda stored: (
            self._of_torchs(item, stored, parameters, places) if is_optimizer_state(stored) else stored
        )

    def _of_tables(self, own: Any, stored: Any) -> Any:
        groups = [{**group, "tables": self._tables_of(group)} for group in stored["param_groups"]]
        if self.is_strict or not all(len(group["tables"]) == len(group["params"]) for group in groups):
            return {**stored, "param_groups": groups}  # Which it compares, or refuses.
        there = {
            name: (group, stored["state"].get(number, {}))
            for group in groups
            for name, number in zip(group["tables"], group["params"], strict=True)
        }
        now, state = own.state_dict(), {}
        for group in now["param_groups"]:
            options = own.defaults.keys() & group.keys() - {"slots", "differentiable"}  # The second is torch's.
            was: Mapping[str, Any] = next((there[name][0] for name in group["tables"] if name in there), {})
            if options <= was.keys():  # Else it is of an optimizer with other rules.
                group |= {name: was[name] for name in options}
            for name, number in zip(group["tables"], group["params"], strict=True):
                slots = {f"{name}@{slot}" for slot in group["slots"]}
                if name not in there:
                    state[number] = now["state"].get(number, {})
                elif options <= there[name][0].keys() and self._absent.isdisjoint(slots):
                    state[number] = there[name][1]
        return {**stored, "state": state, "param_groups": now["param_groups"]}

    def _tables_of(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of the tables of a stored group, as they are now."""
        tables = group.get("tables")
        return [self._names.name(str(name)) for name in tables] if isinstance(tables, list) else []

    def _of_torchs(self, item: Rebuilt, stored: Any, parameters: list[torch.Tensor], places: list[object]) -> Any:
        own, groups = item.owner.state_dict(), stored["param_groups"]
        numbers = self._numbers(own["param_groups"], groups, places)
        if numbers is None:
            return stored
        state: dict[Any, Any] = {}
        for number, (parameter, place) in enumerate(zip(parameters, places, strict=True)):
            entries = stored["state"].get(numbers.get(number))
            fitting = None if entries is None else _fitting(entries, tuple(parameter.shape), self._sources.get(place))
            if fitting is not None:
                state[number] = fitting
                continue
            if number in own["state"]:
                state[number] = own["state"][number]  # Some make it before the first step.
            if entries is not None or number not in numbers:
                known = next(iter(self._known_as.get(place, [])), f"parameter {number}")
                self._missing[f"{path_name(item.path)} of {known}"] = None
        return {**stored, "state": state, "param_groups": list(self._groups(own["param_groups"], groups, numbers))}

    def _numbers(self, own: list[Any], groups: list[Any], places: list[object]) -> Mapping[int, Any] | None:
        """Return the stored numbers of parameters, by their own; None: nobody can tell."""
        numbers = [number for group in groups for number in group["params"]]
        there = [bare_name(name) for group in groups for name in self._names_of(group)]
        given = [name for group in own for name in group.get("param_names", [])]
        known = [self._known_as.get(place, []) for place in places]
        if len(given) == len(places):
            known = [[*names, bare_name(name)] for names, name in zip(known, given, strict=True)]
        if self.is_strict or len(there) != len(numbers) or not all(known):
            is_same = [len(group["params"]) for group in groups] == [len(group["params"]) for group in own]
            return dict(enumerate(numbers)) if is_same else None
        by_name = dict(zip(there, numbers, strict=True))
        found = [next((name for name in names if name in by_name), None) for names in known]
        return {number: by_name[name] for number, name in enumerate(found) if name is not None}

    def _names_of(self, group: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of the parameters of a stored group, as they are now: in the first module of which something
        was renamed.
        """
        for name in map(str, group.get("param_names", [])):
            new = ((f"{module}.", self._names.name(f"{module}.{name}")) for module in self._modules)
            changed = (to[len(begin) :] for begin, to in new if to != f"{begin}{name}" and to.startswith(begin))
            yield next(changed, name)

    def _groups(self, own: list[Any], stored: list[Any], numbers: Mapping[int, Any]) -> Iterator[dict[str, Any]]:
        """Yield the groups of an optimizer with the options of those that their first known parameters were in."""
        was_in = {number: group for group in stored for number in group["params"]}
        for group in own:
            first = next((numbers[number] for number in group["params"] if number in numbers), None)
            options = {} if first is None else was_in[first]
            fitting = {
                **group,
                **{key: value for key, value in options.items() if key not in ("params", "param_names")},
            }
            if self.is_strict and "param_names" in options:
                fitting["param_names"] = list(self._names_of(options))  # To be compared.
            yield fitting


def _fitting(entries: Mapping[Any, Any], shape: tuple[int, ...], source: StoredDense | None) -> Any:
    """Return the state of a parameter in its shape; None where there is none. source: what the parameter is loaded
    from; None: it is not, and so has no state if its moments have another shape.
    """
    if source is not None and source.shape != shape:
        return {key: _with_shape(value, source.shape, shape) for key, value in entries.items()}
    moments = [value for value in entries.values() if isinstance(value, torch.Tensor) and value.dim()]
    return None if source is None and any(tuple(value.shape) != shape for value in moments) else entries


def _with_shape(value: Any, was: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != was:
        return value
    if value.stride() == (0,) * value.dim():  # It stands for one of this form.
        return value.new_zeros(()).expand(shape)
    found = value.new_zeros(shape)
    shared = tuple(slice(min(sizes)) for sizes in zip(was, shape, strict=True))
    found[shared] = value[shared]
    return found
