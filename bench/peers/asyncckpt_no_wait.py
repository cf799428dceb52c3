"""A control: asyncckpt_steps whose steps do not wait. Its image has to be refused, or torn."""

from __future__ import annotations

from pathlib import Path

from asyncckpt.engine.features.steps import StepFences
from bench.peers.asyncckpt_steps import AsyncckptSteps
from bench.state import State


class AsyncckptNoWait(AsyncckptSteps):
    def __init__(self, state: State, directory: Path) -> None:
        StepFences.before_step = lambda *_: None  # type: ignore[method-assign]
        super().__init__(state, directory)


PEER = AsyncckptNoWait
