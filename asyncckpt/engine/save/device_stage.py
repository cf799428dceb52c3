"""What a save asks of devices: copies listed while it captures, an arena pinned as far as they write to it, and steps
of optimizers that wait for the copies, so that forward and backward need not.

Parameters and the state of an optimizer change in its step only, if its owner says so. A hook before the step waits
until they are copied: the current streams for those of devices, the trainer himself for those of the host, which the
background copies meanwhile. Everything else of a state is waited for at the save; and so are short tensors, which
take less time to copy than to watch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

import torch

from asyncckpt.devices.contract import Runtime
from asyncckpt.devices.current_runtime import runtime
from asyncckpt.devices.host_copies import HostCopies, Pending
from asyncckpt.devices.step_copies import StepCopies
from asyncckpt.devices.stepped_memory import NOTHING_STEPPED, SteppedMemory
from asyncckpt.engine.process.background import Job, copiers, run_on
from asyncckpt.engine.process.log import log_warning
from asyncckpt.engine.save.step_hooks import is_stepping, listen
from asyncckpt.errors import DeviceError, IOFailedError
from asyncckpt.guard import Guard
from asyncckpt.native import core
from asyncckpt.options import SaveOptions
from asyncckpt.signals import uninterrupted
from asyncckpt.staging.arena import Arena
from asyncckpt.staging.pool import pool
from asyncckpt.system import lower_priority

STEPPED_BYTES_MIN = 16 << 10


def host_copies(options: SaveOptions, stepped: StepFences | None = None) -> HostCopies:
    """Return an empty list of copies for one save."""
    return HostCopies(
        runtime(),
        scratch_bytes=options.device.scratch_bytes,
        streams=options.device.streams,
        stepped=NOTHING_STEPPED if stepped is None else stepped.memory(),
    )


def launch(copies: HostCopies, arena: Arena, options: SaveOptions) -> Pending:
    """Queue all copies into an arena, pinned if it may be. As HostCopies.launch."""
    begin, end = copies.targets
    if copies.runtime is None or begin == end:
        return copies.launch()
    limit_bytes = options.device.pinned_memory_limit
    pin(arena, begin - arena.address, end - arena.address, copies.runtime, limit_bytes=limit_bytes)
    try:
        return copies.launch(reachable=arena.pinned_pieces)
    finally:
        arena.writer = copies.pending


def pin(arena: Arena, begin: int, end: int, runtime: Runtime, *, limit_bytes: int | None) -> None:
    """Pin bytes [begin, end) of an arena; a warning says so when they are not, one for each reason."""
    total = pool.pinned_bytes() - arena.pinned[1] + arena.pinned_bytes_with(begin, end)
    if limit_bytes is not None and total > limit_bytes:
        _warn_once(f"more than the pinned_memory_limit of {limit_bytes} bytes would be pinned")
        return
    try:
        arena.pin(begin, end, runtime)
    except DeviceError as error:
        _warn_once(str(error))


@lru_cache(maxsize=100)
def _warn_once(why: str) -> None:
    log_warning("copies from devices go to memory that is not pinned, and the trainer waits for them: %s", why)


class StepFences:
    """The optimizers of one Saver, whose steps wait."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._optimizers = list(optimizers)
        self._order = list(range(len(self._optimizers)))  # In which they have stepped last.
        self._guard = Guard()  # Any thread's optimizer comes here, also one that trains something else.
        self._pending: tuple[Pending, ...] = ()
        self._pid = os.getpid()
        self._uncompiled = StepFences._let_wait
        if self._optimizers:
            # Else it would be compiled with a step that is, anew for each save. Optimizers have loaded the compiler.
            self._uncompiled = torch.compiler.disable(StepFences._let_wait)  # type: ignore[no-untyped-call]
            # To all optimizers: one of these may be a wrapper of another one, or have a copy, which has no hooks.
            listen(self)

    def memory(self) -> SteppedMemory:
        """Return the memory that only steps change. Within a step, none: it has waited already."""
        if not self._optimizers or is_stepping():
            return NOTHING_STEPPED
        return SteppedMemory(self._optimizers, bytes_min=STEPPED_BYTES_MIN)

    def expect(self, pending: Pending) -> None:
        """Let the next step wait for these copies, by the streams of devices; and by itself for those of the host."""
        if self._optimizers:
            pending.steps.begin()
            self._prune(pending)

    def copy_job(self, pending: Pending) -> Job:
        """Return a job that copies on the host, beside what else is in flight. Where it fails, the save copies."""
        order = tuple(self._order)

        async def run() -> None:
            with suppress(IOFailedError):
                await run_on(copiers, _copy, pending.steps, order)

        return Job(run=run, fail=lambda error: None, beside=True)

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
