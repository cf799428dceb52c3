"""Runs of a tiny Llama with one of transformers' own callbacks, ended and resumed by ours and by transformers' saving.

Callbacks of services whose package is not here get a stand-in for it, which takes every call.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import transformers
from transformers import Trainer, TrainerCallback
from transformers.integrations import integration_utils

import asyncckpt
from asyncckpt.integrations.transformers import AsyncCheckpoint
from tests.integrations.same import same
from tests.integrations.transformers_job import arguments, model, samples

STEPS, EPOCH, EVERY = 10, 5, 4
GIVEN: dict[str, dict[str, Any]] = {
    "EarlyStoppingCallback": {"early_stopping_patience": 1, "early_stopping_threshold": 1.0},
    "FlyteCallback": {"sync_checkpoints": False},  # It is refused otherwise.
}
SERVICES = frozenset(
    {
        "IPython",
        "azureml",
        "clearml",
        "codecarbon",
        "comet_ml",
        "dagshub",
        "dvclive",
        "flytekit",
        "flytekitplugins",
        "kubeflow",
    }
    | {"mlflow", "neptune", "swanlab", "tensorboard", "tensorboardX", "trackio", "wandb"}
)
# A hook, after how many steps a run is ended in it, and by what.
ENDS = {
    "on_train_begin": (0, "error"),
    "on_epoch_begin": (EPOCH, "interrupt"),
    "on_step_begin": (6, "error"),
    "on_pre_optimizer_step": (5, "interrupt"),
    "on_optimizer_step": (6, "error"),
    "on_step_end": (7, "error"),
    "on_log": (6, "interrupt"),
    "on_evaluate": (8, "error"),
    "on_prediction_step": (4, "interrupt"),
    "on_save": (8, "interrupt"),
    "on_epoch_end": (EPOCH, "error"),
    "on_train_end": (STEPS, "interrupt"),
}


class Taking(MagicMock):
    """Takes every call, and has what a MagicMock has not of itself."""

    MAX_PARAM_VAL_LENGTH = MAX_PARAMS_TAGS_PER_BATCH = 100

    def __getattr__(self, name: str) -> Any:
        return MagicMock() if name.startswith("__internal_api__") else super().__getattr__(name)


class StandIn(Taking):
    """A package; its classes are no types, but for one that is asked for as such."""

    __version__ = "99.0"
    Live = type("Live", (MagicMock,), {})

    def _get_child_mock(self, **given: Any) -> MagicMock:
        return Taking(**given)


class StandIns:
    """Finds a stand-in for what is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in SERVICES else None

    def create_module(self, spec: Any) -> Any:
        return StandIn(name=spec.name)

    def exec_module(self, module: Any) -> None:
        pass


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    names = [
        name
        for name in vars(integration_utils)
        if (found := re.fullmatch(r"_?is_(\w+?)_(deck_standard_)?(available|installed|recent_enough|configured)", name))
        and any(service.startswith(found[1]) for service in SERVICES)
    ]
    found, before = StandIns(), set(sys.modules)
    sys.meta_path.append(found)
    try:
        said = {name: True if name.startswith("_") else (lambda: True) for name in names}
        with patch.multiple(integration_utils, **said):
            yield
    finally:
        sys.meta_path.remove(found)
        for name in set(sys.modules) - before:
            if isinstance(sys.modules[name], StandIn):
                del sys.modules[name]


def shipped() -> list[str]:
    """Return the module and the name of every class of a callback in the package, by the text of its modules."""
    root = Path(transformers.__file__).parent
    found = []
    for path in sorted([*root.glob("*.py"), *root.glob("integrations/*.py"), *root.glob("utils/*.py")]):
        module = ".".join(("transformers", *path.relative_to(root).with_suffix("").parts))
        names = re.findall(r"^class (\w+)\(.*Callback\b.*\):", path.read_text(encoding="utf-8"), re.MULTILINE)
        found += [f"{module}.{name}" for name in names if name != "CallbackHandler"]  # It calls them.
    return found


class Broken(Exception):
    pass


class RaisingOnce(TrainerCallback):
    """Raises in one hook, when so many steps were trained."""

    def __init__(self, hook: str, step: int, error: BaseException) -> None:
        def fail(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == step:
                raise error

        setattr(self, hook, fail)


class AskingOnce(TrainerCallback):
    """Asks the callback that saves when a signal has come, as its timer does, in one step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self.asked.jit_manager.is_checkpoint_requested = True


class TransformersPrograms:
    """Runs with one callback, of a class that is given by its name."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, (module, self._name) = folder, name.rsplit(".", 1)
        self._kind = getattr(importlib.import_module(module), self._name)

    def fit(
        self, name: str, *callbacks: TrainerCallback, every: int = EVERY, resume: str | bool | None = None
    ) -> dict[str, Any]:
        """Train once in a folder, and return what the run has come to."""
        data = samples(4 * EPOCH)
        callback = self._kind(**GIVEN.get(self._name, {}))
        more = {"enable_jit_checkpoint": True} if self._name == "JITCheckpointCallback" else {}
        running = Trainer(
            model=model(),
            args=arguments(
                self._folder / name, max_steps=STEPS, logging_steps=3, eval_steps=EVERY, save_steps=every, **more
            ),
            train_dataset=data,
            eval_dataset=data[:4],
            callbacks=[*callbacks] if more else [*callbacks, callback],  # The Trainer makes that one itself.
        )
        for asking in callbacks:
            if isinstance(asking, AskingOnce):
                asking.asked = next(c for c in running.callback_handler.callbacks if isinstance(c, self._kind))
        with contextlib.suppress(Broken, KeyboardInterrupt):
            running.train(resume_from_checkpoint=resume)
        return facts(running)

    def ours(self, name: str, *callbacks: TrainerCallback, **more: Any) -> dict[str, Any]:
        return self.fit(name, AsyncCheckpoint(), *callbacks, **more)

    def newest(self, name: str) -> int:
        folder = self.steps_of(name)
        return max(asyncckpt.list_steps(folder), default=0) if folder.exists() else 0

    def steps_of(self, name: str) -> Path:
        return self._folder / name / "checkpoints"

    @cache  # noqa: B019
    def own_resumed(self, step: int) -> dict[str, Any]:
        """Return what transformers' own checkpoint of a step, of the run "own", comes to."""
        return self.fit(f"own-{step}", resume=str(self._folder / "own" / f"checkpoint-{step}"))


def facts(running: Trainer) -> dict[str, Any]:
    left_out = ("runtime", "per_second", "train_loss", "total_flos", "loss")
    told = running.state.log_history
    return {
        "steps": running.state.global_step,
        "logs": [{k: v for k, v in e.items() if k == "eval_loss" or not k.endswith(left_out)} for e in told],
        "losses": [entry.get("loss") for entry in told],
        "rates": running.lr_scheduler.state_dict()["_last_lr"] if running.lr_scheduler else None,
        "callbacks": running.state.stateful_callbacks,
        "weights": {name: tensor.clone() for name, tensor in running.model.state_dict().items()},
        "optimizer": running.optimizer.state_dict()["state"] if running.optimizer else None,
        "random numbers": torch.get_rng_state(),
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if not same(one[name], other[name])]
