"""Whether the state has been changed since a step of training has ended: it is in the middle of the next one.

Then what is saved may be half of that step. Seen are

    an optimizer of the state begins its step
    another one does, of parameters or tables of the state: one of a part, or those that step in a backward
    a module that changes rows in its backward (FBGEMM's with a fused optimizer) gets a gradient

What else changes in the middle of a step (statistics of a BatchNorm in forward, random numbers, a position in the data)
is not seen; nor what a compiled forward or a replayed graph does, for these run no hooks.

An optimizer may be a wrapper, whose step is that of another one, which has the same parameters. So the steps of all
optimizers of the process are looked at. One that is neither seen to step, nor of a class whose step torch reports, says
nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from asyncckpt.engine.features.step_hooks import listen
from asyncckpt.model.table import Table, TrainedInBackward


class StepWatch:
    """The optimizers of one state, in its mappings, lists and tuples, and what else trains it. The hooks go with it."""

    def __init__(self, state: Any, tables: Mapping[str, Table] = {}) -> None:
        self._is_changed = False
        self._state, self._tables = state, tables
        self._trained: dict[int, Any] | None = None
        self._optimizers = list(_found_in(state, torch.optim.Optimizer))
        self._tell = [bool(getattr(type(optimizer).step, "hooked", False)) for optimizer in self._optimizers]
        if not self._optimizers:
            return
        listen(self)
        own = weakref.ref(self)

        def before_backward(_: torch.Tensor) -> None:
            watch = own()
            if watch is not None:
                watch._is_changed = True

        def after_forward(_: torch.nn.Module, __: Any, output: Any) -> None:
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                for tensor in _found_in(output, torch.Tensor):
                    if tensor.requires_grad:
                        tensor.register_hook(before_backward)

        modules = (table.in_backward_of for table in tables.values() if isinstance(table, TrainedInBackward))
        for module in dict.fromkeys(modules):
            if module is not None:
                weakref.finalize(self, module.register_forward_hook(after_forward).remove).atexit = False

    def step_ended(self) -> None:
        """Note that the state is that of the end of a step."""
        self._is_changed = False

    @property
    def is_changed(self) -> bool | None:
        """Whether an optimizer has begun a step since; None: there are none that could tell, or one that could not."""
        return True if self._is_changed else False if self._tell and all(self._tell) else None

    def before_step(self, stepping: torch.optim.Optimizer) -> None:
        """Note whose step begins."""
        is_known = False
        for number, optimizer in enumerate(self._optimizers):
            if optimizer is stepping or _share_parameters(optimizer, stepping):
                self._is_changed = self._tell[number] = is_known = True
        if not is_known and not self._is_changed:
            self._is_changed = self._trains(stepping)

    def _trains(self, stepping: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer that is not in the state has parameters or tables that are."""
        if self._trained is None:
            found = (*self._tables.values(), *_found_in(self._state, torch.Tensor))
            self._trained = {id(item): item for item in found}  # Kept alive, so that their ids stay theirs.
        firsts = (group["params"][0] for group in stepping.param_groups if group["params"])
        return any(id(getattr(first, "table", first)) in self._trained for first in firsts)


def _share_parameters(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Return whether the first parameter of the other one is one of its own."""
    first = next((parameter for group in other.param_groups for parameter in group["params"]), None)
    return first is not None and any(first is parameter for group in one.param_groups for parameter in group["params"])


def _found_in(state: Any, *kinds: type) -> Iterator[Any]:
    """Yield the items of these kinds in mappings, lists and tuples, and the tensors of modules."""
    if isinstance(state, kinds):
        yield state
    elif torch.Tensor in kinds and isinstance(state, (torch.nn.Module, Mapping)) and hasattr(state, "parameters"):
        yield from state.parameters()  # Of the dense state of a module, those of the module.
    elif isinstance(state, (Mapping, list, tuple)):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from _found_in(value, *kinds)
