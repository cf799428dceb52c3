"""Objects that a load has begun to fill: where it has failed, they are of no step until a load of them succeeds.

They are known by what they are, not by who loads: a Loader beside a PeriodicSaver, or an earlier Checkpointer. Each
module within a module counts: the loop may save what holds it, such as DDP, or is held.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from asyncckpt.plan.wrapped_names import unwrapped


class HalfFilled:
    """Weak references: a new object in place of such a one is another one."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[weakref.ref[Any], int]] = {}

    def note(self, *states: Mapping[str, Any], step: int) -> None:
        self._steps = {key: item for key, item in self._steps.items() if item[0]() is not None}
        for owner in _owners(states):
            try:
                self._steps[id(owner)] = weakref.ref(owner), step
            except TypeError:
                continue

    def forget(self, *states: Mapping[str, Any]) -> None:
        for owner in _owners(states) if self._steps else ():
            self._steps.pop(id(owner), None)

    def step_of(self, *states: Mapping[str, Any]) -> int | None:
        """Return the step that a load has left in parts of some states; None in general."""
        for owner in _owners(states) if self._steps else ():
            ref, step = self._steps.get(id(owner), (None, 0))
            if ref is not None and ref() is owner:
                return step
        return None


half_filled = HalfFilled()


def _owners(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for item in state:
            yield from _owners(item)
    elif isinstance(state, torch.nn.Module):
        yield from unwrapped(state).modules()
    else:
        yield state
