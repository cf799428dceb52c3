"""What the optimizers of tables share: torch.optim.Optimizer over tables instead of tensors.

A group lists modules; the optimizer puts one TableParameter for each of their tables in their place, so that modules
that share a table count as one. Gradients are summed per id, in the order of the modules and of the forwards of each
module, before a single update of the row: the result depends on ids and batch order, never on row numbers, and a run
that was resumed from a checkpoint is bit-equal to one that was not.

Rows without a gradient stay as they are: momentum, moments and weight decay of a row advance in the steps that touch
it (docs/decisions/0023-rows-update-when-touched.md).

What belongs to a row is a slot of the table and saved with it. `state_dict()` has the rest in torch's shape: per table
the number of its steps, per group the hyper-parameters and the names of tables and slots.

Hyper-parameters are numbers of any kind, also of NumPy, and tensors of one element. What the caller gives for a new
group is checked for its sign. What a scheduler sets is not, nor is what a state has of it: schedulers end at -2e-19 for
0, by rounding, and torch takes that too.

What an optimizer has in place of a parameter: the rows of a table that wait for an update.

torch's tools look at `.grad` of what an optimizer's groups list, and change it in place: GradScaler unscales it,
clip_grad_norm_ scales it, zero_grad drops it. A table has no tensor with a gradient of its shape. So its parameter is a
leaf without rows, whose `grad` is `[n, dim]`: one row for each of the n distinct ids with a pending gradient, summed
over all mentions and forwards. That is the gradient of the whole table without its rows of zeros, so it has the same
norm and the same infinities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import nn

from asyncckpt.errors import UsageError, must_be
from asyncckpt.model.table import Role
from asyncckpt.signals import uninterrupted
from asyncckpt.tables.embedding import HashEmbedding, TrainableTable
from asyncckpt.tables.gradients import PendingRows, merged
from asyncckpt.tables.row_update import RuleStep, update_rows
from asyncckpt.tables.slots import WEIGHT_DTYPES, SlotSpec
from asyncckpt.tables.table_lock import uncompiled


class TableParameter(torch.Tensor):
    """The parameter of a table in one optimizer: `[0, dim]`, in the table's dtype and on its device.

    `grad` is the sum of what is pending in `modules`, None if nothing is; it may be changed in place, or set to None,
    which drops it. A gradient that comes later is added to it.
    """

    table: TrainableTable
    modules: tuple[HashEmbedding, ...]

    # What torch computes of it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as nn.Parameter does

    def __new__(cls, table: TrainableTable, modules: Sequence[HashEmbedding]) -> TableParameter:
        data = torch.empty((0, table.dim), dtype=table.embedding.dtype, device=table.device)
        made: TableParameter = torch.Tensor._make_subclass(cls, data, True)
        made.table, made.modules = table, tuple(modules)
        return made

    def __reduce_ex__(self, _: Any) -> Any:
        return TableParameter, (self.table, self.modules)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        return TableParameter(deepcopy(self.table, memo), deepcopy(self.modules, memo))

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes what only torch passes
        return f"TableParameter({self.table.name!r}, dim={self.shape[1]})"

    def pending(self) -> PendingRows | None:
        """Return what is pending, as one entry; None if nothing is."""
        return merged([module.pending for module in self.modules])

    def drop(self) -> None:
        """Drop what is pending."""
        for module in self.modules:
            module.pending.drop()

    @property
    def grad(self) -> torch.Tensor | None:
        entry = self.pending()
        return None if entry is None else entry.leaf.grad

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is None:
            self.drop()
            return
        entry = self.pending()
        now = None if entry is None else entry.leaf.grad
        found = (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else type(value)
        if entry is None or now is None or found != (now.shape, now.dtype, now.device):
            raise must_be(f"gradient of table {self.table.name!r}", "None or a tensor like the pending gradient", found)
        entry.leaf.grad = value


# What torch's optimizers would do, and these do not. Others of theirs are about speed, or ignored by torch too.
ABSENT_OPTIONS = frozenset(
    {
        "amsgrad",
        "capturable",
        "dampening",
        "decoupled_weight_decay",
        "differentiable",
        "initial_accumulator_value",
        "maximize",
    }
)

Modules: TypeAlias = nn.Module | Iterable[nn.Module] | Iterable[Mapping[str, Any]]
"""Modules that hold HashEmbedding or HashEmbeddingBag somewhere, or groups of them: `{"params": modules, "lr": 1}`."""


class SparseOptimizer(torch.optim.Optimizer):
    """An optimizer of the rows under HashEmbedding modules that got a gradient. Raises UsageError for wrong arguments.

    Use it like any other of torch's: param_groups, schedulers, GradScaler and hooks see nothing special. Its parameters
    are not in `model.parameters()`; to clip gradients, add `optimizer.parameters()` to these.
    """

    # Slots, in the order of the rule; by default a slot of the table has the name of its part.
    _slot_parts: ClassVar[tuple[str, ...]] = ()
    # Whether the last slot may have one number a row.
    _may_be_rowwise: ClassVar[bool] = False
    # Names of hyper-parameters that are not just a finite number of at least 0, and what reads them.
    _readers: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    def __init__(self, modules: Modules, defaults: dict[str, Any], slots: Mapping[str, str] | None) -> None:
        defaults = {**defaults, "slots": self._named_slots(slots)}
        self._read_numbers(defaults, defaults, is_new=True)
        super().__init__(_groups(modules), defaults)

    @classmethod
    def optimizer_slots(cls, *, rowwise: bool = False, dtype: torch.dtype = torch.float32) -> dict[str, SlotSpec]:
        """Return the slots that a new table needs, by name; rowwise: the last one has row shape ()."""
        if dtype not in WEIGHT_DTYPES:
            raise must_be(f"dtype of slots of {cls.__name__}", WEIGHT_DTYPES, dtype)
        if rowwise and not cls._may_be_rowwise:
            raise UsageError(f"{cls.__name__} has no row-wise form", found=rowwise)
        specs: dict[str, SlotSpec] = dict.fromkeys(cls._slot_parts, dtype)
        if rowwise:
            specs[cls._slot_parts[-1]] = (dtype, ())
        return specs

    def parameters(self) -> list[TableParameter]:
        """Return the parameters of all groups, for torch.nn.utils.clip_grad_norm_ and the like."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add `{"params": modules, ...}` with hyper-parameters of its own. Raises UsageError, and adds nothing.

        All modules of a table that the optimizer shall update are in one group.
        """
        if not isinstance(param_group, Mapping) or "params" not in param_group:
            raise must_be("group of a sparse optimizer", '{"params": modules}', param_group)
        group = {**self.defaults, **param_group}
        if isinstance(group["slots"], Mapping):
            group["slots"] = self._named_slots(group["slots"])
        parameters = [TableParameter(table, modules) for table, modules in _by_table(group["params"])]
        known = {id(parameter.table) for parameter in self.parameters()}
        for parameter in parameters:
            if id(parameter.table) in known:
                what = f"table {parameter.table.name!r} is in two groups of a sparse optimizer"
                raise UsageError(what, hint="give all modules of a table to one group")
        tables = [parameter.table.name for parameter in parameters]
        group.update(params=parameters, tables=tables)
        self._read_group(group, is_new=True)
        super().add_param_group(group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the rows with a pending gradient and drop the gradients; skip ids removed since their forward.

        closure: called first, with gradients enabled; what it returns is returned. A table that is in a cut is waited
        for. Raises UsageError for hyper-parameters that are not finite numbers; then nothing is updated, and the
        gradients stay.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_tables()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set steps and hyper-parameters to those of a `state_dict()`, all or none. Raises UsageError."""
        self._check_saved(state_dict)
        super().load_state_dict(copy(dict(state_dict)))

    def _check_saved(self, state_dict: object) -> None:
        """Raise UsageError for a state that `load_state_dict` does not take."""
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
            found = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict)
            raise must_be("state of a sparse optimizer", "a mapping with 'param_groups' and 'state'", found)
        groups = state_dict["param_groups"]
        if not isinstance(groups, list) or len(groups) != len(self.param_groups):
            count = f"{len(groups)} groups" if isinstance(groups, list) else type(groups)
            raise must_be("param_groups of the state of a sparse optimizer", f"{len(self.param_groups)} groups", count)
        for own, group in zip(self.param_groups, groups, strict=True):
            self._check_stored(own, group)
        steps = state_dict["state"]
        if not isinstance(steps, Mapping) or not all(_is_state(state) for state in steps.values()):
            raise must_be("state of a sparse optimizer", "a mapping of parameter to {'step': int}", steps)

    # -- for each of the optimizers ------------------------------------------------------------------------------------

    def _rule_step(self, group: dict[str, Any], steps_count: int) -> RuleStep | None:
        """Return what to do in the steps_count-th step, counted from 1, of a table of a group; None: nothing."""
        raise NotImplementedError

    def _slots_used(self, group: dict[str, Any]) -> Sequence[str]:
        """Return the slots that tables of a group need."""
        slots: Sequence[str] = group["slots"]
        return slots

    # ------------------------------------------------------------------------------------------------------------------

    @uncompiled
    @uninterrupted
    def _update_tables(self) -> None:
        for group in [self._read_group(group, is_new=False) for group in self.param_groups]:
            for parameter in group["params"]:
                entry = parameter.pending()
                if entry is None or entry.leaf.grad is None:
                    continue
                state = self.state[parameter]
                steps_count = state.get("step", 0) + 1
                step = self._rule_step(group, steps_count)
                if step is not None:
                    update_rows(parameter.table, entry.ids, entry.leaf.grad, step)
                state["step"] = steps_count
                parameter.drop()

    def _named_slots(self, slots: object) -> list[str]:
        if slots is None:
            return list(self._slot_parts)
        named = slots if isinstance(slots, Mapping) else None
        if named is None or not set(named) <= set(self._slot_parts):
            rule = f"a mapping of {list(self._slot_parts)} to names of slots"
            raise must_be("slots of a sparse optimizer", rule, slots)
        return [named.get(part, part) for part in self._slot_parts]

    def _names(self) -> list[str]:
        """Return the names of the hyper-parameters."""
        return [name for name in self.defaults if name != "differentiable"]  # That one torch adds in a load.

    def _read_group(self, group: dict[str, Any], *, is_new: bool) -> dict[str, Any]:
        """Check a group and return it with plain numbers."""
        absent = sorted(name for name in ABSENT_OPTIONS & group.keys() if group[name])
        if absent:
            what = f"option {absent[0]!r} of a sparse optimizer does not exist"
            raise UsageError(what, found=group[absent[0]], expected=self._names())
        group = {**group, **self._read_numbers(group, self._names(), is_new=is_new)}
        for parameter in group["params"]:
            used = self._slots_used(group)
            for name in used:
                _check_slot(parameter.table, name, may_be_rowwise=self._may_be_rowwise and name == used[-1])
        return group

    def _read_numbers(self, group: Mapping[str, Any], names: Iterable[str], *, is_new: bool) -> dict[str, Any]:
        numbers = {}
        for name in names:
            if name != "slots":
                numbers[name] = self._readers.get(name, read_number)(name, group[name], is_new=is_new)
                continue
            slots = group[name]
            if not isinstance(slots, (list, tuple)) or len(slots) != len(self._slot_parts):
                raise must_be("slots of a sparse optimizer", f"names for {list(self._slot_parts)}", slots)
        return numbers

    def _check_stored(self, own: dict[str, Any], stored: object) -> None:
        if not isinstance(stored, Mapping):
            raise must_be("group of the state of a sparse optimizer", "a mapping", type(stored))
        if lacking := sorted(set(self._names()) - set(stored)):
            raise UsageError(f"the state is not that of a {type(self).__name__}: it lacks {lacking}")
        if stored.get("tables") != own["tables"]:
            what = "state of a sparse optimizer is that of other tables"
            raise UsageError(what, found=stored.get("tables"), expected=own["tables"])
        params = stored.get("params")
        if not isinstance(params, list) or len(params) != len(own["params"]):
            raise must_be("params of the state of a sparse optimizer", f"{len(own['params'])} of them", params)
        self._read_group({**own, **stored, "params": own["params"]}, is_new=False)


def read_number(name: str, value: object, *, is_new: bool) -> float:
    """Return a finite number as a float; that of a new group is at least 0."""
    number = _as_float(value)
    if not math.isfinite(number) or (is_new and number < 0):
        rule = "a finite number >= 0" if is_new else "a finite number"
        raise must_be(f"{name} of a sparse optimizer", rule, value)
    return number


def read_positive(name: str, value: object, *, is_new: bool) -> float:
    """Return a finite number as a float; that of a new group is above 0."""
    number = read_number(name, value, is_new=is_new)
    if is_new and number == 0:
        raise must_be(f"{name} of a sparse optimizer", "a finite number > 0", value)
    return number


def read_betas(name: str, value: object, *, is_new: bool) -> tuple[float, ...]:
    """Return two numbers below 1 as floats; those of a new group are at least 0, others above -1."""
    betas = tuple(_as_float(beta) for beta in value) if isinstance(value, (tuple, list)) else ()
    if len(betas) != 2 or not all(abs(beta) < 1 and (beta >= 0 or not is_new) for beta in betas):
        raise must_be(f"{name} of a sparse optimizer", "two numbers in [0, 1)", value)
    return betas


def read_flag(name: str, value: object, *, is_new: bool) -> bool:
    """Return a bool."""
    if not isinstance(value, bool):
        raise must_be(f"{name} of a sparse optimizer", "a bool", value)
    return value


def _as_float(value: object) -> float:
    """Return a number, or the one of a tensor or array, as a float; nan if it is not a number."""
    if isinstance(value, (torch.Tensor, np.ndarray)) and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, Real) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # An int beyond all floats.
        return math.inf


def _groups(modules: object) -> list[dict[str, Any]]:
    roots = _listed(modules)
    if roots and all(isinstance(root, Mapping) for root in roots):
        return [dict(root) for root in roots]
    return [{"params": roots}]


def _listed(modules: object) -> list[Any]:
    if isinstance(modules, nn.Module):
        return [modules]
    if not isinstance(modules, Iterable):
        raise must_be("modules of a sparse optimizer", "a torch.nn.Module or several", type(modules))
    return list(modules)


def _by_table(modules: object) -> list[tuple[TrainableTable, list[HashEmbedding]]]:
    groups: dict[int, tuple[TrainableTable, list[HashEmbedding]]] = {}
    for module in _hash_modules(modules):
        groups.setdefault(id(module.table), (module.table, []))[1].append(module)
    return list(groups.values())


def _hash_modules(modules: object) -> list[HashEmbedding]:
    found: dict[int, HashEmbedding] = {}
    for root in _listed(modules):
        if not isinstance(root, nn.Module):
            raise must_be("module of a sparse optimizer", "a torch.nn.Module", type(root))
        found.update((id(module), module) for module in root.modules() if isinstance(module, HashEmbedding))
    if not found:
        raise UsageError("modules of a sparse optimizer hold no HashEmbedding or HashEmbeddingBag", found=modules)
    return list(found.values())


def _check_slot(table: TrainableTable, name: object, *, may_be_rowwise: bool) -> None:
    column = table.schema().column(name) if isinstance(name, str) else None
    is_slot = column is not None and column.role is Role.OPTIMIZER and column.dtype.is_floating_point
    shapes = ((table.dim,), ()) if may_be_rowwise else ((table.dim,),)
    if column is None or not is_slot or column.row_shape not in shapes:
        rule = f"a floating-point optimizer slot of row shape {' or '.join(map(str, shapes))}"
        raise must_be(f"slot {name!r} of table {table.name!r}", rule, column)


def _is_state(state: object) -> bool:
    step = state.get("step", 0) if isinstance(state, Mapping) else None
    return type(step) is int and step >= 0
