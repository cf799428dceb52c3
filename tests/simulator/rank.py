"""One simulated rank: a process that drives the real machines as driver.py does, and may stop or die anywhere."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from asyncckpt.coordination.actions import AbandonAttempt, Action, Look, MakeFolder, Publish, Send, Write
from asyncckpt.coordination.messages import AttemptMessage, Begin, Failed, Message, Outcome, Skipped
from asyncckpt.coordination.rank_machine import RankMachine
from asyncckpt.format.names import Attempt
from tests.simulator.schedule import DISK_SECONDS_MAX, LIMITS

if TYPE_CHECKING:
    from tests.simulator.job import SimulatedJob

Result = Callable[[], list[Action]]


class RankDied(Exception):
    """This rank's process ends here."""


class SimulatedRank:
    """Makes its calls one after the other. Everything that it does is a doing, counted: deaths and pauses are there."""

    def __init__(self, job: SimulatedJob, rank: int) -> None:
        self._job, self.rank = job, rank
        self._schedule, self._events = job.schedule, job.events
        self._rng = random.Random(job.schedule.seed * 1_000_003 + rank)
        self._call = 0
        self._machine: RankMachine | None = None
        self._mail: defaultdict[int, list[tuple[int, Message]]] = defaultdict(list)
        self._doings_count = 0
        self._effects_count = 0
        self._writes_count = 0
        self._timer = float("inf")
        self._paused_until = 0.0
        self._unsynced: Attempt | None = None
        self._is_lost = False
        self._is_told = True
        self.is_dead = False
        self.paused_s = 0.0

    def run(self, do: Callable[[], None]) -> None:
        """Do something as soon as this process runs; never, when it is dead."""
        if self.is_dead:
            return
        if self._events.now < self._paused_until:
            self._events.at(self._paused_until, lambda: self.run(do))
            return
        try:
            do()
        except RankDied:
            self._die()

    def begin_next(self) -> None:
        """Make the next call, if there is one."""
        call = self._call + 1
        behaviour = self._schedule.behaviour(self.rank, call)
        if call > self._schedule.calls_count or behaviour.what == "never":
            return
        self._call = call
        step = self._job.step_of(call) + behaviour.step_offset
        begin: Begin | Skipped | Failed = Begin(step, behaviour.kind, {"fact": behaviour.fact})  # type: ignore[arg-type]
        if behaviour.what != "save":
            begin = Skipped() if behaviour.what == "skip" else Failed("it has failed before")
        self._machine = RankMachine(self.rank, self._schedule.ranks_count, begin, LIMITS, self._events.now)
        self._is_told = False
        self._timer = float("inf")
        self._job.log(self, "calls", begin)
        self._job.record.begun(self.rank, call, self._events.now, paused_s=self.paused_s)
        self._feed(lambda: self._current.participant.start())
        if self._is_lost:
            self._feed(lambda: self._current.lost("the channel is gone"))
        self._drain()

    def deliver(self, call: int, sender: int, message: Message) -> None:
        """The network leaves a message here; it is read when the process runs."""
        if call < self._call or self.is_dead or self._is_lost:
            return
        self._mail[call].append((sender, message))
        self._job.record.told(self.rank, message)
        if call == self._call:
            self.run(self._drain)

    def lose_channel(self) -> None:
        """The way to the others is gone for good."""
        if not self._is_lost:
            self._is_lost = True
            if self._machine is not None:
                self._feed(lambda: self._current.lost("the channel is gone"))

    @property
    def _current(self) -> RankMachine:
        assert self._machine is not None
        return self._machine

    def _drain(self) -> None:
        """As the driver does: first all that has arrived, then time."""
        if self._machine is None:
            return
        machine, now = self._machine, self._events.now
        for sender, message in self._mail.pop(self._call, []):
            self._job.log(self, f"hears rank {sender} say", message)
            self._feed(lambda sender=sender, message=message: machine.receive(sender, message, now))
        self._feed(lambda: machine.tick(now))

    def _feed(self, give: Result) -> None:
        """Give the machine an input, also one that has ended, do what it wants, and see whether it ends."""
        if self._machine is None:
            return
        self._do(self._machine.hand_over(give(), self._events.now))
        if self._current.has_ended:
            if not self._is_told:
                self._is_told = True
                self._job.log(self, "ends", self._current.outcome)
                self._job.record.ended(self.rank, self._call, self._current.outcome, self._events.now, self.paused_s)
            if self._effects_count == 0:
                self._machine = None
                pause_s = self._rng.random()
                late_s = self._schedule.behaviour(self.rank, self._call + 1).late_s
                self._events.at(self._events.now + pause_s + late_s, lambda: self.run(self.begin_next))
            return
        self._set_timer()

    def _set_timer(self) -> None:
        when = max(self._current.next_tick(), self._events.now)
        if when < self._timer:
            self._timer = when
            self._events.at(when, lambda: self.run(self._ring))

    def _ring(self) -> None:
        if self._machine is None or self._events.now < self._timer:
            return
        self._timer = float("inf")
        self._drain()

    def _doing(self) -> None:
        """Count; here a process may die or stop."""
        self._doings_count += 1
        if self._schedule.deaths.get(self.rank) == self._doings_count:
            raise RankDied
        at, seconds = self._schedule.pauses.get(self.rank, (0, 0.0))
        if at == self._doings_count:
            self._paused_until = self._events.now + seconds
            self.paused_s += seconds
            self._job.log(self, "stops", f"for {seconds:.3f} s")

    def _die(self) -> None:
        self.is_dead = True
        self._job.log(self, "dies", "")
        if self._unsynced is not None and self._schedule.rename_can_vanish:
            self._job.disk.vanish(self._unsynced)
        self._job.died(self)

    @property
    def _free_at(self) -> float:
        return max(self._events.now, self._paused_until)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(None, message):
                    for to in range(1, self._schedule.ranks_count):
                        self._send(to, message)
                case Send(int(to), message):
                    self._send(to, message)
                case MakeFolder(begins):
                    self._doing()
                    self._later(self._disk_s(0.01, 0.1), lambda begins=begins: self._make_folder(begins))
                case Write(attempt):
                    self._doing()
                    self._job.record.wrote_kind(self._call, attempt)
                    self._writes_count += 1
                    self._later(self._disk_s(*self._schedule.write_s), lambda attempt=attempt: self._write(attempt))
                case Publish(attempt):
                    self._doing()
                    self._later(self._disk_s(0.01, 1.0), lambda attempt=attempt: self._rename(attempt))
                case Look(attempt):
                    self._doing()
                    self._later(self._disk_s(0.001, 0.1), lambda attempt=attempt: self._look(attempt))
                case AbandonAttempt(attempt):
                    self._doing()
                    self._later(self._disk_s(0.01, 0.1), lambda attempt=attempt: self._abandon(attempt))

    def _send(self, to: int, message: Message) -> None:
        self._doing()
        self._job.log(self, f"tells rank {to}", message)
        self._job.record.said(self.rank, self._call, to, message)
        self._job.network.send(self._call, self.rank, to, message, departs=self._free_at)

    # -- effects ------------------------------------------------------------------------------------------------------

    def _disk_s(self, least: float, most: float) -> float:
        if self._schedule.slow_disk and self._rng.random() < self._schedule.slow_disk:
            return self._rng.random() * DISK_SECONDS_MAX
        return self._rng.uniform(least, most)

    def _later(self, seconds: float, do: Callable[[], Result | None]) -> None:
        """Run one part of an effect after a while; its result goes to the machine, None means that it goes on."""
        self._effects_count += 1

        def part() -> None:
            self._effects_count -= 1
            self._doing()
            result = do()
            self._feed(result or list)

        self._events.at(self._free_at + seconds, lambda: self.run(part))

    def _make_folder(self, begins: Mapping[int, Begin]) -> Result:
        machine = self._current.coordinator
        step = next(iter(begins.values())).step
        if self._rng.random() < self._schedule.folder_failure:
            return lambda: machine.folder_failed("OSError: no room")
        attempt = self._job.disk.make_folder(step, self._call)
        return lambda: machine.folder_made(attempt, {})

    def _write(self, message: AttemptMessage) -> Result:
        self._writes_count -= 1
        machine = self._current.participant
        if self._rng.random() < self._schedule.write_failure or not self._job.disk.write(message.attempt, self.rank):
            return lambda: machine.write_failed("OSError: cannot write")
        return lambda: machine.wrote({})

    def _rename(self, attempt: Attempt) -> Result | None:
        mode = self._rng.choice(self._schedule.publish_modes)
        if mode == "fails" or (mode != "in_doubt_absent" and not self._job.disk.publish(attempt)):
            return self._published(Outcome("aborted", attempt, 0, "the manifest was not published"))
        if self._job.disk.has_manifest(attempt):
            self._job.log(self, "publishes", attempt)
            self._unsynced = attempt
        self._later(self._disk_s(0.01, 1.0), lambda: self._sync(attempt, mode))
        return None

    def _sync(self, attempt: Attempt, mode: str) -> Result:
        if mode != "ok":
            return self._published(Outcome("in_doubt", attempt, 0, "the folder was not synced"))
        self._job.disk.make_durable(attempt)
        self._unsynced = None
        return self._published(Outcome("committed", attempt, notes={"digest": attempt.id}))

    def _published(self, outcome: Outcome) -> Result:
        machine = self._current.coordinator
        return lambda: machine.published(outcome)

    def _look(self, attempt: Attempt) -> Result | None:
        found = self._job.disk.has_manifest(attempt) and self._rng.random() >= self._schedule.look_failure
        if found:
            self._job.disk.make_durable(attempt)
        machine = self._current.participant
        self._job.log(self, "looks", found)
        return lambda: machine.looked(found)

    def _abandon(self, attempt: Attempt) -> Result | None:
        if self._writes_count:  # As the driver: after the own files are closed.
            self._later(0.1, lambda: self._abandon(attempt))
        else:
            self._job.disk.abandon(attempt)
        return None
