"""Load the step that a training loop goes on from, on all ranks: the chosen one or, where a damaged one may be passed
by, the newest before it that is sound.

Only a CorruptError says that a step is damaged: a disk that does not answer, or refuses, may do so for all of them.
What one rank finds counts for all. Where the directory is uploaded, the copy in the store is tried before an older
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from asyncckpt.commit.aside import put_aside
from asyncckpt.commit.discover import committed_steps
from asyncckpt.engine.features.go_back import choose_step, go_back, store_of
from asyncckpt.engine.load.fallback import does_not_fit
from asyncckpt.engine.process.background import check_may_wait, result_or_end, retainer
from asyncckpt.engine.process.log import log_restored, log_warning
from asyncckpt.engine.ranks.steps_together import StepsTogether
from asyncckpt.engine.save.save_job import SaveTarget
from asyncckpt.engine.save.start_save import encode_metadata
from asyncckpt.engine.upload.uploads import Uploads
from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, IOFailedError, warn
from asyncckpt.format.strict_json import Json
from asyncckpt.model.result import LoadReport
from asyncckpt.options import HALF_WAY, INTERRUPTED, SAVE_DEADLINE_S
from asyncckpt.signals import uninterrupted

Copy = tuple[int, str | None]  # A step, and the URL of the directory in the store if it is the copy there.


class LoopRestore:
    """What the restores of one loop choose and load. All ranks call everything alike."""

    def __init__(self, together: StepsTogether, target: SaveTarget, uploads: Uploads | None) -> None:
        self._together, self._target, self._uploads = together, target, uploads
        self._passed: list[Copy] = []  # By the last restore, and newer than what it has loaded.

    def choose(self, step: int | None, *, discard_newer: bool) -> Copy | None:
        """Return what to load, by default the newest; None: there is nothing. Raises as `choose_step`."""
        target, uploads = self._target, self._uploads
        chosen = self._together.decided(lambda: choose_step(target, uploads, step, discard_newer=discard_newer))
        return None if chosen is None else cast("Copy", tuple(cast("list[Json]", chosen)))

    def load(
        self,
        load: Callable[[int, str | None], LoadReport],
        chosen: Copy,
        *,
        discard_newer: bool = False,
        fallback: bool = False,
    ) -> LoadReport:
        """Load a step. load: does so on this rank, from the directory or the store. CorruptError: none is sound."""
        passed: dict[Copy, str] = {}
        target, self._passed = self._target, []
        while True:
            try:
                report, why = self._together.all_tried(partial(load, *chosen), CorruptError if fallback else ())
            except BaseException as error:
                target.memory.newest = None  # It may be what is damaged, and a new history is no delta of it.
                if isinstance(error, CorruptError):
                    self._advise(*chosen)
                if passed and isinstance(error, IncompatibleError):
                    raise does_not_fit(min(step for step, _ in passed), chosen[0], error) from error
                raise
            if not why:
                break
            passed[chosen], target.memory.newest = why, None
            chosen = self._older(chosen, passed)
        assert report is not None
        report = replace(report, fallback_from=tuple(step for step, _ in passed if step > report.step))
        target.memory.half_loaded = None
        self._passed = [(step, url) for step, url in passed if step > report.step]
        if discard_newer:
            self._together.all_done(lambda: go_back(target, self._uploads, report.step))
        if target.rank == 0:
            log_restored(report)
        if report.metadata.get(HALF_WAY):
            by = report.metadata.get(INTERRUPTED, "the end of the program")
            warn(
                f"asyncckpt: step {report.step} was saved after {by} in the middle of the next step, of which the "
                "state may hold a part; restore(an earlier step, discard_newer=True) goes back",
                RuntimeWarning,
            )
        return report

    def begin_history(self, metadata: Mapping[str, Any] | None) -> None:
        """Put aside what the restore has passed by, before anything is saved, unless the call is going to be refused.

        IOFailedError: it stays, and nothing may be saved, for retention would count it.
        """
        if not self._passed:
            return
        with self._together.restoring():
            self._together.all_done(lambda: encode_metadata(metadata))
            _, why = self._together.all_tried(self._put_aside, CheckpointError)
            if why:
                raise IOFailedError(f"damaged steps of {str(self._target.root.path)!r} cannot be put aside: {why}")
        self._passed = []

    def _advise(self, step: int, url: str | None) -> None:
        """Warn what to do about a damaged step, where there are older ones."""
        older = [other for other in committed_steps(self._target.root) if other < step]
        if older and url is None and self._target.rank == 0:
            path = self._target.root.path
            back = f"restore(fallback=True) puts it aside, and continues from step {older[-1]} if that is sound"
            with suppress(RuntimeWarning):  # Where warnings are errors, the other one says more.
                warn(f"asyncckpt: step {step} of {str(path)!r} is damaged; {back}", RuntimeWarning)

    def _older(self, last: Copy, passed: Mapping[Copy, str]) -> Copy:
        """Return what to try after what was passed by, and log it. CorruptError: nothing is left."""
        found = self._together.decided(lambda: _next(self._target, self._uploads, passed))
        step, url = cast("Copy", tuple(cast("list[Json]", found)))
        if self._target.rank == 0:
            tried = f"its copy in {url}" if step == last[0] else f"step {step}"
            what = "step %d of %s is damaged and passed by, %s is tried: %s"
            log_warning(what, last[0], last[1] or self._target.root.path, tried, passed[last])
        return step, url

    @uninterrupted
    def _put_aside(self) -> None:
        """Do so on rank 0."""
        if self._target.rank != 0:
            return
        if self._uploads is not None:
            self._uploads.discarded_after(min(step for step, _ in self._passed) - 1)
        there, what = store_of(self._uploads), "putting damaged checkpoints aside"
        for root, is_copy in ((self._target.root, False), (there, True)):
            steps = [step for step, url in self._passed if (url is not None) == is_copy]
            if root is not None and steps:
                check_may_wait(what)
                places = result_or_end(retainer.submit(put_aside, root, steps), what, SAVE_DEADLINE_S, lambda: None)
                log_warning("damaged steps of %s are put aside until somebody removes them: %s", root.path, places)


def _next(target: SaveTarget, uploads: Uploads | None, passed: Mapping[Copy, str]) -> Json:
    last, there = min(step for step, _ in passed), store_of(uploads)
    copies: list[Copy] = [(step, None) for step in committed_steps(target.root)]
    copies += [(step, str(there.path)) for step in committed_steps(there)] if there is not None else []
    left = [copy for copy in copies if copy[0] <= last and copy not in passed]
    if not left:
        where = f"in {str(target.root.path)!r}"
        why = "; ".join(f"step {step}: {text.removeprefix(f'{where}: ')}" for (step, _), text in passed.items())
        raise CorruptError(f"no checkpoint {where} is sound: {why}")
    step, url = max(left, key=lambda copy: (copy[0], copy[1] is None))
    return [step, url]
