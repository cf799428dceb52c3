"""The lock of a table in a forked child."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from asyncckpt.errors import UsageError
from asyncckpt.tables import HashTable
from tests.unit.tables.multi_level_world import LevelsBesideDict, Saving

DEADLINE_S = 60
CHILD_S_MAX = 10


def in_child(call: Callable[[], object]) -> None:
    """Run a call in a forked child, which ends within CHILD_S_MAX."""
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(CHILD_S_MAX, exit=True, file=sys.__stderr__)
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def table() -> HashTable:
    table = HashTable("user", 4)
    table.insert(torch.arange(8), torch.ones(8, 4))
    return table


@pytest.fixture
def held_by(table: HashTable) -> Iterator[Callable[[str], None]]:
    """Have another thread hold the table for a use, until the test ends."""
    may_end, threads = threading.Event(), list[threading.Thread]()

    def hold(use: str) -> None:
        held = threading.Event()

        def work() -> None:
            with table._lock.hold(use):
                held.set()
                may_end.wait(DEADLINE_S)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        assert held.wait(DEADLINE_S)

    yield hold
    may_end.set()
    for thread in threads:
        thread.join()


def test_a_table_that_another_thread_saves_at_a_fork_is_free_in_the_child(
    table: HashTable, held_by: Callable[[str], None]
) -> None:
    held_by("cut")

    def use() -> None:
        table.insert(torch.tensor([8]), torch.ones(1, 4))
        assert table.lookup(torch.arange(9)).unique().numel() == 9

    in_child(use)


def test_a_table_that_another_thread_changes_at_a_fork_is_refused_in_the_child(
    table: HashTable, held_by: Callable[[str], None]
) -> None:
    held_by("insert")

    def use() -> None:
        for call in (lambda: table.lookup(torch.arange(8)), table.begin_cut, table.clear):
            with pytest.raises(UsageError, match="of table 'user', which another thread changed at the fork"):
                call()

    in_child(use)


def test_what_the_forking_thread_holds_it_holds_in_the_child(table: HashTable) -> None:
    cut = table.begin_cut()

    def use() -> None:
        with pytest.raises(UsageError, match="waits for cut of it on the same thread"):
            table.lookup(torch.arange(8))
        cut.fence()
        table.lookup(torch.arange(8))

    in_child(use)
    cut.fence()


@pytest.mark.filterwarnings("ignore:cache of table:RuntimeWarning")
def test_a_child_keeps_no_rows_for_a_save_of_its_parent() -> None:
    """The memory for them and those who would write them are not there."""
    world = LevelsBesideDict(cache_rows=4, capacity=32)
    world.train(range(16))
    saving = Saving(world, window_rows=4)
    world.train(range(8))

    def use() -> None:
        world.train(range(16))
        world.check()
        world.table.clear()

    with saving.cut._opened()[0].reading(0):  # type: ignore[attr-defined]
        in_child(use)
    world.train(range(16))
    assert saving.end() == saving.expected
