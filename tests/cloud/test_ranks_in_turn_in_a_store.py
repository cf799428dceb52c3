"""Ranks of one process that save one after the other to a store: the last one commits all parts, or none is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.commit.attempt import claims
from asyncckpt.engine.ranks import in_turn
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FAULTS, FaultProxy, Mishap, Request, first
from tests.cloud.small_parts import small_parts

__all__ = ["small_parts"]

RANKS = 4
IDS = torch.arange(-100, 100)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not in_turn._steps
    assert not claims.held


def saver_of(url: str, rank: int, *, value: float = 0.0, **options: Any) -> asyncckpt.Saver:
    table = asyncckpt.HashTable("user", 2, shard=(rank, RANKS))
    mine = IDS[table.owns(IDS)]
    table.insert(mine, (mine + float(value))[:, None].expand(-1, 2))
    tensors = {"weight": torch.full((2000,), float(value)), "rank": rank}
    return asyncckpt.Saver(
        rank, RANKS, 8, url, {"user": table}, tensors, ranks=asyncckpt.RankOptions(in_turn=True), **options
    )


def check_loads(url: str, *, step: int, value: float, count: int) -> None:
    """Into any number of ranks."""
    found: dict[int, float] = {}
    for rank in range(count):
        table, weight = asyncckpt.HashTable("user", 2, shard=(rank, count)), torch.zeros(2000)
        asyncckpt.Loader(url, {"user": table}, {"weight": weight}, step=step).load()
        assert bool(weight.eq(value).all())
        ids = table.ids()
        found |= dict(zip(ids.tolist(), table.read(ids)["embedding"][:, 0].tolist(), strict=True))
    assert found == {number: number + value for number in IDS.tolist()}


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_each_leaves_its_part_and_the_last_one_commits(owner: seaweed.Server, url: str, order: Sequence[int]) -> None:
    for step in range(2):  # Each with Savers of its own, which are closed in between.
        for place, rank in enumerate(order):
            with saver_of(url, rank, value=step) as saver:
                result = saver.save()
            assert (result.step, set(result.waits_for)) == (step, {*order[place + 1 :]})
        assert asyncckpt.list_steps(url) == [*range(step + 1)]
    for step, count in ((0, 1), (1, 3)):
        asyncckpt.verify(url, step)
        check_loads(url, step=step, value=step, count=count)


def test_savers_that_stay_open_know_of_steps_that_others_have_begun(owner: seaweed.Server, url: str) -> None:
    with ExitStack() as opened:
        savers = [opened.enter_context(saver_of(url, rank, keep=2)) for rank in range(RANKS)]
        for step in range(4):
            turn = [*savers[step:], *savers[:step]]  # Another one is the first.
            assert [saver.save().step for saver in turn] == [step] * RANKS
            for saver in savers:
                saver.wait_idle()
    assert asyncckpt.list_steps(url)[-2:] == [2, 3]
    check_loads(url, step=3, value=0, count=2)


def test_a_part_that_does_not_come_leaves_nothing(owner: seaweed.Server, url: str) -> None:
    with saver_of(url, 0) as first, saver_of(url, 1) as second:
        first.save(0)
        second.save(0)
        with pytest.raises(asyncckpt.PeerError, match="ranks have not saved their parts: 2, 3"):
            first.save(1)
    assert asyncckpt.list_steps(url) == []
    assert not ObjectStore(StoreUrl.of(url)).below("data")


def test_a_part_that_fails_gives_the_step_up(proxy: FaultProxy, url: str) -> None:
    def refuse(request: Request) -> Mishap | None:
        return Mishap(answer=(403, "AccessDenied")) if request.method == "PUT" and "/r00001" in request.path else None

    proxy.fault = refuse
    with saver_of(url, 0) as saver:
        saver.save(0)
    with saver_of(url, 1) as saver, pytest.raises(asyncckpt.IOFailedError, match="AccessDenied"):
        saver.save(0)
    proxy.fault = lambda request: None
    assert not ObjectStore(StoreUrl.of(url)).below("data")
    for rank in range(RANKS):
        with saver_of(url, rank, value=5) as saver:
            saver.save(0)
    check_loads(url, step=0, value=5, count=1)


def test_a_step_in_doubt_is_settled_by_the_next_one(proxy: FaultProxy, url: str, small_parts: None) -> None:
    with ExitStack() as opened:
        savers = [opened.enter_context(saver_of(url, rank)) for rank in range(RANKS)]
        proxy.fault = first("put", [FAULTS["silent"]] * 100, where="/manifests/")
        for saver in savers[:-1]:
            saver.save()
        with pytest.raises(asyncckpt.IndeterminateError):
            savers[-1].save()
        proxy.fault = lambda request: None
        steps = {saver.save().step for saver in savers}
        assert not any(saver._target.commits.in_doubt for saver in savers)
    assert (steps, asyncckpt.list_steps(url)) == ({1}, [0, 1])
    check_loads(url, step=0, value=0, count=2)
