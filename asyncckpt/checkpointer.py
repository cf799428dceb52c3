"""Checkpoints of a training loop in five lines, from the first step to the last, whatever ends it.

    with asyncckpt.Checkpointer("ckpt", every=500, model=model, optimizer=optimizer) as ckpt:
        for step in range(ckpt.restore(), steps):
            train(step)
            ckpt.step(step)

A Saver, a PeriodicSaver and a Loader over one state, and what ends a loop:

    the end of the `with` block     the last step is saved, if it was not yet
    an exception, sys.exit          the same; the metadata says whether the state may be half a step off (periodic.py)
    the end of the interpreter      the same, where there is no `with` block
    SIGTERM, max_hours              the next `.step` saves, and the process ends: SystemExit 143, or SIGTERM's handler
    SIGKILL, os._exit, power loss   what had committed is there

With several ranks all of them do this together: they restore one step, stop after one step, save the same last one.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from time import monotonic
from typing import Any

from asyncckpt.arguments import check_seconds, check_type
from asyncckpt.checkpointer_options import check_options, parts_of
from asyncckpt.commit.discover import committed_steps
from asyncckpt.engine.features.go_back import store_of
from asyncckpt.engine.load.run_load import LoadRequest
from asyncckpt.engine.process.future import SaveFuture
from asyncckpt.engine.process.log import log_ended
from asyncckpt.engine.process.termination import Termination, exit_as_terminated
from asyncckpt.engine.ranks import steps_together
from asyncckpt.engine.ranks.loop_restore import Copy, LoopRestore
from asyncckpt.engine.ranks.open_directory import look_for_all, which_of_all
from asyncckpt.engine.ranks.steps_together import StepsTogether
from asyncckpt.errors import IOFailedError, UsageError, closing_beside
from asyncckpt.format.names import check_step
from asyncckpt.loader import changed_request, load_now
from asyncckpt.model.result import LoadReport, SaveResult
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.options import SAVE_DEADLINE_S, BusyPolicy, DeltaPolicy, KeepPolicy, RankOptions
from asyncckpt.periodic import ErrorHandler, PeriodicSaver, PeriodicStatistics, check_every
from asyncckpt.plan.load_offer import LoadFilter
from asyncckpt.saver import Saver
from asyncckpt.shard.reader import read_threads
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.folder import check_place

_MAX_HOURS = "max_hours"


class Checkpointer:
    """Save a state every few steps, restore it, and save the last step whatever ends the loop.

    path           the checkpoint directory, made with its parents when missing
    every          steps between saves (or use every_seconds, with one rank). A save that comes due while another is in
                   flight is skipped. math.inf: save only on `.step(step, save=True)`
    keep           how many of the newest checkpoints stay, or a KeepPolicy; None: all
    max_hours      save and end the process before this many hours have passed since this was made: in time for one more
                   step (with several ranks two) and save as long as the longest so far; None: no limit
    deltas         see Saver
    on_error       what to do with errors of background saves; see PeriodicSaver
    options        further arguments of the Saver, by name: {"durability": "none"}
    state          what is saved, by name: tables, modules (also in DDP or torch.compile), optimizers, dicts, anything
                   with a state dict, tensors. Tables in modules and of sparse optimizers are found

    Use it from one thread. On the main thread it handles SIGTERM from the start of the `with` block, or else the first
    step; with several ranks from the constructor on. Without a block, it is closed by `close`, by another Checkpointer
    of the same directory, or when the interpreter ends. Ranks are torch.distributed's, unless options say otherwise.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: float | None = None,
        every_seconds: float | None = None,
        keep: int | KeepPolicy | None = None,
        max_hours: float | None = None,
        deltas: DeltaPolicy | None = None,
        on_error: ErrorHandler = "raise",
        options: Mapping[str, Any] | None = None,
        **state: Any,
    ) -> None:
        if max_hours is not None:
            check_seconds("max_hours", max_hours, above_zero=True, unit="hours")
        options = {} if options is None else options
        check_options(options)
        tables, tensors = parts_of(state)
        more = {"keep": keep, "deltas": deltas, **options}
        ranks = more.get("ranks", RankOptions())
        check_type("ranks", ranks, RankOptions)
        if ranks.in_turn:
            raise UsageError("ranks in turn cannot share a Checkpointer", hint="give each of them a Saver")
        if "shard_num" not in more:
            more["shard_index"], more["shard_num"] = which_of_all(ranks)
        key = str(path if more["shard_num"] != 1 else check_place(path))  # Of ranks the Saver does, and tells all.
        _end_earlier(key := key if StoreUrl.is_url(key) else os.path.realpath(key))
        self._termination = Termination()
        if more["shard_num"] != 1:  # From here on the other ranks wait for this one: none ends by itself.
            self._termination.listen()
        try:
            with self._termination.waiting(steps_together.ASKED_S_MAX):
                look_for_all(path, None if "shard_num" in options else ranks)
                self._saver = Saver(path=path, hashtables=tables, tensors=tensors, **more)
            self._together = StepsTogether(self._saver._ranks, self._termination, self._saver.path)
            self._restores = LoopRestore(self._together, self._saver._target, self._saver._uploads)
            try:
                # A rank that is not made fails the first restore of the others.
                with StepsTogether(self._saver._ranks, self._termination, self._saver.path).restoring():
                    check_every("every", every, every_seconds)
                    self._periodic = PeriodicSaver(
                        self._saver, every_steps=every, every_seconds=every_seconds, on_error=on_error
                    )
            except BaseException:
                self._saver.close()
                raise
        except BaseException:
            self._termination.end()
            if self._termination.is_asked:
                self._termination.leave()
            raise
        self._until = None if max_hours is None else monotonic() + 3600 * max_hours
        self._step_ended: float | None = None
        self._last_step: int | None = None
        self._report: LoadReport | None = None
        self._key, self._pid = key, os.getpid()
        self._longest_step_s, self._is_entered, self._closed = 0.0, False, False
        self._errors_before: list[BaseException] = []  # Raised before the last step ended, as far as can be seen.
        _open[key] = self
        if parent_process() is not None:  # Processes of multiprocessing end without what is registered with atexit.
            Finalize(None, _end_all, exitpriority=0)

    def __repr__(self) -> str:
        last = "no step yet" if self._last_step is None else f"step {self._last_step}"
        return f"Checkpointer({self.path!r}, {last}, {'closed' if self._closed else 'open'})"

    @property
    def path(self) -> str:
        """The checkpoint directory, absolute."""
        return self._saver.path

    @property
    def report(self) -> LoadReport | None:
        """What the last `restore` has loaded; None before it, and when there was nothing to load."""
        return self._report

    def restore(
        self,
        step: int | None = None,
        *,
        discard_newer: bool = False,
        strict: bool = True,
        cast: bool = False,
        rename: Mapping[str, str] | None = None,
        resize: Collection[str] = (),
        filter_func: LoadFilter | None = None,
        fallback: bool = False,
    ) -> int:
        """Load a step, by default the newest, into the state; return the step to go on with: 0 in an empty directory.

        A directory without checkpoints that is uploaded goes on from those in the store.

        To go back, name the step: what was saved after it is discarded, durably, when the step is loaded, so that the
        directory tells one history. UsageError, with nothing changed, if that needs discard_newer=True and it is not
        given, or a newer step is pinned. Every rank calls it, with the same arguments. Waits for saves in flight.

        strict, cast, rename, resize, filter_func: for a model that has changed since, see Loader. The same call also
        restores what is saved afterwards. `report` has what is missing.

        fallback: where the newest step is damaged, all ranks load the newest older one that is sound, and a warning is
        logged. The next `.step` or `save_now` puts the damaged ones aside, into the folder `damaged`. Not for a step
        that is named, nor with strict=False, resize or filter_func, which could leave parts of a damaged one in place.

        Raises as Loader.load does, and then the last step is not saved at the end. If parts of the state were filled,
        all saves raise until a `restore` succeeds or `begin_anew` is called.
        """
        self._check_open()
        with self._together.restoring():
            step = check_step(step)
            check_type("discard_newer", discard_newer, bool)
            check_type("fallback", fallback, bool)
            how = changed_request(strict=strict, cast=cast, rename=rename, resize=resize, filter_func=filter_func)
            if fallback and (step is not None or discard_newer or not strict or resize or filter_func is not None):
                raise UsageError(
                    "fallback is for the newest step, and for a state that a load fills as a whole",
                    hint="leave out step, discard_newer, strict=False, resize and filter_func",
                )
            self._periodic.drain()
            self._saver._wait_in_flight(SAVE_DEADLINE_S)
            chosen = self._restores.choose(step, discard_newer=discard_newer)
            if chosen is not None:
                self._load_step(chosen, how, discard_newer=discard_newer, fallback=fallback)
        if self._together.is_asked:  # Nothing is to be saved.
            self._termination.leave()
        return 0 if chosen is None or self._last_step is None else self._last_step + 1

    def step(
        self, step: int, *, metadata: Mapping[str, Any] | None = None, save: bool | None = None
    ) -> SaveFuture | None:
        """Note that a training step has ended; return the future if a save was begun.

        save: see PeriodicSaver.step.

        Steps ascend. Every rank calls it, for the same steps. After SIGTERM, or shortly before max_hours have passed,
        it saves, waits for that, and ends the process.
        """
        step = check_step(step, or_none=False)
        self._check_open()
        self._check_ascends(step)
        if save is not None:
            check_type("save", save, bool)
        self._restores.begin_history(metadata)
        self._last_step = step
        self._errors_before = _errors_raised()
        self._termination.listen()
        self._measure_step()
        why = self._together.stop(self._why_stop())
        if not why:
            return self._periodic.step(step, metadata=metadata, save=save)
        log_ended(self._periodic._save_and_leave(step, metadata), why, rank=self._saver._target.rank)
        if why == _MAX_HOURS:
            exit_as_terminated()
        self._termination.leave()
        return None

    def begin_anew(self) -> None:
        """Say, on every rank, that a new state goes on above the steps there, after a `restore` failed half-way."""
        self._check_open()
        self._saver._target.begin_anew()

    def save_now(self, step: int | None = None, *, metadata: Mapping[str, Any] | None = None) -> SaveResult:
        """Save the state as it is now, and return when the checkpoint is durable: see PeriodicSaver.save_now."""
        self._check_open()
        step = check_step(step)
        if step is not None and step != self._last_step:
            self._check_ascends(step)
            self._restores.begin_history(metadata)
            self._last_step = step - 1  # The step may still be noted.
        elif step is not None:
            self._restores.begin_history(metadata)
        return self._periodic.save_now(step, metadata=metadata)

    def compact(self, step: int | None = None) -> SaveFuture:
        """Fold the chain of a delta (default: the newest step) into a full checkpoint of it: see Saver.compact."""
        self._check_open()
        return self._saver.compact(step)

    def statistics(self) -> PeriodicStatistics:
        """Return how many saves were begun, skipped or failed."""
        return self._periodic.statistics()

    def close(self) -> None:
        """Save the last step, unless it is saved, and give everything back. Idempotent."""
        # Of several ranks, those that are closed are at an end that all come to.
        self._end(self._error_since() if self._saver.ranks_count == 1 else None)

    def __enter__(self) -> Checkpointer:
        self._check_open()
        self._is_entered = True
        self._termination.listen()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with closing_beside(error, "the last step was not saved"):
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Save the last step, close, and act on a SIGTERM that came meanwhile. error: what has ended the loop."""
        self._finish(error)
        if self._termination.is_asked:
            self._termination.leave()

    def _error_since(self) -> BaseException | None:
        """Return what was raised after the last step, as far as can be seen outside of a `with` block."""
        return next((new for new in _errors_raised() if all(new is not old for old in self._errors_before)), None)

    def _finish(self, error: BaseException | None) -> None:
        if self._closed or self._pid != os.getpid():
            return
        try:
            with uninterrupted:
                self._closed = True
                try:
                    self._periodic._finish(error)
                finally:
                    if _open.get(self._key) is self:
                        del _open[self._key]
                    self._saver.close()
        finally:
            self._termination.end()

    def _load_step(self, chosen: Copy, how: LoadRequest, **options: bool) -> None:
        """Load a step on all ranks, and make it the newest one."""
        # From here on, also when an error ends it, the state is not that of the last step any more.
        self._last_step = self._step_ended = None
        self._periodic._forget_last()
        self._report = self._restores.load(partial(self._load, how), chosen, **options)
        self._last_step = self._report.step

    def _load(self, how: LoadRequest, step: int, url: str | None) -> LoadReport:
        target = self._saver._target
        request = replace(
            how,
            tables=target.tables,
            state=target.state,
            step=step,
            threads=read_threads(16),  # As a Loader.
            rank=target.rank,
            ranks_count=self._saver.ranks_count,
            puts_values=True,
            before_fill=lambda: setattr(target.memory, "half_loaded", step),
        )
        return load_now(check_place(url or self.path), request, BusyPolicy("wait"))

    def _check_ascends(self, step: int) -> None:
        """Refuse at once what would be refused, or become a second history, in the middle of training."""
        if self._last_step is None:
            root, where = self._saver._target.root, self.path
            steps = committed_steps(root.in_calls)
            if steps and steps[-1] >= step and root.look_anew():
                steps = committed_steps(root.in_calls)
            there = None if steps else store_of(self._saver._uploads)
            if there is not None:  # Its disk may have been lost.
                where = str(there.path)
                with suppress(IOFailedError):
                    steps = committed_steps(there)
            if steps and steps[-1] >= step:
                raise UsageError(
                    f"step {step} is not above step {steps[-1]}, the newest in {where!r}",
                    hint="call restore() before the loop and count from what it returns, or use another directory",
                )
        elif step <= self._last_step:
            what = f"step {step} comes after step {self._last_step}, but each step must be greater than the last"
            raise UsageError(what, hint="count over the whole run, not in each epoch")

    def _measure_step(self) -> None:
        now = monotonic()
        if self._step_ended is not None:
            self._longest_step_s = max(self._longest_step_s, now - self._step_ended)
        self._step_ended = now

    def _why_stop(self) -> str:
        """Return why this rank would stop now, or ""."""
        if self._termination.is_asked:
            return "SIGTERM"
        if self._until is None:
            return ""
        step_s, save_s = self._longest_step_s, self._periodic._longest_save_s
        # At the end of the last step, a save may be in flight that begins in the step before it.
        needed_s = (self._together.steps_to_stop - 1) * step_s + max(step_s, save_s) + save_s
        return _MAX_HOURS if monotonic() + needed_s >= self._until else ""

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"the Checkpointer of {self.path!r} is closed")
        if self._pid != os.getpid():
            raise UsageError("this Checkpointer belongs to the parent process", hint="make a new one in this process")


# Those that are not closed, by path. They stay alive: the last step of one that nobody holds is to be saved, too.
_open: dict[str, Checkpointer] = {}


def _end_earlier(path: str) -> None:
    """Close an earlier Checkpointer of the same directory: a cell of a notebook is run again."""
    earlier = _open.get(path)
    if earlier is None or earlier._pid != os.getpid():
        return
    if earlier._is_entered:
        raise UsageError(f"a Checkpointer of {path!r} is open already", hint="close it, or leave its with block")
    earlier.close()


def _errors_raised() -> list[BaseException]:
    """Return the exception that is being handled, and the last one that ended a program or a cell of a notebook."""
    return [error for error in (sys.exc_info()[1], getattr(sys, "last_value", None)) if error is not None]


@atexit.register
def _end_all() -> None:
    """Save the last steps at the end of the interpreter; then act on a SIGTERM that came since they ended."""
    ended = list(reversed(_open.values()))
    for checkpointer in ended:
        try:
            checkpointer._finish(checkpointer._error_since())
        except Exception as failed:
            print(f"asyncckpt: the last step was not saved in {checkpointer.path!r}: {failed}", file=sys.stderr)
    for checkpointer in ended:
        if checkpointer._termination.is_asked:
            checkpointer._termination.leave(at_exit=True)
