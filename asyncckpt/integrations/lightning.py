"""Checkpoints of Lightning in the background: a callback with one directory, and a plugin for paths of their own.

    from asyncckpt.integrations.lightning import AsyncCheckpoint

    trainer = Trainer(callbacks=[AsyncCheckpoint("ckpt", every_n_train_steps=100)])
    trainer.fit(model, ckpt_path="last")  # Starts from the beginning if there is nothing to resume.

`AsyncCheckpoint` saves through a Checkpointer. What is saved is Lightning's own checkpoint, a dict with the states of
model, optimizers, schedulers, loops and callbacks, and with the random numbers of every rank. A step has ended when its
weights are whole; a validation or an end of the epoch that comes after it is run by the resumed fit, unless it is saved
after that. SIGTERM is taken then: the step is saved, and the signal goes on to Lightning, which ends the run.

`AsyncCheckpointIO` is what Trainer(plugins=...) and Fabric(plugins=...) take: every path that others choose, such as
ModelCheckpoint's, becomes a checkpoint directory.

`Batches` makes a DataLoader one whose position Lightning saves and restores, in the middle of an epoch too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.errors import CheckpointError, UsageError, Words, must_be, warn
from asyncckpt.format.names import MANIFESTS_DIR
from asyncckpt.integrations.lightning_io import ROOT, AsyncCheckpointIO, check_no_url, check_plain, checkpoint_file
from asyncckpt.integrations.lightning_loops import (
    NotedStep,
    after_epoch,
    before_epoch_end,
    before_first_batch,
    before_validation,
    copied,
    norms_of,
    set_resumed,
)
from asyncckpt.integrations.loggers import warn_of_loggers
from asyncckpt.integrations.needed import needed
from asyncckpt.integrations.places import steps_in, upload_url
from asyncckpt.options import KeepPolicy
from asyncckpt.trainer_state import DataPosition, RngState

__all__ = ["AsyncCheckpoint", "AsyncCheckpointIO", "Batches", "checkpoint_file"]

_METRICS = "callback_metrics"
needed("lightning", "lightning")
_callbacks = needed("lightning.pytorch.callbacks", "lightning")
call = needed("lightning.pytorch.trainer.call", "lightning")


class AsyncCheckpoint(_callbacks.OnExceptionCheckpoint):  # type: ignore[misc, name-defined]
    """Saves a fit to one checkpoint directory, from its first step to its last, and resumes it. See above.

    dirpath               the checkpoint directory
    every_n_train_steps   optimizer steps between saves; None: only after validations, if there is a `monitor`
    monitor, mode         the metric that chooses the best step; then steps are saved after validations, too
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
            raise must_be("mode", ("min", "max"), mode)
        self.monitor, self.mode = monitor, mode
        self.best_step: int | None = None
        self.best_model_score: float | None = None
        self._every, self._keep, self._checkpointing = every_n_train_steps, keep, dict(checkpointing or {})
        self._checkpointer: Checkpointer | None = None
        self._noted: NotedStep | None = None
        self._begun_step = 0
        self._rng: Mapping[str, Any] | None = None
        self._positions: list[Any] = []
        self._metrics: Mapping[str, torch.Tensor] = {}
        self._found_key = type(self).__qualname__

    # What Lightning asks for.

    @property
    def state_key(self) -> str:
        """One for each of several callbacks, by the names of their directories."""
        return str(self._generate_state_key(directory=Path(self.dirpath).name))

    @property
    def _legacy_state_key(self) -> str:  # What Lightning asks for where there is no state of that name.
        return self._found_key

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
        rng = RngState().state_dict()
        return {"rng": rng, "best_step": self.best_step, "best_model_score": self.best_model_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_step, self.best_model_score = state_dict["best_step"], state_dict["best_model_score"]
        self._rng = state_dict["rng"]
        RngState().load_state_dict(self._rng)  # What is drawn for a new epoch comes before its first batch.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            warn_of_loggers(trainer.loggers)
        if not isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
            trainer.strategy.checkpoint_io = AsyncCheckpointIO()
        url = upload_url(self._checkpointing)
        if url is not None:
            trainer.strategy.checkpoint_io.uploads[os.path.realpath(self.dirpath)] = url

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[_METRICS] = dict(trainer.callback_metrics)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        fit_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
        self._positions = fit_loop.get("combined_loader", [])
        saved = [key for key in checkpoint["callbacks"] if str(key).startswith(type(self).__qualname__)]
        self._found_key = saved[0] if len(saved) == 1 else self.state_key  # Of a directory with another name.
        self._metrics = checkpoint.get(_METRICS, {})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fast_dev_run:  # A trial, for which Lightning saves nothing either.
            return
        self._check_newest(trainer.global_step)
        # What ends the epoch after a validation, such as EarlyStopping, asks for what that has measured.
        trainer.callback_metrics.update(self._metrics)
        if trainer.fit_loop.is_resuming:
            set_resumed(trainer.fit_loop)
        if self._rng is not None and trainer.fit_loop.restarting:
            RngState().load_state_dict(self._rng)  # Iterators were made again; a validation may come first.
        # Lightning sets positions in the middle of an epoch alone, and would begin with the first epoch's order.
        loaders = trainer.fit_loop._combined_loader.flattened
        for loader, position in zip(filter(_has_position, loaders), self._positions, strict=False):
            if isinstance(loader, Batches):
                loader.load_state_dict(position)
        keep = self._keep
        if keep is not None and self.monitor is not None:
            best = {"best": 1, "metric": self.monitor, "mode": self.mode}
            self._checkpointing.setdefault("keep", KeepPolicy(latest=keep, **best))  # type: ignore[arg-type]
        told = {"callbacks": call._call_callbacks_state_dict(trainer)}
        for owner in filter(None, (trainer.lightning_module, trainer.datamodule)):
            told[owner.CHECKPOINT_HYPER_PARAMS_KEY] = dict(owner.hparams)
        check_plain(told)  # Now, and not at the first save.
        arguments = {"every": math.inf, "keep": keep, **self._checkpointing, ROOT: _Dumped(trainer, self)}
        checkpointer = Checkpointer(self.dirpath, **arguments)
        self._noted = None
        self._begun_step = trainer.global_step
        self._checkpointer = checkpointer.__enter__()
        # The others count steps that they begin, and at the end put averages in the place of the weights.
        trainer.callbacks = [_BeforeOthers(self), *trainer.callbacks]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        noted = self._noted
        self._set_rng(trainer, batch_idx)
        if batch_idx == 0 and noted is not None and noted.step == trainer.global_step:
            states = noted.callbacks
            noted.go_on(before_first_batch, trainer)  # Until here the epoch would begin again, with all that it does.
            noted.callbacks, noted.next_begun, noted.is_followed = states, True, False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # The same step again is in the middle of accumulated gradients.
        if self._checkpointer is not None and trainer.global_step != self._last_step:
            self._note(trainer)
            if not (self._validates(trainer) and self.monitor is not None):
                self._tell(save=self._every is not None and trainer.global_step % self._every == 0)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking and self._checkpointer is not None:
            self._rng = None  # A validation that a resumed fit begins with has drawn since.
            trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.reset_on_restart()  # See before_validation.

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        noted = self._noted
        if self._checkpointer is None or noted is None or not noted.is_followed:
            return  # Before training, or in the middle of accumulated gradients.
        noted.go_on(copied, trainer)
        noted.callbacks = self._states_of_others(trainer)  # The end of the epoch may begin, and not be reached.
        if self.monitor is None or noted.is_told:
            return
        found = trainer.callback_metrics.get(self.monitor)
        if found is None:
            known = sorted(trainer.callback_metrics)
            raise UsageError(f"there is no metric {self.monitor!r} after the validation", found=known)
        score = float(found)
        best = self.best_model_score
        is_better = best is None or (score < best if self.mode == "min" else score > best)
        if is_better and not math.isnan(score):
            self.best_step, self.best_model_score = noted.step, score
        self._tell(save=True, score=score)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        loop, noted = trainer.fit_loop, self._noted
        if not loop.epoch_loop._num_ready_batches_reached():
            return
        if loop.restarting:
            # Lightning leaves it out after a resume, where it has no metrics.
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            loop.epoch_loop.restarting = False  # It has not begun an iteration if only the end of the epoch was left.
            loop.epoch_loop.reset_restart_stage()
        if noted is not None and noted.step == trainer.global_step:
            noted.go_on(after_epoch, trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end(trainer, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException, *_: Any, **__: Any) -> None:
        if self._checkpointer is not None and not self._is_noted_state(trainer):
            what = "the error came where the weights, or what chooses the best step, were not those of a whole step"
            warn(f"asyncckpt: {what}; {self.dirpath!r} holds what was saved before", RuntimeWarning)
            self._checkpointer._periodic._forget_last()
        self._end(trainer, exception)

    def teardown(self, trainer: Any, *_: Any, **__: Any) -> None:
        self._end(trainer, None)

    # How it is done.

    def _check_newest(self, step: int) -> None:
        newest = max(steps_in(self.dirpath), default=step)
        if step < newest:
            raise UsageError(
                f"{self.dirpath!r} holds newer steps than step {step}, from which this fit would continue",
                found=Words(f"step {newest}"),
                hint=f"asyncckpt.checkpoints.remove_after(path, {step}) removes them; or give another directory",
            )

    @property
    def _last_step(self) -> int:
        return self._begun_step if self._noted is None else self._noted.step

    def _validates(self, trainer: Any) -> bool:
        return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher))

    def _note(self, trainer: Any) -> None:
        """Note a step whose weights are whole, and that what comes after it has still to be done."""
        noted = self._noted = NotedStep(trainer.global_step, RngState().state_dict())
        validates = self._validates(trainer)
        fit_loop = trainer.fit_loop
        # What other loaders have to say of their positions may take longer than a step.
        if all(isinstance(loader, Batches) for loader in filter(_has_position, fit_loop._combined_loader.flattened)):
            noted.loops = noted.next_batch = copied(fit_loop.state_dict())
            if validates:
                noted.loops = before_validation(noted.next_batch)
            elif fit_loop.epoch_loop._num_ready_batches_reached():
                noted.loops = before_epoch_end(noted.next_batch)
        noted.is_followed = validates or fit_loop.epoch_loop._num_ready_batches_reached()
        if noted.is_followed:
            noted.callbacks = self._states_of_others(trainer)
        if validates and trainer.world_size == 1:
            noted.norms = norms_of(trainer.lightning_module)

    def _set_rng(self, trainer: Any, batch_idx: int) -> None:
        if self._rng is not None and (batch_idx > 0 or trainer.fit_loop.restarted_mid_epoch):
            RngState().load_state_dict(self._rng)  # In the middle of an epoch, making its iterator again has drawn.
        self._rng = None

    def _before_batch(self, trainer: Any, batch_idx: int) -> None:
        noted = self._noted
        if batch_idx > 0:
            self._set_rng(trainer, batch_idx)
        if noted is None or noted.step != trainer.global_step or noted.next_begun:
            return
        noted.callbacks = self._states_of_others(trainer)
        if batch_idx > 0:
            noted.loops, noted.norms = noted.next_batch, None
            noted.next_begun, noted.is_followed = True, False

    def _states_of_others(self, trainer: Any) -> dict[str, Any]:
        others = (other for other in trainer.callbacks if other is not self)
        return copied({other.state_key: state for other in others if (state := other.state_dict())})

    def _tell(self, *, save: bool, score: float = math.nan) -> None:
        noted = self._noted
        if noted is None or noted.is_told:
            return
        assert self._checkpointer is not None
        noted.is_told = True
        metadata = None if self.monitor is None else {self.monitor: score}
        self._checkpointer.step(noted.step, save=save, metadata=metadata)

    def _is_noted_state(self, trainer: Any) -> bool:
        noted = self._noted
        if noted is None:
            return bool(trainer.global_step == self._begun_step)
        if noted.step != trainer.global_step or not noted.is_told:
            return False  # Other callbacks, or the validation, had not yet done their part of the step.
        return noted.norms is None or all(map(torch.equal, noted.norms, norms_of(trainer.lightning_module)))

    def _put_noted(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Put what was noted at the end of the step into its checkpoint: the next may be under way."""
        noted = self._noted
        if noted is None or noted.step != trainer.global_step:
            return
        if noted.loops is not None:
            checkpoint["loops"]["fit_loop"] = noted.loops
        states = checkpoint["callbacks"]
        own = {**states[self.state_key], "rng": noted.rng}
        checkpoint["callbacks"] = {**(states if noted.callbacks is None else noted.callbacks), self.state_key: own}

    def _end(self, trainer: Any, error: BaseException | None) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        trainer.callbacks = [other for other in trainer.callbacks if not isinstance(other, _BeforeOthers)]
        if checkpointer is not None:
            checkpointer.__exit__(None if error is None else type(error), error, None)


class _BeforeOthers(_callbacks.Callback):  # type: ignore[misc, name-defined]
    """Ends the saving of a fit before any other callback ends, and notes their states before any of them begins a step:
    Lightning calls those that save last.
    """

    def __init__(self, saving: AsyncCheckpoint) -> None:
        self._saving = saving

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._saving._before_batch(trainer, batch_idx)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._saving.on_train_end(trainer, pl_module)


class _Dumped:
    """Lightning's checkpoint of a trainer, made when it is asked for."""

    def __init__(self, trainer: Any, saving: AsyncCheckpoint) -> None:
        self._trainer, self._saving = trainer, saving

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self._saving._put_noted(self._trainer, found)
        check_plain(found)
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
