"""What happens at night to jobs of several ranks: the logs name the culprit, and all go on from the same step."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
from tests.night import rank_job
from tests.night.nights import COMMITTED, OPENED, RESTORED, STEPS, Night
from tests.ranks.processes import Ended, await_ranks, start_rank
from tests.worlds.directories import flip_byte

pytestmark = [pytest.mark.slow, pytest.mark.any_core]
RUN_S_MAX = 90.0
KILLED = -signal.SIGKILL


class RankNight(Night):
    """A directory, and the jobs of two ranks on it."""

    def of_ranks(self, *, steps: int = STEPS, stopped: int | None = None, **options: Any) -> list[Ended]:
        """Run the job; stopped: the rank that goes on when the others have ended."""
        folder = self.run.parent
        (folder / "store").unlink(missing_ok=True)  # Where the ranks of the job before have met.
        ranks = [
            start_rank(rank_job.__name__, [self.run, rank, 2, steps, json.dumps(options)], folder) for rank in range(2)
        ]
        if stopped is not None:
            ranks[1 - stopped].process.join(RUN_S_MAX)
            os.kill(ranks[stopped].pid, signal.SIGCONT)
        return await_ranks(ranks, RUN_S_MAX)

    def of_ranks_again(self, **options: Any) -> list[Ended]:
        """Run it once more: all ranks end as if nothing had happened."""
        again = self.of_ranks(**options)
        said = "\n".join(rank.output for rank in again)
        assert [rank.status for rank in again] == [0, 0], said
        assert [re.findall(r"^DONE (.*)$", rank.output, re.M) for rank in again] == [[f"[{float(STEPS)}]"]] * 2, said
        return again

    def rank_says(self, ended: Ended, *lines: str) -> None:
        self.says(ended.output.splitlines(), *lines)


@pytest.fixture
def ranks(tmp_path: Path) -> RankNight:
    return RankNight(tmp_path)


def statuses(ended: list[Ended]) -> list[int | None]:
    return [rank.status for rank in ended]


def test_a_quiet_night_of_ranks(ranks: RankNight) -> None:
    first, second = ended = ranks.of_ranks(sum=True)
    assert statuses(ended) == [0, 0]
    ranks.rank_says(first, OPENED, COMMITTED.format(2), COMMITTED.format(8))
    assert "WARNING" not in first.output + second.output
    assert "Traceback" not in first.output + second.output
    ranks.check([4, 6, 8])
    ranks.rank_says(ranks.of_ranks_again(sum=True)[0], RESTORED.format(8))


@pytest.mark.parametrize(("point", "steps"), [("write", [2]), ("written", [2]), ("prepared", [2, 4])])
def test_a_rank_dies_in_a_save(ranks: RankNight, point: str, steps: list[int]) -> None:
    """Before it has said that its files are durable: no checkpoint. After that: the save goes on without it."""
    first, second = ranks.of_ranks(at={"1 4": point})
    assert (first.status, second.status) == (1, KILLED), first.output
    ranks.rank_says(first, OPENED, COMMITTED.format(2), "PeerError: ")
    assert re.search(r"PeerError: .*rank 1", first.output), first.output
    ranks.check(steps)
    ranks.rank_says(ranks.of_ranks_again()[0], RESTORED.format(steps[-1]), COMMITTED.format(8))


@pytest.mark.parametrize(("point", "steps"), [("write", [2]), ("manifest written", [2]), ("renamed", [2, 4])])
def test_rank_0_is_lost_in_a_save(ranks: RankNight, point: str, steps: list[int]) -> None:
    """The other one looks for the manifest; it ends, and does not wait for ever."""
    first, second = ranks.of_ranks(at={"0 4": point})
    assert (first.status, second.status) == (KILLED, 1), second.output
    assert re.search(r"Peer(InDoubt)?Error: .*rank 0", second.output), second.output
    ranks.check(steps)
    ranks.rank_says(ranks.of_ranks_again()[0], RESTORED.format(steps[-1]), COMMITTED.format(8))


@pytest.mark.parametrize(("what", "status"), [("exit", 3), ("raise", 1), ("SIGKILL", KILLED)])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_ends_early(ranks: RankNight, culprit: int, what: str, status: int) -> None:
    """Between two saves: the other one hears of it in its next one."""
    ended = ranks.of_ranks(at={f"{culprit} 5": what})
    other = ended[1 - culprit]
    assert (ended[culprit].status, other.status) == (status, 1), other.output
    assert re.search(rf"Peer(InDoubt)?Error: .*rank {culprit}", other.output), other.output
    ranks.check([2, 4])
    ranks.rank_says(ranks.of_ranks_again()[0], RESTORED.format(4), COMMITTED.format(8))


def test_a_rank_dies_in_a_step(ranks: RankNight) -> None:
    """In synchronous training gloo notices: the error is its own, and nothing is saved that not all have."""
    first, second = ranks.of_ranks(sum=True, at={"1 5": "SIGKILL"})
    assert (first.status, second.status) == (1, KILLED), first.output
    ranks.rank_says(first, OPENED, COMMITTED.format(4), "RuntimeError: ")
    ranks.check([2, 4])
    ranks.rank_says(ranks.of_ranks_again(sum=True)[0], RESTORED.format(4), COMMITTED.format(8))


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_hangs_for_longer_than_the_deadline(ranks: RankNight, culprit: int) -> None:
    """The other one ends, naming it; the one that goes on an hour later ends, too, and has spoiled nothing."""
    ended = ranks.of_ranks(at={f"{culprit} 5": "SIGSTOP"}, stopped=culprit)
    assert statuses(ended) == [1, 1], ended
    assert re.search(rf"Peer(InDoubt)?Error: .*rank {culprit}", ended[1 - culprit].output), ended[1 - culprit].output
    assert re.search(r"Peer(InDoubt)?Error: ", ended[culprit].output), ended[culprit].output
    ranks.check([2, 4])
    ranks.rank_says(ranks.of_ranks_again()[0], RESTORED.format(4), COMMITTED.format(8))


@pytest.mark.parametrize("culprit", [0, 1])
def test_one_rank_cannot_write(ranks: RankNight, culprit: int) -> None:
    """Its own log has the reason of the system, and the other one's the rank and that reason."""
    ended = ranks.of_ranks(at={f"{culprit} 4": "file size"})
    assert statuses(ended) == [1, 1], ended
    for rank, error in ((culprit, "IOFailedError: "), (1 - culprit, "PeerError: ")):
        ranks.rank_says(ended[rank], error)
        assert re.search(rf"{error}.*{re.escape(str(ranks.run))}.*File too large", ended[rank].output), ended[
            rank
        ].output
    assert re.search(rf"PeerError: .*rank {culprit}", ended[1 - culprit].output)
    ranks.check([2])
    ranks.rank_says(ranks.of_ranks_again()[0], RESTORED.format(2), COMMITTED.format(8))


@pytest.mark.parametrize("asked", [0, 1])
def test_the_scheduler_asks_one_rank(ranks: RankNight, asked: int) -> None:
    ended = ranks.of_ranks(sum=True, at={f"{asked} 4": "SIGTERM"})
    assert statuses(ended) == [143, 143], ended
    step = asyncckpt.list_steps(ranks.run)[-1]
    assert step == 5  # All stop together after the next step.
    ranks.rank_says(ended[0], OPENED, "INFO step 5 of {run} is saved, and the process ends: SIGTERM")
    ranks.rank_says(ranks.of_ranks_again(sum=True)[0], RESTORED.format(5), COMMITTED.format(8))


@pytest.mark.parametrize("damaged", [0, 1])
def test_the_newest_of_ranks_is_damaged(ranks: RankNight, damaged: int) -> None:
    """In a part that only one of them reads."""
    assert statuses(ranks.of_ranks(steps=7)) == [0, 0]
    (name,) = (name for name in asyncckpt.describe(ranks.run, 6).files if f"/r0000{damaged}-" in name)
    flip_byte(ranks.run / name)
    ended = ranks.of_ranks()
    assert statuses(ended) == [1, 1]
    ranks.rank_says(ended[damaged], "CorruptError: ")
    ranks.check([2, 4, 6], damaged=True)
    again = ranks.of_ranks_again(fallback=True)
    ranks.rank_says(
        again[0],
        "WARNING step 6 of {run} is damaged and passed by, step 4 is tried: ",
        RESTORED.format(4),
        COMMITTED.format(8),
    )
    ranks.check([4, 6, 8])
    shutil.rmtree(ranks.run / "damaged")
    ranks.check([4, 6, 8])
