"""The future of a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncckpt.devices.host_copies import Pending
from asyncckpt.engine.process.future import SaveFuture
from asyncckpt.errors import DeadlineError


class Fenced(Pending):
    """Notes who was to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Any] = []

    def fence(self, stream: Any = None) -> None:
        self.streams.append(stream)


class EndedMeanwhile(SaveFuture):
    """Its save has ended as soon as somebody has looked whether there are copies."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "_pending" and found is not None:
            self.skip()
        return found


def test_a_fence_may_come_when_the_copies_end() -> None:
    future, pending = EndedMeanwhile(step=1, path=Path("run"), what="save of step 1"), Fenced()
    future.expect_copies(pending)
    future.fence("stream")
    future.fence("later")
    assert pending.streams == ["stream"]


def test_a_capture_that_takes_too_long_names_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("asyncckpt.engine.process.future.DEVICE_DEADLINE_S", 0.01)
    future = SaveFuture(step=1, path=tmp_path, what="save of step 1")
    future._staged.clear()
    with pytest.raises(DeadlineError, match=r"was not captured within 0\.01 s"):
        future.wait_staged()
    future.skip()
