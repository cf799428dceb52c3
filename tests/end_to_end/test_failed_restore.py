"""A restore that fails, wherever, and the loop that ends behind it: no checkpoint holds the state of another step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
from asyncckpt import checkpoints
from asyncckpt.loader import load_now
from asyncckpt.storage.directory import Directory
from tests.worlds.filled import STEPS, Filled, check_all, damage

Failing = Callable[[asyncckpt.Checkpointer, pytest.MonkeyPatch], None]


def no_such_step(ckpt: asyncckpt.Checkpointer, _: pytest.MonkeyPatch) -> None:
    ckpt.restore(7, discard_newer=True)


def newer_is_pinned(ckpt: asyncckpt.Checkpointer, _: pytest.MonkeyPatch) -> None:
    checkpoints.pin(ckpt.path, 20)
    ckpt.restore(10, discard_newer=True)


def pinned_meanwhile(ckpt: asyncckpt.Checkpointer, patch: pytest.MonkeyPatch) -> None:
    def load_and_pin(*arguments: Any) -> asyncckpt.LoadReport:
        checkpoints.pin(ckpt.path, 20)
        return load_now(*arguments)

    patch.setattr("asyncckpt.checkpointer.load_now", load_and_pin)
    ckpt.restore(10, discard_newer=True)


def damaged(ckpt: asyncckpt.Checkpointer, _: pytest.MonkeyPatch) -> None:
    damage(Path(ckpt.path), 10)
    ckpt.restore(10, discard_newer=True)


def newest_is_damaged(ckpt: asyncckpt.Checkpointer, _: pytest.MonkeyPatch) -> None:
    damage(Path(ckpt.path), 20)
    ckpt.restore()


def disk_fails(ckpt: asyncckpt.Checkpointer, patch: pytest.MonkeyPatch) -> None:
    def remove_folder(folder: Directory, name: str) -> None:
        raise asyncckpt.errors.IOFailedError(f"{name!r} cannot be removed")

    patch.setattr(Directory, "remove_folder", remove_folder)
    ckpt.restore(10, discard_newer=True)


@contextlib.contextmanager
def by_with(ckpt: asyncckpt.Checkpointer) -> Iterator[None]:
    with ckpt:
        yield


@contextlib.contextmanager
def caught(ckpt: asyncckpt.Checkpointer) -> Iterator[None]:
    with ckpt, contextlib.suppress(asyncckpt.CheckpointError):
        yield


@contextlib.contextmanager
def by_close(ckpt: asyncckpt.Checkpointer) -> Iterator[None]:
    try:
        yield
    finally:
        ckpt.close()


@pytest.mark.parametrize("ending", [by_with, caught, by_close], ids=lambda ending: ending.__name__)
@pytest.mark.parametrize(
    ("failing", "steps"),
    [
        (no_such_step, [10, 20, 23]),  # Nothing has changed, so the last step is saved.
        (newer_is_pinned, [10, 20, 23]),
        (pinned_meanwhile, [10, 20]),
        (damaged, None),
        (newest_is_damaged, None),
        (disk_fails, [10]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_failed_restore_leaves_is_not_saved_as_the_last_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: Failing,
    steps: list[int] | None,
    ending: Callable[[asyncckpt.Checkpointer], contextlib.AbstractContextManager[None]],
) -> None:
    state = Filled()
    ckpt = state.open(tmp_path)
    with contextlib.suppress(asyncckpt.CheckpointError), ending(ckpt):
        state.run(ckpt)
        failing(ckpt, monkeypatch)
        raise AssertionError("it has not failed")
    monkeypatch.undo()
    if steps is None:
        assert asyncckpt.list_steps(tmp_path) == [10, 20]
    else:
        assert check_all(tmp_path) == steps


def test_a_step_behind_a_failed_restore_is_no_second_history(tmp_path: Path) -> None:
    state = Filled()
    with state.open(tmp_path) as ckpt:
        state.run(ckpt)
        damage(tmp_path, 20)
        way_back = r"step 20 of .* is damaged; restore\(fallback=True\) puts it aside, and continues from step 10 if"
        with pytest.warns(RuntimeWarning, match=way_back), pytest.raises(asyncckpt.CorruptError):
            ckpt.restore()
        with pytest.raises(asyncckpt.UsageError, match=r"not above step 20, .* \(call restore\(\) before the loop"):
            ckpt.step(20)
        assert ckpt.restore(10, discard_newer=True) == 11
        for step in range(11, STEPS + 1):
            state.train(step)
            ckpt.step(step)
    assert check_all(tmp_path) == [10, 20, 23]


@pytest.mark.filterwarnings("error")
def test_a_damaged_step_is_a_corrupt_error_where_warnings_are_errors(tmp_path: Path) -> None:
    state = Filled()
    with state.open(tmp_path) as ckpt:
        state.run(ckpt)
        damage(tmp_path, 20)
        with pytest.raises(asyncckpt.CorruptError):
            ckpt.restore()
