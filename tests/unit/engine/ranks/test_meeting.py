"""Ranks that open directories of which nobody has said who saves: all of them agree, in whichever order they come.

Ranks are threads of which one runs at a time, in virtual time: each answer of the store and each pause hands over to
the next. Ranks come late, are stopped, are interrupted and die anywhere.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from asyncckpt.coordination import channel
from asyncckpt.engine.ranks import meeting
from asyncckpt.engine.ranks.meeting import ANSWER_S_MAX, MEETING_S
from asyncckpt.errors import CheckpointError

pytestmark = pytest.mark.any_core

SCHEDULES_COUNT = 40
PATHS = ("a", "b")


class Died(BaseException):
    """The process of this rank ends here."""


class MeetingRanks:
    """Ranks, the store between them, and the clock."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ranks_count = self.rng.randint(2, 4)
        self.is_calm = self.rng.random() < 0.3  # Nobody dies or is stopped.
        self.now, self.values = 0.0, dict[str, int]()
        self.wakes: dict[int, float] = {}
        self.turns = [threading.Semaphore(0) for _ in range(self.ranks_count)]
        self.handed_back = threading.Semaphore(0)
        self.dead: set[int] = set()
        self.stopped_s: Counter[int] = Counter()
        self.holders: dict[tuple[str, int], int] = {}  # (path, rank) -> round, of those that save alone.
        self.came: defaultdict[str, set[int]] = defaultdict(set)  # Of each round.
        self.outcomes: defaultdict[tuple[str, int], dict[int, bool]] = defaultdict(dict)
        self.said: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.own = threading.local()

    def run(self) -> None:
        for rank in range(self.ranks_count):
            self.wakes[rank] = 0.0
            threading.Thread(target=self._rank, args=(rank,), daemon=True).start()
        while self.wakes:
            rank = min(self.wakes, key=lambda rank: (self.wakes[rank], rank))
            self.now = max(self.now, self.wakes.pop(rank))
            self.turns[rank].release()
            assert self.handed_back.acquire(timeout=30), "a rank waits for something else than the clock"

    def sleep(self, seconds: float) -> None:
        """Let others run."""
        rank = self.own.rank
        self.wakes[rank] = self.now + seconds
        self.handed_back.release()
        self.turns[rank].acquire()

    def disturb(self, *, interrupts: bool = False) -> None:
        """Die, be stopped or be interrupted here, rarely."""
        rank, drawn = self.own.rank, self.rng.random()
        if self.is_calm or self.own.is_ending or drawn > 0.02:
            return
        if drawn < 0.002:
            self.dead.add(rank)
            raise Died
        if drawn > 0.01:
            seconds = self.rng.choice((1.0, MEETING_S, 2 * MEETING_S))
            self.stopped_s[rank] += seconds
            self.sleep(seconds)
        elif interrupts:
            raise KeyboardInterrupt

    def warn(self, text: str) -> None:
        """Be told that not all have come; where warnings are errors, that is one."""
        if not self.own.is_ending and self.rng.random() < 0.3:
            raise UserWarning(text)

    def add(self, key: str, amount: int) -> int:
        self.sleep(self.rng.expovariate(1000))
        self.values[key] = self.values.get(key, 0) + amount
        found = self.values[key]
        if key.endswith("/came") and amount == 1:
            self.came[key].add(self.own.rank)
        self.sleep(self.rng.expovariate(1000))
        return found

    def delete(self, key: str) -> bool:
        self.sleep(self.rng.expovariate(1000))
        return self.values.pop(key, None) is not None

    def _rank(self, rank: int) -> None:
        self.own.rank, self.own.is_ending = rank, False
        self.turns[rank].acquire()
        try:
            for _ in range(self.rng.randint(1, 4)):
                self.sleep(self.rng.choice((0.0, 0.001, 1.0, MEETING_S, 2 * MEETING_S)) * self.rng.random())
                self.open(self.rng.choice(PATHS[: 1 + (self.rng.random() < 0.2)]))
            self.own.is_ending = True  # From here on all who live come at the same time: nothing is in their way.
            for when in (1000.0, 2000.0):  # A round that nobody has ended is ended by the first.
                self.sleep(when - self.now)
                self.open("a", is_last=when == 2000.0)
        except Died:
            pass
        except BaseException as error:
            self.wrong.append(f"rank {rank}: {error!r}")
        finally:
            self.handed_back.release()

    def open(self, path: str, *, is_last: bool = False) -> None:
        rank, begun, stopped_s = self.own.rank, self.now, self.stopped_s[self.own.rank]
        try:
            met = meeting.meet(path)  # type: ignore[arg-type]
        except (CheckpointError, KeyboardInterrupt, UserWarning) as error:
            self.said[type(error).__name__] += 1
            if is_last and not self.dead:  # The dead may save alone, as far as anybody knows.
                self.wrong.append(f"rank {rank}: in the end {error!r}")
            return
        finally:
            took_s = self.now - begun - (self.stopped_s[rank] - stopped_s)
            if took_s > MEETING_S + ANSWER_S_MAX + 1.0:
                self.wrong.append(f"rank {rank}: {took_s} s")
        assert met is not None
        self.said["together" if met.is_complete else "alone"] += 1
        outcomes = self.outcomes[path, met._round]
        outcomes[rank] = met.is_complete
        if len(set(outcomes.values())) > 1:
            self.wrong.append(f"{path!r}, round {met._round}: {outcomes}")
        if met.is_complete:
            others = [key for key, number in self.holders.items() if key[0] == path and number <= met._round]
            if others:
                self.wrong.append(f"{path!r}: rank {rank} together, while {others} save alone")
            if len(came := self.came[f"{met._place.name}/{met._key('came')}"]) < self.ranks_count:
                self.wrong.append(f"{path!r}, round {met._round}: together, but only {came} have come")
        else:
            if is_last and not self.dead:
                self.wrong.append(f"rank {rank}: alone in the end, though all are there")
            self.holders[path, rank] = met._round
            self.sleep(self.rng.choice((0.0, 1.0, 3 * MEETING_S)) * self.rng.random())
            del self.holders[path, rank]
        with contextlib.suppress(KeyboardInterrupt):
            met.end()


class Line:
    """As a StoreLine, in virtual time."""

    world: MeetingRanks

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._store = connect()

    def ask(self, call: Callable[[Any], Any]) -> Any:
        if self.world.own.rank in self.world.dead:
            raise Died
        self.world.disturb()
        answer: Any = Future()
        try:
            answer.set_result(call(self._store))
        except CheckpointError as error:
            answer.set_exception(error)

        def wait(_: float) -> bool:
            self.world.disturb(interrupts=True)
            return True

        return SimpleNamespace(wait=wait, result=answer.result)

    def hang_up(self) -> None:
        pass


def run_schedule(seed: int, monkeypatch: pytest.MonkeyPatch) -> MeetingRanks:
    world = MeetingRanks(seed)
    clock = SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep)

    def part(name: str, _: object) -> object:
        place = name.rsplit("/", 1)[1]
        return SimpleNamespace(
            name=place,
            add=lambda key, amount: world.add(f"{place}/{key}", amount),
            delete_key=lambda key: world.delete(f"{place}/{key}"),
        )

    dist = SimpleNamespace(PrefixStore=part)
    Line.world = world
    with monkeypatch.context() as patched:
        patched.setattr(meeting, "StoreLine", Line)
        patched.setattr(meeting, "PAUSE_S_MAX", 1.0)
        patched.setattr(meeting, "time", clock)
        patched.setattr(channel, "time", clock)
        patched.setattr(meeting, "import_module", lambda _: dist)
        patched.setattr(meeting, "default_store", lambda: None)
        patched.setattr(meeting, "rank_in_group", lambda: (world.own.rank, world.ranks_count))
        patched.setattr(meeting, "warn", world.warn)
        world.run()
    rounds = {key.rsplit("/", 1)[0] for key in world.values if not key.endswith("/round")}
    if len(rounds) > 2 * len(PATHS) and world.is_calm:  # Ranks that were stopped ask for keys that were removed.
        world.wrong.append(f"left in the store: {sorted(rounds)}")
    return world


def test_ranks_agree_on_who_saves(base_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    said: Counter[str] = Counter()
    for seed in range(base_seed, base_seed + SCHEDULES_COUNT):
        world = run_schedule(seed, monkeypatch)
        assert not world.wrong, f"seed {seed}: {world.wrong}"
        said += world.said
    print(said)
    assert {"together", "alone", "ConflictError", "UserWarning"} <= set(said)
