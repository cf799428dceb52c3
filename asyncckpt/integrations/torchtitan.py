"""A checkpointer with the methods that torchtitan's trainer calls: load, save, maybe_wait_for_staging, close.

    checkpointer = CheckpointManager(
        dataloader, model_parts, optimizers, lr_schedulers, {"train_state": trainer}, folder="ckpt", interval=500
    )
    checkpointer.load()
    for step in range(trainer.step + 1, steps + 1):
        train_step()
        checkpointer.save(step, last_step=step == steps)
    checkpointer.close()

Nothing of torchtitan is imported: parts are whatever has a state dict. Source of the interface: torchtitan 0.3.0,
`components/checkpointer/base.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from asyncckpt.arguments import check_int
from asyncckpt.checkpointer import Checkpointer
from asyncckpt.checkpointer_options import checked_restoring
from asyncckpt.format.names import check_step
from asyncckpt.loader import changed_request
from asyncckpt.options import SAVE_DEADLINE_S
from asyncckpt.plan.wrapped_names import unwrapped
from asyncckpt.trainer_state import DataPosition, RngState

__all__ = ["CheckpointManager"]

LATEST = -1


class CheckpointManager:
    """Saves in the background every `interval` steps, and the last one; resumes with the model on any number of ranks.

    dataloader       a loader with a state dict, of every rank its own; or None
    model_parts      the module, or those of a pipeline on this rank, whose names differ
    optimizers,      objects with state dicts, torchtitan's containers among them
    lr_schedulers
    states           more of them by name: {"train_state": trainer}
    folder           the checkpoint directory
    interval         steps between saves
    keep_latest_k    how many stay; 0: all
    load_only        saves nothing and removes nothing
    restoring        how to load into a changed model, by name: {"strict": False}; see Checkpointer.restore
    arguments        further arguments of the Checkpointer, by name

    Used by all ranks alike. After SIGTERM `save` saves the step and ends the process.
    """

    def __init__(
        self,
        dataloader: Any,
        model_parts: torch.nn.Module | Sequence[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        *,
        folder: str | os.PathLike[str],
        interval: int = 500,
        keep_latest_k: int = 10,
        enable_first_step_checkpoint: bool = False,
        load_only: bool = False,
        restoring: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self._restoring = checked_restoring(restoring)
        check_int("interval", interval, at_least=1)
        check_int("keep_latest_k", keep_latest_k, at_least=0)
        self._interval, self._saves_first, self._load_only = interval, enable_first_step_checkpoint, load_only
        modules = [model_parts] if isinstance(model_parts, torch.nn.Module) else list(model_parts)
        state = {
            "model": modules[0] if len(modules) == 1 else _Parts(modules),
            "optimizer": optimizers,
            "lr_scheduler": lr_schedulers,
            "dataloader": None if dataloader is None else DataPosition(dataloader),
            **states,
            "random": RngState(),
        }
        state = {name: value for name, value in state.items() if value is not None}
        keep = {"keep": keep_latest_k or None, **arguments}
        self._checkpointer = Checkpointer(folder, every=math.inf, **keep, **state)

    def load(self, step: int = LATEST) -> bool:
        """Restore a step, or the newest; return whether there was one.

        Training goes on from a step that is given: what is newer is removed, durably. With load_only it stays.
        """
        if step == LATEST:
            self._checkpointer.restore(**self._restoring)
        elif self._load_only:
            self._load_beside_newer(step)
        else:
            self._checkpointer.restore(step, discard_newer=True, **self._restoring)
        return self._checkpointer.report is not None

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Note that a step has ended; capture it if it is due, or the last one. Return whether a save has begun."""
        if self._load_only:
            return False
        is_first = self._saves_first and curr_step == 1
        future = self._checkpointer.step(curr_step, save=last_step or is_first or curr_step % self._interval == 0)
        return future is not None

    def maybe_wait_for_staging(self) -> None:
        """Do nothing: when `save` returns, the state is captured."""

    def maybe_wait_for_saving(self) -> None:
        """Wait until what is in flight is durable, and raise its error."""
        self._checkpointer._periodic.drain(SAVE_DEADLINE_S)

    def close(self) -> None:
        """Wait for what is in flight and give everything back."""
        self._checkpointer.close()

    def _load_beside_newer(self, step: int) -> None:
        """Load a step as `restore` does, on all ranks. Newer ones may stay: nothing is saved."""
        own = self._checkpointer
        own._check_open()
        with own._together.restoring():
            how = changed_request(**self._restoring)
            own._load_step((check_step(step, or_none=False), None), how)
        if own._together.is_asked:
            own._termination.leave()


class _Parts(torch.nn.Module):
    """The parts of a pipeline under one name, each asked for its state whenever that is saved or loaded.

    A torch.nn.Module only by type: it has no children, whose names would say where they are, and a Loader fills the
    tensors of modules in place.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self._parts = tuple(map(unwrapped, modules))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: value for module in self._parts for name, value in module.state_dict().items()}

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for module in self._parts:
            yield from module.named_buffers(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        for module in self._parts:
            module.load_state_dict({name: state_dict[name] for name in module.state_dict()}, strict, assign)
