"""All of a trainer's state besides its tensors, as one object with a state dict; and the number of the step in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from asyncckpt.errors import IncompatibleError, UsageError
from asyncckpt.format.names import check_step
from asyncckpt.trainer_state.data_position import DataPosition
from asyncckpt.trainer_state.rng import RngState

_NO_OBJECTS = (Mapping, list, tuple, type, torch.Tensor, np.ndarray)


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
        self._check_state(state)
        self.value = state["step"]

    def _check_state(self, state: Any) -> None:
        value = state.get("step") if isinstance(state, Mapping) else None
        if type(value) is not int or value < 0:
            raise IncompatibleError("a saved step counter holds no step", found=value)


class TrainerState:
    """Step, random numbers, position in the data, and whatever else has a state dict.

    Used as `Saver(tensors={"model": model, "optim": optimizer, "trainer": trainer})`, and with a Loader likewise.
    `step` and `rng` are made where they are not given. The random numbers are set last, so that nothing that another
    part draws while it loads remains.
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
            if not callable(getattr(part, "state_dict", None)) or not callable(getattr(part, "load_state_dict", None)):
                raise UsageError(
                    f"part {name!r} of the trainer's state has no state_dict() and load_state_dict()",
                    found=type(part),
                )

    @property
    def _objects_in_it(self) -> dict[str, Any] | None:
        """The parts; None of a derived class that saves or loads in a way of its own, or where a part would be taken
        for something else than an object with a state dict. See plan/module_state.py.
        """
        own, ours = type(self), TrainerState
        is_ours = own.state_dict is ours.state_dict and own.load_state_dict is ours.load_state_dict
        are_objects = not any(isinstance(part, _NO_OBJECTS) for part in self._inner_objects.values())
        return self._inner_objects if is_ours and are_objects else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of the parts, by name."""
        return {name: part.state_dict() for name, part in self._inner_objects.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load every part; IncompatibleError, with nothing changed, when the checkpoint has others."""
        self._check_state(state)
        for name, part in self._inner_objects.items():
            part.load_state_dict(state[name])

    def _check_state(self, state: Any) -> None:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state)
        if not isinstance(state, Mapping) or state.keys() != self._inner_objects.keys():
            raise IncompatibleError(
                "the saved state of the trainer has other parts", found=found, expected=sorted(self._inner_objects)
            )
        for name, part in self._inner_objects.items():
            if hasattr(type(part), "_check_state"):
                part._check_state(state[name])
