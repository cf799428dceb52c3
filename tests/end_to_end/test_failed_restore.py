"""A restore that fails, wherever, and the loop that ends behind it: no checkpoint holds the state of another step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import checkpoints
from asyncckpt.loader import load_now
from asyncckpt.storage.directory import Directory

STEPS = 23
Failing = Callable[[asyncckpt.Checkpointer, pytest.MonkeyPatch], None]


class Filled:
    """A state that tells its step: a tensor behind a dict, another one, an optimizer, and the rows of a table."""

    def __init__(self) -> None:
        self.x, self.y = torch.nn.Parameter(torch.zeros(1)), torch.zeros(1 << 16)
        self.optimizer = torch.optim.SGD([self.x], lr=1.0)
        self.table = asyncckpt.HashTable("t", 1)

    def open(self, path: Path) -> asyncckpt.Checkpointer:
        return asyncckpt.Checkpointer(
            path, every=10, x={"v": self.x.data}, y=self.y, optimizer=self.optimizer, t=self.table
        )

    def train(self, step: int) -> None:
        self.x.grad = -torch.ones(1)
        self.optimizer.step()
        self.y.fill_(step)
        self.table.insert(torch.tensor([step]), torch.full((1, 1), float(step)))


def check_all(path: Path) -> list[int]:
    """Every checkpoint of a directory holds what belongs to its step."""
    steps = asyncckpt.list_steps(path)
    for step in steps:
        state = asyncckpt.load(path, step, tables=True)
        found = (state["x"]["v"].item(), state["y"].unique().tolist(), sorted(state["t"]["id"].tolist()))
        assert found == (step, [step], list(range(1, step + 1))), step
    return steps


def damage(path: Path, step: int) -> None:
    """Change the last byte of `y`, the largest part."""
    file = max((path / name for name in asyncckpt.describe(path, step).files), key=lambda file: file.stat().st_size)
    found = bytearray(file.read_bytes())
    at = found.rindex(torch.tensor([float(step)]).numpy().tobytes())
    found[at + 3] ^= 1
    file.write_bytes(found)


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
        for step in range(1, STEPS + 1):
            state.train(step)
            ckpt.step(step)
            ckpt._periodic.drain()
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
        for step in range(1, STEPS + 1):
            state.train(step)
            ckpt.step(step)
            ckpt._periodic.drain()
        damage(tmp_path, 20)
        way_back = r"step 20 of .* is damaged; restore\(10, discard_newer=True\) continues from the one before it"
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
        for step in range(1, STEPS + 1):
            state.train(step)
            ckpt.step(step)
            ckpt._periodic.drain()
        damage(tmp_path, 20)
        with pytest.raises(asyncckpt.CorruptError):
            ckpt.restore()
