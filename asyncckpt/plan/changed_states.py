"""What was stored for an optimizer, as one of a changed model takes it. Of loads that are not strict, rename or resize.

An optimizer of tables takes it table by table: its steps, if all its slots are loaded, whichever optimizer had them;
and a group the numbers of a stored one that had the same tables, as far as they are still there.

An optimizer of torch takes it parameter by parameter. Which is which is told by the tensors of modules that the stored
names of parameters (`param_names`) belong to, for these are loaded by name; where that cannot be told, by these names
alone; and without names by the numbers, as torch does, if all parameters are loaded. A parameter that is not loaded has
no state. One that is resized has its moments resized with it.

Where parameters are spread over ranks, or a state has composites, it is only taken as it is. What cannot be told is a
problem: in a load that is not strict the object stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from asyncckpt.errors import UsageError
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import Path, descend, kinds_in, leaves, path_name, tensor_paths
from asyncckpt.format.values import COMPOSITE
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.load_targets import DenseTargets, InPlace, Rebuilt
from asyncckpt.plan.object_checks import is_optimizer_state, loads_as, memory_of
from asyncckpt.plan.rename import Names
from asyncckpt.plan.wrapped_names import bare_name

Fit = Callable[[Any], Any]
# What the elements begin with that a moment of a resized parameter gets: 0, or this option of the group.
_BEGINS_WITH = {"sum": "initial_accumulator_value", "step_size": "lr"}
_HINT = "make optimizers of named_parameters(), before the model changes"


@dataclass(frozen=True)
class Changes:
    """What of a model has another name, or may have another shape, than what was stored. See Loader. was: the paths
    that tensors had, by those that they have now.
    """

    names: Names
    resized: frozenset[str]
    was: Mapping[Path, Path] = field(default_factory=dict)

    @staticmethod
    def apply(rename: Mapping[str, str], resize: Collection[str], chain: Chain) -> tuple[Changes, Chain]:
        """Check them, and return them with a checkpoint under the new names. UsageError. What it has under its new name
        already is not renamed.
        """
        if twice := sorted(rename.keys() & set(rename.values())):
            hint = "the next restore would rename it once more; a filter_func, for one restore, can exchange names"
            raise UsageError(f"rename gives the name {twice[0]!r}, and takes it away", hint=hint)
        there = {path_name(path) for part in chain.newest.parts for path, _ in leaves(part.tree)}
        begins = _begins({*there, *(facts.name for part in chain.newest.parts for facts in part.tables)})
        names = Names({old: new for old, new in rename.items() if new not in begins})
        renamed = names.chain(chain)
        pairs = zip(chain.newest.parts, renamed.newest.parts, strict=True)
        was = {new: old for a, b in pairs for old, new in zip(tensor_paths(a.tree), tensor_paths(b.tree), strict=True)}
        return Changes(names, frozenset(resize), was), renamed

    def check_known(self, names: Collection[str]) -> None:
        """Raise UsageError for a resize of what no table and no tensor of the model begins with."""
        if unknown := sorted(self.resized - _begins(names)):
            raise UsageError("resize has unknown names", found=unknown, expected=sorted(names)[:16])

    def resizes(self, name: str) -> bool:
        """Return whether a name, or what it begins with up to a dot, may have another shape."""
        return not self.resized.isdisjoint(_begins([name]))


def _begins(names: Collection[str]) -> set[str]:
    """Return what names begin with, up to a dot or to their end."""
    return {name[:end] for name in names for end in range(1, len(name) + 1) if name[end : end + 1] in ("", ".")}


class ChangedStates:
    """Makes the states of one load fit. missing: gets what has no state then, as a report has it.

    loads: its tensors, each with its source. tables: the columns of the tables that are loaded, by their ids.
    """

    def __init__(
        self,
        contents: Contents,
        targets: DenseTargets,
        loads: Sequence[tuple[InPlace | None, StoredDense]],
        tables: Mapping[int, frozenset[str]],
        changes: Changes | None,
        *,
        strict: bool,
        missing: dict[str, None],
    ) -> None:
        self._contents, self._tables, self._strict, self._missing = contents, tables, strict, missing
        self._changes = Changes(Names(), frozenset()) if changes is None else changes
        self._sources: dict[object, StoredDense] = {}
        self._known_as: dict[object, str] = {}
        for target, source in loads:
            if target is not None and (at := _place(target)) is not None:
                self._sources[at] = source
        for leaf in targets.in_place:
            owner = targets.owner_of(leaf.path)
            if owner is not None and owner.is_module and (at := _place(leaf)) is not None:
                self._known_as.setdefault(at, path_name(leaf.path[len(owner.path) :]))

    def of(self, item: Rebuilt) -> Fit | None:
        """Return what makes the stored state of an object fit; None: it stays as it is. It raises UsageError for one of
        which nobody can tell how.
        """
        own, node = item.owner, descend(self._contents.tree, item.path)
        if item.is_module or node is None:
            return None
        if hasattr(type(own), "_check_state") and all("tables" in each for each in getattr(own, "param_groups", [{}])):
            return lambda state: self._of_tables(item, state) if is_optimizer_state(state) else state
        if not loads_as(torch.optim.Optimizer, own):
            return None
        if own._optimizer_load_state_dict_pre_hooks or own._optimizer_state_dict_post_hooks:
            return None
        parameters = [parameter for group in own.param_groups for parameter in group["params"]]
        is_whole = COMPOSITE not in kinds_in(node) and not any(hasattr(each, "device_mesh") for each in parameters)
        places = list(map(memory_of, parameters))  # A module that is loaded may put its parameters elsewhere.
        fit = _OfTorch(self, item, parameters, places, is_whole=is_whole)
        return lambda state: fit(state) if is_optimizer_state(state) else state

    # -- tables --------------------------------------------------------------------------------------------------------

    def _of_tables(self, item: Rebuilt, stored: Any) -> Any:
        own, rename = item.owner, self._changes.names.name
        if not all(isinstance(group.get("tables"), list) for group in stored["param_groups"]):
            return stored
        groups = [
            {**group, "tables": [rename(str(name)) for name in group["tables"]]} for group in stored["param_groups"]
        ]
        if self._strict or not all(len(group["tables"]) == len(group["params"]) for group in groups):
            return {**stored, "param_groups": groups}  # Which it compares, or refuses.
        there = {
            name: (stored["state"].get(number, {}).get("step", 0), frozenset(group))
            for group in groups
            for name, number in zip(group["tables"], group["params"], strict=True)
        }
        now, state = own.state_dict(), dict[Any, Any]()
        alive = {name for group in now["param_groups"] for name in group["tables"]}
        for group, live in zip(now["param_groups"], own.param_groups, strict=True):
            options = own.defaults.keys() & group.keys() - {"slots", "differentiable"}  # The second is torch's.
            was = _group_of(group["tables"], [each["tables"] for each in groups], alive)
            if was is not None and options <= groups[was].keys():  # Else it is of an optimizer with other rules.
                group |= {name: groups[was][name] for name in options}
            for name, number, parameter in zip(group["tables"], group["params"], live["params"], strict=True):
                loaded = self._tables.get(id(parameter.table))
                if loaded is None:
                    state[number] = now["state"].get(number, {})
                elif loaded.issuperset(group["slots"]):
                    step, had = there.get(name) or self._steps.get(name) or (None, frozenset[str]())
                    if step is None or not options <= had:
                        self._missing[f"{path_name(item.path)} of {name}"] = None
                    else:
                        state[number] = {"step": step}
        return {**stored, "state": state, "param_groups": now["param_groups"]}

    @cached_property
    def _steps(self) -> Mapping[str, tuple[int, frozenset[str]]]:
        """The steps that optimizers had of tables, by the names of these, and the options of their groups."""
        found: dict[str, tuple[int, frozenset[str]]] = {}
        options: dict[Path, set[str]] = defaultdict(set)
        values = self._contents.values
        for path in values:
            if len(path) > 2 and "param_groups" in path[:-2]:
                at = path.index("param_groups") + 2
                options[path[:at]].add(str(path[at]))
        for path, name in values.items():
            if len(path) > 3 and path[-2] == "tables" and path[-4] == "param_groups":
                number = values.get((*path[:-2], "params", path[-1]))
                step = values.get((*path[:-4], "state", ("int", number), "step"), 0)
                found[self._changes.names.name(str(name))] = step, frozenset(options[path[:-2]])
        return found

    # -- which parameter is which --------------------------------------------------------------------------------------

    def paths_of(self, names: Sequence[str], among: Collection[Path]) -> Sequence[Path] | None:
        """Return the stored tensors that names of parameters belong to, by their paths now; None: nobody can tell. All
        are names of one module, with more or less before them. among: some of them are among these.
        """
        among = set(among)
        found: list[Sequence[Path]] = []
        for cut in range(min(name.count(".") for name in names) + 1):
            parts = [name.split(".", cut) for name in names]
            if len({tuple(part[:cut]) for part in parts}) > 1:
                break
            shorter = [part[-1] for part in parts]
            for keys in self._stored_keys.values():
                last = f".{shorter[0]}"
                for before in [key[: -len(shorter[0])] for key in keys if f".{key}".endswith(last)]:
                    if all(before + name in keys for name in shorter):
                        paths = [keys[before + name] for name in shorter]
                        if paths not in found and not among.isdisjoint(paths):
                            found.append(paths)
        return found[0] if len(found) == 1 else None

    def may_be(self, name: str, source: StoredDense | None) -> bool:
        """Return whether a stored name of a parameter may be that of a tensor: one of both ends as the other."""
        if source is None:
            return True
        key, name = f".{bare_name(str(self._changes.was.get(source.path, source.path)[-1]))}", f".{bare_name(name)}"
        return key.endswith(name) or name.endswith(key)

    @cached_property
    def _stored_keys(self) -> Mapping[Path, Mapping[str, Path]]:
        """The tensors of the checkpoint by the keys that they had, with their paths now; for each mapping."""
        found: dict[Path, dict[str, Path]] = defaultdict(dict)
        paths = [(self._changes.was.get(path, path), path) for path in self._contents.leaf_paths]
        paths = [(was, path) for was, path in paths if type(was[-1]) is str]
        for was, path in paths:
            found[was[:-1]][str(was[-1])] = path
        for was, path in paths:
            found[was[:-1]].setdefault(bare_name(str(was[-1])), path)
        return found


class _OfTorch:
    """Makes the stored state of an optimizer of torch fit. places: where its parameters were when it was planned."""

    def __init__(
        self,
        changed: ChangedStates,
        item: Rebuilt,
        parameters: Sequence[torch.Tensor],
        places: Sequence[object],
        *,
        is_whole: bool,
    ) -> None:
        self._changed, self._item, self._is_whole = changed, item, is_whole
        self._parameters, self._places = parameters, places

    def __call__(self, stored: Any) -> Any:
        changed, own, groups = self._changed, self._item.owner.state_dict(), stored["param_groups"]
        sources = [changed._sources.get(place) for place in self._places]
        numbers = self._numbers(own["param_groups"], groups, sources)
        order = [number for group in groups for number in group["params"]]
        is_same = _sizes(own["param_groups"]) == _sizes(groups) and list(numbers.values()) == order
        shapes = [tuple(parameter.shape) for parameter in self._parameters]
        are_resized = any(each is not None and each.shape != shape for each, shape in zip(sources, shapes, strict=True))
        if is_same and not are_resized and not changed._changes.names.new:
            return stored
        if changed._strict and not is_same:
            raise UsageError("its parameters are others, or in another order, than those that were saved")
        is_lbfgs = isinstance(self._item.owner, torch.optim.LBFGS)  # It has one state for all of them.
        if (is_lbfgs or not self._is_whole) and (are_resized or not is_same):
            raise UsageError("its parameters have changed, and its state can only be taken as a whole")
        state: dict[Any, Any] = {}
        named = [group for group in own["param_groups"] for _ in group["params"]]
        for number, (source, shape) in enumerate(zip(sources, shapes, strict=True)):
            entries = stored["state"].get(numbers.get(number))
            if entries is not None and source is not None and source.shape != shape:
                entries = _with_shape(entries, source.shape, shape, named[number])
            if entries is not None:
                state[number] = entries
                continue
            if number in own["state"]:
                state[number] = own["state"][number]  # Some make it before the first step.
            if number not in numbers or numbers[number] in stored["state"]:
                known = changed._known_as.get(self._places[number], f"parameter {number}")
                changed._missing[f"{path_name(self._item.path)} of {known}"] = None
        return {**stored, "state": state, "param_groups": list(_groups(own["param_groups"], groups, numbers))}

    def _numbers(self, own: list[Any], groups: list[Any], sources: Sequence[StoredDense | None]) -> Mapping[int, Any]:
        """Return the stored numbers of parameters, by their own. UsageError: nobody can tell."""
        changed = self._changed
        numbers = [number for group in groups for number in group["params"]]
        there, given = (
            [str(name) for group in each for name in group.get("param_names", [])] for each in (groups, own)
        )
        told = [place is not None and place in changed._known_as for place in self._places]
        are_loaded = all(source is not None for source, is_told in zip(sources, told, strict=True) if is_told)
        is_same = _sizes(own) == _sizes(groups)
        if is_same and are_loaded and there == given and not changed._changes.names.new:
            return dict(enumerate(numbers))
        there = _bare(there)
        if len(there) == len(numbers) and len(set(there)) == len(there) and there:
            paths = changed.paths_of(there, {source.path for source in sources if source is not None})
            if paths is not None and all(told):
                number_at = dict(zip(paths, numbers, strict=True))
                found = {at: number_at.get(each.path) for at, each in enumerate(sources) if each is not None}
                return {at: number for at, number in found.items() if number is not None}
            given, by_name = _bare(given), dict(zip(there, numbers, strict=True))
            is_clear = len(given) == len(self._places) and len(set(given)) == len(given)
            if is_clear and not changed._changes.names.new and not by_name.keys().isdisjoint(given):
                pairs = enumerate(zip(given, sources, told, strict=True))
                return {
                    at: by_name[name]
                    for at, (name, source, is_told) in pairs
                    if name in by_name and (source is not None or not is_told)
                }
        if is_same and are_loaded and all(map(changed.may_be, there, sources)):
            return dict(enumerate(numbers))
        raise UsageError("its parameters are others, and no names tell which they were", hint=_HINT)


def _place(leaf: InPlace) -> object:
    """Return where a tensor is; None for one without elements, which is nowhere."""
    return memory_of(leaf.pieces[0].tensor) if leaf.pieces else None


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _bare(names: list[str]) -> list[str]:
    """Return names without those of wrappers, unless two became the same."""
    found = list(map(bare_name, names))
    return found if len(set(found)) == len(set(names)) else names


def _group_of(known: Collection[Any], groups: Sequence[Collection[Any]], alive: Collection[Any]) -> int | None:
    """Return which stored group had just these, of those that are still alive; None: they are in other groups now."""
    alive = set(alive)
    theirs = [alive.intersection(each) for each in groups]
    wanted = set(known).intersection(*([set().union(*theirs)] if theirs else []))
    return next((number for number, each in enumerate(theirs) if wanted and each == wanted), None)


def _groups(own: list[Any], stored: list[Any], numbers: Mapping[int, Any]) -> Iterator[dict[str, Any]]:
    """Yield the groups of an optimizer, with the options of the stored ones whose parameters they have."""
    for group in own:
        known = [numbers[number] for number in group["params"] if number in numbers]
        was = _group_of(known, [each["params"] for each in stored], list(numbers.values()))
        options = {} if was is None else {key: value for key, value in stored[was].items() if key != "param_names"}
        yield {**group, **options, "params": group["params"]}


def _with_shape(
    entries: Mapping[Any, Any], was: tuple[int, ...], shape: tuple[int, ...], group: Mapping[str, Any]
) -> Any:
    """Return the state of a parameter in another shape; None for one that has tensors of still other shapes."""
    found = dict(entries)
    for key, value in entries.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        if tuple(value.shape) != was:
            return None
        if value.stride() == (0,) * value.dim():  # It stands for one of this form.
            found[key] = value.new_zeros(()).expand(shape)
            continue
        found[key] = value.new_full(shape, float(group.get(_BEGINS_WITH.get(key, ""), 0)))
        both = tuple(map(slice, map(min, was, shape)))
        found[key][both] = value[both]
    return found
