"""Steps of optimizers that wait for the copies of a save, so that forward and backward need not.

Parameters and the state of an optimizer change in its step only, if its owner declares that (DeviceOptions.optimizers).
A hook before the step waits until they are copied: the current streams for those of devices, the trainer himself for
those of the host, which the background copies meanwhile. Everything else of a state is waited for at the save; and so
are short tensors, which take less time to copy than to watch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import torch

from asyncckpt.devices.host_copies import Pending
from asyncckpt.devices.step_copies import StepCopies
from asyncckpt.devices.stepped_memory import NOTHING_STEPPED, SteppedMemory
from asyncckpt.engine.features.step_hooks import is_stepping, listen
from asyncckpt.engine.process.background import Job, background, copiers, run_on
from asyncckpt.engine.save.device_stage import DeviceStage
from asyncckpt.engine.save.feature import SaveFeature
from asyncckpt.engine.save.save_job import SaveJob
from asyncckpt.engine.save.stage import StageChoice
from asyncckpt.errors import IOFailedError
from asyncckpt.native import core
from asyncckpt.signals import Guard, uninterrupted
from asyncckpt.system import lower_priority

STEPPED_BYTES_MIN = 16 << 10


class StepFences(SaveFeature):
    """The optimizers of one Saver, whose steps wait."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._order = list(range(len(self._optimizers)))  # In which they have stepped last.
        self._guard = Guard()  # Any thread's optimizer comes here, also one that trains something else.
        self._pending: tuple[Pending, ...] = ()
        self._pid = os.getpid()
        # Else it would be compiled with a step that is, anew for each save. Optimizers have loaded the compiler.
        self._uncompiled = torch.compiler.disable(StepFences._let_wait)  # type: ignore[no-untyped-call]
        # To all optimizers: one of these may be a wrapper of another one, or have a copy, which has no hooks.
        listen(self)

    def memory(self) -> SteppedMemory:
        """Return the memory that only steps change. Within a step, none: it has waited already."""
        if is_stepping():
            return NOTHING_STEPPED
        return SteppedMemory(self._optimizers, bytes_min=STEPPED_BYTES_MIN)

    def planned(self, job: SaveJob, stage: StageChoice) -> None:
        if stage.fallback is None:
            job.copies = DeviceStage(job.target.options, self.memory())

    def expect(self, pending: Pending) -> None:
        """Let the next step wait for these copies."""
        pending.steps.begin()
        self._prune(pending)

    def captured(self, job: SaveJob) -> None:
        """Let the next step wait for the copies, by the streams of devices; and by itself for those of the host, which
        are made beside what else is in flight. Where that fails, the save copies.
        """
        pending, order = job.pending, tuple(self._order)
        if pending is None:
            return
        self.expect(pending)

        async def run() -> None:
            with suppress(IOFailedError):
                await run_on(copiers, _copy, pending.steps, order)

        if not pending.steps.is_copied:
            background.submit(Job(run=run, fail=lambda error: None, beside=True))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let a step wait: the current streams of this thread for devices, this thread for the host."""
        self._uncompiled(self, optimizer)

    def _let_wait(self, optimizer: torch.optim.Optimizer) -> None:
        if self._pid != os.getpid():  # A forked child has no arena, and no save.
            self._pending = ()
        number = next((number for number, item in enumerate(self._optimizers) if item is optimizer), None)
        if number is not None:
            self._order = [*(other for other in self._order if other != number), number]  # In one go: see signals.py.
        if self._pending:
            with uninterrupted:
                for pending in self._pending:
                    try:
                        numbers = pending.steps.memory.parts_of(optimizer)
                    except Exception:  # Not the step's: an optimizer may be like no other.
                        numbers = frozenset(self._order)
                    if numbers:
                        pending.fence()
                        pending.steps.wait(numbers)
                self._prune()

    def _prune(self, *more: Pending) -> None:
        """Take more, and forget what no step has to ask for, with all tensors of that time."""
        with self._guard:
            self._pending = tuple(item for item in (*self._pending, *more) if item.devices or item.steps.is_open)


def _copy(steps: StepCopies, order: Sequence[int]) -> None:
    """Copy on as many threads as the trainer leaves; when it leaves none, on one of low priority."""
    free_count = core.cores_count - torch.get_num_threads()
    if free_count < 1:
        lower_priority()
    steps.run(order, threads=max(1, free_count))
