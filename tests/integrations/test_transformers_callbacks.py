"""Each callback that transformers ships comes to the same beside ours as beside its own saving, however a run ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers.integrations.integration_utils
import transformers.trainer_jit_checkpoint
import transformers.utils.notebook  # noqa: F401
from transformers import Trainer, TrainerCallback

from asyncckpt.integrations.transformers import AsyncCheckpoint
from tests.integrations.transformers_job import arguments, model, samples

MADE: dict[str, dict[str, Any]] = {
    "EarlyStoppingCallback": {"early_stopping_patience": 1, "early_stopping_threshold": 1.0}
}
ENDS = {
    "on_step_begin": 6,
    "on_pre_optimizer_step": 5,
    "on_optimizer_step": 6,
    "on_step_end": 7,
    "on_log": 6,
    "on_evaluate": 8,
    "on_prediction_step": 4,
    "on_save": 8,
    "on_epoch_end": 10,
    "on_epoch_begin": 10,
    "on_train_end": 12,
}


def shipped() -> Iterator[type[TrainerCallback]]:
    """Yield every class of a callback in the package, of modules that are imported by now."""
    kinds, found = [TrainerCallback], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("transformers.") and kind not in found:
            found.add(kind)
    yield from sorted(found, key=lambda kind: kind.__name__)


class Broken(Exception):
    pass


class Raising(TrainerCallback):
    """Raises in one hook, when so many steps were trained."""


def raising(hook: str, step: int, error: BaseException) -> Raising:
    def fail(args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            raise error

    found = Raising()
    setattr(found, hook, fail)
    return found


def fit(folder: Path, kind: type[TrainerCallback], *more: TrainerCallback, resume: bool = False) -> Trainer:
    data = samples()
    running = Trainer(
        model=model(),
        args=arguments(folder, max_steps=12, logging_steps=3),
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=[*more, kind(**MADE.get(kind.__name__, {}))],
    )
    has = resume and (any(folder.glob("checkpoint-*")) or any((folder / "checkpoints").glob("manifests/*")))
    with contextlib.suppress(Broken, KeyboardInterrupt):
        running.train(resume_from_checkpoint=has or None)
    return running


def facts(running: Trainer) -> list[Any]:
    timed = ("runtime", "per_second", "train_loss", "total_flos")
    logs = [{k: v for k, v in e.items() if not k.endswith(timed)} for e in running.state.log_history]
    rates = running.lr_scheduler.state_dict()["_last_lr"]
    state = running.optimizer.state_dict()["state"]
    return [running.state.global_step, logs, rates, running.state.stateful_callbacks, running.model.state_dict(), state]


def differences(one: list[Any], other: list[Any]) -> list[int]:
    return [at for at, pair in enumerate(zip(one, other, strict=True)) if not same(*pair)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.mark.parametrize("kind", shipped(), ids=lambda kind: kind.__name__)
def test_a_run_goes_on_where_it_was_ended(kind: type[TrainerCallback], tmp_path: Path) -> None:
    try:
        kind(**MADE.get(kind.__name__, {}))
    except Exception as error:
        pytest.skip(f"cannot be made here: {str(error)[:120]}")
    own = facts(fit(tmp_path / "own", kind))
    assert differences(facts(fit(tmp_path / "ours", kind, AsyncCheckpoint())), own) == []
    wrong = {}
    for hook, step in ENDS.items():
        error = KeyboardInterrupt() if step % 4 == 0 else Broken()
        fit(tmp_path / hook, kind, AsyncCheckpoint(), raising(hook, step, error))
        resumed = facts(fit(tmp_path / hook, kind, AsyncCheckpoint(), resume=True))
        if found := differences(resumed, own):
            fit(tmp_path / f"{hook}-own", kind, raising(hook, step, error))
            by_own = differences(facts(fit(tmp_path / f"{hook}-own", kind, resume=True)), own)
            print(f"{hook} at step {step}: differs in {found}, Hugging Face's own in {by_own}")
            if not set(found) <= set(by_own):
                wrong[hook, step] = found
    assert wrong == {}
