"""Loggers that upload what a trainer saves: they look for its own files, which are not there.

Those of Hugging Face fail at the first save, those of Lightning upload nothing, without a word. Both are told before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asyncckpt.errors import UnsupportedError, warn


def _is_set(variable: str, default: str = "") -> bool:
    return os.environ.get(variable, default).upper() in ("1", "ON", "YES", "TRUE")  # As transformers reads them.


# By class of callback of transformers: whether it uploads each checkpoint, and what to do instead.
_UPLOADS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "WandbCallback": (
        lambda callback: bool(callback._log_model.value == "checkpoint"),
        "WANDB_LOG_MODEL=end uploads the model at the end",
    ),
    "MLflowCallback": (lambda _: _is_set("HF_MLFLOW_LOG_ARTIFACTS"), "HF_MLFLOW_LOG_ARTIFACTS=FALSE"),
    "ClearMLCallback": (  # A task that somebody else has begun uploads where it is told to.
        lambda callback: _is_set("CLEARML_LOG_MODEL", "FALSE" if callback._clearml.Task.current_task() else "TRUE"),
        "CLEARML_LOG_MODEL=FALSE",
    ),
    "NeptuneCallback": (
        lambda callback: callback._log_checkpoints is not None,
        "NeptuneCallback(log_checkpoints=None)",
    ),
    "FlyteCallback": (lambda callback: bool(callback.sync_checkpoints), "FlyteCallback(sync_checkpoints=False)"),
    "DVCLiveCallback": (
        lambda callback: bool(callback._log_model == "all"),
        "DVCLiveCallback(log_model=True) uploads the model at the end",
    ),
}


def check_loggers(callbacks: Iterable[Any]) -> None:
    """Raise UnsupportedError for a callback of transformers that would upload the folder of each checkpoint."""
    for callback in callbacks:
        name = next((kind.__name__ for kind in type(callback).__mro__ if kind.__name__ in _UPLOADS), None)
        if name is None:
            continue
        uploads, instead = _UPLOADS[name]
        if uploads(callback):
            raise UnsupportedError(
                f"{name} uploads a folder checkpoint-N at each save, and all steps are in one directory here",
                hint=f"{instead}; checkpointing={{'options': {{'upload': url}}}} copies steps to an object store",
            )


def warn_of_loggers(loggers: Iterable[Any]) -> None:
    """Warn of loggers of Lightning that would upload checkpoints: they take files alone."""
    names = [type(logger).__name__ for logger in loggers if getattr(logger, "_log_model", False)]
    if names:
        warn(
            f"asyncckpt: {', '.join(names)} uploads files alone, and checkpoints are directories here: none is "
            "uploaded (log_model=False; options={'upload': url} copies checkpoints to an object store, and "
            "checkpoint_file(path) makes a file of one)",
            UserWarning,
        )
