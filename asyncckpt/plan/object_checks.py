"""What is known of the load_state_dict of an object before anything is filled: where it would refuse what was stored,
or take the state of something else without a word.

Our own objects check a state themselves (`_check_saved`), torch's are known here, and nobody knows others, with a
load_state_dict of their own or hooks before it: theirs may fail when all tensors are filled.

An optimizer gets moments by the numbers of parameters. They are those of other parameters where the stored names have
another order, or the stored shapes fit in another order only. Its class is another one where the stored names of its
classes, or the options of its groups, differ; what a newer version of torch adds to a class, and what a program or a
scheduler adds to a group, does not. Of schedulers that are not torch's nobody can tell, nor by how many groups there
were: one may have been made before its optimizer got the last ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler

from asyncckpt.errors import CheckpointError
from asyncckpt.format.composite import Composite
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import VALUE, Path, composites, descend, leaves, path_name, rebuild
from asyncckpt.model.object_classes import CLASSES_OF, class_names, is_known_class
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.leaf_memory import memory_of
from asyncckpt.plan.load_targets import DenseTargets, InPlace, Rebuilt

if TYPE_CHECKING:
    from asyncckpt.plan.changed_states import Changes, OfTable
    from asyncckpt.plan.which_parameter import Parameters

# What torch's own optimizers keep for every element of a parameter.
_LIKE_PARAMETERS = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum", "square_avg", "grad_avg", "ax")
) | {"acc_delta", "prev", "step_size", "variance"}
# Without which these fail at the next step.
_KEEPS = dict.fromkeys(("Adam", "AdamW", "RAdam"), "exp_avg_sq") | {"NAdam": "mu_product", "Adamax": "exp_inf"}
_KEEPS |= {"RMSprop": "square_avg", "Adadelta": "acc_delta", "Adagrad": "sum", "Rprop": "prev"}
# Options that torch's optimizers have got since they are there, and what others put into groups.
_MAY_DIFFER = frozenset(
    ("params", "param_names", "initial_lr", "foreach", "fused", "maximize", "capturable", "differentiable", "amsgrad")
) | {"decoupled_weight_decay", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
# Of schedulers, what load_state_dict asks for; the first two have one item for each of those that it goes through.
_ASKED_FOR = ("lr_lambdas", "_schedulers", "_scale_fn_custom", "threshold_mode")
# What these have in some versions of torch, or with some arguments.
_NOT_ALWAYS = frozenset(("verbose", "use_beta1", "default_min_lr"))
_SCALER_KEYS = frozenset(("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"))


class ObjectChecks:
    """Which objects are loaded. loads: the tensors of a load, each with its source. tables: see ChangedStates.
    is_plain: all is loaded under its own name, into what it was saved from.

    unfit: what was stored that an object would not take. left: where the load is not strict, those that are not loaded
    for this, and why. incomplete: states of which tensors are left out. missing: what gets nothing. fits: what makes
    the states of objects fit, see changed_states.py.
    """

    def __init__(
        self,
        chain: Chain,
        contents: Contents,
        targets: DenseTargets,
        loads: Sequence[tuple[InPlace | None, StoredDense]],
        tables: Mapping[int, OfTable],
        *,
        strict: bool,
        changes: Changes | None,
        is_plain: bool,
    ) -> None:
        self.unfit, self.incomplete = list[str](), list[str]()
        self.left: dict[Path, list[str]] = {}
        self.missing: dict[str, None] = {}
        self.fits: dict[Path, Callable[[Any], Any]] = {}
        self._chain, self._contents, self._targets, self._loads = chain, contents, targets, loads
        self._strict = strict
        self._dense = {item.path: item for item in contents.dense.values()}
        self._was = {} if changes is None else changes.was
        self._changed = None
        if not is_plain:
            from asyncckpt.plan.changed_states import ChangedStates

            self._changed = ChangedStates(
                contents, self._parameters, tables, changes, strict=strict, missing=self.missing
            )

    def loaded(self, made: Collection[Path]) -> tuple[Rebuilt, ...]:
        """Return the objects whose tensors are all loaded. One with none of them loaded is left alone. made: the paths
        of tensors that are loaded for objects.
        """
        wanted: dict[Path, list[Path]] = defaultdict(list)
        for path in self._contents.leaf_paths:
            owner = self._targets.owner_of(path)
            if owner is not None:
                wanted[owner.path].append(path)
        filled = {target.path[:end] for target, _ in self._loads if target for end in range(len(target.path))}
        chosen = []
        for item in self._targets.rebuilt:
            if not self._contents.has(item.path) and not (item.is_module and item.path in filled):
                continue
            left_out = [path for path in wanted[item.path] if path not in made]
            if not item.is_module and left_out:
                if len(left_out) < len(wanted[item.path]):
                    name, at = path_name(left_out[0]), path_name(item.path)
                    self.incomplete.append(f"state of {at!r} is incomplete: {name!r} was filtered out")
                continue
            problems = self.problems(item) if self._contents.has(item.path) else []
            if problems and not self._strict:
                self.left[item.path] = problems
                self.missing[path_name(item.path)] = None
                continue
            chosen.append(item)
            self.unfit += problems
        if self._strict:
            return tuple(chosen)
        loaded = {id(item.owner) for item in chosen}
        return tuple(item for item in chosen if not self._is_of_another(item, loaded))

    def _is_of_another(self, item: Rebuilt, loaded: Collection[int]) -> bool:
        """Leave a schedule as it is whose optimizer stays so, or has other groups: return whether it is one."""
        optimizer = None if item.is_module else getattr(item.owner, "optimizer", None)
        is_loaded = id(optimizer) in loaded or all(each.owner is not optimizer for each in self._targets.rebuilt)
        are_same = self._changed is None or id(optimizer) not in self._changed.regrouped
        if optimizer is None or (is_loaded and are_same):
            return False
        name = path_name(item.path)
        what = "has other groups now" if is_loaded else "stays as it is"
        self.left[item.path], self.missing[name] = [f"{name!r} is of an optimizer that {what}"], None
        return True

    @property
    def _lists_of_groups(self) -> tuple[str, ...]:
        """What schedulers have one item of for each group: in a load where groups may have changed."""
        return () if self._changed is None else ("base_lrs", "min_lrs")

    @cached_property
    def _parameters(self) -> Parameters:
        from asyncckpt.plan.which_parameter import Parameters  # Only where names, or changes, tell which is which.

        return Parameters(self._chain, self._contents, self._targets, self._loads, self._was)

    def problems(self, item: Rebuilt) -> list[str]:
        """Return what is wrong with the state that was stored for an object, as far as it can be known."""
        own, is_foreign = item.owner, _loads_by_numbers(item.owner)
        if item.is_module or not (hasattr(type(own), "_check_saved") or _is_known(own) or is_foreign):
            return []
        name, stored = path_name(item.path), self._state(item.path)
        raw = stored  # Before what is still there of its groups has the options of those that are here.
        classes = self._contents.classes.get(item.path, ())
        try:
            if self._changed is not None and (fit := self._changed.of(item)) is not None:
                self.fits[item.path], stored = fit, fit(stored)
            if hasattr(type(own), "_check_saved"):
                if self._strict and class_names(own) and (other := other_class(own, classes, set(), set())):
                    return [f"{name!r} {other}"]
                own._check_saved(stored)
                return []
            if is_foreign:
                return [f"{name!r} {what}" for what in self._of_foreign(own, stored)]
            if isinstance(own, torch.optim.Optimizer):
                raw = raw if item.path in self.fits else None
                found = [f"{name!r} {what}" for what in self._of_optimizer(own, stored, classes, raw)]
                return found or self._of_composites(item, classes)
            if isinstance(own, lr_scheduler.LRScheduler):
                return [f"{name!r} {what}" for what in _of_scheduler(own, stored, classes, self._lists_of_groups)]
            if own.is_enabled() and not (isinstance(stored, Mapping) and stored.keys() >= _SCALER_KEYS):
                return [f"{name!r} is a GradScaler, and a disabled one, or none, was saved"]
        except CheckpointError as error:
            return [f"{name!r} does not take its state: {error}"]
        except (TypeError, KeyError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            return [
                f"{name!r} does not take its state, which no such object has saved: {type(error).__name__}: {error}"
            ]
        return []

    def _state(self, path: Path) -> Any:
        """Return what was stored at a path, with tensors that have but dtypes and shapes."""
        node = descend(self._contents.tree, path)
        assert node is not None
        found = dict(leaves(node, path))
        tensors = (form_of(self._dense.get(at)) for at, kind in found.items() if kind is not VALUE)
        return rebuild(node, tensors, (self._contents.values[at] for at, kind in found.items() if kind is VALUE))

    def _of_optimizer(
        self, own: torch.optim.Optimizer, stored: Any, classes: Collection[str], raw: Any
    ) -> Iterator[str]:
        if own._optimizer_load_state_dict_pre_hooks:
            return
        groups = stored.get("param_groups") if isinstance(stored, Mapping) else None
        if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
            yield "is an optimizer, and no state of one was saved"
            return
        numbers = [number for group in groups for number in group.get("params", [])]
        state = stored["state"]
        if any(type(number) is int and number not in state and str(number) in state for number in numbers):
            yield (
                "was saved by DCP as an optimizer's own state dict, with text for the numbers of parameters: get it by "
                "asyncckpt.load, make the keys of its 'state' int, and call load_state_dict"
            )
            return
        if other := other_class(own, classes, *_options(own, groups if raw is None else raw["param_groups"])):
            yield other
        found = [len(group.get("params", [])) for group in groups]
        sizes = [len(group["params"]) for group in own.param_groups]
        if found != sizes:
            yield f"has groups of {sizes} parameters, the checkpoint {found}"
            return
        if raw is None:
            if any([piece.tensor.shape for piece in to.pieces] != [to.whole_shape] for to in self._targets.in_place):
                yield from self._other_parameters(own)
            yield from self._other_order(own, own.param_groups, groups)
        keeps, entries = _KEEPS.get(type(own).__name__), [*state.values()]
        if keeps and any(isinstance(each, Mapping) and each and keeps not in each for each in entries):
            yield f"keeps {keeps!r} of parameters, and the checkpoint has none of it: it is of another class"
            return
        parameters = [parameter for group in own.param_groups for parameter in group["params"]]
        yield from _other_shapes(own, dict(zip(numbers, parameters, strict=True)), state)

    def _of_composites(self, item: Rebuilt, classes: Collection[str]) -> list[str]:
        """Tensors of classes of their own are made by just the class of optimizer that was saved."""
        names, node = class_names(item.owner), descend(self._contents.tree, item.path) or VALUE
        kinds = [Composite.of(each[3]).class_name for _, each in composites(node)]
        if not (kinds and names and classes) or names[0] == next(iter(classes)):
            return []
        what = f"is of class {names[0]!r}, the checkpoint has {kinds[0]} of a {next(iter(classes))!r}"
        return [f"{path_name(item.path)!r} {what}"]

    def _of_foreign(self, own: torch.optim.Optimizer, stored: Any) -> Iterator[str]:
        """Compare the parameters of an optimizer that loads in its own way, as a whole."""
        if not is_optimizer_state(stored):
            return
        groups = stored["param_groups"]
        said = own.state_dict()["param_groups"]  # Some save others than they have.
        found, sizes, real = ([len(each["params"]) for each in one] for one in (groups, said, own.param_groups))
        if found != sizes:
            yield f"has groups of {sizes} parameters, the checkpoint {found}"
            return
        yield from self._other_parameters(own)
        if sum(sizes) == sum(real):
            yield from self._other_order(own, said, groups)

    def _other_parameters(self, own: torch.optim.Optimizer) -> Iterator[str]:
        for number, parameter in enumerate(each for group in own.param_groups for each in group["params"]):
            paths = self._parameters.paths(parameter)
            is_new = not self._strict and paths and not self._parameters.sources(paths)
            if is_new or self._parameters.shape_before(parameter, paths) is not None:
                yield f"has a parameter {number} that is {'not loaded' if is_new else 'of another shape or part'}"
                return

    def _other_order(self, own: torch.optim.Optimizer, said: list[Any], groups: list[Any]) -> Iterator[str]:
        """Compare what the stored names of parameters belong to with what these are loaded from. said: its groups."""
        if not any("param_names" in group for group in groups):
            return
        at = [self._parameters.paths(parameter) for group in own.param_groups for parameter in group["params"]]
        numbers = self._parameters.numbers(said, groups, at)
        order = [number for group in groups for number in group["params"]]
        there = [name for group in groups for name in group.get("param_names", ())]
        for index, (number, paths) in enumerate(zip(order, at, strict=True)):
            if numbers.get(index, number) != number or (index not in numbers and self._parameters.sources(paths)):
                name = there[order.index(numbers[index])] if index in numbers else path_name(paths[0])
                what = f"number {index} is {name!r}, in the checkpoint {there[index]!r}"
                yield f"has its parameters in another order: {what}"
                return


def _is_known(own: Any) -> bool:
    """Return whether torch makes and loads the state of an object, in a way that is known here."""
    if not isinstance(own, (torch.optim.Optimizer, lr_scheduler.LRScheduler, torch.amp.GradScaler)):
        return False
    modules = [str(getattr(method, "__module__", "")) for method in (own.state_dict, own.load_state_dict)]
    return all(module.startswith(("torch.optim.", "torch.amp.")) for module in modules)


def _loads_by_numbers(own: Any) -> bool:
    """Return whether an optimizer has a state dict of torch's form, and loads it in a way of its own."""
    if not isinstance(own, torch.optim.Optimizer) or hasattr(type(own), "_check_saved") or _is_known(own):
        return False
    groups = state["param_groups"] if is_optimizer_state(state := own.state_dict()) else []
    numbers = [number for group in groups for number in group["params"]]
    return bool(numbers) and numbers == [*range(len(numbers))]


def loads_as(base: Any, owner: Any) -> bool:
    """Return whether load_state_dict of an object is torch's own."""
    is_own = isinstance(owner, base) and type(owner).load_state_dict is base.load_state_dict
    return is_own and "load_state_dict" not in vars(owner)


def parameters_at(places: Collection[object], owners: Iterable[Any]) -> Mapping[int, torch.dtype]:
    """Return the ids and dtypes of the parameters that torch's load_state_dict gives states, of those at such places,
    see `memory_of`."""
    optimizers = (owner for owner in owners if loads_as(torch.optim.Optimizer, owner))
    parameters = (each for owner in optimizers for group in owner.param_groups for each in group["params"])
    return {id(each): each.dtype for each in parameters if memory_of(each) in places}


def form_of(stored: StoredDense | None) -> torch.Tensor:
    """Return a tensor of the stored dtype and shape, which takes no memory."""
    if stored is None:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    dtype = dtype_by_name(stored.dtype, owner=stored.name).dtype
    return torch.zeros((), dtype=dtype, device="cpu").expand(stored.shape)


def is_optimizer_state(stored: Any) -> bool:
    """Return whether what was stored is the state of an optimizer, as torch's have it."""
    if not isinstance(stored, Mapping) or not isinstance(stored.get("state"), Mapping):
        return False
    groups = stored.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def _options(own: torch.optim.Optimizer, groups: list[Any]) -> tuple[set[str], set[str]]:
    """Return options that an optimizer has and the stored groups lack, and those that only these have."""
    if not groups or not own.param_groups:
        return set(), set()
    return set(own.defaults) - set(groups[0]), set(groups[0]) - set(own.param_groups[0])


def other_class(own: Any, classes: Collection[str], lacking: set[str], unknown: set[str]) -> str | None:
    """Return that a state is one of another class, with other options; None: it is not, or nobody can tell.

    classes: those of the object that was saved, as far as they are known.
    """
    names = class_names(own)
    base = next(base for base in CLASSES_OF if isinstance(own, base))
    ours, theirs = (next((name for name in item if is_known_class(name, base)), None) for item in (names, classes))
    if not set(names).isdisjoint(classes) and (ours == theirs or not (ours and theirs)):  # AdamW is an Adam to torch.
        return None
    is_scheduler, is_own = base is lr_scheduler.LRScheduler, bool(names) and ours == names[0]
    is_adams = "amsgrad" in unknown  # No version of torch has taken it from a class.
    lacking, unknown = lacking - _MAY_DIFFER, unknown - _MAY_DIFFER
    # A plain state dict, or one of before they were kept, is stored without classes: what torch's own ones always have
    # tells whether it is the one that is here.
    is_other = base is torch.optim.Optimizer and bool(classes and names) and bool(ours) != bool(theirs)
    is_known = is_own and not classes and ((is_scheduler and (lacking or unknown)) or is_adams)
    is_foreign = is_scheduler and (classes or not is_own)
    if not (ours and theirs) and not is_known and not is_other and (is_foreign or not (lacking and unknown)):
        return None
    saved = f"state of {next(iter(classes))!r}" if classes else "state of another class"
    differ = f", which differs in {sorted(lacking | unknown)}" if lacking or unknown else ""
    return f"is of class {names[0]!r}, the checkpoint has the {saved}{differ}"


def _other_shapes(own: torch.optim.Optimizer, parameters: Mapping[Any, Any], state: Any) -> Iterator[str]:
    """Return states without their parameters' shapes, if they always have these, or have them in another order."""
    found: dict[Any, dict[Any, tuple[int, ...]]] = defaultdict(dict)
    for number, entries in state.items() if isinstance(state, Mapping) else ():
        if number in parameters and isinstance(entries, Mapping):
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    found[key][number] = tuple(value.shape)
    is_torchs = type(own).step.__module__.startswith("torch.optim.")
    for key, shapes in found.items():
        wanted = {number: tuple(parameters[number].shape) for number in shapes}
        if shapes == wanted or (not is_torchs and shapes == {number: shape[::-1] for number, shape in wanted.items()}):
            continue  # Others may keep it transposed.
        if (is_torchs and key in _LIKE_PARAMETERS) or sorted(shapes.values()) == sorted(wanted.values()):
            number = next(number for number in shapes if shapes[number] != wanted[number])
            is_order = not Counter(shapes.values()) - Counter(tuple(item.shape) for item in parameters.values())
            yield (
                f"has a parameter {number} of shape {wanted[number]}, its {key!r} in the checkpoint has "
                f"{shapes[number]}{': they may be in another order' if is_order else ''}"
            )
            return


def _of_scheduler(own: Any, stored: Any, classes: Collection[str], more: tuple[str, ...] = ()) -> Iterator[str]:
    state = own.state_dict()
    if not isinstance(stored, Mapping):
        yield "is a scheduler, and no state of one was saved"
        return
    public = [
        {key for key in item if key == "_schedulers" or not str(key).startswith("_")} - _NOT_ALWAYS
        for item in (state, stored)
    ]
    if other := other_class(own, classes, public[0] - public[1], public[1] - public[0]):
        yield other
        return
    for key in (*_ASKED_FOR, *more):
        mine, theirs = state.get(key), stored.get(key)
        if key in state and key not in stored:
            yield f"has {key!r}, the checkpoint none: it may be of another scheduler"
        elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) != len(theirs):
            yield f"has {len(mine)} of {key!r}, the checkpoint {len(theirs)}"
        elif key == "_schedulers" and isinstance(mine, list) and isinstance(theirs, list):
            for inner, state_of_inner in zip(own._schedulers, theirs, strict=True):
                for what in _of_scheduler(inner, state_of_inner, (), more) if _is_known(inner) else ():
                    yield f"holds one that {what}"
