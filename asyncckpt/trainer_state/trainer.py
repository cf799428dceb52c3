"""All of a trainer's state besides its tensors, as one object with a state dict; and the number of the step in it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from asyncckpt.errors import IncompatibleError, UsageError
from asyncckpt.format.names import check_step
from asyncckpt.trainer_state.data_position import DataPosition
from asyncckpt.trainer_state.rng import RngState

# What would be taken for something else than an object with a state dict.
_NO_OBJECTS = (Mapping, list, tuple, type, torch.Tensor, np.ndarray, np.generic)


class StepCounter:
    """How many steps were trained. An int where one is wanted: `saver.save_async(int(step))`."""

    def __init__(self, value: int = 0) -> None:
        self.value: int = check_step(value, name="the first step", or_none=False)

    def advance(self) -> int:
        """Count one step; returns its number."""
        self.value += 1
        return self.value

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value

    def __repr__(self) -> str:
        return f"StepCounter({self.value})"

    def state_dict(self) -> dict[str, Any]:
        """Return {"step": int}."""
        return {"step": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step that was saved."""
        self._check_saved(state)
        self.value = state["step"]

    def _check_saved(self, state: Any) -> None:
        value = state.get("step") if isinstance(state, Mapping) else None
        if type(value) is not int or value < 0:
            raise IncompatibleError("a saved step counter holds no step", found=value)


class TrainerState:
    """Step, random numbers, position in the data, and whatever else has a state dict.

    Used as `Saver(tensors={"model": model, "optim": optimizer, "trainer": trainer})`, and with a Loader likewise.
    `step` and `rng` are made where they are not given. The random numbers are set last, so that nothing that another
    part draws while it loads remains. A derived class with a state_dict or load_state_dict of its own is refused when a
    Saver is made (UsageError), for each part is saved and loaded as if it stood alone: give what it adds as a part.
    """

    def __init__(
        self,
        step: StepCounter | None = None,
        rng: RngState | None = None,
        data: DataPosition | None = None,
        **more: Any,
    ) -> None:
        self.step = StepCounter() if step is None else step
        self.rng = RngState() if rng is None else rng
        self.data = data
        self._inner_objects: dict[str, Any] = {"step": self.step, **({} if data is None else {"data": data}), **more}
        self._inner_objects["rng"] = self.rng
        for name, part in self._inner_objects.items():
            methods = {each: getattr(part, each, None) for each in ("state_dict", "load_state_dict")}
            if not all(map(callable, methods.values())):
                raise UsageError(
                    f"part {name!r} of the trainer's state has no state_dict() and load_state_dict()",
                    found=type(part),
                )
            if isinstance(part, _NO_OBJECTS):
                self._inner_objects[name] = SimpleNamespace(**methods)

    @property
    def _objects_in_it(self) -> dict[str, Any]:
        """The parts, which a Saver and a Loader take one by one: see plan/module_state.py."""
        own, ours = type(self), TrainerState
        if own.state_dict is not ours.state_dict or own.load_state_dict is not ours.load_state_dict:
            hint = "give TrainerState what it adds as a part: an object with state_dict() and load_state_dict()"
            raise UsageError(f"{own.__name__} saves or loads a TrainerState in a way of its own", hint=hint)
        return self._inner_objects

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of the parts, by name."""
        return {name: part.state_dict() for name, part in self._inner_objects.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load every part; IncompatibleError, with nothing changed, when the checkpoint has others."""
        self._check_saved(state)
        for name, part in self._inner_objects.items():
            part.load_state_dict(state[name])

    def _check_saved(self, state: Any) -> None:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state)
        if not isinstance(state, Mapping) or state.keys() != self._inner_objects.keys():
            raise IncompatibleError(
                "the saved state of the trainer has other parts", found=found, expected=sorted(self._inner_objects)
            )
        for name, part in self._inner_objects.items():
            if hasattr(type(part), "_check_saved"):
                part._check_saved(state[name])
