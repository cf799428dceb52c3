"""Calls of several ranks from end to end: real machines, threads and time; a channel in memory and fake effects."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncckpt.coordination.actions import Contradiction
from asyncckpt.coordination.channel import Channel
from asyncckpt.coordination.driver import run_call
from asyncckpt.coordination.messages import (
    Alive,
    AttemptMessage,
    Begin,
    Failed,
    Limits,
    Outcome,
    Prepared,
    Skipped,
    encode,
)
from asyncckpt.errors import ConflictError, IndeterminateError, IOFailedError, PeerError, PeerInDoubtError
from asyncckpt.format.names import Attempt
from bench.memory_channel import MemoryExchange

pytestmark = pytest.mark.any_core

LONG = Limits(begin_s=30, silence_s=20, save_s=60)
SHORT = Limits(begin_s=0.4, silence_s=1.0, save_s=30)


@dataclass
class FakeEffects:
    """Notes what it was asked for. fails: what effects of these names raise. holds: write waits for `stop`.

    behind: write waits until those of these others have begun.
    """

    fails: dict[str, BaseException] = field(default_factory=dict)
    holds: bool = False
    behind: tuple[FakeEffects, ...] = ()
    found: bool = False
    events: list[str] = field(default_factory=list)
    begins: Mapping[int, Begin] = field(default_factory=dict)
    prepared: Mapping[int, Prepared] = field(default_factory=dict)
    written: list[AttemptMessage] = field(default_factory=list)
    before_publish: Any = None
    writing: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def _do(self, name: str) -> None:
        self.events.append(name)
        if name in self.fails:
            raise self.fails[name]

    async def make_folder(self, begins: Mapping[int, Begin]) -> tuple[Attempt, Mapping[str, Any]]:
        self._do("make_folder")
        self.begins = begins
        return Attempt.new(begins[0].step), {"owners": [0]}

    async def write(self, attempt: AttemptMessage) -> Mapping[str, Any]:
        self.writing.set()
        for other in self.behind:
            await other.writing.wait()
        self._do("write")
        self.written.append(attempt)
        if self.holds:
            await self.stopped.wait()
            self.events.append("write ended")
        return {"files": len(self.written)}

    async def publish(self, attempt: Attempt, prepared: Mapping[int, Prepared]) -> Mapping[str, Any]:
        self.prepared = prepared
        if self.before_publish is not None:
            self.before_publish()
        self._do("publish")
        return {"digest": attempt.id}

    async def abandon(self, attempt: Attempt) -> None:
        self._do("abandon")

    def stop(self) -> None:
        self.events.append("stop")
        self.stopped.set()

    def is_committed(self, attempt: Attempt) -> bool:
        self._do("look")
        return self.found


class RanksAndEffects:
    """Ranks with channels, threads and effects; `call` makes the next call on some of them."""

    def __init__(self, ranks_count: int, threads: ThreadPoolExecutor) -> None:
        self.exchange = MemoryExchange(ranks_count)
        self.channels: list[Channel] = [self.exchange.channel(rank) for rank in range(ranks_count)]
        self.effects = [FakeEffects() for _ in range(ranks_count)]
        self.threads = threads
        self.number = 0

    async def call(
        self, begins: Mapping[int, Begin | Skipped | Failed] | None = None, *, limits: Limits = LONG
    ) -> list[Outcome | BaseException]:
        self.number += 1
        if begins is None:
            begins = {rank: Begin(step=self.number) for rank in range(len(self.channels))}
        calls = [
            run_call(self.channels[rank], self.number, begin, self.effects[rank], limits, threads=self.threads)
            for rank, begin in begins.items()
        ]
        return await asyncio.gather(*calls, return_exceptions=True)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


@pytest.fixture
def job(threads: ThreadPoolExecutor) -> RanksAndEffects:
    return RanksAndEffects(3, threads)


async def test_all_ranks_commit(job: RanksAndEffects) -> None:
    kinds = {
        0: Begin(5, "full", {"v": "1"}, {"n": 0}),
        1: Begin(5, "delta", {"v": "1"}),
        2: Begin(5, "full", {"v": "1"}),
    }
    outcomes = await job.call(kinds)
    attempt = job.effects[0].written[0]
    assert attempt.kind == "delta"
    assert attempt.notes == {"owners": [0]}
    expected = Outcome("committed", attempt=attempt.attempt, notes={"digest": attempt.attempt.id})
    assert outcomes == [expected] * 3
    assert job.effects[0].begins == kinds
    assert job.effects[0].prepared == {rank: Prepared(attempt.attempt, {"files": 1}) for rank in range(3)}
    assert [effects.events for effects in job.effects] == [["make_folder", "write", "publish"], ["write"], ["write"]]


async def test_one_rank_alone_needs_no_channel(threads: ThreadPoolExecutor) -> None:
    job = RanksAndEffects(1, threads)
    (outcome,) = await job.call()
    assert isinstance(outcome, Outcome)
    assert outcome.state == "committed"
    assert job.exchange.sent_count == 0


@pytest.mark.parametrize("rank", [0, 2])
async def test_a_failed_write_is_raised_where_it_failed(job: RanksAndEffects, rank: int) -> None:
    error = IOFailedError("no room for shard 'r00002-000'")
    job.effects[rank].fails["write"] = error
    outcomes = await job.call()
    assert outcomes[rank] is error
    for other in {0, 1, 2} - {rank}:
        told = outcomes[other]
        assert isinstance(told, PeerError)
        assert not isinstance(told, IndeterminateError)
        assert told.rank == rank
        assert told.cause == "IOFailedError: no room for shard 'r00002-000'"
        assert f"because of rank {rank}: IOFailedError" in str(told)
    assert "publish" not in job.effects[0].events
    assert job.effects[0].events[-1] == "abandon"


async def test_a_call_that_ends_early_leaves_no_write_behind(job: RanksAndEffects) -> None:
    job.effects[0].holds = job.effects[1].holds = True
    job.effects[2].behind = (job.effects[0], job.effects[1])
    job.effects[2].fails["write"] = OSError("gone")
    await job.call()
    assert job.effects[0].events == ["make_folder", "write", "stop", "write ended", "abandon"]
    assert job.effects[1].events == ["write", "stop", "write ended"]


@pytest.mark.parametrize("name", ["make_folder", "publish"])
async def test_a_coordinator_that_fails_aborts_for_all(job: RanksAndEffects, name: str) -> None:
    error = job.effects[0].fails[name] = ConflictError("step 1 already exists")
    outcomes = await job.call()
    assert outcomes[0] is error
    assert [(it.rank, it.cause) for it in outcomes[1:] if isinstance(it, PeerError)] == [
        (0, "ConflictError: step 1 already exists")
    ] * 2
    assert ("abandon" in job.effects[0].events) == (name == "publish")


async def test_a_contradiction_is_a_conflict_on_all_ranks(job: RanksAndEffects) -> None:
    job.effects[0].fails["make_folder"] = Contradiction("ranks 0 and 1 hold different ones: \udc80")
    outcomes = await job.call()
    assert [type(outcome) for outcome in outcomes] == [ConflictError] * 3
    (text,) = {str(outcome) for outcome in outcomes}
    assert "was aborted on all ranks: ranks 0 and 1 hold different ones: \\udc80" in text
    assert [effects.events for effects in job.effects] == [["make_folder"], [], []]
    job.effects[0].fails.clear()
    assert [outcome.state for outcome in await job.call() if isinstance(outcome, Outcome)] == ["committed"] * 3


async def test_doubt_is_told_to_all(job: RanksAndEffects) -> None:
    error = job.effects[0].fails["publish"] = IndeterminateError("not synced", resolve=lambda: True)
    job.effects[1].found = True
    outcomes = await job.call()
    assert outcomes[0] is error
    for rank in (1, 2):
        told = outcomes[rank]
        assert isinstance(told, PeerInDoubtError)
        assert isinstance(told, IndeterminateError)
        assert told.rank == 0
        assert told.resolve() is (rank == 1)
    assert "abandon" not in job.effects[0].events


@pytest.mark.parametrize("rank", [0, 1])
async def test_who_skips_skips_for_all(job: RanksAndEffects, rank: int) -> None:
    outcomes = await job.call({other: Skipped("busy") if other == rank else Begin(3) for other in range(3)})
    assert outcomes == [Outcome("skipped", rank=rank, cause="busy")] * 3
    assert [effects.events for effects in job.effects] == [[], [], []]


@pytest.mark.parametrize("rank", [0, 1])
async def test_who_failed_before_fails_for_all(job: RanksAndEffects, rank: int) -> None:
    outcomes = await job.call({other: Failed("FilterError: no") if other == rank else Begin(3) for other in range(3)})
    assert outcomes[rank] == Outcome("aborted", rank=rank, cause="FilterError: no")
    others = [outcomes[other] for other in range(3) if other != rank]
    assert [(it.rank, it.cause) for it in others if isinstance(it, PeerError)] == [(rank, "FilterError: no")] * 2


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (Begin(8), "differ in step: '7' on rank 0, '8' on rank 2"),
        (Begin(7, facts={"version": "2"}), "differ in version: None on rank 0, '2' on rank 2"),
    ],
)
async def test_ranks_that_differ_conflict_everywhere(job: RanksAndEffects, odd: Begin, message: str) -> None:
    outcomes = await job.call({0: Begin(7), 1: Begin(7), 2: odd})
    for outcome in outcomes:
        assert type(outcome) is ConflictError
        assert f"ranks 0 and 2 save together but {message}" in str(outcome)
    assert job.effects[0].events == []


async def test_a_rank_that_never_calls_is_named(job: RanksAndEffects) -> None:
    outcomes = await job.call({0: Begin(1), 1: Begin(1)}, limits=SHORT)
    assert [(it.rank, it.cause) for it in outcomes if isinstance(it, PeerError)] == [
        (2, "rank 2 did not begin this save within 0.4 s of rank 0")
    ] * 2


async def test_a_coordinator_that_never_calls_is_named(job: RanksAndEffects) -> None:
    outcomes = await job.call({1: Begin(1), 2: Begin(1)}, limits=SHORT)
    assert [(it.rank, it.cause) for it in outcomes if isinstance(it, PeerError)] == [
        (0, "rank 0 did not begin this save within 0.4 s")
    ] * 2


async def test_a_rank_that_falls_silent_is_named(job: RanksAndEffects) -> None:
    job.effects[0].holds = job.effects[1].holds = True
    job.channels[2].send(1, 0, encode(Begin(1)))  # Its last word.
    outcomes = await job.call({0: Begin(1), 1: Begin(1)}, limits=SHORT)
    assert [(it.rank, it.cause) for it in outcomes if isinstance(it, PeerError)] == [
        (2, "rank 2 sent nothing for 1 s")
    ] * 2


async def test_a_slow_rank_says_that_it_is_alive(job: RanksAndEffects) -> None:
    for effects in job.effects:
        effects.holds = True
    loop = asyncio.get_running_loop()
    for effects in job.effects:
        loop.call_later(2.2 * SHORT.silence_s, effects.stopped.set)
    outcomes = await job.call(limits=SHORT)
    assert [it.state for it in outcomes if isinstance(it, Outcome)] == ["committed"] * 3


@pytest.mark.parametrize("found", [True, False])
async def test_who_is_not_told_looks(job: RanksAndEffects, found: bool) -> None:
    job.effects[0].before_publish = job.channels[0].close  # All have prepared; from here nobody hears of it.
    job.effects[1].found = job.effects[2].found = found
    outcomes = await job.call()
    assert isinstance(outcomes[0], Outcome)
    assert outcomes[0].state == "committed"
    for rank in (1, 2):
        told = outcomes[rank]
        assert job.effects[rank].events[:2] == ["write", "look"]
        if found:
            assert told == Outcome("committed", attempt=outcomes[0].attempt)
        else:
            assert isinstance(told, PeerInDoubtError)
            assert told.resolve() is False


async def test_a_look_that_fails_finds_nothing(job: RanksAndEffects) -> None:
    job.effects[0].before_publish = job.channels[0].close
    job.effects[1].fails["look"] = OSError("stale handle")
    outcomes = await job.call()
    assert isinstance(outcomes[1], PeerInDoubtError)


async def test_what_is_no_message_aborts_the_call(job: RanksAndEffects) -> None:
    job.channels[1].send(1, 0, b"\x80\x05K\x01.")
    outcomes = await job.call({0: Begin(1), 2: Begin(1)})
    for outcome in outcomes:
        assert isinstance(outcome, PeerError)
        assert outcome.rank == 0
        assert "message from rank 1 is not strict JSON" in outcome.cause


async def test_messages_from_nowhere_are_ignored(job: RanksAndEffects) -> None:
    for sender in (0, 3, 99):
        job.exchange.inboxes[1, 0].append((sender, encode(Failed("I am not there"))))
    job.exchange.inboxes[1, 2].append((1, encode(Outcome("aborted", rank=1, cause="I decide"))))
    outcomes = await job.call()
    assert [it.state for it in outcomes if isinstance(it, Outcome)] == ["committed"] * 3


async def test_a_cancelled_rank_tells_the_others(job: RanksAndEffects) -> None:
    job.effects[0].holds = job.effects[1].holds = job.effects[2].holds = True
    job.number = 1
    calls = [
        asyncio.create_task(run_call(job.channels[rank], 1, Begin(1), job.effects[rank], LONG, threads=job.threads))
        for rank in range(3)
    ]
    await job.effects[2].writing.wait()
    calls[2].cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(outcomes[2], asyncio.CancelledError)
    assert [it.rank for it in outcomes[:2] if isinstance(it, PeerError)] == [2, 2]
    assert job.effects[2].events == ["write", "stop", "write ended"]


async def test_older_calls_are_forgotten(job: RanksAndEffects) -> None:
    await job.call({0: Begin(1), 1: Begin(1), 2: Skipped()})
    await job.call()
    await job.call({0: Skipped(), 1: Begin(3), 2: Begin(3)})
    assert {call for call, _ in job.exchange.inboxes} <= {2, 3}
    await job.call()
    assert {call for call, _ in job.exchange.inboxes} <= {4}


class SendingChannel:
    """A channel but for what it receives."""

    def __init__(self, channel: Channel) -> None:
        self.rank, self.ranks_count = channel.rank, channel.ranks_count
        self.send, self.put, self.get = channel.send, channel.put, channel.get
        self.forget, self.close = channel.forget, channel.close


class StuckChannel(SendingChannel):
    """A channel whose receive never comes back until it is let go."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.let_go = threading.Event()

    def receive(self, call: int, timeout_s: float) -> list[tuple[int, bytes]]:
        self.let_go.wait()
        return []


async def test_a_channel_that_hangs_is_a_lost_one(job: RanksAndEffects) -> None:
    stuck = StuckChannel(job.channels[1])
    job.channels[1] = stuck
    try:
        outcomes = await job.call({1: Begin(1)}, limits=SHORT)
    finally:
        stuck.let_go.set()
    assert isinstance(outcomes[0], PeerError)
    assert outcomes[0].cause == "rank 1 got no answer from its channel for 1 s"


async def test_one_thread_is_enough(threads: ThreadPoolExecutor) -> None:
    job = RanksAndEffects(2, threads)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        outcomes = await asyncio.gather(
            run_call(job.channels[0], 1, Begin(1), job.effects[0], LONG, threads=one),
            run_call(job.channels[1], 1, Begin(1), job.effects[1], LONG, threads=other),
        )
    assert [outcome.state for outcome in outcomes] == ["committed"] * 2


class LateChannel(SendingChannel):
    """A channel that is deaf until its rank's clock has jumped, and finds nothing in the first look after that."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._channel = channel
        self.is_deaf = self.has_jumped = False
        self.deaf_looks_count = 0

    def receive(self, call: int, timeout_s: float) -> list[tuple[int, bytes]]:
        if not self.is_deaf:
            return self._channel.receive(call, timeout_s)
        self.deaf_looks_count += 1
        time.sleep(0.001)  # Not to keep the threads busy for nothing.
        self.is_deaf = not self.has_jumped
        return []


async def test_time_in_which_a_process_was_stopped_is_nobodys_silence(threads: ThreadPoolExecutor) -> None:
    """The clock jumps past the limit of silence, while what was said meanwhile lies in the inbox."""
    job, jump_s = RanksAndEffects(2, threads), 0.0
    late = [LateChannel(channel) for channel in job.channels]

    def clock() -> float:
        return time.monotonic() + jump_s

    for effects in job.effects:
        effects.holds = True
    running = asyncio.gather(
        *(run_call(late[rank], 1, Begin(1), job.effects[rank], LONG, threads=threads, clock=clock) for rank in (0, 1))
    )
    for effects in job.effects:
        await effects.writing.wait()
    for channel in late:
        channel.is_deaf = True
        while channel.deaf_looks_count < 2:  # Then none is left that was begun before.
            await asyncio.sleep(0.001)
    job.channels[0].send(1, 1, encode(Alive()))
    job.channels[1].send(1, 0, encode(Alive()))
    jump_s = 2 * LONG.silence_s
    for channel in late:
        channel.has_jumped = True
    while any(channel.is_deaf for channel in late) and not running.done():
        await asyncio.sleep(0.001)
    for effects in job.effects:
        effects.stopped.set()
    assert [outcome.state for outcome in await running] == ["committed"] * 2
