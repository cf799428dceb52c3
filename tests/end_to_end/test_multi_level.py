"""Saves of multi-level tables: which way they go, what they leave alone, how they fail, what else can load them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import asyncckpt
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.shard import stream
from asyncckpt.staging.pool import pool
from asyncckpt.tables import undo_log
from tests.end_to_end.multi_level_runs import (
    DIM,
    Contents,
    LevelsRun,
    Pace,
    RunSpec,
    contents,
    differing,
    paced_exports,
)
from tests.worlds.arenas import close_free

pytestmark = pytest.mark.filterwarnings("ignore:cache of table")

SPEC = RunSpec(seed=5, cache_rows=40, policy="lru", prefetch_depth=2, host_level="first_touch", steps_count=8)


@pytest.fixture
def pace() -> Iterator[Pace]:
    with paced_exports() as pace:
        yield pace


def trained(steps: int = 4, spec: RunSpec = SPEC) -> LevelsRun:
    run = LevelsRun(spec)
    for number in range(steps):
        run.step(number)
    return run


def saver_of(run: LevelsRun, path: Path, **options: Any) -> asyncckpt.Saver:
    return asyncckpt.Saver(path=path, hashtables={"t": run.cached.table}, **options)


def loaded(path: Path, *, shard: tuple[int, int] = (0, 1)) -> Contents:
    target = asyncckpt.HashTable("t", DIM, shard=shard, **SPEC.kinds)
    asyncckpt.Loader(path, hashtables={"t": target}).load()
    return contents(target)


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("data/*/*.safetensors"))


def live_bits(table: Any) -> dict[str, bytes]:
    """Everything a save might have touched: both levels, the cache's map and what its policy knows."""
    levels = table._levels
    bits = {f"cache {name}": column.numpy().tobytes() for name, column in levels.cache.columns().items()}
    bits["map"] = levels.cache.host_rows.tobytes()
    bits["cached ids"] = levels.cache.ids_by_row().tobytes()
    rows = levels.store.rows()
    for name in ("embedding", "sum", "last_seen"):
        bits[f"host {name}"] = levels.store.column(name)[torch.from_numpy(rows)].numpy().tobytes()
    bits["host ids"] = levels.store.ids().tobytes()
    return bits


# -- which way ---------------------------------------------------------------------------------------------------------


def test_both_ways_bring_out_the_cut(tmp_path: Path, pace: Pace) -> None:
    run = trained()
    for way in ("copy", "first_touch"):
        with saver_of(run, tmp_path / way, device=asyncckpt.DeviceOptions(host_level=way)) as saver:
            expected = contents(run.plain.table)
            future = saver.save_async(1)
            run.step(4)
            pace.open()
            assert future.result(60).fallback is None
            assert saver.statistics().plans_made_count == 1
            assert differing(loaded(tmp_path / way), expected) == []
            assert differing(contents(run.plain.table), expected) != []
        run = trained()
    assert len(files_of(tmp_path / "copy")) == 1
    # Left open, the table has a file of its own behind that of the arena.
    assert len(files_of(tmp_path / "first_touch")) == 2


def test_auto_leaves_open_what_does_not_fit(tmp_path: Path, pace: Pace) -> None:
    run = trained(spec=RunSpec(seed=6, cache_rows=8, policy="lru", prefetch_depth=0, host_level="auto"))
    for side in (run.cached, run.plain):
        side.table.insert(np.arange(4000), torch.ones(4000, DIM))  # 128 KB of rows beside a cache of a few pages.
    ways = {"copy": (1 << 20, 1, False), "left open": (40_000, 2, False), "blocking": (1000, 1, True)}
    pace.open()
    gc.collect()  # Arenas that other tests have lent count as held.
    for way, (limit, files_count, is_blocking) in ways.items():
        close_free(pool)
        with saver_of(run, tmp_path / way, host_memory_limit=limit) as saver:
            if is_blocking:
                with pytest.warns(RuntimeWarning, match="does not fit the host memory limit"):
                    result = saver.save_async(1).result(60)
            else:
                result = saver.save_async(1).result(60)
        assert (result.fallback is not None) == is_blocking, way
        assert len(files_of(tmp_path / way)) == files_count, way
        assert differing(loaded(tmp_path / way), contents(run.plain.table)) == [], way
    close_free(pool)


def test_blocking_and_filtered_saves_see_the_overlaid_rows(tmp_path: Path) -> None:
    run = trained()
    seen: list[str] = []

    def keep(blocks: list[WriteBlock]) -> list[WriteBlock]:
        seen.extend(str(block.data.shape) for block in blocks)
        return list(reversed(blocks))

    for name, options, save in (
        ("blocking", {}, "save"),
        ("filtered", {"filter_func": keep, "device": asyncckpt.DeviceOptions(host_level="first_touch")}, "save_async"),
        ("filtered blocking", {"filter_func": keep}, "save"),
    ):
        with saver_of(run, tmp_path / name, **options) as saver:
            answer = getattr(saver, save)(1)
            if save == "save_async":
                answer.result(60)
        assert differing(loaded(tmp_path / name), contents(run.plain.table)) == [], name
    assert len(seen) == 8


def test_other_tables_and_tensors_share_the_checkpoint(tmp_path: Path, pace: Pace) -> None:
    run = trained()
    dense = {"weight": torch.randn(7, 3), "epoch": 4}
    with asyncckpt.Saver(
        path=tmp_path,
        hashtables={"t": run.cached.table, "plain": run.plain.table},
        tensors=dense,
        device=asyncckpt.DeviceOptions(host_level="first_touch"),
    ) as saver:
        expected, weight = contents(run.plain.table), dense["weight"].clone()
        future = saver.save_async(1)
        dense["weight"].zero_()
        run.step(4)
        pace.open()
        future.result(60)
    targets = {"t": SPEC.multi_level(), "plain": SPEC.plain()}
    back = {"weight": torch.zeros(7, 3), "epoch": 0}
    report = asyncckpt.Loader(tmp_path, hashtables=targets, tensors=back).load()
    assert torch.equal(back["weight"], weight)
    assert report.values == {"epoch": 4}
    assert differing(contents(targets["plain"]), expected) == []
    assert differing(read_all(targets["t"]), expected) == []
    asyncckpt.verify(tmp_path)
    for path in files_of(tmp_path):
        with safe_open(str(path), "pt") as file:
            assert list(file.keys())


def read_all(table: asyncckpt.MultiLevelTable) -> Contents:
    ids = np.sort(table.ids().numpy())
    return {"id": ids} | {name: rows.numpy() for name, rows in table.read(ids).items() if name != "id"}


def test_loads_into_either_kind_and_other_shards(tmp_path: Path, pace: Pace) -> None:
    run = trained()
    pace.open()
    with saver_of(run, tmp_path, device=asyncckpt.DeviceOptions(host_level="first_touch")) as saver:
        saver.save_async(1).result(60)
    expected = contents(run.plain.table)
    parts = [loaded(tmp_path, shard=(index, 3)) for index in range(3)]
    assert sorted(np.concatenate([part["id"] for part in parts]).tolist()) == expected["id"].tolist()
    for index, part in enumerate(parts):
        assert (part["id"].view(np.uint64) % np.uint64(3) == np.uint64(index)).all()
    target = SPEC.multi_level()
    target.insert(np.array([123456789]), torch.ones(1, DIM))
    asyncckpt.Loader(tmp_path, hashtables={"t": target}).load()
    assert differing(read_all(target), expected) == []


# -- what a save leaves alone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["copy", "first_touch"])
def test_the_live_table_is_unchanged_by_a_save(tmp_path: Path, pace: Pace, way: str) -> None:
    run = trained()
    for ahead in (5, 6):
        run.cached.table.prefetch(run._batches[ahead])
    before = live_bits(run.cached.table)
    pace.open()
    with saver_of(run, tmp_path, device=asyncckpt.DeviceOptions(host_level=way)) as saver:
        saver.save_async(1).result(60)
        saver.save(2)
    assert live_bits(run.cached.table) == before


def test_training_with_saves_equals_training_without(tmp_path: Path, pace: Pace) -> None:
    alone, saved = LevelsRun(SPEC), LevelsRun(SPEC)
    with saver_of(saved, tmp_path, device=asyncckpt.DeviceOptions(host_level="first_touch"), on_busy="wait") as saver:
        for number in range(SPEC.steps_count):
            alone.step(number)
            saved.step(number)
            if number % 3 == 0:
                pace.open()
                saver.save_async(number)
    assert live_bits(saved.cached.table) == live_bits(alone.cached.table)


# -- several at once, failures -----------------------------------------------------------------------------------------


def test_queued_saves_are_cuts_of_their_own(tmp_path: Path, pace: Pace) -> None:
    run = trained()
    with saver_of(run, tmp_path, device=asyncckpt.DeviceOptions(host_level="first_touch"), on_busy="queue") as saver:
        expected = {}
        futures = []
        for number in (4, 5):
            futures.append(saver.save_async(number))
            expected[number] = contents(run.plain.table)
            run.step(number)
        run.step(6)
        pace.open()
        for future in futures:
            future.result(60)
    for number, reference in expected.items():
        target = SPEC.plain()
        asyncckpt.Loader(tmp_path, hashtables={"t": target}, step=number).load()
        assert differing(contents(target), reference) == []


def test_a_failed_export_fails_the_save_alone(tmp_path: Path, pace: Pace, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained()
    with saver_of(run, tmp_path, device=asyncckpt.DeviceOptions(host_level="first_touch")) as saver:
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(stream, "_export_window", fail)
            future = saver.save_async(1)
            run.step(4)
            with pytest.raises(asyncckpt.IOFailedError, match="No space left"):
                future.result(60)
        run.step(5)
        pace.open()
        saver.save_async(2).result(60)
    assert asyncckpt.list_steps(tmp_path) == [2]
    assert differing(loaded(tmp_path), contents(run.plain.table)) == []


def test_a_cut_that_is_given_up_fails_the_save_and_not_training(
    tmp_path: Path, pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undo_log, "PAUSE_S_MAX", 0.0)
    run = trained(spec=RunSpec(seed=5, cache_rows=1, policy="lru", prefetch_depth=0, host_level="x", undo_bytes_max=1))
    held = threading.Event()
    monkeypatch.setattr(Pace, "wait", lambda self: held.wait(60))
    with saver_of(run, tmp_path, device=asyncckpt.DeviceOptions(host_level="first_touch")) as saver:
        future = saver.save_async(1)
        for number in range(4, 8):
            run.step(number)
        held.set()
        with pytest.raises(asyncckpt.IOFailedError, match="was given up"):
            future.result(60)
        saver.save_async(2).result(60)
    assert differing(loaded(tmp_path), contents(run.plain.table)) == []


def test_a_cancelled_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pace: Pace) -> None:
    run = trained()
    held = threading.Event()
    monkeypatch.setattr(Pace, "wait", lambda self: held.wait(60))
    with saver_of(run, tmp_path, device=asyncckpt.DeviceOptions(host_level="first_touch")) as saver:
        future = saver.save_async(1)
        assert future.cancel()
        held.set()
        with pytest.raises(asyncckpt.SaveCancelledError):
            future.result(60)
        assert run.cached.table.insert(np.arange(5000), torch.zeros(5000, DIM)) is None  # Growth waits for no one.
    assert asyncckpt.list_steps(tmp_path) == []


# -- companions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_table", [asyncckpt.HashTable, partial(asyncckpt.MultiLevelTable, cache_rows=4)])
def test_candidates_are_saved_in_the_same_cut(tmp_path: Path, new_table: Any) -> None:
    table = new_table("t", DIM, admit_after=3)
    table.lookup(np.array([1, 2]))
    table.lookup(np.array([1, -7]))
    table.lookup(np.array([1]))
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        saver.save(1)
    again = new_table("t", DIM, admit_after=3)
    asyncckpt.Loader(tmp_path, hashtables={"t": again}).load()
    assert again.ids().tolist() == [1]
    assert again.lookup(np.array([2, -7])).tolist() == [-1, -1]
    assert (again.lookup(np.array([2, -7])) >= 0).all()


def test_a_companion_may_not_take_the_name_of_another_table(tmp_path: Path) -> None:
    table = asyncckpt.MultiLevelTable("t", DIM, cache_rows=4, admit_after=2)
    other = asyncckpt.HashTable("x", DIM)
    with pytest.raises(asyncckpt.UsageError, match=r"'t\.candidates'"):
        asyncckpt.Saver(path=tmp_path, hashtables={"t": table, "t.candidates": other})
