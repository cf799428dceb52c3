"""One answer for all ranks, whenever they ask; and an answer in time, whoever is silent."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from asyncckpt.coordination.agreement import Agreement, Verdict
from asyncckpt.errors import CorruptError, PeerError
from bench.memory_channel import MemoryExchange

pytestmark = pytest.mark.any_core
LONG_S = 60.0
DONE = Verdict()
RUNNING = Verdict(running=True)


def agreements(ranks_count: int, *, deadline_s: float = LONG_S) -> list[Agreement]:
    exchange = MemoryExchange(ranks_count)
    return [Agreement(exchange.channel(rank), deadline_s=deadline_s) for rank in range(ranks_count)]


def test_a_call_is_done_when_it_has_ended_on_all_ranks() -> None:
    zero, one = agreements(2)
    assert zero.decide(0, DONE, blocking=False) == RUNNING
    assert one.decide(0, RUNNING, blocking=False) == RUNNING
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(one.decide, 0, DONE, blocking=True)
        assert zero.decide(0, DONE, blocking=True) == DONE
        assert other.result(LONG_S) == DONE


def test_a_rank_that_asks_late_gets_the_answer_of_its_round() -> None:
    """Rank 0 has gone on to the next round, in which more is known."""
    zero, one = agreements(2)
    assert zero.decide(0, DONE, blocking=False) == RUNNING
    one._channel.send(0, 0, b'{"running":false}')
    assert zero.decide(0, DONE, blocking=False) == DONE
    assert one.decide(0, DONE, blocking=False) == RUNNING
    assert one.decide(0, DONE, blocking=False) == DONE


def test_a_failure_is_everybodys_at_once() -> None:
    zero, one, two = agreements(3)
    error = OSError("the disk is full \udcff")
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(two.is_done, 0, "the call", ended=True, error=error, blocking=True)
        verdict = zero.decide(0, RUNNING, blocking=True)
        assert verdict == Verdict(rank=2, cause="OSError: the disk is full \\udcff")
        assert failed.exception(LONG_S) is error
        with pytest.raises(PeerError, match="the call failed on rank 2: OSError: the disk is full"):
            one.is_done(0, "the call", ended=False, error=None, blocking=True)


def test_results_must_be_equal() -> None:
    zero, one, two = agreements(3)
    with ThreadPoolExecutor(2) as threads:
        for call, results in enumerate([("step 3", "step 3", "step 3"), ("step 3", "step 3", "step 4")]):
            others = [
                threads.submit(
                    agreement.is_done, call, "the load", ended=True, error=None, blocking=True, result=result
                )
                for agreement, result in zip((one, two), results[1:], strict=True)
            ]
            own = zero.decide(call, Verdict(result=results[0]), blocking=True)
            if call == 0:
                assert own == DONE
                assert [other.result(LONG_S) for other in others] == [True, True]
            else:
                assert own.rank is not None
                for other in others:
                    with pytest.raises(PeerError, match=r"the load failed on rank [12]: it has step \d, rank"):
                        other.result(LONG_S)


def test_a_call_after_a_failed_one_is_decided_anew() -> None:
    zero, one = agreements(2)
    with ThreadPoolExecutor(1) as thread:
        failure = Verdict(rank=1, cause="it broke")
        other = thread.submit(one.decide, 0, failure, blocking=True)
        assert zero.decide(0, DONE, blocking=True) == failure
        assert other.result(LONG_S) == failure
        other = thread.submit(one.decide, 1, DONE, blocking=True)
        assert zero.decide(1, DONE, blocking=True) == DONE
        assert other.result(LONG_S) == DONE


def test_a_silent_rank_is_named() -> None:
    zero, _ = agreements(2, deadline_s=0.05)
    verdict = zero.decide(0, DONE, blocking=True)
    assert verdict == Verdict(rank=1, cause="no word for 0.05 s")


def test_a_silent_rank_0_is_a_peer_error() -> None:
    _, one = agreements(2, deadline_s=0.05)
    with pytest.raises(PeerError, match=r"no word for 0\.05 s") as caught:
        one.decide(0, DONE, blocking=True)
    assert caught.value.rank == 0


def test_who_says_that_it_lives_is_waited_for() -> None:
    """Rank 1 speaks for longer than the deadline before its call ends."""
    zero, one = agreements(2, deadline_s=1.0)

    def speak() -> Verdict:
        for _ in range(5):
            one.say_running(0)
            one._channel.receive(7, one.pause_s)  # Nothing ever comes here.
        return one.decide(0, DONE, blocking=True)

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(speak)
        assert zero.decide(0, DONE, blocking=True) == DONE
        assert other.result(LONG_S) == DONE


def test_rank_0_says_that_it_lives_while_it_waits() -> None:
    zero, one, two = agreements(3, deadline_s=1.0)

    def late() -> Verdict:
        for _ in range(5):
            two.say_running(0)
            two._channel.receive(7, two.pause_s)
        return two.decide(0, DONE, blocking=True)

    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(late), threads.submit(one.decide, 0, DONE, blocking=True)]
        assert zero.decide(0, DONE, blocking=True) == DONE
        assert [other.result(LONG_S) for other in others] == [DONE, DONE]


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_finalize_a_call_in_the_same_round(seed: int) -> None:
    draw = random.Random(seed)
    ranks_count, calls_count = draw.randint(2, 5), 4
    # After how many rounds each call ends on each rank.
    ends = [[draw.randint(0, 5) for _ in range(calls_count)] for _ in range(ranks_count)]
    exchange = MemoryExchange(ranks_count)

    def rounds_of(rank: int) -> list[int]:
        agreement = Agreement(exchange.channel(rank), deadline_s=LONG_S)
        counts = []
        for call in range(calls_count):
            count = 0
            while agreement.decide(call, Verdict(running=count < ends[rank][call]), blocking=False).running:
                count += 1
            counts.append(count)
        return counts

    with ThreadPoolExecutor(ranks_count) as threads:
        rounds = [future.result(LONG_S) for future in [threads.submit(rounds_of, rank) for rank in range(ranks_count)]]
    assert rounds == [rounds[0]] * ranks_count
    assert all(rounds[0][call] >= max(end[call] for end in ends) for call in range(calls_count))
    assert {call for call, _ in exchange.data} == {calls_count - 2, calls_count - 1}  # Older ones are forgotten.


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"running":1}', b'{"rank":-1,"cause":""}', b'{"rank":1}'])
def test_a_message_that_is_none_is_corrupt(raw: bytes) -> None:
    zero, one = agreements(2)
    one._channel.send(0, 0, raw)
    with pytest.raises(CorruptError, match="rank 1"):
        zero.decide(0, DONE, blocking=False)
