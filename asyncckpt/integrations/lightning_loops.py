"""Where a fit goes on, as what Lightning's loops save of themselves.

Lightning resumes by four counters of each loop: ready, started, processed, completed. Asked in one of its hooks, its
loops leave out what comes after that hook, or do it twice. So the loops are asked at the end of a step, and these say
where the resumed fit goes on:

    at the end of a step        as they are: what comes next is the next batch
    before_validation           the validation after the step is run, then what follows it
    before_epoch_end            the hooks at the end of the epoch are run: see `goes_on_at_epoch_end`
    after_epoch                 the next epoch begins
    before_first_batch          the epoch has begun, and none of its batches was trained
"""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import tree_map

_BATCHES, _VALIDATION = "epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"
_STEPPED = "_batches_that_stepped"


def copied(state: Any) -> Any:
    """Return a state in containers of its own. Its tensors are not copied: some callbacks hold a whole model."""
    return tree_map(lambda value: value, state)


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
