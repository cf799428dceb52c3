"""Full saves whose arena is brought up to date, not filled anew: whatever has happened since, the image is the cut.

Random runs with everything that moves rows or changes the plan, in which every step must load bit for bit; then that
the refresh is really used, and that one which forgets a row is found by the same check.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.filters import keep_rows, skip_zero_rows
from asyncckpt.model.table import CutVersion
from asyncckpt.tables.touched_rows import TouchedRows
from tests.deltas.failing_storage import Hold, watched
from tests.deltas.table_world import Rows, TableWorld, new_table
from tests.worlds.rows import rows_of

ROWS_COUNT = 1500
SAVES_COUNT = 14
SHARES = (0.001, 0.01, 0.03, 0.1, 0.8)
RUNS_COUNT = 8
MEMORY_LIMIT = 64 << 20


def is_odd(columns: dict[str, torch.Tensor]) -> torch.Tensor:
    return columns["last_seen"] % 2 == 1


class RefreshRun:
    """Two tables that are saved in full again and again, to two directories, by Savers that come and go."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.worlds = [TableWorld(new_table("a")), TableWorld(new_table("b"))]
        self.names = ["a", "b"]
        self.dense = {"w": torch.zeros(5)}
        self.filtered = False
        self.savers: dict[str, asyncckpt.Saver] = {}
        self.expected: dict[tuple[str, int], tuple[dict[str, Rows], dict[str, list[float]]]] = {}
        self.rows_copied = self.rows_there = 0
        for world in self.worlds:
            world.insert(range(ROWS_COUNT))

    def run(self) -> list[str]:
        """Returns what is wrong."""
        events = [
            *[self.touch] * 20, self.scribble, self.grow, self.remove, self.evict, self.rename, self.filter,
            self.reshape, self.reopen, self.clear, self.load_back,
        ]  # fmt: skip
        for step in range(1, SAVES_COUNT + 1):
            for event in self.random.choices(events, k=2):
                event()
            self.save(step)
        self.close()
        return self.wrong()

    # -- what happens between saves ------------------------------------------------------------------------------

    def touch(self) -> None:
        for world in self.worlds:
            ids = sorted(world.rows)
            share = self.random.choice(SHARES)
            world.train(self.random.sample(ids, int(len(ids) * share)))

    def scribble(self) -> None:
        """Code that knows nothing of marks writes a few rows."""
        world = self.random.choice(self.worlds)
        world.write_in_place(self.random.sample(sorted(world.rows), min(3, len(world.rows))))

    def grow(self) -> None:
        self.random.choice(self.worlds).grow()

    def remove(self) -> None:
        world = self.random.choice(self.worlds)
        gone = self.random.sample(sorted(world.rows), len(world.rows) // 10)
        world.remove(gone)
        world.look_up(gone[::3])

    def evict(self) -> None:
        world = self.random.choice(self.worlds)
        world.evict(below=world.number - 3 * ROWS_COUNT)

    def clear(self) -> None:
        if self.random.random() < 0.3:
            world = self.random.choice(self.worlds)
            world.clear()
            world.insert(range(self.random.choice([10, ROWS_COUNT])))

    def rename(self) -> None:
        """The tables change their names; the arena of the old ones must not be taken for theirs."""
        self.names = self.names[::-1] if self.random.random() < 0.5 else [f"{name}x" for name in self.names]
        self.close()

    def filter(self) -> None:
        self.filtered = not self.filtered
        self.close()

    def reshape(self) -> None:
        """Dense tensors come, go and change their size."""
        self.dense = {name: torch.zeros(self.random.randrange(1, 3000)) for name in self.random.sample("uvw", 2)}

    def reopen(self) -> None:
        self.close()

    def load_back(self) -> None:
        """Rows of another step come into the live tables, behind the back of the marks."""
        if not self.expected or self.random.random() < 0.5:
            return
        path, step = self.random.choice(list(self.expected))
        tables, _ = self.expected[path, step]
        target = {name: world.table for name, world in zip(tables, self.worlds, strict=True)}
        asyncckpt.Loader(self.root / path, hashtables=target, step=step, strict=False).load()
        for name, world in zip(tables, self.worlds, strict=True):
            world.was_loaded(tables[name])

    # -- saves ---------------------------------------------------------------------------------------------------

    def save(self, step: int) -> None:
        """Save to one of two directories, now and then twice in a row without waiting."""
        path = self.random.choice(["left", "right"])
        saver = self.saver(path)
        if self.random.random() < 0.2:
            saver.prepare().result(60)
        futures = []
        for number in range(self.random.choice([1, 1, 2])):
            self.expected[path, 10 * step + number] = self.copy()
            self.rows_there += sum(len(world.rows) for world in self.worlds)
            futures.append(saver.save_async(10 * step + number))
            self.touch()
            for tensor in self.dense.values():
                tensor += 1
        for future in futures:
            self.rows_copied += future.result(60).rows_copied

    def copy(self) -> tuple[dict[str, Rows], dict[str, list[float]]]:
        tables = {
            name: {id: row for id, row in world.rows.items() if not self.filtered or row[3] % 2 == 1}
            for name, world in zip(self.names, self.worlds, strict=True)
        }
        return tables, {name: tensor.tolist() for name, tensor in self.dense.items()}

    def saver(self, path: str) -> asyncckpt.Saver:
        if path not in self.savers:
            self.savers[path] = asyncckpt.Saver(
                path=self.root / path,
                hashtables=dict(zip(self.names, (world.table for world in self.worlds), strict=True)),
                tensors={"dense": _Live(self)},
                on_busy="queue",
                filters=[keep_rows("*", is_odd), skip_zero_rows("*@sum")] if self.filtered else [],
                host_memory_limit=MEMORY_LIMIT,
            )
        return self.savers[path]

    def close(self) -> None:
        for saver in self.savers.values():
            saver.close()
        self.savers.clear()

    def wrong(self) -> list[str]:
        found = []
        for (path, step), (tables, dense) in self.expected.items():
            targets = {name: new_table(name) for name in tables}
            tensors = {"dense": {name: torch.zeros(len(values)) for name, values in dense.items()}}
            asyncckpt.Loader(self.root / path, hashtables=targets, tensors=tensors, step=step).load()
            found += [f"{path} {step}: {name}" for name in tables if rows_of(targets[name]) != tables[name]]
            found += [f"{path} {step}: {name}" for name in dense if tensors["dense"][name].tolist() != dense[name]]
        return found


class _Live:
    """The dense tensors, whatever they are at this save."""

    def __init__(self, run: RefreshRun) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        return dict(self._run.dense)


@pytest.mark.parametrize("seed", range(RUNS_COUNT))
def test_every_step_of_a_random_run_is_its_cut(seed: int, tmp_path: Path) -> None:
    run = RefreshRun(tmp_path, seed)
    assert run.run() == []
    print(f"{run.rows_copied} of {run.rows_there} rows were copied")
    assert run.rows_copied < run.rows_there


def test_a_refresh_that_forgets_a_row_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TouchedRows.touched_since

    def forgetful(self: TouchedRows, version: CutVersion) -> Any:
        rows = plain(self, version)
        return rows if rows is None else rows[1:]

    monkeypatch.setattr(TouchedRows, "touched_since", forgetful)
    wrong = RefreshRun(tmp_path, 0).run()
    print(f"{len(wrong)} tables differ")
    assert wrong


def full_saves(tmp_path: Path, *, shares: list[float], **options: Any) -> list[asyncckpt.SaveResult]:
    """Repeated full saves of one table, with a share of its rows written before each."""
    world = TableWorld(new_table("t", capacity=ROWS_COUNT))
    world.insert(range(ROWS_COUNT))
    generator = random.Random(3)
    results = []
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": world.table}, **options) as saver:
        for step, share in enumerate(shares):
            world.train(generator.sample(range(ROWS_COUNT), int(share * ROWS_COUNT)))
            results.append(saver.save_async(step).result(60))
        statistics = saver.statistics()
    assert statistics.rows_copied == sum(result.rows_copied for result in results)
    assert statistics.rows_count == sum(result.rows_count for result in results)
    assert all(result.rows_count == ROWS_COUNT for result in results)
    return results


def test_only_written_rows_are_copied(tmp_path: Path) -> None:
    results = full_saves(tmp_path, shares=[0, 0.01, 0.02, 0, 0.01])
    assert [result.rows_copied for result in results] == [ROWS_COUNT, 15, 30, 0, 15]


def test_all_rows_are_copied_without_refresh(tmp_path: Path) -> None:
    results = full_saves(tmp_path, shares=[0, 0.01], debug=asyncckpt.DebugOptions(refresh=False))
    assert [result.rows_copied for result in results] == [ROWS_COUNT, ROWS_COUNT]


def test_rows_of_a_save_that_failed_are_copied_again_or_still_there(tmp_path: Path) -> None:
    """An arena that was brought up to date for a save that fails holds what it holds; no row is missing in the next."""
    world = TableWorld(new_table("t"))
    world.insert(range(ROWS_COUNT))
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": world.table}) as saver:
        saver.save_async(1).result(60)
        world.train(range(100))
        with pytest.raises(asyncckpt.SaveCancelledError):
            cancelled(saver, 2)
        world.train(range(50, 150))
        saver.save_async(3).result(60)
    target = new_table("t")
    asyncckpt.Loader(tmp_path, hashtables={"t": target}).load()
    assert rows_of(target) == world.rows


def cancelled(saver: asyncckpt.Saver, step: int) -> None:
    hold = Hold()
    with watched(hold):
        future = saver.save_async(step)
        assert future.cancel()
        hold.let_go()
        future.result(60)
