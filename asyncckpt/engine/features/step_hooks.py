"""Listeners to the steps of this process's optimizers: one pair of hooks for all, which stays.

torch goes through its hooks while a step begins, and raises where one is added or removed meanwhile: by the collector,
another hook or another thread. So listeners are in a tuple, which is replaced; they go when nothing else holds them.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from asyncckpt.signals import Guard


class StepListener(Protocol):
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called on the thread of the step, before it writes anything."""
        ...


_guard = Guard()
_listeners: tuple[weakref.ref[StepListener], ...] = ()
_are_registered = False
# By identity: an optimizer may have no hash.
_stepping: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = weakref.WeakValueDictionary()
_within: dict[int, int] = {}
"""How many steps of an optimizer are within one of its own: in its closure, or as that of the class below."""


def listen(listener: StepListener) -> None:
    """Call a listener from now on, as long as something else holds it."""
    global _listeners, _are_registered
    with _guard:
        _listeners = (*(known for known in _listeners if known() is not None), weakref.ref(listener))
        if not _are_registered:
            register_optimizer_step_pre_hook(_before)
            register_optimizer_step_post_hook(_after)
            _note_those_in_their_step()
            _are_registered = True


def is_stepping() -> bool:
    """Return whether an optimizer is within its step, as far as is known: one that raised counts until it steps again.

    Its closure and hooks of its own run after the listeners.
    """
    return bool(len(_stepping))


def _note_those_in_their_step() -> None:
    """Note which steps have begun without a hook: the first listener may be made in a closure."""
    code = torch.optim.Optimizer.profile_hook_step(torch.optim.Optimizer.step).__code__
    for frame in sys._current_frames().values():
        calling: FrameType | None = frame
        while calling is not None:
            if calling.f_code is code and isinstance(optimizer := calling.f_locals.get("self"), torch.optim.Optimizer):
                if id(optimizer) in _stepping:
                    _within[id(optimizer)] = _within.get(id(optimizer), 0) + 1
                _stepping[id(optimizer)] = optimizer
            calling = calling.f_back


def _before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _listeners:
        return
    # First: a save that a signal handler makes while a listener waits would be behind what that has waited for.
    if id(optimizer) in _stepping and _is_within_its_step(optimizer):
        _within[id(optimizer)] = _within.get(id(optimizer), 0) + 1
    else:
        _within.pop(id(optimizer), None)
        _stepping[id(optimizer)] = optimizer
    try:
        for known in _listeners:
            listener = known()
            if listener is not None:
                listener.before_step(optimizer)
    except BaseException:  # The step does not begin.
        _after(optimizer)
        raise


def _after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    count = _within.pop(id(optimizer), 0)
    if count > 1:
        _within[id(optimizer)] = count - 1
    elif not count:
        _stepping.pop(id(optimizer), None)


def _is_within_its_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step that calls hooks now is within another one of its optimizer, which has not raised."""
    calling = sys._getframe(2)
    outer = calling.f_back
    while outer is not None:
        if outer.f_code is calling.f_code and outer.f_locals.get("self") is optimizer:
            return True
        outer = outer.f_back
    return False
