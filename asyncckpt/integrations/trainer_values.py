"""What a run of Hugging Face's Trainer is beside model and optimizer: TrainerState, the untold loss, random numbers."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch

from asyncckpt.integrations.needed import needed
from asyncckpt.trainer_state import RngState

transformers = needed("transformers", "transformers")


class TrainerValues:
    """Hugging Face's TrainerState as JSON, and the loss that no log has told yet."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.text = ""
        self._loss, self._logged_step = 0.0, 0
        self._noted: dict[str, Any] | None = None

    def note(self) -> None:
        """Remember a step that has ended, for a save by an error in the middle of the next one."""
        self._noted = self._now()

    def _now(self) -> dict[str, Any]:
        trainer = self._trainer
        if trainer.args.parallel_mode is not transformers.training_args.ParallelMode.DISTRIBUTED:
            trainer.store_flos()  # Else ranks would have to do so together.
        loss = getattr(trainer, "_tr_loss", 0.0)
        return {
            "state": copy.copy(trainer.state),
            "logs_count": len(trainer.state.log_history),
            "callbacks": _callbacks_states([*trainer.callback_handler.callbacks, trainer.control]),
            "loss": loss.clone() if isinstance(loss, torch.Tensor) else loss,
        }

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        noted = self._noted or self._now()  # A load asks before the loop has begun, too.
        fields = dataclasses.asdict(noted["state"])
        fields["log_history"] = fields["log_history"][: noted["logs_count"]]
        fields["stateful_callbacks"] = noted["callbacks"]
        if self._noted is not None:  # The run's own state shows the last save's, as with Trainer._save_checkpoint.
            trainer.state.stateful_callbacks = noted["callbacks"]
        return {
            "json": json.dumps(fields, indent=2, sort_keys=True),
            "loss_since_log": float(noted["loss"]),
            "logged_step": getattr(trainer, "_globalstep_last_logged", 0),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.text, self._loss, self._logged_step = state["json"], state["loss_since_log"], state["logged_step"]

    def set_loss(self) -> None:
        """Let the next log tell the mean since the last one, although the loop has restarted."""
        trainer = self._trainer
        trainer._tr_loss += self._loss
        trainer._total_loss_scalar -= self._loss  # The mean of the run is that of its own steps.
        trainer._globalstep_last_logged = self._logged_step


def _callbacks_states(callbacks: list[Any]) -> dict[str, Any]:
    """Return the states of callbacks by their class, as Trainer._save_checkpoint does."""
    found: dict[str, Any] = {}
    for callback in callbacks:
        if isinstance(callback, transformers.trainer_callback.ExportableState):
            found.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states if len(states) > 1 else states[0] for name, states in found.items()}


class HeldRng:
    """The random numbers, loaded with everything else and set when the loop has skipped its batches.

    What is saved are those of the last step that has ended: an error may come in the middle of the next one.
    """

    def __init__(self) -> None:
        self._held: Mapping[str, Any] | None = None
        self._noted: dict[str, Any] | None = None

    def note(self) -> None:
        self._noted = RngState().state_dict()

    def state_dict(self) -> dict[str, Any]:
        return RngState().state_dict() if self._noted is None else self._noted

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._held = state

    def set_held(self) -> None:
        if self._held is not None:
            RngState().load_state_dict(self._held)
