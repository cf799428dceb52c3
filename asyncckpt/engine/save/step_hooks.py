"""Whoever wants to know that optimizers of this process step: one pair of hooks for all, which stays.

torch goes through its hooks while a step begins, and raises where one is added or removed meanwhile: by the collector,
another hook or another thread. So listeners are in a tuple, which is replaced; they go when nothing else holds them.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from asyncckpt.guard import Guard


class StepListener(Protocol):
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called on the thread of the step, before it writes anything."""
        ...


_guard = Guard()
_listeners: tuple[weakref.ref[StepListener], ...] = ()
_are_registered = False
# By identity: an optimizer may have no hash.
_stepping: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = weakref.WeakValueDictionary()


def listen(listener: StepListener) -> None:
    """Call a listener from now on, as long as something else holds it."""
    global _listeners, _are_registered
    with _guard:
        _listeners = (*(known for known in _listeners if known() is not None), weakref.ref(listener))
        if not _are_registered:
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)
            _are_registered = True


def is_stepping() -> bool:
    """Return whether an optimizer is within its step, as far as is known: one that raised counts until it steps again.

    Its closure and hooks of its own run behind the listeners.
    """
    return bool(len(_stepping))


def _before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _listeners:
        return
    # First: a save that a signal handler makes while a listener waits would be behind what that has waited for.
    _stepping[id(optimizer)] = optimizer
    try:
        for known in _listeners:
            listener = known()
            if listener is not None:
                listener.before_step(optimizer)
    except BaseException:  # The step does not begin.
        _stepping.pop(id(optimizer), None)
        raise


def _after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _stepping.pop(id(optimizer), None)
