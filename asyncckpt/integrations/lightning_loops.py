"""Where a fit goes on, as what Lightning's loops save of themselves.

Lightning resumes by four counters of each loop: ready, started, processed, completed. Asked in one of its hooks, its
loops leave out what comes after that hook, or do it twice. So the loops are asked at the end of a step, and these say
where the resumed fit goes on:

    at the end of a step        as they are: what comes next is the next batch
    before_validation           the validation after the step is run, then what follows it
    before_epoch_end            the hooks at the end of the epoch are run: see set_resumed
    after_epoch                 the next epoch begins
    before_first_batch          the epoch has begun, and none of its batches was trained
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from asyncckpt.trainer_state import RngState

_BATCHES, _VALIDATION = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"
_STEPPED = "_batches_that_stepped"


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in containers of its own. Its tensors are not copied: some callbacks hold a whole model."""
    found: dict[str, Any] = tree_map(lambda value: value, state)
    return found


def before_validation(loops: dict[str, Any]) -> dict[str, Any]:
    """As if the first batch of the validation was in flight: nothing else has Lightning run one again."""
    found = _with_completed_batch(loops)
    total, current = found[_VALIDATION]["total"], found[_VALIDATION]["current"]
    total |= {"ready": total["completed"] + 1, "started": total["completed"] + 1, "processed": total["completed"]}
    current |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    return found


def before_epoch_end(loops: dict[str, Any]) -> dict[str, Any]:
    found = _with_completed_batch(loops)
    found["epoch_loop.state_dict"][_STEPPED] += 1
    return found


def after_epoch(loops: dict[str, Any]) -> dict[str, Any]:
    found = copied(loops)
    for counters in (found["epoch_progress"]["total"], found["epoch_progress"]["current"]):
        counters |= dict.fromkeys(("ready", "started", "completed"), counters["processed"])
    return found


def before_first_batch(loops: dict[str, Any]) -> dict[str, Any]:
    """As at the end of a batch before the first one, which Lightning counts when it resumes."""
    found = copied(loops)
    for counters in (found[_BATCHES]["total"], found[_BATCHES]["current"]):
        counters |= {"ready": counters["processed"], "completed": counters["processed"] - 1}
    found[_BATCHES]["is_last_batch"] = False
    found["epoch_loop.state_dict"][_STEPPED] -= 1
    return found


def _with_completed_batch(loops: dict[str, Any]) -> dict[str, Any]:
    found = copied(loops)
    for counters in (found[_BATCHES]["total"], found[_BATCHES]["current"]):
        counters["completed"] = counters["processed"]
    return found


@dataclass
class NotedStep:
    """What was so when a step had ended.

    loops        where the fit goes on; None if the loaders have more to say of their positions than is short
    next_batch   the same for when the next batch has begun
    callbacks    states of the others, before a validation, the end of an epoch or the next step changes them
    is_followed  whether a validation or the end of the epoch comes after it
    next_begun   whether the next step has begun; then it is trained again from its first batch
    is_told      whether it was said to the Checkpointer
    norms        of the weights, before a validation in which others may stand in their place
    """

    step: int
    rng: Mapping[str, Any]
    loops: dict[str, Any] | None = None
    next_batch: dict[str, Any] | None = None
    callbacks: dict[str, Any] | None = None
    norms: Sequence[torch.Tensor] | None = None
    is_followed: bool = False
    next_begun: bool = False
    is_told: bool = False

    def go_on(self, place: Callable[[dict[str, Any]], dict[str, Any]], trainer: Any) -> None:
        """Note that something after the step has ended too. place: one of the functions above."""
        self.rng, self.callbacks, self.norms = RngState().state_dict(), None, None
        if self.loops is not None:
            positions = {"state_dict": self.loops["state_dict"]} if place is before_first_batch else {}
            # The loaders have gone ahead where a batch has begun.
            self.loops = {**place(trainer.fit_loop.state_dict()), **positions}


def norms_of(module: torch.nn.Module) -> Sequence[torch.Tensor]:
    """Return what tells whether weights are the same again, also if they were changed unseen, as by `.data`."""
    with torch.no_grad():
        return torch._foreach_norm([weights.detach() for weights in module.parameters()])


def set_resumed(fit_loop: Any) -> None:
    """Have the loops of a resumed fit, which are about to run, go on where the functions above say."""
    epochs, loop = fit_loop.epoch_progress.total, fit_loop.epoch_loop
    if epochs.ready == epochs.processed:  # With max_steps Lightning would take up the epoch that has ended.
        fit_loop._restarting = loop.restarting = False
    elif (
        loop.restarted_on_last
        and loop._num_ready_batches_reached()
        and not loop._should_check_val_fx(fit_loop._data_fetcher)
    ):  # Else it would train a batch more.
        loop.val_loop._has_run = True
