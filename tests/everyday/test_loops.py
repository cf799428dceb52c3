"""Random everyday programs: what is acknowledged is what the state was in the call, whatever went on around it.

Every seed is another program: it trains, changes its state, saves in all ways, with new Savers, deltas, retention,
compaction, full disks, and loads. A plain copy of the state stands beside each save.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
from asyncckpt.model.table import CutVersion
from asyncckpt.tables.touched_rows import TouchedRows
from tests.everyday.loop import Image, Loop, in_order, rows_of
from tests.shares import slow_but_for_a_share

SEEDS_COUNT = 8
OPERATIONS_COUNT = 60
WAIT_S = 60


class LoopsOfDirectory:
    """Savers of one directory, one after the other or at once, beside the images of all steps."""

    def __init__(self, seed: int, path: Path) -> None:
        self.draw, self.path = random.Random(seed), path
        self.loop, self.done = Loop(self.draw, seed), list[str]()
        self.images: dict[int, Image] = {}
        self.acknowledged, self.unknown = set[int](), set[int]()
        self.pending: dict[int, asyncckpt.SaveFuture] = {}
        self.may_fail = set[int]()
        self.keeps, self.others = [99], list[Any]()
        self.new_saver()

    def new_saver(self) -> None:
        """Go on with another Saver; the old one is closed, or stays."""
        draw, loop = self.draw, self.loop
        self.has_optimizers = draw.random() < 0.6
        self.has_deltas = draw.random() < 0.5
        policy = asyncckpt.DeltaPolicy(deltas_max=draw.choice([1, 3, 8]), bytes_share_max=draw.choice([0.5, 20.0]))
        keep = draw.choice([None, None, 1, 3])
        self.keeps.append(keep or 99)
        self.saver = asyncckpt.Saver(
            path=self.path,
            hashtables=loop.tables,
            tensors=loop.state,
            on_busy=draw.choice(["wait", "skip", "queue"]),
            keep=keep,
            deltas=policy if self.has_deltas else None,
            device=asyncckpt.DeviceOptions(
                optimizers=loop.optimizers() if self.has_optimizers else (),
                host_level=draw.choice(["auto", "copy", "first_touch"]),
            ),
            durability=draw.choice(["none", "none", "fsync"]),
            parallel=draw.choice([1, 4]),
            filter_func=draw.choice([list, lambda blocks: blocks]),
        )

    # -- operations ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        self.loop.train()

    def change(self) -> None:
        self.done.append(self.loop.change())

    def save(self) -> None:
        step = self.loop.step
        if step in self.images:
            return
        self.settle()
        self.images[step] = self.loop.image()
        kind = self.draw.choice(["auto", "auto", "full", "delta"]) if self.has_deltas else "auto"
        with self.maybe_full_disk() as is_full:
            if is_full:
                self.may_fail |= {step, *self.pending}  # What is still written, too, whatever becomes of this one.
            try:
                future = self.saver.save_async(step, kind=kind, metadata={"n": step})
            except (asyncckpt.IOFailedError, asyncckpt.ConflictError, asyncckpt.UsageError) as error:
                is_of_before = bool(self.may_fail) and "was changed between save_async" in str(error)
                if is_full or kind == "delta" or is_of_before:
                    return
                raise
            self.pending[step] = future
            if is_full:
                future.exception(WAIT_S)
        self.done.append(f"{kind} save of {step}")
        if self.draw.random() < 0.1:
            future.cancel()
        if self.has_optimizers:
            self.go_on_behind(step)
        if self.draw.random() < 0.3:
            self.settle(wait=True)

    def go_on_behind(self, step: int) -> None:
        """Change under the copies what may change; now and then what may not: then the save fails, or was over."""
        for _ in range(self.draw.randrange(3)):
            self.done.append(f"behind: {self.loop.change(behind_a_save=True)}")
        if self.draw.random() < 0.2:
            self.may_fail.add(step)
            self.done.append(f"behind, not allowed: {self.loop.change()}")
        self.loop.forward_and_backward()
        self.loop.end_step()

    def save_at_once(self) -> None:
        step = self.loop.step
        self.settle(wait=True)
        if step not in self.images:
            self.images[step] = self.loop.image()
            if not self.saver.save(step, on_busy="wait").skipped:
                self.acknowledged.add(step)

    def settle(self, *, wait: bool = False) -> None:
        """Look at what has ended."""
        for step, future in list(self.pending.items()):
            if not wait and not future.done():
                continue
            del self.pending[step]
            error = future.exception(WAIT_S)
            if error is None and not future.result().skipped:
                self.acknowledged.add(step)
            allowed = (asyncckpt.UsageError, asyncckpt.IOFailedError) if step in self.may_fail else ()
            assert error is None or isinstance(error, (asyncckpt.SaveCancelledError, *allowed)), error

    def rest(self) -> None:
        self.settle(wait=True)
        for saver in (self.saver, *self.others):
            saver.wait_idle(WAIT_S)

    def look(self) -> None:
        """Compare what is there with the images of those steps."""
        self.rest()
        there = set(asyncckpt.list_steps(self.path))
        assert there <= self.acknowledged
        assert set(sorted(self.acknowledged)[-min(self.keeps) :]) <= there
        for step in there:
            asyncckpt.verify(self.path, step)
            found = asyncckpt.load(self.path, step, tables=True)
            rows = {name: in_order(found.pop(name)) for name in self.images[step].tables}
            dense = {name: value for name, value in found.items() if name in self.loop.state}
            assert self.images[step].differs(dense, rows) == []

    def load(self) -> None:
        """Load into what is trained, or into new tables; what is refused changes nothing."""
        self.rest()
        there = asyncckpt.list_steps(self.path)
        if not there:
            return
        step, before = self.draw.choice([there[-1], self.draw.choice(there)]), self.loop.image()
        tables = self.loop.tables if self.draw.random() < 0.5 else self.loop.new_tables()
        state = {name: value for name, value in self.loop.state.items() if name not in ("plain", "views")}
        loader = asyncckpt.Loader(self.path, tables, state, step=step, verify=self.draw.choice([True, "before", False]))
        try:
            loader.load()
        except asyncckpt.IncompatibleError:
            assert forms(before.dense) != forms(self.images[step].dense)
            now = self.loop.image()
            assert before.differs(now.dense, now.tables) == []
        else:
            wanted, now = self.images[step], self.loop.image()
            rows = {name: rows_of(table) for name, table in tables.items()}
            unsaved = {name: wanted.dense[name] for name in ("plain", "views")}
            assert wanted.differs({**now.dense, **unsaved}, rows) == []

    def load_shards(self) -> None:
        self.rest()
        if not (there := asyncckpt.list_steps(self.path)):
            return
        step = self.draw.choice(there)
        for number in range(3):
            tables = self.loop.new_tables(shard=(number, 3))
            asyncckpt.Loader(self.path, tables, step=step, strict=False).load()
            for name, table in tables.items():
                rows = self.images[step].tables[name]
                own = {column: values[table.owns(rows["id"])] for column, values in rows.items()}
                assert Image({}, {name: own}).differs({}, {name: rows_of(table)}) == []

    def another_saver(self) -> None:
        self.settle(wait=True)
        if self.draw.random() < 0.5:
            self.others.append(self.saver)
        else:
            self.saver.close()
        self.new_saver()

    def compact(self) -> None:
        self.settle(wait=True)
        try:
            future = self.saver.compact()
            if self.draw.random() < 0.5:
                self.save()
            future.exception(WAIT_S)
        except (asyncckpt.NotFoundError, asyncckpt.UsageError):
            return  # There is nothing, or no chain.

    def run(self) -> None:
        operations = [self.train] * 9 + [self.change] * 4 + [self.save] * 6
        operations += [self.settle, self.look, self.load, self.load_shards, self.another_saver, self.compact]
        operations += [self.save_at_once]
        for _ in range(OPERATIONS_COUNT):
            operation = self.draw.choice(operations)
            self.done.append(operation.__name__)
            operation()
        self.look()
        for saver in (self.saver, *self.others):
            saver.close()

    @contextmanager
    def maybe_full_disk(self) -> Iterator[bool]:
        """Now and then let no file have more than so many bytes, as a full disk does."""
        if self.draw.random() > 0.15:
            yield False
            return
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.draw.choice([0, 3000, 50_000]), hard))
        try:
            yield True
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def forms(state: Any) -> Any:
    """Return a state without its values."""
    if isinstance(state, dict):
        return {key: forms(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [forms(value) for value in state]
    return (str(state.dtype), tuple(state.shape)) if hasattr(state, "shape") else None


def run(seed: int, path: Path) -> None:
    program = LoopsOfDirectory(seed, path)
    try:
        program.run()
    except BaseException:
        print(f"seed {seed}, the last of {len(program.done)}: {program.done[-12:]}")
        raise


@pytest.mark.parametrize("seed", slow_but_for_a_share(range(SEEDS_COUNT), "everyday loops", every=2))
def test_what_is_acknowledged_is_what_was_trained(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path / "ckpt")


def test_a_forgotten_row_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TouchedRows.touched_since

    def forgetful(self: TouchedRows, version: CutVersion) -> Any:
        rows = plain(self, version)
        return rows if rows is None else rows[:-1]

    monkeypatch.setattr(TouchedRows, "touched_since", forgetful)
    for seed in range(3, 3 + SEEDS_COUNT):
        try:
            run(seed, tmp_path / str(seed))
        except (AssertionError, asyncckpt.CorruptError):
            return
    pytest.fail("no program has missed it")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_many_programs(part: int, tmp_path: Path) -> None:
    for seed in range(1000 + 40 * part, 1040 + 40 * part):
        run(seed, tmp_path / str(seed))
