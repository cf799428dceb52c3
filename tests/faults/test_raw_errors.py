"""Whatever call of the system fails while a directory is opened or read: the error is one of this library's."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import asyncckpt
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.dcp import StorageReader
from asyncckpt.errors import CheckpointError
from tests.end_to_end.state import new_table

pytestmark = [pytest.mark.any_core, pytest.mark.filterwarnings("ignore:torch.distributed is")]

CALLS = ("open", "fstat", "stat", "listdir", "pread", "read", "mkdir", "fsync")
CALLS_MAX = 1000


class FailingCalls:
    """Of the calls that this library's modules make, the one of a number fails with ESTALE."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails_at = -1
        self.count = 0
        self.failed: str | None = None
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            caller = sys._getframe(1)
            if str(caller.f_globals.get("__name__")).startswith("asyncckpt."):
                self.count += 1
                if self.count == self.fails_at:
                    self.failed = f"{name} in {caller.f_code.co_name}"
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return call(*arguments, **options)

        return run

    def each(self) -> Iterator[None]:
        """Let the first call fail, then the second one, until all have."""
        for number in range(1, CALLS_MAX):
            self.fails_at, self.count, self.failed = number, 0, None
            yield
            if self.failed is None:
                assert number > 1, "nothing is called"
                return
        raise AssertionError("too many calls")


async def follow(path: Path) -> None:
    async for update in asyncckpt.follow(path, until=2):
        await update.load(targets()[0], targets()[1])


def targets() -> tuple[dict[str, Any], dict[str, Any]]:
    return {"user": new_table("user")}, {"w": torch.zeros(100)}


READERS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: asyncckpt.Loader(path, *targets()).load(),
    "verify": lambda path: asyncckpt.verify(path),
    "describe": lambda path: asyncckpt.describe(path),
    "list": lambda path: asyncckpt.list_steps(path),
    "dcp": lambda path: dcp.load({"w": torch.zeros(100)}, storage_reader=StorageReader(path), no_dist=True),
    "compact": lambda path: asyncckpt.compact(path),
    "open to write": lambda path: CheckpointRoot.for_writing(path).close(),
}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    table = new_table("user")
    table.lookup(torch.arange(10))
    with asyncckpt.Saver(path=tmp_path, hashtables={"user": table}, tensors={"w": torch.ones(100)}) as saver:
        saver.save(1)
        table.lookup(torch.arange(15))
        saver.save(2, kind="delta")
    return tmp_path


def is_ours(error: BaseException) -> bool:
    """Whether it is an error of the library, also where DCP has put one of its own around it."""
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
        return all(isinstance(cause, CheckpointError) or "metadata read failed" in str(cause) for cause in causes)
    return isinstance(error, CheckpointError)


@pytest.mark.parametrize("name", READERS)
def test_a_reader_raises_errors_of_the_library(name: str, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = FailingCalls(monkeypatch)
    raw = []
    for _ in calls.each():
        try:
            READERS[name](written)
        except Exception as error:
            raw += [] if is_ours(error) else [(calls.failed, repr(error))]
    assert raw == []


async def test_a_follower_raises_errors_of_the_library(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = FailingCalls(monkeypatch)
    raw = []
    for _ in calls.each():
        try:
            await follow(written)
        except Exception as error:
            raw += [] if is_ours(error) else [(calls.failed, repr(error))]
    assert raw == []
