"""Each callback that transformers ships comes to the same beside ours as beside its own saving, however a run ends."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import Trainer, TrainerCallback

from asyncckpt.integrations.transformers import AsyncCheckpoint
from tests.integrations.transformers_job import arguments, model, samples
from tests.shares import share_of

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


def shipped() -> Iterator[Any]:
    """Yield every class of a callback in the package, found by the text of its modules, or why it is left out."""
    root = Path(transformers.__file__).parent
    for path in sorted([*root.glob("*.py"), *root.glob("integrations/*.py"), *root.glob("utils/*.py")]):
        names = re.findall(r"^class (\w+)\(.*Callback\b.*\):", path.read_text(encoding="utf-8"), re.MULTILINE)
        for name in names:
            reason = ""
            try:
                module = ".".join(("transformers", *path.relative_to(root).with_suffix("").parts))
                kind = getattr(importlib.import_module(module), name)
                kind(**MADE.get(name, {}))
            except Exception as error:
                reason = f"{name} cannot be made here: {str(error)[:120]}"
            if name != "CallbackHandler":  # It calls them.
                yield pytest.param(
                    None if reason else kind, id=name, marks=[pytest.mark.skip(reason)] if reason else []
                )


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


@pytest.mark.parametrize("kind", shipped())
def test_a_run_goes_on_where_it_was_ended(kind: type[TrainerCallback], tmp_path: Path) -> None:
    own = facts(fit(tmp_path / "own", kind))
    assert differences(facts(fit(tmp_path / "ours", kind, AsyncCheckpoint())), own) == []
    wrong = {}
    for hook, step in share_of(ENDS.items(), f"ends of {kind.__name__}"):
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
