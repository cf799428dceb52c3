"""All of a trainer's state besides its tensors, as one object with a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncckpt.errors import IncompatibleError, UsageError
from asyncckpt.trainer_state.data_position import DataPosition
from asyncckpt.trainer_state.rng import RngState
from asyncckpt.trainer_state.step import StepCounter


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
        self._parts: dict[str, Any] = {"step": self.step, **({} if data is None else {"data": data}), **more}
        self._parts["rng"] = self.rng
        for name, part in self._parts.items():
            if not callable(getattr(part, "state_dict", None)) or not callable(getattr(part, "load_state_dict", None)):
                raise UsageError(
                    f"part {name!r} of the trainer's state has no state_dict() and load_state_dict()",
                    found=type(part).__name__,
                )

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of the parts, by name."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load every part; IncompatibleError, with nothing changed, when the checkpoint has others."""
        if state.keys() != self._parts.keys():
            raise IncompatibleError(
                "the saved state of the trainer has other parts", found=sorted(state), expected=sorted(self._parts)
            )
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
