"""Retention goes on behind the future: it delays neither the save that it belongs to nor the next one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.commit import judge, retention
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.features import retention as behind_saves
from asyncckpt.engine.features.deltas import Deltas
from asyncckpt.engine.features.retention import Retention
from asyncckpt.engine.process.background import retainer
from asyncckpt.format.names import Mark
from asyncckpt.storage.directory import Directory
from tests.worlds.gates import Gate

WAIT_S_MAX = 60.0
STATE = {"x": torch.arange(3.0)}


@pytest.fixture
def removal_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Removals of manifests stand still after their last look."""
    gate, remove_file = Gate(), Directory.remove_file

    def held(self: Directory, name: str, **options: Any) -> bool:
        if name.endswith(".json"):
            gate()
        return remove_file(self, name, **options)

    monkeypatch.setattr(Directory, "remove_file", held)
    yield gate
    gate.open()


def feature_of(saver: asyncckpt.Saver) -> Retention:
    return next(feature for feature in saver._target.features if isinstance(feature, Retention))


def behind_of(saver: asyncckpt.Saver) -> deque[Future[None]]:
    """Its retentions that have perhaps not ended."""
    return feature_of(saver)._behind


def test_saves_end_while_retention_stands_still(tmp_path: Path, removal_held: Gate) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=1) as saver:
        for step in range(3):
            assert saver.save_async(step).result(WAIT_S_MAX).step == step
        saver.save(3)
        assert asyncckpt.list_steps(tmp_path) == [0, 1, 2, 3]
        with pytest.raises(asyncckpt.DeadlineError, match=r"retention in .* did not end"):
            saver.wait_idle(0.01)
        removal_held.open()
        saver.wait_idle(WAIT_S_MAX)
        assert asyncckpt.list_steps(tmp_path) == [3]


def test_a_saver_that_is_dropped_lets_retention_end(tmp_path: Path, removal_held: Gate) -> None:
    saver: Any = asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=1)
    saver.save(0)
    saver.save(1)
    retaining = saver._target.memory.behind["retention"]
    del saver
    removal_held.open()
    retaining.result(WAIT_S_MAX)
    assert asyncckpt.list_steps(tmp_path) == [1]
    with asyncckpt.Saver(path=tmp_path, tensors=STATE) as again:
        again.save(2)


def test_a_callback_may_close_the_saver(tmp_path: Path, removal_held: Gate) -> None:
    saver = asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=1)
    saver.save(0)
    removal_held.open()
    closed = threading.Event()

    def close(_: object) -> None:
        saver.close()
        closed.set()

    saver.save_async(1).add_done_callback(close)
    assert closed.wait(WAIT_S_MAX)
    assert asyncckpt.list_steps(tmp_path) == [1]


def new_table() -> asyncckpt.HashTable:
    table = asyncckpt.HashTable("t", 2)
    table.insert(torch.arange(9), torch.ones(9, 2))
    return table


def test_a_delta_of_another_saver_keeps_what_it_builds_upon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is published while retention, which has not seen it, is on its way to remove that."""
    gate, check_files = Gate(), judge.check_files

    def held(*arguments: Any) -> None:
        gate()
        check_files(*arguments)

    table = new_table()
    retaining = asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=1)
    with retaining, asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        saver.save(1)
        monkeypatch.setattr(judge, "check_files", held)
        retaining.save_async(2).result(WAIT_S_MAX)
        assert gate.reached.wait(WAIT_S_MAX)
        assert saver.save_async(3, kind="delta").result(WAIT_S_MAX).kind == "delta"
        gate.open()
        retaining.wait_idle(WAIT_S_MAX)
    asyncckpt.verify(tmp_path, 3)
    assert asyncckpt.list_steps(tmp_path) == [1, 2, 3]


def test_nothing_is_committed_upon_what_is_being_removed(tmp_path: Path, removal_held: Gate) -> None:
    table = new_table()
    retaining = asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=1)
    with retaining, asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        saver.save(1)
        retaining.save(2)
        # Not before: a removal that finds the delta under way when it looks once more lets the delta have its parent.
        assert removal_held.reached.wait(WAIT_S_MAX)
        with pytest.raises(asyncckpt.ConflictError, match="step 1 is being removed"):
            saver.save(3, kind="delta")
        removal_held.open()
    assert asyncckpt.list_steps(tmp_path) == [2]


def test_a_delta_builds_upon_a_compacted_step_whose_own_checkpoint_is_being_removed(tmp_path: Path) -> None:
    table = new_table()
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        saver.save(1)
        saver.save(2, kind="delta")
        own = next((tmp_path / "data").glob(f"{2:012d}-*")).name
        asyncckpt.compact(tmp_path, 2)
        mark = tmp_path / "manifests" / Mark("ab" * 16, own).name
        mark.touch()
        saver.save(3, kind="delta")
        mark.unlink()
    asyncckpt.checkpoints.prune(tmp_path, 9)
    assert not (tmp_path / "data" / own).exists()
    assert asyncckpt.verify(tmp_path, 3).steps == (3, 2)


def test_a_lower_step_that_is_saved_meanwhile_stays(tmp_path: Path) -> None:
    """After a job was rolled back its newest checkpoint is not that of the highest step."""
    with asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=1) as saver:
        saver.save(100)
        saver.wait_idle(WAIT_S_MAX)
        with retention._retaining:  # As in another directory, by another thread.
            saver.save(6)
            saver.save(7)
        saver.wait_idle(WAIT_S_MAX)
        assert asyncckpt.list_steps(tmp_path) == [7, 100]


def test_what_a_delta_chose_at_its_call_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is captured, a full save before it commits, and retention lets go what that does not need."""
    may_commit, publish, choose = threading.Event(), Directory.publish, Deltas.chosen
    futures: list[asyncckpt.SaveFuture] = []

    def held(self: Directory, *names: str) -> None:
        assert may_commit.wait(WAIT_S_MAX)
        publish(self, *names)

    def choose_and_wait(*arguments: Any) -> None:
        choose(*arguments)
        if futures:
            may_commit.set()
            futures[0].result(WAIT_S_MAX)
            saver._target.memory.behind["retention"].result(WAIT_S_MAX)

    table = new_table()
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}, keep=1, on_busy="queue") as saver:
        saver.save(1)
        monkeypatch.setattr(Directory, "publish", held)
        monkeypatch.setattr(Deltas, "chosen", choose_and_wait)
        futures.append(saver.save_async(2, kind="full"))
        saver.save_async(3, kind="delta").result(WAIT_S_MAX)
        assert asyncckpt.verify(tmp_path, 3).steps == (3, 1)


def test_a_step_that_another_saver_has_saved_anew_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []
    remove_folder = Directory.remove_folder

    def note(self: Directory, name: str) -> None:
        removed.append(name)
        remove_folder(self, name)

    first = asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=3)
    with first, asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=1) as second:
        for saver, step in ((first, 5), (second, 6), (second, 5)):
            saver.save(step)
            saver.wait_idle(WAIT_S_MAX)
        stray = f"{5:012d}-{'ab' * 16}"
        (tmp_path / "data" / stray).mkdir()
        monkeypatch.setattr(Directory, "remove_folder", note)
        for step in (7, 8):
            first.save(step)
            first.wait_idle(WAIT_S_MAX)
    assert removed[0] == stray
    assert removed[1].startswith(f"{5:012d}-")
    assert len(removed) == 2
    assert asyncckpt.list_steps(tmp_path) == [6, 7, 8]


def test_saves_that_come_faster_than_retention_looks_leave_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of its looks a save commits before it has announced what goes."""
    create, changed = Directory.create_file, threading.Condition()
    is_looking, is_over, counts = False, False, []

    def after_one_more(self: Directory, name: str, **options: bool) -> tuple[int, bool]:
        nonlocal is_looking
        if name.startswith(".r-") and retainer.is_current_thread():
            with changed:
                is_looking = True
                assert changed.wait_for(lambda: not is_looking or is_over, WAIT_S_MAX)
        return create(self, name, **options)

    monkeypatch.setattr(Directory, "create_file", after_one_more)
    monkeypatch.setattr(behind_saves, "BEHIND_MAX", 1000)  # No save waits for it.
    with asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=2, durability="none") as saver:
        for step in range(40):
            saver.save(step)
            counts.append(len(asyncckpt.list_steps(tmp_path)))
            with changed:
                is_looking = False
                changed.notify_all()
            while not is_looking and not all(one.done() for one in behind_of(saver)):
                time.sleep(0.001)
        with changed:
            is_over = True
            changed.notify_all()
        saver.wait_idle(WAIT_S_MAX)
        assert asyncckpt.list_steps(tmp_path) == [38, 39]
    assert max(counts) <= 2 + 4, counts


def test_a_save_waits_for_retention_that_is_far_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noticed(Future[None]):
        def add_done_callback(self, call: Any) -> None:
            super().add_done_callback(call)
            is_awaited.set()

    is_awaited, ended = threading.Event(), list[bool]()
    with asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=1) as saver:
        behind = behind_of(saver)
        behind.extend(Noticed() for _ in range(behind_saves.BEHIND_MAX))
        oldest, begin = behind[0], Transaction.begin
        feature_of(saver)._wait_s_max = WAIT_S_MAX
        monkeypatch.setattr(Transaction, "begin", lambda *args: ended.append(oldest.done()) or begin(*args))
        future = saver.save_async(1)
        future.add_done_callback(lambda _: is_awaited.set())
        assert is_awaited.wait(WAIT_S_MAX)
        oldest.set_result(None)
        future.result(WAIT_S_MAX)
        assert ended == [True]
        feature_of(saver)._wait_s_max = 0.0
        behind.appendleft(Noticed())
        saver.save_async(2).result(WAIT_S_MAX)
        assert ended == [True, True], "not for ever"
        behind.clear()
