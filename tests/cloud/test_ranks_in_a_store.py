"""Several ranks save to one prefix of a store: all of a step or nothing of it, also where one of them is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.commit.discover import check_listed
from asyncckpt.commit.store_root import StoreRoot
from asyncckpt.engine.ranks.rank_save import _attempt_folder
from asyncckpt.format.head import FileFacts
from asyncckpt.format.names import Attempt
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FaultProxy, Mishap, Request
from tests.cloud.rank_in_a_store import ROWS_COUNT, STEPS_COUNT
from tests.ranks.processes import Ended, RankProcess, await_ranks, outputs, start_rank
from tests.shares import share_of

RANKS_COUNT = 3
WAIT_S = 120.0
MANY_RANKS = 8
WAIT_OF_MANY_S = 300.0
# Of a victim: the number of its request. The first ones are those of its constructor.
KILLS = [(victim, number) for victim in (0, 1) for number in (3, 6, 10, 14, 18, 23, 29)]
KILLS_OF_MANY = [(0, number) for number in (3, 6, 10, 14, 18, 23, 29)] + [
    (5, number) for number in (2, 4, 6, 8, 10, 13)
]


def start_ranks(
    folder: Path, url: str, *more_words: str, endpoints: dict[int, str] | None = None, count: int = RANKS_COUNT
) -> list[RankProcess]:
    folder.mkdir()
    started = []
    for rank in range(count):
        more = {"AWS_ENDPOINT_URL": endpoints[rank]} if endpoints and rank in endpoints else {}
        arguments = (rank, count, folder, url, *more_words)
        started.append(start_rank("tests.cloud.rank_in_a_store", arguments, folder, **more))
    return started


def said_steps(ended: list[Ended]) -> set[int]:
    lines = [line for rank in ended for line in rank.output.splitlines() if line.startswith("step ")]
    return {int(line.split()[1]) for line in lines}


def check_step(url: str, step: int, *, shards: int = 1, count: int = RANKS_COUNT) -> None:
    """Load a step of `count` ranks as so many ranks would."""
    asyncckpt.verify(url, step)
    found: dict[int, float] = {}
    for shard in range(shards):
        table = asyncckpt.HashTable("t", 2, shard=(shard, shards))
        tensors: dict[str, Any] = {
            "both": torch.zeros(4),
            **{f"own.{rank}": torch.zeros(1) for rank in range(count)},
        }
        asyncckpt.Loader(url, {"t": table}, tensors, step=step, shard_index=shard, shard_num=shards).load()
        assert [tensors[f"own.{rank}"].item() for rank in range(count)] == [step + 100 * rank for rank in range(count)]
        assert torch.equal(tensors["both"], torch.full((4,), float(step)))
        ids = torch.arange(shard, ROWS_COUNT, shards)
        values = table.embedding[table.lookup(ids, insert=False)][:, 0]
        found |= dict(zip(ids.tolist(), values.tolist(), strict=True))
    assert found == {number: number + 100.0 * step for number in range(ROWS_COUNT)}


def test_what_ranks_save_loads_with_any_number_of_them(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    for run in range(2):  # The second one goes on behind the first.
        ended = await_ranks(start_ranks(tmp_path / f"run{run}", url), WAIT_S)
        assert [rank.status for rank in ended] == [0] * RANKS_COUNT, outputs(ended)
    assert asyncckpt.list_steps(url) == [*range(2 * STEPS_COUNT)]
    for step, shards in ((0, 1), (2, 2), (5, 5)):
        check_step(url, step, shards=shards)


def test_ranks_find_the_next_step_behind_one_of_others(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    """The last commit of a job that ends late comes behind the constructors of the next one."""
    ended = await_ranks(start_ranks(tmp_path / "run", url, "another saves"), WAIT_S)
    assert [rank.status for rank in ended] == [0] * RANKS_COUNT, outputs(ended)
    assert asyncckpt.list_steps(url) == [*range(STEPS_COUNT + 2)]


@pytest.mark.parametrize(("victim", "number"), share_of(KILLS, "ranks that are killed"))
def test_a_killed_rank_leaves_whole_checkpoints(
    proxy: FaultProxy, url: str, tmp_path: Path, victim: int, number: int
) -> None:
    kill_a_rank(proxy, url, tmp_path, victim, number)


@pytest.mark.slow
@pytest.mark.timeout(2 * WAIT_OF_MANY_S)
@pytest.mark.parametrize(("victim", "number"), KILLS_OF_MANY)
def test_one_of_many_ranks_that_is_killed_leaves_whole_checkpoints(
    proxy: FaultProxy, url: str, tmp_path: Path, victim: int, number: int
) -> None:
    kill_a_rank(proxy, url, tmp_path, victim, number, count=MANY_RANKS, wait_s=WAIT_OF_MANY_S)


def kill_a_rank(
    proxy: FaultProxy,
    url: str,
    tmp_path: Path,
    victim: int,
    number: int,
    *,
    count: int = RANKS_COUNT,
    wait_s: float = WAIT_S,
) -> None:
    """Kill one rank at its request of this number, look at what is there, and let the job go on."""
    running: list[RankProcess] = []

    def kill_at(left: list[int]) -> Callable[[Request], Mishap | None]:
        def disturb(request: Request) -> Mishap | None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(running[victim].pid, signal.SIGKILL)
            return Mishap(silent=True) if left[0] <= 0 else None

        return disturb

    endpoints = {rank: proxy.target for rank in range(count)} | {victim: proxy.endpoint}
    proxy.fault = kill_at([number])
    running += start_ranks(tmp_path / "killed", url, endpoints=endpoints, count=count)
    ended = await_ranks(running, wait_s)
    proxy.fault = lambda request: None
    assert ended[victim].status in (0, -signal.SIGKILL), outputs(ended)
    if ended[victim].status:
        others = [rank.status for place, rank in enumerate(ended) if place != victim]
        assert None not in others, outputs(ended)
        assert 0 not in others or said_steps(ended) == {*range(STEPS_COUNT)}, outputs(ended)
    try:
        steps = asyncckpt.list_steps(url)
    except asyncckpt.NotFoundError:
        steps = []
    assert said_steps(ended) <= {*steps}
    for step in steps:
        check_step(url, step, count=count)

    ended = await_ranks(start_ranks(tmp_path / "again", url, count=count), wait_s)
    assert [rank.status for rank in ended] == [0] * count, outputs(ended)
    check_step(url, max(steps, default=-1) + STEPS_COUNT, count=count)


def test_a_rank_that_cannot_join_is_named_by_the_others(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    proxy.fault = lambda request: Mishap(answer=(403, "SignatureDoesNotMatch"))
    endpoints = {0: proxy.target, 1: proxy.endpoint, 2: proxy.target}
    ended = await_ranks(start_ranks(tmp_path / "refused", url, endpoints=endpoints), WAIT_S)
    assert [rank.status for rank in ended] == [1] * RANKS_COUNT, outputs(ended)
    assert all("SignatureDoesNotMatch" in rank.output for rank in ended), outputs(ended)


def test_ranks_with_different_prefixes_are_refused(owner: seaweed.Server, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    words = [(rank, 2, folder, f"{url}/{rank}") for rank in range(2)]
    ended = await_ranks([start_rank("tests.cloud.rank_in_a_store", one, folder) for one in words], WAIT_S)
    assert [rank.status for rank in ended] == [1, 1], outputs(ended)
    assert all("ranks save to different places" in rank.output for rank in ended), outputs(ended)


def test_a_bucket_that_is_not_there_ends_all_constructors(owner: seaweed.Server, tmp_path: Path) -> None:
    ended = await_ranks(start_ranks(tmp_path / "run", "s3://no-such-bucket/run"), WAIT_S)
    assert [rank.status for rank in ended] == [1] * RANKS_COUNT, outputs(ended)
    assert all("NoSuchBucket" in rank.output for rank in ended)


def test_files_that_rank_0_has_removed_are_not_damaged(owner: seaweed.Server, url: str) -> None:
    """Rank 0 aborts while this rank looks at its own files: its word, which says why, ends the save."""
    root, attempt = StoreRoot(ObjectStore(StoreUrl.of(url))), Attempt.new(1)
    file = FileFacts(f"data/{attempt.directory}/r00001-000.safetensors", 1, 8, bytes(16), 8)
    aborted = pytest.raises(asyncckpt.NotFoundError, match="unless rank 0 has aborted")
    with aborted, _attempt_folder(root, attempt) as folder:
        check_listed(folder, [file], step=1)
