"""Fits of a small model with one of Lightning's own callbacks, ended and resumed by ours and by Lightning's own saving.

A run is a list of parts, each a fit that is ended by an error but the last. What it has come to is compared: weights,
optimizers, rates, steps, what each validation has measured, and the state of the callback.
"""

from __future__ import annotations

import importlib
import io
import pkgutil
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks

import asyncckpt
from asyncckpt.integrations.lightning import AsyncCheckpoint, Batches
from asyncckpt.trainer_state import ResumableSampler
from tests.integrations.same import same

EPOCHS, BATCHES, EVERY = 3, 6, 4
STEPS = EPOCHS * BATCHES
NOT_COMPARED = (callbacks.Timer, callbacks.ModelCheckpoint)  # Times, and paths.


class ScheduledNet(pl.LightningModule):
    """Draws random numbers in each step, has a schedule, and notes what it was validated with."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = torch.nn.Linear(4, 8)
        self.net = torch.nn.Sequential(torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
        self.validated: list[tuple[int, float]] = []
        self.lr, self.batch_size = 1e-2, 4

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.net(self.backbone(batch)) - batch.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append((self.global_step, self.trainer.callback_metrics["val_loss"].item()))

    def train_dataloader(self) -> Batches:
        data = torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(0))
        sampler = ResumableSampler(data, seed=7)
        return Batches(torch.utils.data.DataLoader(data, batch_size=self.batch_size, sampler=sampler))

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=4)

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW([weights for weights in self.parameters() if weights.requires_grad], lr=self.lr)
        return {"optimizer": adam, "lr_scheduler": torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)}


class RaisingCallback(callbacks.Callback):
    """Raises once, in one hook, when so many steps were trained."""

    def __init__(self, hook: str, step: int, error: BaseException) -> None:
        self._step, self._error = step, error
        setattr(self, hook, self._raise)

    def _raise(self, running: pl.Trainer, *_: Any, **__: Any) -> None:
        if running.global_step == self._step and not running.sanity_checking:
            raise self._error


class OwnSaving(callbacks.Checkpoint):
    """Lightning's own checkpoint of each step, as torch.save writes it and torch.load reads it."""

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}

    def on_train_start(self, *_: Any) -> None:
        self.files.clear()  # Of trials before it.

    def on_train_batch_end(self, running: pl.Trainer, *_: Any) -> None:
        if running.global_step not in self.files:  # As ModelCheckpoint: not again between accumulated gradients.
            self._save(running)

    def on_train_epoch_end(self, running: pl.Trainer, *_: Any) -> None:
        if running.current_epoch == EPOCHS - 1:  # Ours saves the last step when the epoch has ended, if it is not due.
            self._save(running)

    def _save(self, running: pl.Trainer) -> None:
        file = io.BytesIO()
        torch.save(running._checkpoint_connector.dump_checkpoint(weights_only=False), file)
        self.files[running.global_step] = file.getvalue()


def shipped() -> list[type[callbacks.Callback]]:
    """Return every class of a callback in Lightning's package of callbacks."""
    found: dict[str, type[callbacks.Callback]] = {}
    for module in pkgutil.walk_packages(callbacks.__path__, f"{callbacks.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, callbacks.Callback):
                found[value.__name__] = value
    return [found[name] for name in sorted(found)]


@dataclass
class RunFacts:
    """What the parts of a run have come to."""

    validated: dict[int, set[float]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, running: pl.Trainer, module: ScheduledNet, callback: callbacks.Callback) -> None:
        for step, loss in module.validated:
            self.validated.setdefault(step, set()).add(loss)
        self.facts = {
            "weights": module.state_dict(),
            "moments": [optimizer.state_dict()["state"] for optimizer in running.optimizers],
            "groups": [optimizer.state_dict()["param_groups"] for optimizer in running.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in running.lr_scheduler_configs],
            "steps": (running.global_step, running.fit_loop.epoch_progress.current.completed),
            "callback": {} if isinstance(callback, NOT_COMPARED) else callback.state_dict(),
        }

    def differences(self, other: RunFacts) -> set[str]:
        wrong = {name for name, value in self.facts.items() if not same(value, other.facts[name])}
        steps = self.validated.keys() | other.validated.keys()
        return wrong | {f"validation {at}" for at in steps if self.validated.get(at) != other.validated.get(at)}

    def validated_before(self, step: int) -> RunFacts:
        """Return a run that begins with what this one has measured before a step is resumed."""
        return RunFacts({at: set(losses) for at, losses in self.validated.items() if at < step or step == STEPS})


class LightningPrograms:
    """Fits with one callback, which a function makes for each."""

    def __init__(self, folder: Path, make: Callable[[], callbacks.Callback]) -> None:
        self._folder, self._make = folder, make

    def fit(
        self,
        run: RunFacts,
        *last: callbacks.Callback,
        first: Sequence[callbacks.Callback] = (),
        path: object = None,
        dropout: float = 0.5,
    ) -> BaseException | None:
        """Fit once; return what has ended it."""
        module, callback, found = ScheduledNet(dropout), self._make(), None
        running = pl.Trainer(
            default_root_dir=self._folder,
            callbacks=[*first, callback, *last],
            max_epochs=EPOCHS,
            accelerator="cpu",
            devices=1,
            logger=pl.loggers.CSVLogger(self._folder),
            log_every_n_steps=BATCHES,
            enable_model_summary=isinstance(callback, callbacks.ModelSummary),
            enable_progress_bar=isinstance(callback, callbacks.ProgressBar),
        )
        try:
            running.fit(module, ckpt_path=path)
        except (Exception, SystemExit) as error:
            found = error
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it after Ctrl-C.
        run.add(running, module, callback)
        return found

    def ours(self, name: str) -> AsyncCheckpoint:
        return AsyncCheckpoint(self._folder / name, every_n_train_steps=EVERY)

    @cache  # noqa: B019
    def whole(self, dropout: float) -> RunFacts:
        """Return a run that nothing ends, saved by ours as `whole-DROPOUT`."""
        run = RunFacts()
        assert self.fit(run, self.ours(f"whole-{dropout}"), dropout=dropout) is None
        return run

    @cache  # noqa: B019
    def own_resumed(self, step: int) -> tuple[RunFacts, BaseException | None]:
        """Return what Lightning's own checkpoint of a step comes to; without dropout, for it has no random numbers."""
        if step == 0:
            return self.whole(0.0), None
        resumed, own = self.whole(0.0).validated_before(step), OwnSaving()
        self.fit(RunFacts(), own, dropout=0.0)
        path = self._folder / "own.ckpt"
        path.write_bytes(own.files[step])
        return resumed, self.fit(resumed, path=path, dropout=0.0)

    def part(self, step: int, dropout: float) -> RunFacts:
        """Have the folder `part` be as a kill leaves it when a step was saved, and return the run until then."""
        before = self.whole(dropout).validated_before(step)
        shutil.copytree(self._folder / f"whole-{dropout}", self._folder / "part")
        asyncckpt.checkpoints.remove_after(self._folder / "part", step)
        return before

    def ended(self, hook: str, step: int, error: BaseException, dropout: float) -> RunFacts:
        run = RunFacts()
        self.fit(run, self.ours("part"), first=[RaisingCallback(hook, step, error)], dropout=dropout)
        return run

    def resumed(self, ended: Callable[[float], RunFacts], dropout: float) -> tuple[int, RunFacts, BaseException | None]:
        """Resume what was ended; return from which step, what the run has come to, and what has ended it."""
        run = ended(dropout)
        step = max(asyncckpt.list_steps(self._folder / "part"), default=0)
        error = self.fit(run, self.ours("part"), path="last", dropout=dropout)
        shutil.rmtree(self._folder / "part")
        return step, run, error


def ends() -> Iterator[tuple[str, int, BaseException]]:
    """The hooks in which a run is ended, after how many steps, and by what."""
    hooks = {
        "on_train_epoch_start": (BATCHES, 2 * BATCHES),
        "on_train_batch_start": (5, BATCHES),
        "on_before_backward": (7, BATCHES),
        "on_before_zero_grad": (9,),
        "on_train_batch_end": (5, BATCHES, 8),
        "on_validation_start": (BATCHES,),
        "on_validation_epoch_start": (2 * BATCHES,),
        "on_validation_batch_end": (BATCHES, 3 * BATCHES),
        "on_validation_epoch_end": (BATCHES,),
        "on_validation_end": (BATCHES, 2 * BATCHES),
        "on_train_epoch_end": (2 * BATCHES, 3 * BATCHES),
        "on_train_end": (3 * BATCHES,),
    }
    for hook, steps in hooks.items():
        for step in steps:
            yield hook, step, KeyboardInterrupt() if step % 4 == 0 or hook == "on_validation_end" else ValueError(hook)
