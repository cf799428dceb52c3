"""The number of the training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncckpt.errors import IncompatibleError
from asyncckpt.format.limits import check_step


class StepCounter:
    """How many steps were trained. An int where one is wanted: `saver.save_async(int(step))`."""

    def __init__(self, value: int = 0) -> None:
        check_step(value, name="the first step", or_none=False)
        self.value = value

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
        """{"step": int}."""
        return {"step": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the step that was saved."""
        value = state.get("step")
        if type(value) is not int or value < 0:
            raise IncompatibleError("a saved step counter holds no step", found=value)
        self.value = value
