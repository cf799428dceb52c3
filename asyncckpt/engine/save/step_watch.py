"""Whether the state has been changed since a step of training has ended: an optimizer has begun its next step.

Then what is saved in the middle of a step may be half of that step. What else changes in the middle of one (statistics
of a BatchNorm in forward, random numbers, a position in the data) is not seen.

An optimizer may be a wrapper, whose step is that of another one, which has the same parameters. So the steps of all
optimizers of the process are looked at. One that is neither seen to step, nor of a class whose step torch reports, says
nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class StepWatch:
    """The optimizers of one state, in its mappings, lists and tuples. The hook goes when this does."""

    def __init__(self, state: Any) -> None:
        self._is_changed = False
        self._optimizers = list(_optimizers_in(state))
        self._tell = [bool(getattr(type(optimizer).step, "hooked", False)) for optimizer in self._optimizers]
        if not self._optimizers:
            return
        own = weakref.ref(self)

        def before_step(stepping: torch.optim.Optimizer, *_: Any) -> None:
            watch = own()
            if watch is not None:
                watch._note(stepping)

        weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove).atexit = False

    def step_ended(self) -> None:
        """Note that the state is that of the end of a step."""
        self._is_changed = False

    @property
    def is_changed(self) -> bool | None:
        """Whether an optimizer has begun a step since; None: there are none that could tell, or one that could not."""
        return True if self._is_changed else False if self._tell and all(self._tell) else None

    def _note(self, stepping: torch.optim.Optimizer) -> None:
        for number, optimizer in enumerate(self._optimizers):
            if optimizer is stepping or _share_parameters(optimizer, stepping):
                self._is_changed = self._tell[number] = True


def _share_parameters(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Return whether the first parameter of the other one is one of its own."""
    first = next((parameter for group in other.param_groups for parameter in group["params"]), None)
    return first is not None and any(first is parameter for group in one.param_groups for parameter in group["params"])


def _optimizers_in(state: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(state, torch.optim.Optimizer):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _optimizers_in(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _optimizers_in(value)
