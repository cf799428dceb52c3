"""Loggers that upload files of a trainer's own saving are told at the start; with the real wandb, which is offline."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger

import asyncckpt
from asyncckpt.integrations.lightning import AsyncCheckpoint, AsyncCheckpointIO
from asyncckpt.integrations.loggers import check_loggers
from tests.integrations.lightning_job import TwoLayers, batches, held_out
from tests.integrations.lightning_job import trainer as lightning_trainer
from tests.integrations.transformers_job import trainer


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    (tmp_path / "wandb").mkdir()
    yield
    wandb.finish()


@pytest.mark.parametrize("mode", ["checkpoint", "end", "false"])
def test_wandb_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", mode)
    running = trainer(tmp_path / "run", report_to=["wandb"], run_name="run")
    if mode != "checkpoint":
        running.train()
        assert asyncckpt.list_steps(tmp_path / "run" / "checkpoints")
        return
    with pytest.raises(asyncckpt.UnsupportedError, match=r"WandbCallback uploads a folder.*WANDB_LOG_MODEL=end"):
        running.train()
    assert not (tmp_path / "run" / "checkpoints").exists(), "it is said before anything is saved"


def callback_of(name: str, **attributes: Any) -> object:
    """Libraries that are not here: what their callback in transformers is asked for."""
    return type(name, (), {})() if not attributes else _with(type(name, (), {})(), attributes)


def _with(made: Any, attributes: dict[str, Any]) -> Any:
    made.__dict__.update(attributes)
    return made


TASKS = SimpleNamespace(Task=SimpleNamespace(current_task=lambda: None))
RUNNING = SimpleNamespace(Task=SimpleNamespace(current_task=lambda: "one"))


@pytest.mark.parametrize(
    ("callback", "environment", "uploads"),
    [
        (callback_of("MLflowCallback"), {"HF_MLFLOW_LOG_ARTIFACTS": "1"}, True),
        (callback_of("MLflowCallback"), {}, False),
        (callback_of("ClearMLCallback", _clearml=TASKS), {}, True),
        (callback_of("ClearMLCallback", _clearml=TASKS), {"CLEARML_LOG_MODEL": "false"}, False),
        (callback_of("ClearMLCallback", _clearml=RUNNING), {}, False),
        (callback_of("NeptuneCallback", _log_checkpoints="last"), {}, True),
        (callback_of("NeptuneCallback", _log_checkpoints=None), {}, False),
        (callback_of("FlyteCallback", sync_checkpoints=True), {}, True),
        (callback_of("DVCLiveCallback", _log_model="all"), {}, True),
        (callback_of("DVCLiveCallback", _log_model=True), {}, False),
        (callback_of("SomebodysCallback", _log_model="all"), {}, False),
    ],
)
def test_others_of_transformers(
    monkeypatch: pytest.MonkeyPatch, callback: object, environment: dict[str, str], uploads: bool
) -> None:
    for name in ("HF_MLFLOW_LOG_ARTIFACTS", "CLEARML_LOG_MODEL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if uploads:
        with pytest.raises(asyncckpt.UnsupportedError, match=f"{type(callback).__name__} uploads a folder"):
            check_loggers([callback])
    else:
        check_loggers([callback])


@pytest.mark.parametrize("log_model", [True, "all", False])
@pytest.mark.parametrize("by", ["plugin", "callback"])
def test_wandb_of_lightning(tmp_path: Path, by: str, log_model: Any) -> None:
    logger = WandbLogger(project="p", save_dir=tmp_path, log_model=log_model)
    callback = AsyncCheckpoint(tmp_path / "run", every_n_train_steps=2)
    given: dict[str, Any] = {"logger": [CSVLogger(tmp_path), logger]}
    if by == "plugin":
        callback = ModelCheckpoint(tmp_path / "run", every_n_train_steps=2)
        given["plugins"] = [AsyncCheckpointIO()]
    running = lightning_trainer(tmp_path, callback, max_epochs=1, **given)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        running.fit(TwoLayers(), batches(), held_out())
    about = [str(each.message) for each in told if "WandbLogger" in str(each.message)]
    assert len(about) == (log_model is not False)
    assert all("CSVLogger" not in each and "none is uploaded" in each for each in about)
