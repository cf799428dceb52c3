"""What a Saver keeps: by steps, hours and a metric, with pins and deltas, and removals beside it and in its process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import ConflictError, DeltaPolicy, KeepPolicy, UsageError
from asyncckpt.checkpoints import collect_garbage, pin, prune, remove, remove_after, unpin
from asyncckpt.storage.directory import Directory
from tests.end_to_end.test_directory_lock import hold

WAIT_S_MAX = 60.0
STATE = {"x": torch.arange(3.0)}


def save_all(saver: asyncckpt.Saver, steps: range, **options: Any) -> None:
    for step in steps:
        saver.save(step, **options)
        saver.wait_idle(WAIT_S_MAX)


def test_the_best_and_every_tenth_and_the_newest_stay(tmp_path: Path) -> None:
    policy = KeepPolicy(latest=2, every_steps=10, best=2, metric="loss", mode="max")
    losses = {3: 9.0, 4: 7.0, 12: 8.0}
    with asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=policy) as saver:
        for step in range(25):
            saver.save(step, metadata={"loss": losses.get(step, 0.0)})
    assert asyncckpt.list_steps(tmp_path) == [0, 3, 10, 12, 20, 23, 24]
    with asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=policy) as saver:  # It reads what others have saved.
        saver.save(30, metadata={"loss": 10.0})
    assert asyncckpt.list_steps(tmp_path) == [0, 3, 10, 20, 24, 30]


def test_one_for_every_hour_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = iter([0.0, 0.5, 1.0, 1.1, 5.0, 2.0, 2.1])
    gmtime = time.gmtime
    with asyncckpt.Saver(path=tmp_path, tensors=STATE, keep=KeepPolicy(every_hours=1)) as saver:
        for step, hour in enumerate(hours):
            monkeypatch.setattr(time, "gmtime", lambda hour=hour: gmtime(hour * 3600))
            saver.save(step)
            saver.wait_idle(WAIT_S_MAX)
    assert asyncckpt.list_steps(tmp_path) == [0, 2, 4, 5, 6]


def test_a_save_without_the_metric_is_refused_before_anything_is_captured(tmp_path: Path) -> None:
    class Untouched:
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("the state was read")

    policy = KeepPolicy(best=1, metric="loss")
    with asyncckpt.Saver(path=tmp_path, tensors={"x": Untouched()}, keep=policy) as saver:
        for save in (saver.save, saver.save_async):
            with pytest.raises(UsageError, match=r"no number 'loss'.*found \['los'\]"):
                save(1, metadata={"los": 1.0})
    assert asyncckpt.list_steps(tmp_path) == []


@pytest.mark.parametrize("metadata", [7, ["loss"], "loss"])
def test_metadata_of_another_type_are_refused_by_their_type(tmp_path: Path, metadata: Any) -> None:
    policy = KeepPolicy(best=1, metric="loss")
    with (
        asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}, keep=policy) as saver,
        pytest.raises(UsageError, match="metadata is not a mapping with string keys"),
    ):
        saver.save(1, metadata=metadata)


@pytest.mark.parametrize("ends", ["with the last step", "with an error", "by save_now"])
def test_the_last_step_is_saved_also_without_the_metric(tmp_path: Path, ends: str) -> None:
    """What cannot be measured any more must not cost the state; it is never best."""
    policy = KeepPolicy(best=1, metric="loss")
    with (
        contextlib.suppress(ZeroDivisionError),
        asyncckpt.Checkpointer(tmp_path, every=2, keep=policy, state={"x": torch.ones(3)}) as checkpointer,
    ):
        for step in range(1, 8):
            metadata = {"loss": float(step)} if step % 2 == 0 else None
            future = checkpointer.step(step, metadata=metadata)
            assert future is None or future.result(WAIT_S_MAX)
        if ends == "by save_now":
            checkpointer.save_now()
        assert ends != "with an error" or 1 / 0
    # One that is perhaps half a step off does not count as the newest.
    assert asyncckpt.list_steps(tmp_path) == ([2, 6, 7] if ends == "with an error" else [2, 7])


def test_deltas_keep_what_they_build_upon_until_it_is_compacted(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("t", 2)
    policy = KeepPolicy(best=1, metric="loss")
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}, keep=policy, deltas=DeltaPolicy()) as saver:
        for step in range(6):
            table.insert(torch.tensor([step]), torch.ones(1, 2))
            kind = "full" if step in (0, 4) else "delta"
            saver.save(step, kind=kind, metadata={"loss": 1.0 if step == 3 else 2.0})
            saver.wait_idle(WAIT_S_MAX)
        assert asyncckpt.list_steps(tmp_path) == [0, 1, 2, 3, 4, 5]
        pin(tmp_path, 1)
        saver.compact(3).result(WAIT_S_MAX)
        saver.save(6, kind="full", metadata={"loss": 2.0})
        saver.wait_idle(WAIT_S_MAX)
        assert asyncckpt.list_steps(tmp_path) == [0, 1, 3, 6]
        unpin(tmp_path, 1)
        assert prune(tmp_path, policy, dry_run=True) == prune(tmp_path, policy)
    assert asyncckpt.list_steps(tmp_path) == [3, 6]
    assert asyncckpt.load(tmp_path, 3, tables=True)["t"]["id"].sort().values.tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:asyncckpt. step 3, which")
def test_a_saver_saves_in_full_after_what_it_would_build_upon_was_removed(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("t", 2)
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}, deltas=DeltaPolicy(bytes_share_max=1e9)) as saver:
        for step in range(4):
            table.insert(torch.tensor([step]), torch.ones(1, 2))
            saver.save(step)
        assert remove_after(tmp_path, 1) == [2, 3]
        with pytest.raises(ConflictError, match="step 3, the base of the delta, is missing or damaged"):
            saver.save(2, kind="delta")
        assert saver.save(2).kind == "full"
        assert saver.save(3).kind == "delta"
    assert [asyncckpt.describe(tmp_path, step).parents for step in range(4)] == [(), (0,), (), (2,)]
    asyncckpt.verify(tmp_path, 3)


def test_a_save_in_flight_keeps_what_it_builds_upon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_commit, publish = threading.Event(), Directory.publish

    def held(self: Directory, *names: str) -> None:
        assert may_commit.wait(WAIT_S_MAX)
        publish(self, *names)

    table = asyncckpt.HashTable("t", 2)
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        for step in range(3):
            saver.save(step)
        monkeypatch.setattr(Directory, "publish", held)
        future = saver.save_async(3, kind="delta")
        for act in (lambda: remove(tmp_path, 2), lambda: remove(tmp_path, 3), lambda: remove_after(tmp_path, 1)):
            with pytest.raises(ConflictError, match=r"step [23] .* is in use"):
                act()
        assert prune(tmp_path, 1).removed == (0, 1)
        assert collect_garbage(tmp_path).folders_count == 0
        may_commit.set()
        future.result(WAIT_S_MAX)
        asyncckpt.verify(tmp_path, 3)
        assert remove(tmp_path, [2, 3]) == [2, 3]


def test_another_process_that_has_a_saver_open_keeps_all(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        pin(tmp_path, 1)
        assert prune(tmp_path, 1, dry_run=True).kept == {1: ("latest", "pinned")}
        for act in (
            lambda: remove(tmp_path, 1, even_pinned=True),
            lambda: remove_after(tmp_path, 1),
            lambda: prune(tmp_path, 1),
            lambda: collect_garbage(tmp_path),
        ):
            with pytest.raises(ConflictError, match=f"process {holder.pid} on"):
                act()
    finally:
        holder.communicate("\n", timeout=WAIT_S_MAX)
    assert remove(tmp_path, 1, even_pinned=True) == [1]


KILLED = """
import os, sys, torch, asyncckpt
from asyncckpt.checkpoints import remove_after
from asyncckpt.storage.directory import Directory
remove_folder, left = Directory.remove_folder, int(sys.argv[2])
def dying(self, name):
    global left
    if left == 0:
        os._exit(9)
    left -= 1
    remove_folder(self, name)
Directory.remove_folder = dying
remove_after(sys.argv[1], 2)
"""


def test_a_process_that_is_killed_while_it_goes_back_leaves_one_history(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors=STATE, durability="none") as saver:
        for step in range(6):
            saver.save(step)
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), "1"], timeout=WAIT_S_MAX, check=False)
    assert run.returncode == 9
    assert asyncckpt.list_steps(tmp_path) == [0, 1, 2, 3]
    with asyncckpt.Saver(path=tmp_path, tensors=STATE, durability="none") as saver:
        saver.save(4)  # It sweeps, and goes on from what there is.
    assert asyncckpt.list_steps(tmp_path) == [0, 1, 2, 3, 4]
    assert len(list((tmp_path / "data").iterdir())) == 5
    assert remove_after(tmp_path, 2) == [3, 4], "it may be made again"


def test_a_misspelled_metric_lets_no_best_checkpoint_go(tmp_path: Path) -> None:
    """It counted as a metric that no checkpoint has, so that the best one went like all others, without a word."""
    with asyncckpt.Saver(path=tmp_path, tensors=STATE) as saver:
        for step in range(4):
            saver.save(step, metadata={"loss": abs(step - 1.0)})
    for dry_run in (True, False):
        with pytest.raises(UsageError, match=r"no checkpoint has the metric 'los'.*'loss'"):
            prune(tmp_path, KeepPolicy(best=1, metric="los"), dry_run=dry_run)
    assert asyncckpt.list_steps(tmp_path) == [0, 1, 2, 3]
    assert prune(tmp_path, KeepPolicy(best=1, metric="loss")).removed == (0, 2)
