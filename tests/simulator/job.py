"""One simulated job from its seed to its end."""

from __future__ import annotations

import random
import traceback
from collections import Counter
from dataclasses import dataclass

from tests.simulator.disk import Disk, Violation
from tests.simulator.events import Events
from tests.simulator.network import Network
from tests.simulator.rank import SimulatedRank
from tests.simulator.record import CALL_SECONDS_MAX, Record
from tests.simulator.schedule import JobSchedule, draw


@dataclass(frozen=True)
class JobReport:
    """What came of a seed.

    messages_count: as they arrived. endings: how often a rank's call ended in a state of Outcome, or in "found":
    committed, as this rank saw for itself.
    """

    schedule: JobSchedule
    messages_count: int
    endings: Counter[str]
    trace: tuple[str, ...]


class SimulatedJob:
    """All ranks, the network and the disk between them."""

    def __init__(self, schedule: JobSchedule, *, is_traced: bool = False) -> None:
        self.schedule = schedule
        self.events = Events()
        self.disk = Disk(schedule.ranks_count)
        self.record = Record(schedule, self.disk)
        self.network = Network(schedule, self.events, random.Random(-1 - schedule.seed), self._deliver)
        self.ranks = [SimulatedRank(self, rank) for rank in range(schedule.ranks_count)]
        self.trace: list[str] = []
        self.messages_count = 0
        self._is_traced = is_traced

    def run(self) -> JobReport:
        for rank in self.ranks:
            late_s = self.schedule.behaviour(rank.rank, 1).late_s
            self.events.at(late_s, lambda rank=rank: rank.run(rank.begin_next))
        for number, when in sorted(self.schedule.cuts.items()):
            self.events.at(when, lambda number=number: self._cut(number))
        # Whoever is still at it after this long will be for ever; `check` says so.
        self.events.run(until=2 * CALL_SECONDS_MAX * self.schedule.calls_count)
        self.record.check(alive={rank.rank for rank in self.ranks if not rank.is_dead})
        return JobReport(self.schedule, self.messages_count, self.record.endings, tuple(self.trace))

    def step_of(self, call: int) -> int:
        return 10 if self.schedule.repeats_step else 10 * call

    def log(self, rank: SimulatedRank, what: str, about: object) -> None:
        if self._is_traced:
            self.trace.append(f"{self.events.now:10.4f}  rank {rank.rank}  {what}  {about}")

    def died(self, dead: SimulatedRank) -> None:
        if dead.rank == 0 and self.schedule.server_dies_with_rank_0:
            for rank in self.ranks[1:]:
                self.events.at(self.events.now + 0.01, lambda rank=rank: rank.run(rank.lose_channel))

    def _cut(self, number: int) -> None:
        self.network.cut(number)
        self.ranks[number].run(self.ranks[number].lose_channel)

    def _deliver(self, call: int, sender: int, to: int, message: object) -> None:
        self.messages_count += 1
        self.ranks[to].deliver(call, sender, message)  # type: ignore[arg-type]


def reproduce(seed: int) -> str:
    """The one command that runs a seed again and shows everything."""
    return f"python -m tests.simulator --seed {seed} --trace"


def run_seed(seed: int, *, is_traced: bool = False, ranks_count: int | None = None) -> JobReport:
    """Run a seed; a Violation tells how to run it again."""
    schedule = draw(seed, ranks_count=ranks_count)
    job = SimulatedJob(schedule, is_traced=is_traced)
    try:
        return job.run()
    except AssertionError as error:  # A Violation, or an assertion of the machines.
        ranks = f" --ranks {ranks_count}" if ranks_count else ""
        what = str(error) or traceback.format_exc()
        text = "\n".join([*job.trace, f"seed {seed}: {what}", f"reproduce: {reproduce(seed)}{ranks}"])
        raise Violation(text) from error
