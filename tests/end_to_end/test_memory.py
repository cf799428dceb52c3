"""Arenas: reused by every save of the process, bounded by the limit, never the reason for an OOM kill."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.engine.save import start_save
from asyncckpt.staging.pool import pool
from tests.end_to_end.state import State, load_image
from tests.worlds.arenas import close_free
from tests.worlds.gates import Gate

SAVES_COUNT = 30


def test_snapshot_over_the_limit_is_saved_blocking(tmp_path: Path) -> None:
    state = State.filled(1)
    options = {"hashtables": state.tables, "tensors": state.dense, "host_memory_limit": 10_000}
    close_free(pool)
    with asyncckpt.Saver(path=tmp_path, **options) as saver:
        expected = state.image()
        with pytest.warns(RuntimeWarning, match="does not fit the host memory limit"):
            future = saver.save_async(1)
        state.scribble()
        assert future.done()
        assert "10000 bytes" in str(future.result(0).fallback)
        assert saver.statistics().fallback_count == 1
        assert saver.statistics().arena_bytes == 0
    assert load_image(tmp_path) == expected


def test_a_blocking_save_that_takes_too_long_is_not_left_to_read_what_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_save, "SAVE_DEADLINE_S", 0.1)
    gate, state = Gate(), {"a": torch.zeros(1 << 10)}
    with asyncckpt.Saver(path=tmp_path, tensors=state, host_memory_limit=0, filter_func=gate) as saver:
        with pytest.warns(RuntimeWarning, match="does not fit"), pytest.raises(asyncckpt.DeadlineError):
            saver.save_async(1)
        state["a"].fill_(1)
        gate.open()
    assert asyncckpt.list_steps(tmp_path) == []


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_a_smaller_state_is_not_judged_by_the_plan_of_the_larger_one(way: str, tmp_path: Path) -> None:
    """Where a wait is refused, as on an event loop, the save would be refused with it."""
    state = {"a": torch.zeros(1 << 20)}
    with asyncckpt.Saver(path=tmp_path, tensors=state, host_memory_limit=1 << 20) as saver:
        with contextlib.nullcontext() if way == "save" else pytest.warns(RuntimeWarning, match="does not fit"):
            getattr(saver, way)(1)
        state["a"] = torch.ones(1 << 10)
        close_free(pool)
        assert saver.save_async(2).result(60).fallback is None
        state["a"] = torch.zeros(1 << 20)
        with pytest.warns(RuntimeWarning, match="does not fit"):
            saver.save_async(3)
    assert torch.equal(asyncckpt.load(tmp_path, step=2)["a"], torch.ones(1 << 10))


def test_a_new_saver_reuses_the_arena(tmp_path: Path) -> None:
    state = State.filled(2)
    for number in range(3):
        with asyncckpt.Saver(path=tmp_path / str(number), hashtables=state.tables, tensors=state.dense) as saver:
            saver.save_async(1).result(60)
            statistics = saver.statistics()
        if number == 0:
            first = statistics
        assert (statistics.arena_touches_count, statistics.arenas_count) == (
            first.arena_touches_count,
            first.arenas_count,
        )


def test_saves_of_large_values_keep_none_of_them(tmp_path: Path) -> None:
    """What a Saver remembers of its checkpoints is what retention and chains need."""
    state: dict[str, Any] = {"x": torch.ones(4), "loader": b""}
    with asyncckpt.Saver(path=tmp_path, tensors=state, durability="none") as saver:
        tracemalloc.start()
        try:
            for step in range(24):
                state["loader"] = os.urandom(1 << 20)
                saver.save(step)
                if step == 3:
                    gc.collect()
                    before, _ = tracemalloc.get_traced_memory()
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert after - before < 4 << 20


@pytest.mark.any_core
@pytest.mark.parametrize("way", ["full", "full and delta", "blocking", "failed", "loaded"])
def test_nothing_stays_of_saves_that_retention_has_removed(way: str, tmp_path: Path) -> None:
    """Not one object for each of them: directories remembered the names of all marks of removals."""
    table = asyncckpt.HashTable("t", 4)
    state = {"w": torch.ones(100), "n": 1}
    fails = way == "failed"

    def filter_func(blocks: list[Any]) -> list[Any]:
        if fails:
            raise ValueError("a filter fails")
        return blocks

    def blocks_after(saves_count: int) -> int:
        for number in range(saves_count):
            table.insert(torch.arange(50), torch.rand(50, 4))
            with contextlib.suppress(asyncckpt.CheckpointError):
                if way == "blocking":
                    saver.save()
                    continue
                kind: Any = "delta" if way == "full and delta" and number % 2 else "full"
                saver.save_async(kind=kind).result(60)
            if way == "loaded":
                asyncckpt.Loader(tmp_path, hashtables={"t": table}, tensors=state).load()
        saver.wait_idle(60)
        gc.collect()
        return sys.getallocatedblocks()

    options: dict[str, Any] = {"filter_func": filter_func, "keep": 2, "durability": "none"}
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}, tensors=state, **options) as saver:
        blocks_after(2 * SAVES_COUNT)
        counts = [blocks_after(SAVES_COUNT) for _ in range(4)]
    # Caches of the interpreter fill slowly, and go up and down. A name with its value are four objects.
    assert min(after - before for before, after in itertools.pairwise(counts)) < 3 * SAVES_COUNT, counts


def test_arena_grows_with_the_table_and_keeps_what_it_has(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("t", 64)
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        for step in range(4):
            table.lookup(torch.arange(10_000 * step, 10_000 * (step + 1)))
            saver.save_async(step).result(60)
        assert saver.statistics().arena_bytes >= 40_000 * 64 * 4
    assert [asyncckpt.describe(tmp_path, step).tables["t"] for step in range(4)] == [10_000, 20_000, 30_000, 40_000]


def test_failed_save_gives_its_arena_back(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000)}

    def fail(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        raise RuntimeError("no")

    with asyncckpt.Saver(path=tmp_path, tensors=state, filter_func=fail) as saver:
        for step in range(5):
            with pytest.raises(asyncckpt.errors.FilterError):
                saver.save_async(step).result(60)
        assert saver.statistics().arenas_count <= 2
        assert saver.statistics().failed_count == 5


def test_a_save_waits_for_the_arena_that_prepare_touches(tmp_path: Path) -> None:
    """Not a second one: staging never takes more than one image, except when saves are queued."""
    close_free(pool)
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(8 << 20)}) as saver:
        saver.prepare()
        saver.save_async(1).result(60)
        assert saver.statistics().arenas_count == 1


def test_growing_tables_find_their_memory_touched(tmp_path: Path) -> None:
    close_free(pool)
    table = asyncckpt.HashTable("t", 64)
    table.lookup(torch.arange(100_000))
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        saver.prepare().result(60)
        before = saver.statistics().arena_touches_count
        table.lookup(torch.arange(104_000))
        saver.save_async(1).result(60)
        assert saver.statistics().arena_touches_count == before
