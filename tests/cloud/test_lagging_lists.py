"""A store whose listings lag behind: what is acknowledged is there, what is kept is whole, nothing is overwritten.

Objects that are there are read; only lists are older than they are. A list may lack the newest steps, and may name what
has been removed.
"""

from __future__ import annotations

import random
from typing import Literal

import pytest
import torch

import asyncckpt
from tests.cloud.fault_proxy import FaultProxy, Mishap
from tests.cloud.small_parts import small_parts

__all__ = ["small_parts"]

STEPS = 8
LAG_MAX = 6
KINDS: list[Literal["full", "delta"]] = ["full", "delta", "delta"]


def table_of(step: int) -> asyncckpt.HashTable:
    table = asyncckpt.HashTable("t", 2)
    for number in range(step + 1):
        train(table, number)
    return table


def train(table: asyncckpt.HashTable, step: int) -> None:
    table.insert(torch.arange(5 * step, 5 * step + 8), torch.full((8, 2), float(step)))


def assert_holds(url: str, step: int) -> None:
    found, expected = asyncckpt.HashTable("t", 2), table_of(step)
    asyncckpt.Loader(url, {"t": found}, step=step, verify="before").load()
    ids = expected.ids()
    assert sorted(found.ids().tolist()) == sorted(ids.tolist())
    rows = found.lookup(ids, insert=False)
    assert torch.equal(found.embedding[rows], expected.embedding[expected.lookup(ids, insert=False)])


@pytest.mark.parametrize("seed", range(3))
def test_what_is_saved_stays(proxy: FaultProxy, url: str, seed: int) -> None:
    choices = random.Random(seed)
    table = asyncckpt.HashTable("t", 2)
    proxy.fault = lambda request: Mishap(stale=choices.randrange(LAG_MAX)) if request.kind == "list" else None
    for begin in range(0, STEPS, 4):  # Two runs.
        with asyncckpt.Saver(path=url, hashtables={"t": table}, keep=2) as saver:
            for step in range(begin, begin + 4):
                train(table, step)
                saver.save_async(step, kind="full" if step == begin else choices.choice(KINDS)).result()
                assert_holds(url, step)
            saver.wait_idle()
    proxy.fault = lambda request: None
    steps = asyncckpt.list_steps(url)
    assert steps[-2:] == [STEPS - 2, STEPS - 1]
    for step in steps:
        assert_holds(url, step)
    with asyncckpt.Saver(path=url, hashtables={"t": table}, keep=2) as saver:
        train(table, STEPS)
        saver.save(STEPS, kind="full")
    assert asyncckpt.list_steps(url) == [STEPS - 1, STEPS] or asyncckpt.describe(url, STEPS - 1).parents


def test_a_step_that_no_list_shows_yet_is_not_overwritten(proxy: FaultProxy, url: str) -> None:
    tensors = {"w": torch.zeros(9)}
    with asyncckpt.Saver(path=url, tensors=tensors) as saver:
        saver.save(0)
    proxy.fault = lambda request: Mishap(stale=100) if request.kind == "list" else None
    tensors["w"].fill_(1)
    with asyncckpt.Saver(path=url, tensors=tensors) as saver, pytest.raises(asyncckpt.ConflictError, match="step 0"):
        saver.save(0)
    assert torch.equal(asyncckpt.load(url, 0)["w"], torch.zeros(9))
