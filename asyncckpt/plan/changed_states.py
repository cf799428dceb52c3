"""What was stored for an optimizer, as one of a changed model takes it. Of loads that are not strict, rename or resize.

An optimizer of tables takes it table by table: its steps, if all its slots are loaded, whichever optimizer had them;
and a group the numbers of a stored one that had the same tables, as far as they are still there.

An optimizer of torch takes it parameter by parameter, and its state goes with its values: from the tensor that it is
loaded from. Which stored state is of which tensor is told by the stored names of parameters (which_parameter.py); where
no tensors have them, as for parameters that are not saved, by these names alone; and without names by the numbers, as
torch does, if all parameters are loaded. A parameter that is not loaded has no state. One that is resized has its
moments resized with it.

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
from asyncckpt.format.tree import Node, Path, composites, descend, kinds_in, leaves, path_name, tensor_paths
from asyncckpt.format.values import COMPOSITE
from asyncckpt.plan.contents import Contents
from asyncckpt.plan.load_targets import Rebuilt
from asyncckpt.plan.object_checks import is_optimizer_state, loads_as, other_class
from asyncckpt.plan.rename import Names
from asyncckpt.plan.state import flatten
from asyncckpt.plan.which_parameter import Parameters, sizes_of

Fit = Callable[[Any], Any]
OfTable = tuple[frozenset[str], str, tuple[str, ...]]  # Its columns, its name as a target, and what it is loaded from.
# What the elements begin with that a moment of a resized parameter gets: 0, or this option of the group.
_BEGINS_WITH = {"sum": "initial_accumulator_value", "step_size": "lr"}

# Options without which a state has less in it.
_NEEDS_STATE = ("amsgrad", "centered", "momentum")


@dataclass(frozen=True)
class Changes:
    """What of a model has another name, or may have another shape, than what was stored. See Loader. was: the paths
    that tensors had, by those that they have now.
    """

    names: Names
    resized: frozenset[str]
    was: Mapping[Path, Path] = field(default_factory=dict)

    @staticmethod
    def apply(
        rename: Mapping[str, str],
        resize: Collection[str],
        chain: Chain,
        strict: bool,
        own_tables: Collection[str],
        own_state: Mapping[str, Any],
    ) -> tuple[Changes, Chain]:
        """Check them, and return them with a checkpoint under the new names. UsageError.

        The next restore renames once more: then all have their new names, and stay.
        """
        by_new = {new: old for old, new in rename.items()}
        for old, new in rename.items():
            above = [*_begins([new]) & rename.keys() - ({old} if new != old else set())]
            above += [name for name in _begins([old]) & by_new.keys() if by_new[name] != old]
            if above:
                hint = "the next restore would rename it once more; a filter_func, for one restore, can exchange names"
                raise UsageError(f"rename gives names that it takes away: {old!r} -> {new!r}", found=above, hint=hint)
        tensors = {name for part in chain.newest.parts for name in _names_in(part.tree)}
        tables = {facts.name for part in chain.newest.parts for facts in part.tables}
        below: dict[str, list[str]] = defaultdict(list)
        for name in tensors | tables:
            for begin in _begins([name]):
                below[begin].append(name)
        if strict and (unknown := [old for old, new in rename.items() if not (below.get(old) or below.get(new))]):
            raise UsageError("rename has unknown names", found=sorted(unknown), expected=sorted(tensors | tables)[:16])
        flat, chosen = flatten(own_state), dict[str, str]()
        own = {*own_tables, *_names_in(flat.tree)}
        objects = {path_name(path) for path, owner in flat.stateful if isinstance(owner, torch.optim.Optimizer)}
        for old, new in rename.items():
            called = {name: new + name[len(old) :] for name in below.get(old, ())}
            # An optimizer has all that is stored of it, whatever it has kept so far.
            own |= {name for pair in called.items() for name in pair if not objects.isdisjoint(_begins([name]))}
            wanted = _not_renamed_yet(called, below.get(new, ()), tables, tensors, own)
            chosen |= {old: new} if wanted and len(wanted) == len(called) else {name: called[name] for name in wanted}
        names = Names(chosen)
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


def _names_in(tree: Node) -> set[str]:
    """Return the names of the tensors and values in a tree; one that consists of several has one."""
    whole = {path for path, _ in composites(tree)}
    ends = ((path, range(1, len(path))) for path, _ in leaves(tree))
    return {path_name(next((path[:end] for end in each if path[:end] in whole), path)) for path, each in ends}


def _not_renamed_yet(
    called: Mapping[str, str], at_new: Sequence[str], tables: set[str], tensors: set[str], own: set[str]
) -> set[str]:
    """Return which names of a checkpoint one rename is for, by the names that the model has: some may have been renamed
    before, or be of what has an old name now. called: what it makes of them. at_new: what is there under the new name.

    A name that the model has no more is renamed if the model has what it becomes; the other way round it stays. Where
    the model has both, or neither, it goes by the others.
    """
    wanted, kept, left = set[str](), set[str](), set[str]()
    for name, new in called.items():
        if new not in called and new in (tables if name in tables else tensors):
            if name not in own and new in own:
                what = f"rename gives {name!r} the name {new!r}, and the checkpoint has both"
                hint = "leave out what is renamed already; of what is not, a filter_func loads one of both"
                raise UsageError(what, hint=hint)
            kept.add(name)
        elif (name in own) == (new in own):
            left.add(name)
        else:
            (kept if name in own else wanted).add(name)
    is_done = bool(kept or own.intersection(at_new).difference(called))
    if wanted and is_done and (both := sorted(left & own)):
        what = f"nobody can tell whether {both[0]!r} is renamed already"
        raise UsageError(what, hint=f"name what is to be renamed one by one: {sorted(wanted)[:8]}")
    return wanted | left if wanted or not is_done else wanted


def _begins(names: Collection[str]) -> set[str]:
    """Return what names begin with, up to a dot or to their end."""
    return {name[:end] for name in names for end in range(1, len(name) + 1) if name[end : end + 1] in ("", ".")}


class ChangedStates:
    """Makes the states of one load fit. missing: gets what has no state then, as a report has it. regrouped: gets the
    ids of optimizers whose groups are no longer those that were stored.

    tables: those that are loaded, by their ids.
    """

    def __init__(
        self,
        contents: Contents,
        parameters: Parameters,
        tables: Mapping[int, OfTable],
        changes: Changes | None,
        *,
        strict: bool,
        missing: dict[str, None],
    ) -> None:
        self._contents, self._tables, self._strict, self._missing = contents, tables, strict, missing
        self._changes = Changes(Names(), frozenset()) if changes is None else changes
        self._parameters = parameters
        self.regrouped: set[int] = set()

    def of(self, item: Rebuilt) -> Fit | None:
        """Return what makes the stored state of an object fit; None: it stays as it is. It raises UsageError for one of
        which nobody can tell how.
        """
        own, node = item.owner, descend(self._contents.tree, item.path)
        if item.is_module or node is None:
            return None
        if hasattr(type(own), "_check_saved") and all("tables" in each for each in getattr(own, "param_groups", [{}])):
            return lambda state: self._of_tables(item, state) if is_optimizer_state(state) else state
        if not loads_as(torch.optim.Optimizer, own):
            return None
        if own._optimizer_load_state_dict_pre_hooks or own._optimizer_state_dict_post_hooks:
            return None
        parameters = [parameter for group in own.param_groups for parameter in group["params"]]
        is_whole = COMPOSITE not in kinds_in(node) and not any(hasattr(each, "device_mesh") for each in parameters)
        # At once: a module that is loaded may put its parameters elsewhere.
        paths = list(map(self._parameters.paths, parameters))
        fit = _OfTorch(self, item, parameters, paths, is_whole=is_whole)
        return lambda state: fit(state) if is_optimizer_state(state) else state

    # -- tables --------------------------------------------------------------------------------------------------------

    def _of_tables(self, item: Rebuilt, stored: Any) -> Any:
        own, rename = item.owner, self._changes.names.name
        if not all(isinstance(group.get("tables"), list) for group in stored["param_groups"]):
            return stored
        groups = [
            {**group, "tables": [rename(str(name)) for name in group["tables"]]} for group in stored["param_groups"]
        ]
        now, state = own.state_dict(), dict[Any, Any]()
        of = {
            name: self._tables.get(id(parameter.table), (frozenset[str](), name, ()))
            for group, live in zip(now["param_groups"], own.param_groups, strict=True)
            for name, parameter in zip(group["tables"], live["params"], strict=True)
        }
        called = {key: name for name, (_, key, _) in of.items()}  # Optimizers have tables by their own names.
        sources = {name: tuple(called.get(key, key) for key in found) for name, (_, _, found) in of.items()}
        are_own = all(found in ((), (name,)) for name, found in sources.items())
        if (self._strict and are_own) or not all(len(group["tables"]) == len(group["params"]) for group in groups):
            return {**stored, "param_groups": groups}  # Which it compares, or refuses.
        there = {
            name: (stored["state"].get(number, {}).get("step", 0), frozenset(group))
            for group in groups
            for name, number in zip(group["tables"], group["params"], strict=True)
        }
        was_in = _Groups([each["tables"] for each in groups], sources)
        is_other = other_class(own, self._contents.classes.get(item.path, ()), set(), set())
        for number, (group, live) in enumerate(zip(now["param_groups"], own.param_groups, strict=True)):
            options = own.defaults.keys() & group.keys() - {"slots", "differentiable"}  # The second is torch's.
            was = was_in.same_as(group["tables"])
            if was != number:
                self.regrouped.add(id(own))
            if was is not None and options <= groups[was].keys() and not is_other:  # Else it has other rules.
                group |= {name: groups[was][name] for name in options}
            for name, number, parameter in zip(group["tables"], group["params"], live["params"], strict=True):
                if id(parameter.table) not in self._tables:
                    state[number] = now["state"].get(number, {})
                elif self._tables[id(parameter.table)][0].issuperset(own._slots_used(group)):
                    known = [there.get(source) or self._steps.get(source) for source in sources[name]]
                    steps = {found[0] for found in known if found is not None and options <= found[1]}
                    if len(known) == 1 and len(steps) == 1:
                        state[number] = {"step": steps.pop()}
                    else:
                        self._missing[f"{path_name(item.path)} of {name}"] = None
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


class _OfTorch:
    """Makes the stored state of an optimizer of torch fit. paths: where its parameters are among the targets."""

    def __init__(
        self,
        changed: ChangedStates,
        item: Rebuilt,
        parameters: Sequence[torch.Tensor],
        paths: Sequence[Sequence[Path]],
        *,
        is_whole: bool,
    ) -> None:
        self._changed, self._item, self._is_whole = changed, item, is_whole
        self._parameters, self._paths = parameters, paths

    def __call__(self, stored: Any) -> Any:
        changed, own, groups = self._changed, self._item.owner.state_dict(), stored["param_groups"]
        numbers = changed._parameters.numbers(own["param_groups"], groups, self._paths)
        order = [number for group in groups for number in group["params"]]
        is_same = sizes_of(own["param_groups"]) == sizes_of(groups) and list(numbers.values()) == order
        shapes = [tuple(parameter.shape) for parameter in self._parameters]
        stored_as = map(changed._parameters.shape_before, self._parameters, self._paths)
        was = [shape if found is None else found for found, shape in zip(stored_as, shapes, strict=True)]
        if is_same and was == shapes and not changed._changes.names.new:
            return stored
        is_renamed = len(numbers) == len(order) == len(shapes) and changed._parameters.are_others(self._paths)
        members = [{numbers.get(number) for number in group["params"]} for group in own["param_groups"]]
        is_regrouped = members != [set(group["params"]) for group in groups]
        if changed._strict and not is_same and (is_regrouped or not is_renamed):
            raise UsageError(
                "its parameters are others, or in another order or other groups, than those that were saved"
            )
        is_lbfgs = isinstance(self._item.owner, torch.optim.LBFGS)  # It has one state for all of them.
        if (is_lbfgs or not self._is_whole) and (was != shapes or not is_same):
            raise UsageError("its parameters have changed, and its state can only be taken as a whole")
        # What is under a text is of no parameter.
        state: dict[Any, Any] = {key: value for key, value in stored["state"].items() if type(key) is str}
        named, taken = [group for group in own["param_groups"] for _ in group["params"]], set[Any]()
        fitted = list(self._groups(own["param_groups"], groups, numbers))
        now, then = ([group for group in each for _ in group["params"]] for each in (fitted, groups))
        of = dict(zip(order, then, strict=True))
        for number, (before, shape) in enumerate(zip(was, shapes, strict=True)):
            entries = stored["state"].get(numbers.get(number))
            if entries is not None and before != shape:
                entries = _with_shape(entries, before, shape, named[number])
            if entries is not None:
                self._check_options(now[number], of[numbers[number]])
                state[number] = _copied(entries) if numbers[number] in taken else entries
                taken.add(numbers[number])
                continue
            if number in own["state"] and number not in numbers:
                state[number] = own["state"][number]  # Some make it before the first step.
            if number not in numbers or numbers[number] in stored["state"]:
                paths = self._paths[number]
                known = path_name(paths[0]) if paths else f"parameter {number}"
                changed._missing[f"{path_name(self._item.path)} of {known}"] = None
        return {**stored, "state": state, "param_groups": fitted}

    def _groups(self, own: list[Any], stored: list[Any], numbers: Mapping[int, Any]) -> Iterator[dict[str, Any]]:
        """Yield the groups of an optimizer, with the options of the stored ones whose parameters they have."""
        was_in = _Groups([each["params"] for each in stored], numbers.values())
        for at, group in enumerate(own):
            was = was_in.same_as([numbers[number] for number in group["params"] if number in numbers])
            if was != at:
                self._changed.regrouped.add(id(self._item.owner))
            options = {} if was is None else {key: value for key, value in stored[was].items() if key != "param_names"}
            yield {**group, **options, "params": group["params"]}

    def _check_options(self, now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
        """Raise UsageError if a group has options that need more state than one had."""
        for option in _NEEDS_STATE:  # SGD makes what is not there.
            if now.get(option) and not then.get(option) and not isinstance(self._item.owner, torch.optim.SGD):
                raise UsageError(f"its option {option!r} was off, so that its state was not saved")


class _Groups:
    """Which stored group had just the same, of what is still there."""

    def __init__(self, stored: Sequence[Collection[Any]], alive: Collection[Any]) -> None:
        alive = set(alive)
        self._there = set[Any]().union(*stored)
        self._found: dict[frozenset[Any], int] = {}
        for number, group in enumerate(stored):
            self._found.setdefault(frozenset(alive.intersection(group)), number)

    def same_as(self, group: Collection[Any]) -> int | None:
        known = frozenset(self._there.intersection(group))
        return self._found.get(known) if known else None


def _copied(value: Any) -> Any:
    """Return the state of a parameter for a second one. What stands for a tensor of its form stays so."""
    if isinstance(value, torch.Tensor):
        return value.clone() if not value.dim() or any(value.stride()) else value
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def _with_shape(
    entries: Mapping[Any, Any], was: tuple[int, ...], shape: tuple[int, ...], group: Mapping[str, Any]
) -> Any:
    """Return the state of a parameter in another shape; None for one that has tensors of still other shapes."""
    found = dict(entries)
    for key, value in entries.items():
        held = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        if any(isinstance(each, torch.Tensor) for each in held):
            return None
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
