"""Rows of tables that only an optimizer changes: copied behind the call, whatever training does to the table meanwhile.

Random programs train tables, insert, remove, evict, grow, shrink and update rows beside saves whose copies are held
back, and do what they should not: every checkpoint holds the rows of its cut, or is refused by name.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.devices import watches
from asyncckpt.devices.watches import TableWatch, Watch
from asyncckpt.nn import HashEmbedding, Uniform
from asyncckpt.optim import SparseAdam, SparseSGD
from asyncckpt.snapshot import table_capture
from asyncckpt.tables.touched_rows import RowWatchers
from tests.shares import slow_but_for_a_share
from tests.steps import gate as gates
from tests.steps.held_program import HeldProgram, OpenSave, is_wrong
from tests.worlds.rows import named_rows

pytestmark = pytest.mark.any_core

SEEDS_COUNT = 60
DIM = 3

Rows = dict[int, dict[str, Any]]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are left, too; and nobody waits long for a count."""
    monkeypatch.setattr(table_capture, "LATER_BYTES_MIN", 1)
    monkeypatch.setattr(watches, "COUNT_S_MAX", 0.05)


@pytest.fixture
def gate(few: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[gates.StepGate]:
    made = gates.install(monkeypatch, chunk_bytes=200)
    yield made
    made.open()


@pytest.fixture
def gate_before(few: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[gates.StepGate]:
    made = gates.install_before(monkeypatch, chunk_bytes=200)
    yield made
    made.open()


def differing(found: Rows, expected: Rows) -> list[str]:
    if found.keys() != expected.keys():
        return [f"ids {sorted(found.keys() ^ expected.keys())}"]
    return [
        f"{name} of id {id}"
        for id, values in expected.items()
        for name, value in values.items()
        if found[id][name] != value
    ]


class Job:
    """Two tables under one optimizer, a third under another one."""

    def __init__(self, seed: int = 0, *, capacity: int = 64) -> None:
        optimizers = (SparseAdam, SparseAdam, SparseSGD)
        self.tables = [
            asyncckpt.HashTable(
                f"t{number}",
                DIM,
                optimizer_slots=kind.optimizer_slots(),
                metadata={"last_seen": torch.int64},
                capacity=capacity,
                initializer=Uniform(1.0),
            )
            for number, kind in enumerate(optimizers)
        ]
        self.modules = [HashEmbedding(table) for table in self.tables]
        self.optimizers = [SparseAdam(self.modules[:2], lr=0.1), SparseSGD(self.modules[2:], lr=0.1)]
        generator = random.Random(seed)
        for number in range(3):
            self.forward(number, [generator.randrange(40) for _ in range(20)])
        self.step(0)
        self.step(1)

    def forward(self, number: int, ids: list[int]) -> None:
        module = self.modules[number]
        module(torch.tensor(ids)).square().sum().backward()

    def step(self, part: int) -> None:
        self.optimizers[part].step()

    def values(self) -> dict[str, Rows]:
        return {table.name: named_rows(table) for table in self.tables}

    def saver(self, path: Path, **options: object) -> asyncckpt.Saver:
        return asyncckpt.Saver(
            path=path,
            hashtables={table.name: table for table in self.tables},
            device=asyncckpt.DeviceOptions(optimizers=self.optimizers),
            on_busy="queue",
            durability="none",
            **options,  # type: ignore[arg-type]
        )


def loaded(path: Path, step: int) -> dict[str, Rows]:
    fresh = Job(1)
    asyncckpt.Loader(path, hashtables={table.name: table for table in fresh.tables}, step=step).load()
    return fresh.values()


def wrong_in(path: Path, step: int, expected: dict[str, Rows]) -> list[str]:
    found = loaded(path, step)
    return [f"{name}: {what}" for name, rows in expected.items() for what in differing(found[name], rows)]


def test_rows_are_copied_behind_the_call_and_the_step_waits(tmp_path: Path, gate: gates.StepGate) -> None:
    job = Job()
    with job.saver(tmp_path) as saver:
        before = job.values()
        with gate.held():
            future = saver.save_async(1)
            gate.await_copier()
            assert not future.done()
            job.forward(2, [1, 2, 77])
        job.step(1)
        future.result(30)
        assert "background" in gate.log
        assert wrong_in(tmp_path, 1, before) == []


def test_a_lookup_of_new_ids_does_not_wait_while_there_is_room(tmp_path: Path, gate: gates.StepGate) -> None:
    job = Job()
    with job.saver(tmp_path) as saver:
        before = job.values()
        with gate.held():
            future = saver.save_async(1)
            gate.await_copier()
            for number in range(3):
                job.forward(number, list(range(100, 110)))
            assert gate.log == []
        future.result(30)
        assert wrong_in(tmp_path, 1, before) == []


def test_forward_stamps_rows_without_waiting(tmp_path: Path, gate: gates.StepGate) -> None:
    job = Job()
    with job.saver(tmp_path) as saver:
        with gate.held():
            before = job.values()
            future = saver.save_async(1)
            gate.await_copier()
            with job.tables[0].rows(job.tables[0].ids()) as rows:
                rows["last_seen"] = 7
            assert gate.log == []
        future.result(30)
        assert wrong_in(tmp_path, 1, before) == []


def grow(table: asyncckpt.HashTable) -> None:
    table.lookup(torch.arange(1000, 1000 + table.capacity))


def update(table: asyncckpt.HashTable) -> None:
    with table.rows(table.ids()) as rows:
        rows.embedding *= 2


def insert(table: asyncckpt.HashTable) -> None:
    table.insert(table.ids(), torch.ones(len(table), DIM))


CHANGES: dict[str, Callable[[asyncckpt.HashTable], object]] = {
    "growth": grow,
    "reserve": lambda table: table._store.reserve(1000),
    "update": update,
    "insert": insert,
    "removal": lambda table: table.remove(table.ids()[:3]),
    "clear": lambda table: table.clear(),
    "shrink": lambda table: table.shrink(),
    "eviction": lambda table: table.evict("last_seen", below=5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whoever_changes_rows_waits(change: str, tmp_path: Path, gate: gates.StepGate) -> None:
    job = Job()
    with job.tables[0].rows(job.tables[0].ids()) as rows:
        rows["last_seen"] = 3
    with job.tables[0].rows(job.tables[0].ids()[:2]) as rows:
        rows["last_seen"] = 9
    with job.saver(tmp_path) as saver:
        saver.save_async(1).result(30)
        before = job.values()
        job.forward(0, [3, 4])
        with gate.held():
            future = saver.save_async(2)
            before = job.values()
            gate.await_copier()
            gate.open()  # Else it would wait for the chunk of the background.
            CHANGES[change](job.tables[0])
            job.tables[0].lookup(torch.arange(5000, 5010))
        future.result(30)
        assert wrong_in(tmp_path, 2, before) == []
        future = saver.save_async(3)
        after = job.values()
        future.result(30)
        assert wrong_in(tmp_path, 3, after) == []


def in_place(table: asyncckpt.HashTable) -> None:
    table.embedding.mul_(2)


def uncounted(table: asyncckpt.HashTable) -> None:
    rows = table.lookup(table.ids(), insert=False)
    table.embedding.detach().numpy()[rows.numpy()] *= 2
    table.touch(rows)


@pytest.mark.parametrize("write", [in_place, uncounted])
def test_a_write_past_the_table_is_refused_by_name(
    write: Callable[[asyncckpt.HashTable], None], tmp_path: Path, gate: gates.StepGate
) -> None:
    job = Job()
    with job.saver(tmp_path) as saver:
        with gate.held():
            future = saver.save_async(1)
            gate.await_copier()
            write(job.tables[0])
        error = future.exception(30)
        assert isinstance(error, asyncckpt.UsageError)
        assert "column 't0.embedding' was changed between save_async and" in str(error)
        before = job.values()
        saver.save_async(2).result(30)  # Of an arena that holds nothing that is known.
        assert wrong_in(tmp_path, 2, before) == []


def test_an_audit_tells_nothing_of_a_save_that_is_refused(
    tmp_path: Path, gate: gates.StepGate, caplog: pytest.LogCaptureFixture
) -> None:
    """It would call rows unmarked that were touched behind the call."""
    job = Job()
    with job.saver(tmp_path, debug=asyncckpt.DebugOptions(audit=True)) as saver:
        saver.save(1)
        with gate.held():
            future = saver.save_async(2)
            gate.await_copier()
            uncounted(job.tables[0])
        assert isinstance(future.exception(30), asyncckpt.UsageError)
        assert saver.save(3).missed_ids == {}
    assert "without a mark" not in caplog.text


def test_a_save_that_is_cancelled_leaves_no_watcher_and_no_trust_in_its_arena(
    tmp_path: Path, gate: gates.StepGate
) -> None:
    job = Job()
    with job.saver(tmp_path) as saver:
        saver.save_async(1).result(30)
        job.step(0)
        with gate.held():
            job.forward(0, list(range(30)))
            job.step(0)
            future = saver.save_async(2)
            gate.await_copier()
            assert len(job.tables[0]._store.watchers) == 1
            future.cancel()
        assert isinstance(future.exception(30), (asyncckpt.SaveCancelledError, type(None)))
        assert len(job.tables[0]._store.watchers) == 0
        before = job.values()
        saver.save_async(3).result(30)
        assert wrong_in(tmp_path, 3, before) == []


def test_few_rows_are_copied_in_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gates.install(monkeypatch)
    job = Job()
    with job.saver(tmp_path) as saver:
        saver.save_async(1).result(30)
    assert gate.log == []


class TablesProgram(HeldProgram):
    """One random training."""

    actions_count, saves_max = 22, 4

    def __init__(self, seed: int, path: Path, gate: gates.StepGate) -> None:
        super().__init__(seed, path, gate)
        self.job = Job(seed, capacity=self.random.choice([16, 64, 256]))

    def actions(self, saver: asyncckpt.Saver) -> list[Callable[[], None]]:
        actions: list[Callable[[], None]] = [self.forward, self.forward, self.train, self.train]
        actions += [lambda: self.save(saver), lambda: self.save(saver), self.hold, self.gate.open]
        return [*actions, self.wait_staged, self.change, self.write_past]

    def forward(self) -> None:
        number = self.random.randrange(3)
        ids = [self.random.randrange(60) for _ in range(self.random.randrange(1, 12))]
        self._opening(number, lambda: self.job.forward(number, ids))

    def train(self) -> None:
        part = self.random.randrange(2)
        self.job.step(part)
        # A part is closed by a step that writes to its table, and by one of its own optimizer.
        for save in self.saves.values():
            save.open_parts -= {0, 1} if part == 0 else {2}

    def change(self) -> None:
        number = self.random.randrange(3)
        name = self.random.choice(sorted(CHANGES))
        if name != "eviction":
            self._opening(number, lambda: CHANGES[name](self.job.tables[number]))
            self.job.tables[number].lookup(torch.arange(5000, 5012))

    def _opening(self, number: int, act: Callable[[], object]) -> None:
        """Do what may wait for the copies of a table, which are closed then."""
        act()
        watched = len(self.job.tables[number]._store.watchers)
        if not watched:
            for save in self.saves.values():
                save.open_parts.discard(number)

    def begin(self, saver: asyncckpt.Saver) -> OpenSave:
        values = self.job.values()
        return OpenSave(saver.save_async(self.number, kind="auto"), values, {0, 1, 2})

    def write_past(self) -> None:
        if self.random.random() < 0.7:
            return
        number = self.random.randrange(3)
        table = self.job.tables[number]
        self.random.choice([in_place, uncounted])(table)
        for save in self.saves.values():
            if number in save.open_parts:
                save.changed.add(f"'{table.name}.")

    def wrong_in(self, step: int, values: dict[str, Rows]) -> list[str]:
        return wrong_in(self.path, step, values)


def wrong(seed: int, path: Path, gate: gates.StepGate) -> list[str]:
    program = TablesProgram(seed, path, gate)
    deltas = asyncckpt.DeltaPolicy(bytes_share_max=1e9) if seed % 2 else None
    return program.wrong(program.job.saver(path, deltas=deltas))


@pytest.mark.parametrize("seed", slow_but_for_a_share(range(SEEDS_COUNT), "steps over tables", every=6))
def test_a_save_holds_its_cut_or_is_refused(seed: int, tmp_path: Path, gate_before: gates.StepGate) -> None:
    assert wrong(seed, tmp_path, gate_before) == []


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_saves_of_many_programs(hundred: int, tmp_path: Path, gate_before: gates.StepGate) -> None:
    for seed in range(1000 + 100 * hundred, 1100 + 100 * hundred):
        assert wrong(seed, tmp_path / str(seed), gate_before) == [], seed


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (TableWatch, ["rows_change", "storage_moves"]),
        (RowWatchers, ["storage_moves"]),
        (Watch, ["check_unchanged"]),
    ],
    ids=["tables do not ask", "moves do not ask", "writes of others are not compared"],
)
def test_what_is_left_out_is_found(
    owner: type, names: list[str], tmp_path: Path, gate_before: gates.StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        monkeypatch.setattr(owner, name, lambda *_, **__: None)
    with memory_spoilt_when_freed():
        assert any(is_wrong(wrong, seed, tmp_path / str(seed), gate_before) for seed in range(240))


@contextmanager
def memory_spoilt_when_freed() -> Iterator[None]:
    """Let malloc overwrite what is freed, where it can: else what is read there is mostly what was there before."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 1)
    mallopt(-6, 0xA5)  # M_PERTURB of glibc.
    try:
        yield
    finally:
        mallopt(-6, 0)
