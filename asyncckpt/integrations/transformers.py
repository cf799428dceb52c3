"""Hugging Face's Trainer, saving in the background through a Checkpointer, and resuming by `resume_from_checkpoint`.

    from asyncckpt.integrations.transformers import Trainer

    trainer = Trainer(model=model, args=TrainingArguments("out", save_steps=100), train_dataset=data)
    trainer.train(resume_from_checkpoint=trainer.has_checkpoint())

`CheckpointMixin` gives the same to other Trainers: `class MyTrainer(CheckpointMixin, SFTTrainer)`, and the callback
`AsyncCheckpoint` to a Trainer whose class others choose: `SFTTrainer(callbacks=[AsyncCheckpoint()])`. When to save and
what to keep stays the business of TrainingArguments. One step of the directory holds

    model, optimizer, scheduler, scaler    their state dicts, and tables in the model
    rng                                    the random numbers of this rank
    trainer                                Hugging Face's TrainerState, as JSON, and the loss since the last log
    pretrained                             class, config and generation config, for export_pretrained

How a run resumes:

1. `train` finds the step, reads `trainer` of it, and gives Hugging Face's loop a folder with its JSON alone.
2. The loop makes optimizer and scheduler, and asks for their states: everything is loaded now.
3. It skips the batches of the epoch that were trained on, and asks for the random numbers: they are set now.

A step counts as ended when it is logged, evaluated and saved. SIGTERM is taken then: see Checkpointer.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.checkpointer_options import checked_restoring
from asyncckpt.checkpoints import describe
from asyncckpt.errors import UnsupportedError, UsageError, Words
from asyncckpt.integrations.loggers import check_loggers
from asyncckpt.integrations.needed import needed
from asyncckpt.integrations.places import steps_in, upload_url
from asyncckpt.integrations.pretrained import Pretrained, base_of, export_pretrained
from asyncckpt.integrations.trainer_values import HeldRng, TrainerValues
from asyncckpt.loader import Loader
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.modules.named_parts import named_parts
from asyncckpt.options import KeepPolicy

__all__ = ["AsyncCheckpoint", "CheckpointMixin", "Trainer", "export_pretrained"]

transformers = needed("transformers", "transformers", at_least="5.3")  # Since then the loss can be resumed.
_STATE_FILE = "trainer_state.json"
_FOLDER = "checkpoints"
_NAMED_STEP = re.compile(r"checkpoint-(\d+)")
_PUSHES_AT_THE_END = ("end",)


@dataclass(frozen=True)
class _Resumed:
    """The step that a call of `train` goes on from. source: where it is read, if not in its directory."""

    directory: Path
    step: int
    source: str | None = None


class CheckpointMixin:
    """In front of a Trainer of transformers; see above.

    checkpoint_dir   the checkpoint directory; None: `checkpoints` in the output directory
    discard_newer    whether going back to an older step (resume_from_checkpoint=".../checkpoint-20") may remove what
                     was saved after it; else that is an error
    checkpointing    further arguments of the Checkpointer, by name: {"max_hours": 23}
    restoring        how to resume with a changed model, by name: {"strict": False, "rename": ...}; see
                     Checkpointer.restore
    """

    def __init__(
        self,
        *args: Any,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        discard_newer: bool = False,
        checkpointing: Mapping[str, Any] | None = None,
        restoring: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._take_arguments(checkpoint_dir, discard_newer, checkpointing, restoring)
        super().__init__(*args, **kwargs)

    def _take_arguments(
        self,
        checkpoint_dir: str | os.PathLike[str] | None,
        discard_newer: bool,
        checkpointing: Mapping[str, Any] | None,
        restoring: Mapping[str, Any] | None,
    ) -> None:
        if StoreUrl.is_url(checkpoint_dir):
            hint = 'checkpointing={"options": {"upload": url}} uploads what is saved'
            raise UsageError("checkpoint_dir is a URL", expected="a folder", hint=hint)
        self._checkpoint_dir, self._discard_newer = checkpoint_dir, discard_newer
        self._checkpointing, self._restoring = dict(checkpointing or {}), checked_restoring(restoring)
        self._resumed: _Resumed | None = None
        self._open: contextlib.ExitStack | None = None
        self._checkpointer: Checkpointer | None = None
        self._noted_step = self._put_off_step = -1
        self._trainer_values, self._rng = TrainerValues(self), HeldRng()
        self._trial: Any = None

    # What users call.

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints are saved; each trial of hyperparameter_search has a folder of its own."""
        output = Path(self._get_output_dir(self._trial))
        if self._checkpoint_dir is None:
            return output / _FOLDER
        given = Path(self._checkpoint_dir)
        return given if self._trial is None else given / output.name

    def has_checkpoint(self) -> bool:
        """Return whether there is a step to resume: `train(resume_from_checkpoint=trainer.has_checkpoint())`."""
        output = self.args.output_dir
        theirs = os.path.isdir(output) and transformers.trainer_utils.get_last_checkpoint(output) is not None
        return theirs or bool(steps_in(self.checkpoint_dir) or steps_in(upload_url(self._checkpointing)))

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as Trainer.train does.

        resume_from_checkpoint: True: the newest step; ".../checkpoint-20" or the directory of checkpoints: that step,
        or its newest. What Hugging Face's own Trainer has saved is resumed by it.
        """
        self._check_supported()
        self._trial = trial
        self._resumed = self._find(resume_from_checkpoint)
        self._noted_step = self._put_off_step = -1
        self._trainer_values, self._rng = TrainerValues(self), HeldRng()
        with contextlib.ExitStack() as self._open:
            self._open.callback(self._forget)
            if self._resumed is None:
                self._check_unused()
            else:
                _load(self._resumed, {"trainer": self._trainer_values})
                resume_from_checkpoint = self._open.enter_context(tempfile.TemporaryDirectory())
                Path(resume_from_checkpoint, _STATE_FILE).write_text(self._trainer_values.text, encoding="utf-8")
            try:
                return super().train(resume_from_checkpoint, trial, *args, **kwargs)  # type: ignore[misc]
            except BaseException:
                self._leave_out_half_step()
                raise

    def export_pretrained(self, folder: str | os.PathLike[str], step: int | str | None = None) -> int:
        """Make a folder for `from_pretrained` of a saved step ("best", a number, None: the newest); return the step."""
        kind, tokenizer = type(base_of(self.model)), self.processing_class
        return export_pretrained(self.checkpoint_dir, folder, step=step, model_class=kind, tokenizer=tokenizer)

    # What the loop of transformers calls.

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self._noted_step >= 0:
            what = "training would start again with smaller batches, after steps that are saved"
            hint = "start it again with smaller batches, and resume; or without auto_find_batch_size"
            raise UsageError(what, found=Words(f"step {self._noted_step}"), hint=hint)
        return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        before = -1 if self._resumed is None or self._resumed.directory == self.checkpoint_dir else self._resumed.step
        if self.state.best_global_step and self.state.best_global_step > before:
            self.state.best_model_checkpoint = str(self.checkpoint_dir)
        self._note(save=True)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        step, epoch = self.state.global_step, self.state.epoch or 0.0
        if epoch.is_integer() and self._put_off_step != step:
            self._put_off_step = step  # What ends the epoch comes right behind the last step of it.
        else:
            self._note(save=False)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        if self._resumed.directory == self.checkpoint_dir:
            restore = self._made_checkpointer().restore
            restore(self._resumed.step, discard_newer=self._discard_newer, **self._restoring)
        else:
            _load(self._resumed, self._parts(), **self._restoring)
        if self.args.save_only_model:  # What was saved before may hold more than what will be.
            there = _names(self._resumed)
            parts = {name: part for name, part in self._parts_of_training().items() if name in there}
            _load(self._resumed, parts, **self._restoring)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
            return
        self._rng.set_held()
        self._trainer_values.set_loss()

    def _load_best_model(self) -> None:
        directory = Path(self.state.best_model_checkpoint)
        if directory != self.checkpoint_dir and not steps_in(directory):
            super()._load_best_model()  # type: ignore[misc]
            return
        if self._checkpointer is not None:
            self._checkpointer.save_now()  # The best model must not be taken for the last one.
        _load(_Resumed(directory, self.state.best_global_step), {"model": self.model})

    # How it is done.

    def _note(self, *, save: bool) -> None:
        """Note that a step has ended. After SIGTERM this saves it and ends the process."""
        step = self.state.global_step
        if not save and self.args.save_strategy == "no":
            return
        checkpointer = self._made_checkpointer()
        self._rng.note()
        self._trainer_values.note()
        if step == self._noted_step:
            if save:
                checkpointer.save_now(metadata=self._metric())
            return
        self._noted_step = step
        checkpointer.step(step, save=save, metadata=self._metric())

    def _made_checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            assert self._open is not None
            arguments = {"every": math.inf, "keep": self._keep(), **self._checkpointing, **self._parts()}
            self._checkpointer = self._open.enter_context(Checkpointer(self.checkpoint_dir, **arguments))
        return self._checkpointer

    def _leave_out_half_step(self) -> None:
        """Do not save a step that an error has kept from its end: nothing would log and evaluate it after a resume."""
        if self._checkpointer is not None and self._noted_step >= 0:
            periodic = self._checkpointer._periodic
            if self.state.global_step != self._noted_step or periodic._watch.is_changed:
                periodic._forget_last()

    def _forget(self) -> None:
        self._checkpointer = self._open = self._resumed = self._trial = None

    def _parts(self) -> dict[str, Any]:
        """Return what a checkpoint holds, by name."""
        parts = {"model": self.model, "trainer": self._trainer_values, "pretrained": Pretrained(self.model)}
        return parts if self.args.save_only_model else parts | self._parts_of_training()

    def _parts_of_training(self) -> dict[str, Any]:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate wraps it.
        parts = {"optimizer": optimizer, "scheduler": self.lr_scheduler, "rng": self._rng}
        return parts if self.accelerator.scaler is None else parts | {"scaler": self.accelerator.scaler}

    def _metric_name(self) -> str:
        name = self.args.metric_for_best_model
        return name if name.startswith("eval_") else f"eval_{name}"

    def _keep(self) -> KeepPolicy | None:
        """Return what save_total_limit means: that many of the newest, in addition to the best."""
        limit = self.args.save_total_limit
        if limit is None or limit <= 0:
            return None
        if self.args.metric_for_best_model is None:
            return KeepPolicy(latest=limit)
        is_max = self.args.greater_is_better
        return KeepPolicy(latest=limit, best=1, metric=self._metric_name(), mode="max" if is_max else "min")

    def _metric(self) -> dict[str, float] | None:
        """Return the metric that chooses the best model, nan at a step that was not evaluated."""
        if self.args.metric_for_best_model is None:
            return None
        name = self._metric_name()
        found = (
            entry[name]
            for entry in reversed(self.state.log_history)
            if name in entry and entry.get("step") == self.state.global_step
        )
        return {name: float(next(found, math.nan))}

    def _find(self, asked: str | bool | None) -> _Resumed | None:
        """Return the step that is meant; None for none, and for what Hugging Face's Trainer has saved."""
        if not asked:
            return None
        own, step = self.checkpoint_dir, None
        directory = own if asked is True else Path(asked)
        named = _NAMED_STEP.fullmatch(directory.name)
        if named is not None and not directory.exists():
            directory, step = directory.parent, int(named[1])
            directory = directory if steps_in(directory) else directory / _FOLDER
        elif asked is not True and not steps_in(directory):
            directory /= _FOLDER
        if own.exists() and directory.exists() and own.samefile(directory):
            directory = own
        steps, source = steps_in(directory), None
        if not steps and directory == own:
            source = upload_url(self._checkpointing)
            steps = steps_in(source)
        if not steps:
            return None
        step = steps[-1] if step is None else step
        if step not in steps:
            raise UsageError(f"there is no step {step} in {str(directory)!r}", found=steps)
        if directory == own and step != steps[-1] and not self._discard_newer:
            what = f"cannot resume from step {step}: {str(directory)!r} holds newer ones, up to step {steps[-1]}"
            raise UsageError(what, hint="Trainer(..., discard_newer=True) deletes what was saved after it")
        return _Resumed(directory, step, source)

    def _check_unused(self) -> None:
        steps = steps_in(self.checkpoint_dir)
        if steps and self.args.save_strategy != "no":
            what = f"{str(self.checkpoint_dir)!r} holds another run"
            raise UsageError(what, found=steps, hint="pass resume_from_checkpoint=True, or another folder")

    def _check_supported(self) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if self.is_deepspeed_enabled or (self.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2):
            raise UnsupportedError("DeepSpeed and the first version of FSDP hold a state that is not taken apart here")
        if self.args.push_to_hub and self.args.hub_strategy not in _PUSHES_AT_THE_END:
            raise UnsupportedError(
                "checkpoints are not pushed to the hub while they are saved in the background",
                found=Words(self.args.hub_strategy),
                expected=_PUSHES_AT_THE_END,
            )
        if self.args.save_strategy != "no":
            check_loggers(self.callback_handler.callbacks)

    if TYPE_CHECKING:  # What the Trainer has.

        def __getattr__(self, name: str) -> Any: ...


def _names(resumed: _Resumed) -> set[str]:
    """Return the names of the parts of a checkpoint."""
    found = describe(resumed.source or resumed.directory, resumed.step)
    return {name.split(".")[0] for name in (*(block.name for block in found.blocks), *found.values)}


def _load(resumed: _Resumed, parts: Mapping[str, Any], **changes: Any) -> None:
    tables, tensors = named_parts(parts)
    Loader(resumed.source or resumed.directory, tables, tensors, step=resumed.step, **changes).load()


class Trainer(CheckpointMixin, transformers.Trainer):  # type: ignore[misc, name-defined]
    """transformers.Trainer with checkpoints in the background; see CheckpointMixin."""


class AsyncCheckpoint(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Gives the Trainer that it is handed to as a callback what CheckpointMixin gives, by the same arguments.

    Belongs into `callbacks=[...]` of the Trainer: UsageError at the start of training for one that is added later.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        *,
        discard_newer: bool = False,
        checkpointing: Mapping[str, Any] | None = None,
        restoring: Mapping[str, Any] | None = None,
    ) -> None:
        self._arguments = (checkpoint_dir, discard_newer, checkpointing, restoring)
        self._is_taken = False

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = _trainer_that_calls()
        kind = type(trainer)
        if issubclass(kind, CheckpointMixin):
            raise UsageError(f"{kind.__name__} saves in the background already", hint="leave the callback out")
        # What a step ends with, and what is resumed, is said to no callback, so the Trainer itself gets the methods.
        trainer.__class__ = type(kind.__name__, (CheckpointMixin, kind), {"__module__": kind.__module__})
        trainer._take_arguments(*self._arguments)
        self._is_taken = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._is_taken:
            raise UsageError("the callback came after the Trainer", hint="Trainer(callbacks=[AsyncCheckpoint()])")


def _trainer_that_calls() -> Any:
    """Return the Trainer whose constructor has called: callbacks are given all that it holds, but not itself."""
    frame = sys._getframe(1)
    while not isinstance(found := frame.f_locals.get("self"), transformers.Trainer):
        assert frame.f_back is not None, "only the constructor of a Trainer says that it has ended"
        frame = frame.f_back
    return found
