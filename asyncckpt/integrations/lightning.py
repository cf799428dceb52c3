"""Checkpoints of Lightning in the background: a callback with one directory, and a plugin for paths of their own.

    from asyncckpt.integrations.lightning import AsyncCheckpoint

    trainer = Trainer(callbacks=[AsyncCheckpoint("ckpt", every_n_train_steps=100)])
    trainer.fit(model, ckpt_path="last")  # Begins anew where there is nothing to resume.

`AsyncCheckpoint` saves through a Checkpointer. What is saved is Lightning's own checkpoint, a dict with the states of
model, optimizers, schedulers, loops and callbacks, and with the random numbers of every rank. A step counts as ended
behind its batch, or behind the validation that follows it. SIGTERM is taken then: the step is saved, and the signal
goes on to Lightning, which ends the run.

`AsyncCheckpointIO` is what Trainer(plugins=...) and Fabric(plugins=...) take: every path that others choose, such as
ModelCheckpoint's, becomes a checkpoint directory.

`Batches` makes a DataLoader one whose position Lightning saves and restores, in the middle of an epoch too.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.errors import CheckpointError, UsageError
from asyncckpt.format.names import MANIFESTS_DIR
from asyncckpt.integrations.lightning_io import ROOT, AsyncCheckpointIO, check_no_url, checkpoint_file
from asyncckpt.integrations.needed import needed
from asyncckpt.integrations.places import steps_in, upload_url
from asyncckpt.options import KeepPolicy
from asyncckpt.trainer_state import DataPosition, RngState

__all__ = ["AsyncCheckpoint", "AsyncCheckpointIO", "Batches", "checkpoint_file"]

_METRICS = "callback_metrics"
needed("lightning", "lightning")
_callbacks = needed("lightning.pytorch.callbacks", "lightning")


class AsyncCheckpoint(_callbacks.OnExceptionCheckpoint):  # type: ignore[misc, name-defined]
    """Saves a fit to one checkpoint directory, from its first step to its last, and resumes it. See above.

    dirpath               the checkpoint directory
    every_n_train_steps   optimizer steps between saves; None: only behind validations, if there is a `monitor`
    monitor, mode         the metric that chooses the best step; then steps are saved behind validations, too
    keep                  how many of the newest stay, and with a monitor the best beside them; None: all
    checkpointing         further arguments of the Checkpointer, by name: {"max_hours": 23}

    `fit(ckpt_path="last")` resumes the newest step, `test(ckpt_path="best")` takes the best. Like Lightning's own
    OnExceptionCheckpoint, a fit without ckpt_path resumes, too: one directory holds one run.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        *,
        every_n_train_steps: int | None = None,
        monitor: str | None = None,
        mode: str = "min",
        keep: int | None = None,
        checkpointing: Mapping[str, Any] | None = None,
    ) -> None:
        check_no_url(dirpath)
        super().__init__(os.fspath(dirpath), filename="newest")
        if every_n_train_steps is None and monitor is None:
            raise UsageError("nothing says when to save", hint="give every_n_train_steps, or a monitor")
        if mode not in ("min", "max"):
            raise UsageError("mode is wrong", found=mode, expected=("min", "max"))
        self.monitor, self.mode = monitor, mode
        self.best_step: int | None = None
        self.best_model_score: float | None = None
        self._every, self._keep, self._checkpointing = every_n_train_steps, keep, dict(checkpointing or {})
        self._checkpointer: Checkpointer | None = None
        self._noted_step = 0
        self._noted: Mapping[str, Any] | None = None  # In the middle of a step: what was so at the end of the last.
        self._is_in_step = False
        self._rng: Mapping[str, Any] | None = None
        self._positions: list[Any] = []
        self._metrics: Mapping[str, torch.Tensor] = {}

    # What Lightning asks for.

    @property
    def state_key(self) -> str:
        return type(self).__qualname__

    @property
    def ckpt_path(self) -> str | None:
        """What ckpt_path="last" means, unless another callback has saved later, by the times of what they name."""
        found = Path(self.dirpath, MANIFESTS_DIR)
        if not steps_in(self.dirpath):
            if not steps_in(upload_url(self._checkpointing)):
                return None
            found.mkdir(parents=True, exist_ok=True)  # Lightning takes what is there alone.
        return str(found)

    @property
    def best_model_path(self) -> str:
        """What ckpt_path="best" means."""
        return "" if self.best_step is None else str(Path(self.dirpath, f"step={self.best_step}"))

    def state_dict(self) -> dict[str, Any]:
        rng = RngState().state_dict() if self._noted is None or not self._is_in_step else self._noted["rng"]
        return {"rng": rng, "best_step": self.best_step, "best_model_score": self.best_model_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_step, self.best_model_score = state_dict["best_step"], state_dict["best_model_score"]
        self._rng = state_dict["rng"]
        RngState().load_state_dict(self._rng)  # What is drawn for a new epoch comes before its first batch.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if not isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
            trainer.strategy.checkpoint_io = AsyncCheckpointIO()
        url = upload_url(self._checkpointing)
        if url is not None:
            trainer.strategy.checkpoint_io.uploads[os.path.realpath(self.dirpath)] = url

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[_METRICS] = dict(trainer.callback_metrics)
        fit_loop = None if self._noted is None or not self._is_in_step else self._noted["fit_loop"]
        if fit_loop is not None and trainer.global_step == self._noted_step:
            checkpoint["loops"]["fit_loop"] = fit_loop  # Else the batch of an error would be left out.

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        fit_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
        self._positions = fit_loop.get("combined_loader", [])
        self._metrics = checkpoint.get(_METRICS, {})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._check_newest(trainer.global_step)
        # What ends the epoch behind a validation, such as EarlyStopping, asks for what that has measured.
        trainer.callback_metrics.update(self._metrics)
        # Lightning sets positions in the middle of an epoch alone, and would begin with the first epoch's order.
        loaders = trainer.fit_loop._combined_loader.flattened
        for loader, position in zip(filter(_has_position, loaders), self._positions, strict=False):
            if isinstance(loader, Batches):
                loader.load_state_dict(position)
        keep = self._keep
        if keep is not None and self.monitor is not None:
            best = {"best": 1, "metric": self.monitor, "mode": self.mode}
            self._checkpointing.setdefault("keep", KeepPolicy(latest=keep, **best))  # type: ignore[arg-type]
        arguments = {"every": math.inf, "keep": keep, **self._checkpointing, ROOT: _Dumped(trainer)}
        checkpointer = Checkpointer(self.dirpath, **arguments)
        self._noted_step, self._noted, self._is_in_step = trainer.global_step, None, False
        self._checkpointer = checkpointer.__enter__()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._rng is not None and batch_idx > 0:
            RngState().load_state_dict(self._rng)  # In the middle of an epoch, making its iterator again has drawn.
        self._rng, self._is_in_step = None, True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, loop = trainer.global_step, trainer.fit_loop.epoch_loop
        if step == self._noted_step:  # In the middle of accumulated gradients.
            return
        if not loop._should_check_val_fx(trainer.fit_loop._data_fetcher):  # Else the step ends behind the validation.
            self._note(trainer, step, save=self._every is not None and step % self._every == 0)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        step = trainer.global_step
        if self._checkpointer is None or trainer.sanity_checking or step == self._noted_step:
            return
        if self.monitor is None:
            self._note(trainer, step, save=self._every is not None and step % self._every == 0)
            return
        found = trainer.callback_metrics.get(self.monitor)
        if found is None:
            known = sorted(trainer.callback_metrics)
            raise UsageError(f"there is no metric {self.monitor!r} behind the validation", found=known)
        score = float(found)
        best = self.best_model_score
        is_better = best is None or (score < best if self.mode == "min" else score > best)
        if is_better and not math.isnan(score):
            self.best_step, self.best_model_score = step, score
        self._note(trainer, step, save=True, score=score)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        loop = trainer.fit_loop
        if loop.restarting and loop.epoch_loop._num_ready_batches_reached():
            # Lightning leaves it out behind a resume, where it has no metrics.
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException, *_: Any, **__: Any) -> None:
        self._end(exception)

    def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._end(None)

    # How it is done.

    def _check_newest(self, step: int) -> None:
        newest = max(steps_in(self.dirpath), default=step)
        if step < newest:
            raise UsageError(
                f"{self.dirpath!r} holds newer steps than step {step}, which this fit would go on from",
                found=f"step {newest}",
                hint=f"asyncckpt.checkpoints.remove_after(path, {step}) removes them; or give another directory",
            )

    def _note(self, trainer: Any, step: int, *, save: bool, score: float = math.nan) -> None:
        assert self._checkpointer is not None
        self._noted_step, self._is_in_step = step, False
        loop = trainer.fit_loop
        # What other loaders have to say of their positions may take longer than a step.
        is_short = all(isinstance(loader, Batches) for loader in filter(_has_position, loop._combined_loader.flattened))
        fit_loop = copy.deepcopy(loop.state_dict()) if is_short else None
        self._noted = {"rng": RngState().state_dict(), "fit_loop": fit_loop}
        metadata = None if self.monitor is None else {self.monitor: score}
        self._checkpointer.step(step, save=save, metadata=metadata)

    def _end(self, error: BaseException | None) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(None if error is None else type(error), error, None)


class _Dumped:
    """Lightning's checkpoint of a trainer, made when it is asked for."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise CheckpointError("Lightning loads its checkpoints itself")


def _has_position(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


class Batches:
    """A DataLoader with a ResumableSampler, as Lightning's loops take it: see DataPosition.

    Lightning counts the batches of an epoch and leaves the last iterator where it is, so an epoch that was consumed
    ends here when the next one begins.
    """

    def __init__(self, loader: torch.utils.data.DataLoader[Any]) -> None:
        self.position = DataPosition(loader)
        self._batches_count = len(loader)  # Before any position is set.

    def __len__(self) -> int:
        return self._batches_count

    def __iter__(self) -> Iterator[Any]:
        if self.position.is_at_end:
            for _ in self.position:
                raise AssertionError("an epoch that was consumed has no batches")
        yield from self.position

    def state_dict(self) -> dict[str, Any]:
        return self.position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position.load_state_dict(state)
