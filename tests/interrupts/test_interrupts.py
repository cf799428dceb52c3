"""Ctrl-C at the places of each call that takes something: afterwards nothing is held, tables hold what they held before
or what they should hold after, and a last save commits and loads.

Calls are interrupted at every n-th of their places; `make test-interrupts` tries all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import MultiLevelTable
from tests.interrupts.places import SOME, interrupt_at
from tests.interrupts.world import DEADLINE_S, SaverAndReference, TrainedTables, settled_fds

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 looks for signals in other places")


@pytest.fixture
def world(tmp_path: Path) -> SaverAndReference:
    return SaverAndReference(tmp_path / "checkpoints")


# -- tables ------------------------------------------------------------------------------------------------------------


def _lookup(trained: TrainedTables, ids: torch.Tensor) -> None:
    trained.table.lookup(ids)


def _lookup_levels(trained: TrainedTables, ids: torch.Tensor) -> None:
    trained.levels.lookup(ids)


def _insert(trained: TrainedTables, ids: torch.Tensor) -> None:
    trained.table.insert(ids, torch.full((len(ids), 4), 2.0))


def _insert_levels(trained: TrainedTables, ids: torch.Tensor) -> None:
    trained.levels.insert(ids, torch.full((len(ids), 4), 2.0))


def _remove(trained: TrainedTables, ids: torch.Tensor) -> None:
    trained.table.remove(ids - 6)


def _remove_levels(trained: TrainedTables, ids: torch.Tensor) -> None:
    trained.levels.remove(ids - 6)


def _prefetch(trained: TrainedTables, ids: torch.Tensor) -> None:
    trained.levels.prefetch(ids - 8)


def _rows(trained: TrainedTables, ids: torch.Tensor) -> None:
    with trained.table.rows(ids - 6) as rows:
        rows.embedding += 1.0
        rows["sum"] += 1.0


def _update_levels(trained: TrainedTables, ids: torch.Tensor) -> None:
    def write(rows: Any) -> None:
        rows.embedding += 1.0
        rows["sum"] += 1.0

    trained.levels.update(trained.levels.lookup(ids - 6, insert=False), write)


def _insert_rows(table: MultiLevelTable, ids: torch.Tensor) -> None:
    table.insert(ids, torch.ones(len(ids), 4))


def _clear(table: MultiLevelTable, _: torch.Tensor) -> None:
    table.clear()


USES = [
    _lookup, _lookup_levels, _insert, _insert_levels, _remove, _remove_levels, _prefetch, _rows, _update_levels,
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_uses_of_tables(world: SaverAndReference, use: Callable[[TrainedTables, torch.Tensor], None]) -> None:
    ids = torch.empty(0)
    before: Any = None

    def prepare() -> Callable[[], None]:
        nonlocal ids, before
        ids, before = world.new_ids(6), world.own.rows()
        return lambda: use(world.own, ids)

    def check() -> None:
        world.check_nothing_is_held()
        use(world.reference, ids)
        now = world.own.rows()
        if now == before != world.reference.rows():
            use(world.own, ids)
            now = world.own.rows()
        assert now == world.reference.rows()

    interrupt_at(SOME, prepare, check)
    world.save_and_load()


@pytest.mark.parametrize("use", [MultiLevelTable.lookup, _insert_rows, _clear])
def test_admission(use: Callable[[MultiLevelTable, torch.Tensor], object]) -> None:
    table = MultiLevelTable("a", 4, cache_rows=8, capacity=8, admit_after=2)
    ids = torch.arange(2)

    def prepare() -> Callable[[], object]:
        nonlocal ids
        ids = ids + 2
        table.lookup(ids)
        _insert_rows(table, torch.tensor([-1]))
        return lambda: use(table, ids)

    def check() -> None:
        with_row = table.lookup(ids, insert=False) >= 0
        counted = torch.isin(ids, table.companions()["candidates"].counts()[0])
        if use is _clear:
            assert bool(len(table)) == bool(counted.any())
        else:
            assert torch.equal(with_row, ~counted), "each id has a row or a count"

    interrupt_at(SOME, prepare, check)


def test_step_of_an_optimizer(world: SaverAndReference) -> None:
    before: Any = None

    def prepare() -> Callable[[], None]:
        nonlocal before
        ids = world.new_ids(6)
        for trained in (world.own, world.reference):
            trained.forward(ids)
        before = world.own.rows()
        return world.own.optimizer.step

    def check() -> None:
        world.check_nothing_is_held()
        world.reference.optimizer.step()
        if world.own.rows() == before:
            world.own.optimizer.step()
        assert world.own.rows() == world.reference.rows()

    interrupt_at(SOME, prepare, check)
    world.save_and_load()


# -- saves -------------------------------------------------------------------------------------------------------------


def _save_async(world: SaverAndReference) -> None:
    world.saver.save_async(world.next_step()).result(DEADLINE_S)


def _save_delta(world: SaverAndReference) -> None:
    world.saver.save_async(world.next_step(), kind="delta").result(DEADLINE_S)


def _save_blocking(world: SaverAndReference) -> None:
    world.saver.save(world.next_step())


def _prepare(world: SaverAndReference) -> None:
    world.saver.prepare().result(DEADLINE_S)


def _compact(world: SaverAndReference) -> None:
    world.saver.compact().result(DEADLINE_S)


def _close_and_open(world: SaverAndReference) -> None:
    world.saver.close()
    world.saver = world.new_saver()


@pytest.mark.parametrize("use", [_save_async, _save_delta, _save_blocking, _prepare, _compact, _close_and_open])
def test_calls_of_a_saver(world: SaverAndReference, use: Callable[[SaverAndReference], None]) -> None:
    def prepare() -> Callable[[], None]:
        world.train()
        if use is _compact:
            _save_delta(world)
        return lambda: use(world)

    def check() -> None:
        world.check_nothing_is_held()
        if world.saver._closed:
            world.saver.close()
            world.saver = world.new_saver()
        world.saver.wait_idle(DEADLINE_S)

    def check_whole() -> None:
        world.load()
        world.save_and_load()
        world.check_folders()
        assert settled_fds() == world.fds

    interrupt_at(SOME, prepare, check, check_whole)


# -- loads -------------------------------------------------------------------------------------------------------------


def _load(loader: asyncckpt.Loader) -> None:
    loader.load()


def _load_async(loader: asyncckpt.Loader) -> None:
    loader.load_async().result(DEADLINE_S)


@pytest.mark.parametrize("use", [_load, _load_async])
def test_loads(world: SaverAndReference, use: Callable[[asyncckpt.Loader], None]) -> None:
    saved = world.own.rows()
    loader = asyncckpt.Loader(str(world.path), world.own.tables, world.own.tensors)

    def prepare() -> Callable[[], None]:
        world.train()
        return lambda: use(loader)

    def check_whole() -> None:
        loader.load()
        assert world.own.rows() == saved
        assert settled_fds() == world.fds

    interrupt_at(SOME, prepare, world.check_nothing_is_held, check_whole)
    world.save_and_load()
