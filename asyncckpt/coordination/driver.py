"""Run one call of this rank: the machines on one side, a channel and the effects on the other.

Channel calls block, so they run on `threads`; effects are tasks beside that. A receive lasts no longer than its slice,
so that a call that ends by itself ends soon; many ranks wait in long slices, which spares the one server that serves
them. A machine's time passes only up to the beginning of a receive that has ended, and not at all in the first one
after this process was stopped: what has arrived meanwhile is heard before a limit is judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from asyncckpt.coordination.actions import AbandonAttempt, Action, Contradiction, Look, MakeFolder, Publish, Send, Write
from asyncckpt.coordination.channel import Channel
from asyncckpt.coordination.messages import (
    COORDINATOR,
    AttemptMessage,
    Begin,
    Failed,
    Limits,
    Outcome,
    Prepared,
    Skipped,
    State,
    bounded,
    cause_of,
    decode,
    encode,
)
from asyncckpt.coordination.rank_machine import RankMachine
from asyncckpt.errors import ConflictError, IndeterminateError, PeerError, PeerInDoubtError
from asyncckpt.format.names import Attempt
from asyncckpt.format.strict_json import Json

SLICE_S = 0.05
# The shortest receive, which is enough for one look.
LOOK_S = 0.02
# All ranks together end this many receives a second, when nothing happens, at most.
SLICES_PER_S = 1000


class Effects(Protocol):
    """What the engine does in a call. The coroutines run in the loop of `run_call`.

    While one of them keeps the loop, this rank cannot say that it is alive: what blocks for long belongs on a thread.
    """

    async def make_folder(self, begins: Mapping[int, Begin]) -> tuple[Attempt, Mapping[str, Json]]:
        """Rank 0: draw the attempt, make its folder, durably; return it and notes for all ranks.

        May raise: the call is aborted. After a Contradiction all ranks raise ConflictError.
        """

    async def write(self, attempt: AttemptMessage) -> Mapping[str, Json]:
        """Write and sync the files of this rank, put its part on the channel; return notes for PREPARED. May raise."""

    async def publish(self, attempt: Attempt, prepared: Mapping[int, Prepared]) -> Mapping[str, Json]:
        """Rank 0: assemble the manifest and publish it; return notes for the outcome.

        IndeterminateError when it may be there; whatever else is raised means that it is not there and never will be.
        """

    async def abandon(self, attempt: Attempt) -> None:
        """Rank 0: remove what an aborted attempt left. `write` of this rank has ended; others may still write."""

    def stop(self) -> None:
        """Let `write`, without which the call has ended, end soon, if that is possible.

        It is waited for, and never cancelled, because it reads memory that is given back afterwards.
        """

    def is_committed(self, attempt: Attempt) -> bool:
        """Return whether the manifest of this attempt is there; if so, make that durable before.

        Called on one of the threads, and after the call from any, without anything that the save held open. May raise.
        """


async def run_call(
    channel: Channel,
    call: int,
    begin: Begin | Skipped | Failed,
    effects: Effects | None,
    limits: Limits,
    *,
    threads: Executor,
    clock: Callable[[], float] = time.monotonic,
    where: object = "",
) -> Outcome:
    """Take one call of this rank to its end; nothing of it runs any more when this returns or raises.

    begin: Begin to save; Skipped or Failed (the engine keeps and raises its own error) when this rank does not take
    part, which ends the call for it at once, on rank 0 after all know. Then it has no effects.
    threads: two at least, or what is sent waits for a receive to end, up to its slice.
    where: the checkpoint directory, named in errors.

    Returns an outcome "committed" or "skipped", and "aborted" only for a `begin` of Failed. Raises the error of this
    rank's own effect when that ended the call; ConflictError when the ranks contradict each other; PeerError when
    another rank, or a silence, ended it; PeerInDoubtError when it may be committed.
    """
    run = _Call(channel, call, begin, effects, limits, threads, clock, where)
    await run.run()
    return run.result()


@dataclass
class _Call:
    _channel: Channel
    _call: int
    _begin: Begin | Skipped | Failed
    _given_effects: Effects | None
    _limits: Limits
    _threads: Executor
    _clock: Callable[[], float]
    _where: object

    def __post_init__(self) -> None:
        channel, limits = self._channel, self._limits
        self._asked = self._clock()
        self._machine = RankMachine(channel.rank, channel.ranks_count, self._begin, limits, self._asked)
        self._own_error: BaseException | None = None
        self._outbox: deque[Callable[[], None]] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._receiving: asyncio.Future[list[tuple[int, bytes]]] | None = None
        self._was_stopped = False
        self._is_lost = False
        self._tasks: dict[asyncio.Task[Any], Callable[[asyncio.Task[Any]], list[Action]]] = {}
        self._writing: asyncio.Task[Any] | None = None
        self._is_stopping = False
        shared = SLICE_S if channel.rank == COORDINATOR else channel.ranks_count / SLICES_PER_S
        self._slice_s = max(SLICE_S, min(shared, limits.alive_s))

    @property
    def _effects(self) -> Effects:
        assert self._given_effects is not None, "a rank that takes no part is never asked for anything"
        return self._given_effects

    async def run(self) -> None:
        self._do(self._machine.participant.start())
        try:
            while not self._machine.has_ended:
                await self._wait()
        except BaseException as error:  # Cancelled, or a bug: the others need not wait for a silence.
            self._lose(cause_of(error))
            raise
        finally:
            await self._wind_up()

    def result(self) -> Outcome:
        outcome, step = self._machine.outcome, getattr(self._begin, "step", None)
        if outcome.state in ("committed", "skipped") or isinstance(self._begin, Failed):
            return outcome
        save = f"the save of step {step}" + (f" in {str(self._where)!r}" if self._where else "")
        if self._own_error is not None and outcome.rank == self._channel.rank:
            raise self._own_error
        if outcome.state == "in_doubt":
            assert outcome.attempt is not None
            raise PeerInDoubtError(
                f"{save} may be committed, this rank did not hear the outcome",
                rank=outcome.rank,
                cause=outcome.cause,
                resolve=partial(self._effects.is_committed, outcome.attempt),
                hint=f"call resolve() on this error, see the log of rank {outcome.rank}; older checkpoints are kept",
            )
        if outcome.rank is None:
            hint = None if outcome.cause.endswith(")") else "let all ranks save the same step, in the same way"
            raise ConflictError(f"{save} was aborted on all ranks: {outcome.cause}", hint=hint)
        raise PeerError(
            f"{save} was aborted on all ranks because of rank {outcome.rank}",
            rank=outcome.rank,
            cause=outcome.cause,
        )

    async def _wait(self) -> None:
        """Wait for the next thing that happens, and let the machine know."""
        self._receive()
        waiting = {*self._tasks} if self._receiving is None else {*self._tasks, self._receiving}
        if not waiting:
            assert self._machine.has_ended, "the machine waits for nothing"
            return
        # A channel that keeps a thread longer than it was asked to is as good as gone.
        overdue_s = None if self._is_lost else self._slice_s + self._limits.silence_s
        done, _ = await asyncio.wait(waiting, timeout=overdue_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            self._lose(f"rank {self._channel.rank} got no answer from its channel for {self._limits.silence_s:g} s")
        for task in [task for task in self._tasks if task in done]:
            self._do(self._tasks.pop(task)(task))
        receiving = self._receiving
        if receiving is not None and receiving.done():
            self._receiving = None
            self._take(receiving)

    def _receive(self) -> None:
        """Have a receive on its way, as long as there is a channel."""
        if self._is_lost or self._receiving is not None:
            return
        now = self._clock()
        # Not twice in a row: then the channel is slow, and time must pass.
        self._was_stopped = now - self._asked > self._slice_s + self._limits.alive_s and not self._was_stopped
        self._asked = now
        due_s = self._slice_s if self._was_stopped else max(LOOK_S, self._machine.next_tick() - now)
        receive = partial(self._channel.receive, self._call, min(self._slice_s, due_s))
        try:
            self._receiving = asyncio.get_running_loop().run_in_executor(self._threads, receive)
        except Exception as error:  # No thread can be started.
            self._lose(cause_of(error))

    def _take(self, receiving: asyncio.Future[list[tuple[int, bytes]]]) -> None:
        try:
            messages = [(sender, decode(raw, sender=sender)) for sender, raw in receiving.result()]
        except Exception as error:  # The channel's, or of bytes that are no message.
            self._lose(cause_of(error))
            return
        for sender, message in messages:
            self._do(self._machine.receive(sender, message, self._clock()))
        if not self._was_stopped:
            self._do(self._machine.tick(self._asked))

    def _lose(self, cause: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._do(self._machine.lost(cause))

    def _do(self, actions: list[Action]) -> None:
        for action in self._machine.hand_over(actions, self._clock()):
            match action:
                case Send(to, message):
                    self._send(partial(self._channel.send, self._call, to, encode(message)))
                case MakeFolder(begins):
                    self._forget_older()
                    self._start(self._effects.make_folder(begins), self._made)
                case Write(attempt):
                    self._forget_older()
                    self._writing = self._start(self._effects.write(attempt), self._wrote)
                case Publish(attempt, prepared):
                    self._start(self._effects.publish(attempt, prepared), partial(self._published, attempt))
                case Look(attempt):
                    self._start(self._look(attempt), self._looked)
                case AbandonAttempt(attempt):
                    self._start(self._abandon(attempt), lambda task: [])

    def _start(
        self, work: Coroutine[Any, Any, Any], ended: Callable[[asyncio.Task[Any]], list[Action]]
    ) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = ended
        return task

    def _made(self, task: asyncio.Task[Any]) -> list[Action]:
        error = self._error_of(task)
        if isinstance(error, Contradiction):
            return self._machine.coordinator.folder_failed(bounded(str(error)), rank=None)
        if error is not None:
            return self._machine.coordinator.folder_failed(cause_of(error))
        return self._machine.coordinator.folder_made(*task.result())

    def _wrote(self, task: asyncio.Task[Any]) -> list[Action]:
        self._writing = None
        error = self._error_of(task)
        if error is not None:
            return self._machine.participant.write_failed(cause_of(error))
        return self._machine.participant.wrote(task.result())

    def _published(self, attempt: Attempt, task: asyncio.Task[Any]) -> list[Action]:
        error = self._error_of(task)
        if error is None:
            outcome = Outcome("committed", attempt=attempt, notes=task.result())
        else:
            state: State = "in_doubt" if isinstance(error, IndeterminateError) else "aborted"
            outcome = Outcome(state, attempt=attempt, rank=COORDINATOR, cause=cause_of(error))
        return self._machine.coordinator.published(outcome)

    async def _look(self, attempt: Attempt) -> bool:
        look = self._effects.is_committed
        return await asyncio.get_running_loop().run_in_executor(self._threads, look, attempt)

    def _looked(self, task: asyncio.Task[Any]) -> list[Action]:
        found = False if task.cancelled() or task.exception() is not None else task.result()
        return self._machine.participant.looked(found)

    def _error_of(self, task: asyncio.Task[Any]) -> BaseException | None:
        """Return why an effect of this rank failed, and keep it: it is raised here if it is what ended the call."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and self._own_error is None:
            self._own_error = error
        return error

    async def _abandon(self, attempt: Attempt) -> None:
        """Abandon after the own files are closed, or they would come back after the removal."""
        await self._stop_writing()
        await self._effects.abandon(attempt)

    async def _stop_writing(self) -> None:
        if self._writing is None or self._writing.done():
            return
        if not self._is_stopping:
            self._is_stopping = True
            with contextlib.suppress(Exception):
                self._effects.stop()
        await asyncio.wait({self._writing})

    def _send(self, send: Callable[[], None]) -> None:
        """Call something on the channel after all that was sent before, without waiting for it."""
        if self._channel.ranks_count == 1:
            return
        self._outbox.append(send)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._outbox:
            try:
                await loop.run_in_executor(self._threads, self._outbox.popleft())
            except Exception as error:
                self._outbox.clear()
                self._lose(cause_of(error))

    def _forget_older(self) -> None:
        """Forget the older calls: all ranks have begun this one, so none reads anything of those."""
        self._send(partial(self._channel.forget, self._call - 1))

    async def _wind_up(self) -> None:
        """Leave nothing running: what was sent is out, `write` and `abandon` have ended, no thread receives."""
        await self._stop_writing()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                task.exception()  # Looked at, so that asyncio does not complain: the call has ended without it.
        talking = {future for future in (self._sending, self._receiving) if future is not None}
        if talking:
            await asyncio.wait(talking, timeout=self._slice_s + self._limits.silence_s)
        for future in talking:
            if future.done() and not future.cancelled():
                future.exception()
