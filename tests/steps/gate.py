"""Hold the thread that copies behind the call, so that a test decides who copies what."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from asyncckpt import Saver
from asyncckpt.devices import step_copies
from asyncckpt.devices.step_copies import Chunk, StepCopies
from asyncckpt.engine.features import steps
from asyncckpt.engine.features.steps import StepFences
from asyncckpt.engine.process.background import copiers

WAIT_S_MAX = 30.0


class StepGate:
    """While it is shut, the background begins its next chunk and copies nothing of it.

    log: for each chunk who has copied it, when it was copied.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._open = threading.Event()
        self._open.set()
        self._came = threading.Event()

    def shut(self) -> None:
        self._open.clear()
        self._came.clear()

    def open(self) -> None:
        self._open.set()

    def await_copier(self) -> None:
        """Wait until the background stands before a chunk."""
        assert self._came.wait(WAIT_S_MAX)

    @contextmanager
    def held(self) -> Iterator[None]:
        self.shut()
        try:
            yield
        finally:
            self.open()


def fences_of(saver: Saver) -> StepFences:
    """Return what lets steps wait for the saves of a Saver."""
    return next(feature for feature in saver._target.features if isinstance(feature, StepFences))


def watch_short(monkeypatch: pytest.MonkeyPatch, *, bytes_min: int = 1) -> None:
    """Let steps wait for tensors of so many bytes, too; else these are copied in the call."""
    monkeypatch.setattr(steps, "STEPPED_BYTES_MIN", bytes_min)


def install(monkeypatch: pytest.MonkeyPatch, *, chunk_bytes: int = 256) -> StepGate:
    gate, copy = StepGate(), Chunk.copy
    watch_short(monkeypatch)

    def gated(self: Chunk, *, threads: int) -> None:
        is_copier = copiers.is_current_thread()
        if is_copier:
            gate._came.set()
            assert gate._open.wait(WAIT_S_MAX)
        copy(self, threads=threads)
        gate.log.append("background" if is_copier else "step")

    monkeypatch.setattr(Chunk, "copy", gated)
    monkeypatch.setattr(step_copies, "CHUNK_BYTES", chunk_bytes)
    return gate


def install_before(monkeypatch: pytest.MonkeyPatch, *, chunk_bytes: int = 256) -> StepGate:
    """While this one is shut, the background begins no chunk, so that nobody waits for it."""
    gate, run = StepGate(), StepCopies.run
    watch_short(monkeypatch)

    def gated(self: StepCopies, order: Sequence[int], *, threads: int) -> None:
        gate._came.set()
        assert gate._open.wait(WAIT_S_MAX)
        run(self, order, threads=threads)

    monkeypatch.setattr(StepCopies, "run", gated)
    monkeypatch.setattr(step_copies, "CHUNK_BYTES", chunk_bytes)
    return gate
