"""The hooks by which the author of a suite describes a table, and the tools that the tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.checkpoints import describe
from asyncckpt.loader import Loader
from asyncckpt.model.result import LoadReport
from asyncckpt.model.table import Role, Table
from asyncckpt.options import RankOptions
from asyncckpt.saver import Saver
from asyncckpt.testing.image import Contents, Image, raw_rows

CutKind: TypeAlias = Literal["waits", "copies", "caller"]
FailedLoad: TypeAlias = Literal["empty", "unchanged", "undefined"]

NAME = "table"
STEPS = 4  # Training steps that give a table something to save.
THREAD_S_MAX = 60.0  # A longer use of a table counts as a hang.
HELD_S = 0.1  # How long a thread may try to use a table that must be locked.


class TableCase:
    """The hooks of a TableSuite. Override the first three, and what else is different about the table.

    cut_kind     what keeps a table unchanged between `begin_cut` and `fence`:
                 "waits"   every use of it from another thread waits until the fence
                 "copies"  the cut is a copy, the table may change at once
                 "caller"  nothing; the caller must not train meanwhile
    failed_load  what a load that ends with `end(False)` leaves: "empty", "unchanged" (as before the load), or
                 "undefined" for tables that have no other place for their rows
    fixed_ids    whether the ids are fixed: none can be inserted or removed
    """

    cut_kind: CutKind = "waits"
    failed_load: FailedLoad = "empty"
    fixed_ids: bool = False

    def make_table(self) -> Table:
        """Return a new table; all of them have the same schema and initial values."""
        raise NotImplementedError("a TableSuite needs make_table(self) -> Table")

    def train(self, table: Table, step: int, seed: int) -> None:
        """Change rows of every column, insert and remove if the table can; depend only on table, step and seed.

        The test's thread calls it, or one other thread at a time.
        """
        raise NotImplementedError("a TableSuite needs train(self, table, step, seed)")

    def contents(self, table: Table) -> Contents:
        """Return all rows by column name, in one row order, without changing the table and without a cut."""
        raise NotImplementedError("a TableSuite needs contents(self, table)")

    def make_shard(self, index: int, count: int) -> Table | None:
        """Return a new table of the ids whose unsigned value modulo count is index; None if that is impossible."""
        return None

    def internals(self, table: Table) -> Contents:
        """Return what a save must not change besides the contents: levels, cache map, counters; of any shapes."""
        return {}

    # -- tools ---------------------------------------------------------------------------------------------------------

    def trained(self, seed: int = 1, *, steps: int = STEPS) -> Table:
        """Return a table after some training."""
        table = self.make_table()
        self.train_steps(table, range(steps), seed)
        return table

    def train_steps(self, table: Table, steps: range, seed: int = 1) -> None:
        for step in steps:
            self.train(table, step, seed)

    def image(self, table: Table) -> Image:
        """Return a copy of the contents."""
        return Image.of(self.contents(table))

    def inside(self, table: Table) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """Return a copy of the internals, comparable with ==."""
        return {name: _bits(values) for name, values in self.internals(table).items()}

    def assert_holds(self, table: Table, expected: Image, *, what: str) -> None:
        self.image(table).assert_equals(expected, what=what)

    def assert_loads(self, path: Path, expected: Image, *, step: int | None = None) -> None:
        """Assert that a new table holds the expected rows after a load."""
        table = self.make_table()
        load(table, path, step=step)
        self.assert_holds(table, expected, what=f"the table loaded from step {step or 'newest'}")

    def assert_usable(self, table: Table, path: Path) -> None:
        """Assert that training, saving into a new directory and loading work without waiting."""
        in_thread(lambda: self.train_steps(table, range(50, 52), seed=50))
        expected = self.image(table)
        with saver(table, path) as saving:
            saving.save_async(1).result(THREAD_S_MAX)
        self.assert_loads(path, expected)

    def weight_column(self, table: Table) -> str:
        """Return the name of the first weight column, else of the first one after the ids."""
        columns = table.schema().columns[1:]
        return next((column.name for column in columns if column.role is Role.WEIGHT), columns[0].name)


def saver(table: Table, path: Path, **options: Any) -> Saver:
    """Return a Saver of one table, without fsync: power does not fail in these tests."""
    options = {"ranks": RankOptions(alone=True), **options}  # Parts of tables are saved one by one.
    return Saver(path=path, hashtables={NAME: table}, durability="none", **options)


def load(table: Table, path: Path, **options: Any) -> LoadReport:
    return Loader(path, {NAME: table}, **options).load()


def save(table: Table, path: Path) -> None:
    """Save a table as step 1."""
    with saver(table, path) as saving:
        saving.save(1)


def in_thread(work: Callable[[], object]) -> None:
    """Run work in its own thread, so that a table that was never released fails a test instead of hanging it."""
    finish(start(work))


def start(*works: Callable[[], object]) -> list[Future[None]]:
    """Start a thread that does works one after another; return a future for each."""
    futures = [Future[None]() for _ in works]

    def run() -> None:
        for work, future in zip(works, futures, strict=True):
            try:
                work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    # A daemon: a hanging thread must not keep the interpreter from exiting.
    threading.Thread(target=run, name="table-suite", daemon=True).start()
    return futures


def finish(uses: Sequence[Future[None]]) -> None:
    """Wait for uses of a table in another thread; raise what the first one raised."""
    for use in uses:
        wait([use], THREAD_S_MAX)
        assert use.done(), f"a use of the table did not end within {THREAD_S_MAX} s: what holds it?"
        use.result()


def ends_soon(use: Future[None]) -> bool:
    """Return whether a use of a table in another thread has ended after a moment; raise what it raised."""
    wait([use], HELD_S)
    if use.done():
        use.result()
    return use.done()


def damage(path: Path, block: str) -> None:
    """Flip one bit in the middle of a block of the newest step."""
    info = describe(path)
    found = next(item for item in info.blocks if item.name == block and item.bytes)
    file = next(path / name for name in info.files if name.endswith(found.file))
    with file.open("r+b") as handle:
        handle.seek(found.offset + found.bytes // 2)
        byte = handle.read(1)[0]
        handle.seek(-1, 1)
        handle.write(bytes([byte ^ 1]))


def shuffled(count: int, seed: int) -> list[int]:
    """Return the numbers below count in a random order by seed."""
    return [int(index) for index in np.random.default_rng(seed).permutation(count)]


def _bits(values: torch.Tensor | NDArray[Any]) -> tuple[str, tuple[int, ...], bytes]:
    return str(values.dtype), tuple(values.shape), raw_rows(values.reshape(-1)).tobytes()
