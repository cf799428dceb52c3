"""A trainer that does with a table all that people do, beside a dict that does the same: random programs.

It writes to whole columns, to rows that it has kept over saves, through views that it has kept over growth, by torch's
optimizers; and by the table's own methods, as it should. It trains on two threads, copies its model, and in half of the
programs a third thread evaluates from the first step to the last. What it saved must load as the dict was at the call.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from asyncckpt import DeltaPolicy, DeviceOptions, Loader, Saver
from tests.worlds.rows import rows_of

IDS_COUNT = 40
STEPS_COUNT = 12
CACHE_ROWS = 12
KEPT_MAX = 4
BATCHES_OF_A_THREAD = 4
EVALUATION_PAUSE_S = 0.0002
SWITCH_SECONDS = 1e-5  # So that threads change places within a call.
RESULT_SECONDS_MAX = 60.0
SLOTS: dict[str, Any] = {"sum": (torch.float64, ())}

Model = dict[int, tuple[float, float, float]]  # Two numbers of the embedding, and one of the slot.


def new_table(levels: bool) -> Any:
    if levels:
        return asyncckpt.MultiLevelTable("t", 2, cache_rows=CACHE_ROWS, capacity=4, optimizer_slots=SLOTS)
    return asyncckpt.HashTable("t", 2, capacity=4, optimizer_slots=SLOTS)


class CarelessTrainer:
    """One program: a table, the dict, and two Savers of the table, one of which makes deltas."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.random, self.levels = root, random.Random(seed), seed % 2 == 1
        self.table = new_table(self.levels)
        self.evaluates = seed % 4 >= 2
        self.model: Model = {}
        self.number = 0
        self.step = 0
        self.kept: list[torch.Tensor] = []  # Rows, as lookups returned them.
        self.views: list[tuple[torch.Tensor, int]] = []  # Some rows of the embedding, from the given one on.
        self.weights: list[torch.nn.Parameter] = []
        self.pending: list[int] = []  # Ids with a gradient.
        self.module = asyncckpt.nn.HashEmbedding(self.table)
        self.optimizer = asyncckpt.optim.SparseSGD(self.module, lr=1.0)
        self.expected: dict[tuple[str, int], Model] = {}
        self.savers: dict[str, Saver] = {}
        root.mkdir()

    def run(self) -> list[str]:
        """Return what is wrong."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                with self.evaluating():
                    for _ in range(STEPS_COUNT):
                        self.any_of(self.trainings)
                        if self.random.random() < 0.4:
                            self.save()
                    self.save()
                assert rows_of(self.table) == self.model, "the dict is no twin of the table"
        finally:
            for saver in self.savers.values():
                saver.close()
        return [
            f"{path} {step}" for path, step in self.expected if self.loaded(path, step) != self.expected[path, step]
        ]

    @property
    def trainings(self) -> list[Callable[[], object]]:
        return [
            self.look_up, self.look_up, self.write_kept_rows, self.write_kept_rows, self.write_column, self.write_slot,
            self.keep_view, self.write_view, self.keep_weight, self.step_of_torch, self.forward, self.backward_and_step,
            self.update, self.update_by_ids, self.insert, self.remove, self.grow, self.clear, self.find,
            self.write_past_torch, self.load_back, self.train_on_two_threads, self.copy_model,
        ]  # fmt: skip

    def any_of(self, works: list[Callable[[], object]]) -> None:
        self.random.choice(works)()

    # -- what people do ------------------------------------------------------------------------------------------

    def look_up(self) -> None:
        self.keep(self.look_up_ids(self.ids(known=False)))

    def write_kept_rows(self) -> None:
        """Of a lookup long ago: they may belong to other ids by now, or to none."""
        if self.kept:
            rows, number = self.random.choice(self.kept), self.next_number()
            self.table.embedding[rows, 0] = number
            self.change(rows, lambda row: (number, *row[1:]))

    def write_column(self) -> None:
        number = self.next_number()
        self.table.embedding.add_(number)
        self.change_all(lambda row: (row[0] + number, row[1] + number, row[2]))

    def write_slot(self) -> None:
        number = self.next_number()
        with torch.no_grad():
            self.table.slot("sum").fill_(number)
        self.change_all(lambda row: (*row[:2], number))

    def keep_view(self) -> None:
        first = self.random.randrange(len(self.table.embedding))
        view = self.table.embedding.detach()[first : first + 5].view(-1)
        self.views = [*self.views, (view, first)][-KEPT_MAX:]

    def write_view(self) -> None:
        if self.views:
            (view, first), number = self.random.choice(self.views), self.next_number()
            view.mul_(0).add_(number)
            if self.is_live(view):  # Else the table has grown: it was a write to nothing.
                rows = torch.arange(first, first + len(view) // 2)
                self.change(rows, lambda row: (number, number, row[2]))

    def keep_weight(self) -> None:
        self.weights = [*self.weights, torch.nn.Parameter(self.table.embedding)][-KEPT_MAX:]

    def step_of_torch(self) -> None:
        if self.weights:
            weight, number = self.random.choice(self.weights), self.next_number()
            rows = torch.tensor(sorted(self.random.sample(range(len(weight)), 3)))
            weight.grad = torch.zeros_like(weight).index_fill_(0, rows, -1.0)
            torch.optim.SGD([weight], lr=number, foreach=self.random.random() < 0.5).step()
            if self.is_live(weight):
                self.change(rows, lambda row: (row[0] + number, row[1] + number, row[2]))

    def forward(self, ids: list[int] | None = None) -> None:
        ids = self.ids(known=False) if ids is None else ids
        self.module(torch.tensor(ids)).sum().backward()
        self.pending += ids
        self.begin(ids)

    def backward_and_step(self) -> None:
        self.optimizer.step()
        for id in self.pending:
            if id in self.model:
                first, second, total = self.model[id]
                self.model[id] = (first - 1, second - 1, total)
        self.pending = []

    def update(self) -> None:
        if ids := self.ids(known=True):
            rows, number = self.look_up_ids(ids), self.next_number()

            def write(values: Any) -> None:
                values.embedding += number
                values["sum"] = number

            self.table.update(rows, write)
            self.change(rows, lambda row: (row[0] + number, row[1] + number, number))

    def update_by_ids(self) -> None:
        ids, number = self.ids(known=False), self.next_number()
        with self.table.rows(torch.tensor(ids)) as rows:
            rows["sum"] += number
        for id in set(ids) & set(self.model):
            self.model[id] = (*self.model[id][:2], self.model[id][2] + number)

    def insert(self) -> None:
        ids, number = self.ids(known=False), self.next_number()
        self.table.insert(torch.tensor(ids), torch.full((len(ids), 2), number))
        self.begin(ids)
        for id in ids:
            self.model[id] = (number, number, self.model[id][2])

    def remove(self) -> None:
        ids = self.ids(known=False)
        self.table.remove(torch.tensor(ids))
        for id in ids:
            self.model.pop(id, None)

    def grow(self) -> None:
        self.look_up_ids(list(range(1000 + self.step * 10, 1000 + self.step * 10 + CACHE_ROWS - 2)))

    def clear(self) -> None:
        if self.random.random() < 0.2:
            self.table.clear()
            self.model.clear()

    def find(self) -> None:
        rows = self.table.lookup(torch.tensor(self.ids(known=False)), insert=False)
        self.keep(rows[rows >= 0])

    def write_past_torch(self) -> None:
        """The one way of which the table has to be told."""
        if self.kept:
            rows, number = self.random.choice(self.kept), self.next_number()
            self.table.slot("sum").data[rows] = number
            self.table.touch(rows)
            self.change(rows, lambda row: (*row[:2], number))

    def train_on_two_threads(self) -> None:
        """Each with ids of its own; the other one as an input pipeline that inserts, and updates a table of its own."""
        mine, others = self.ids(known=False), [-1 - id for id in self.ids(known=False)]
        number = self.next_number()

        def train_others() -> None:
            for _ in range(BATCHES_OF_A_THREAD):
                self.table.lookup(torch.tensor(others))
                with self.table.rows(torch.tensor(others)) as rows:
                    rows.embedding += number

        self.backward_and_step()
        other = _Thread(train_others)
        for _ in range(BATCHES_OF_A_THREAD):
            self.forward(mine)
            self.backward_and_step()
        other.end()
        self.begin(others)
        for id in others:
            first, second, total = self.model[id]
            added = number * BATCHES_OF_A_THREAD
            self.model[id] = (first + added, second + added, total)

    def copy_model(self) -> None:
        """The copy is as the model is, and is no part of it afterwards."""
        copied: Any = copy.deepcopy(self.module)
        assert rows_of(copied.table) == self.model
        copied.table.embedding.add_(1000.0)
        copied.table.lookup(torch.tensor([-1000]))

    def load_back(self) -> None:
        if self.expected and self.random.random() < 0.3:
            path, step = self.random.choice(list(self.expected))
            Loader(self.root / path, {"t": self.table}, step=step).load()
            self.model = dict(self.expected[path, step])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate meanwhile, in every second program of each kind of table."""
        if not self.evaluates:
            yield
            return
        module = asyncckpt.nn.HashEmbedding(self.table).eval()
        ids = torch.arange(-5, IDS_COUNT + 5)
        may_end = threading.Event()

        def evaluate() -> None:
            while not may_end.wait(EVALUATION_PAUSE_S):
                assert bool(module(ids).isfinite().all())
                self.table.read(ids, absent_as_zeros=True)

        evaluation = _Thread(evaluate)
        try:
            yield
        finally:
            may_end.set()
            evaluation.end()

    # -- saves ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Save of any kind, and go on while it is written."""
        path = self.random.choice(["deltas", "full"])
        saver = self.saver(path)
        self.step += 1
        self.expected[path, self.step] = dict(self.model)
        if self.random.random() < 0.2:
            saver.save(self.step)
            return
        future = saver.save_async(self.step, kind=self.random.choice(["auto", "auto", "full"]))
        for _ in range(self.random.randrange(3)):
            # A load would wait for the save.
            self.any_of([training for training in self.trainings if training != self.load_back])
        future.result(RESULT_SECONDS_MAX)

    def saver(self, path: str) -> Saver:
        if path not in self.savers:
            options: dict[str, Any] = (
                {"deltas": DeltaPolicy(deltas_max=4, bytes_share_max=1e9)} if path == "deltas" else {}
            )
            level: Any = self.random.choice(["copy", "first_touch"])
            self.savers[path] = Saver(
                path=self.root / path,
                hashtables={"t": self.table},
                durability="none",
                device=DeviceOptions(host_level=level),
                **options,
            )
        return self.savers[path]

    def loaded(self, path: str, step: int) -> Model:
        target = new_table(levels=False)
        Loader(self.root / path, {"t": target}, step=step).load()
        return rows_of(target)

    # -- inside --------------------------------------------------------------------------------------------------

    def ids(self, *, known: bool) -> list[int]:
        """Some distinct ids."""
        among = sorted(self.model) if known else range(IDS_COUNT)
        return self.random.sample(among, min(len(among), self.random.randrange(1, CACHE_ROWS // 2)))

    def look_up_ids(self, ids: list[int]) -> torch.Tensor:
        rows: torch.Tensor = self.table.lookup(torch.tensor(ids))
        self.begin(ids)
        return rows

    def begin(self, ids: list[int]) -> None:
        for id in ids:
            self.model.setdefault(id, (0.0, 0.0, 0.0))

    def keep(self, rows: torch.Tensor) -> None:
        self.kept = [*self.kept, rows][-KEPT_MAX:]

    def next_number(self) -> float:
        self.number += 1
        return float(self.number)

    def is_live(self, view: torch.Tensor) -> bool:
        return view.untyped_storage().data_ptr() == self.table.embedding.untyped_storage().data_ptr()

    def change_all(self, change: Callable[[Any], Any]) -> None:
        self.change(torch.arange(len(self.table.embedding)), change)

    def change(self, rows: torch.Tensor, change: Callable[[Any], Any]) -> None:
        """Change the ids that the rows of the level that training sees belong to at present."""
        level, flat = self.table._level, rows.numpy()
        ids_by_row = level.ids_by_row()
        flat = flat[(flat >= 0) & (flat < len(ids_by_row))]
        ids = ids_by_row[flat]
        for id in ids[level.find(ids) == flat].tolist():
            self.model[id] = change(self.model[id])


class _Thread:
    """A function on another thread; `end` waits for it and raises what it has raised."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        self._thread.join(RESULT_SECONDS_MAX)
        assert not self._thread.is_alive(), "a thread hangs"
        if self._error is not None:
            raise self._error


def wrong_steps(root: Path, seed: int) -> list[str]:
    """Run a program; return the steps that load as something else than was saved."""
    threads_count, seconds = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        return CarelessTrainer(root, seed).run()
    finally:
        torch.set_num_threads(threads_count)
        sys.setswitchinterval(seconds)
