"""How a training run saves: asyncckpt in the background, or torch.save in the training thread for comparison."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

import asyncckpt
from demo.events import Event, Resumed, SaveBegun, SaveEnded, SaveSkipped
from demo.model import Recommender, used_columns
from demo.spec import RunSpec

Tell = Callable[[Event], None]
Clock = Callable[[], float]


class RunSaver(Protocol):
    """What the loop asks of either: everything it has to know about checkpoints."""

    def begin(self) -> None:
        """Get ready; called once, before the first step."""
        ...

    def after_step(self, step: int) -> None:
        """Save if a save is due."""
        ...

    def finish(self, step: int) -> None:
        """Save the last step, blocking, and give everything back."""
        ...


class AsyncSaver:
    """asyncckpt: a PeriodicSaver, fire and forget."""

    def __init__(self, spec: RunSpec, recommender: Recommender, *, tell: Tell, clock: Clock) -> None:
        self._tell = tell
        self._clock = clock
        self._pending: list[asyncckpt.SaveFuture] = []
        self._saver = asyncckpt.Saver(
            path=spec.directory,
            hashtables=recommender.tables,
            tensors=recommender.state,
            keep=spec.keep,
        )
        self._periodic = asyncckpt.PeriodicSaver(self._saver, every_steps=spec.every_steps)

    def begin(self) -> None:
        # Waited for because the tables grow while the model trains.
        self._saver.prepare().result()

    def after_step(self, step: int) -> None:
        self._tell_ended()
        skipped_count = self._periodic.statistics().skipped_count
        at = self._clock()
        future = self._periodic.step(step)
        if future is not None:
            self._pending.append(future)
            self._tell(SaveBegun(step=step, at=at, stall=self._clock() - at))
        elif self._periodic.statistics().skipped_count > skipped_count:
            self._tell(SaveSkipped(step=step))

    def finish(self, step: int) -> None:
        self._periodic.drain()
        self._tell_ended()
        at = self._clock()
        result = self._saver.save(step)
        self._saver.close()
        self._tell(SaveBegun(step=step, at=at, stall=result.seconds))
        self._tell(SaveEnded(step=step, seconds=result.seconds, bytes=result.bytes_written, final=True))

    def _tell_ended(self) -> None:
        # More than one: the last save may end just before the next one begins.
        while self._pending and self._pending[0].done():
            result = self._pending.pop(0).result()
            self._tell(SaveEnded(step=result.step, seconds=result.seconds, bytes=result.bytes_written, final=False))


class TorchSaver:
    """torch.save of the full state, blocking, and not synced to disk: as most loops do it."""

    def __init__(self, spec: RunSpec, recommender: Recommender, *, tell: Tell, clock: Clock) -> None:
        self._spec = spec
        self._recommender = recommender
        self._tell = tell
        self._clock = clock
        self._folder = Path(spec.directory)

    def begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def after_step(self, step: int) -> None:
        if step % self._spec.every_steps == 0:
            self._save(step, final=False)

    def finish(self, step: int) -> None:
        self._save(step, final=True)

    def _save(self, step: int, *, final: bool) -> None:
        at = self._clock()
        state = self._recommender.state
        whole = {
            # Only rows in use: torch.save writes the storage behind a slice to its end.
            "tables": {name: used_columns(table) for name, table in self._recommender.tables.items()},
            "model": state["model"].state_dict(),
            "optim": state["optim"].state_dict(),
            "step": step,
        }
        temporary = self._folder / "state.tmp"
        torch.save(whole, temporary)
        size = temporary.stat().st_size
        os.replace(temporary, self._folder / f"{step}.pt")
        for old in sorted(self._folder.glob("*.pt"), key=lambda path: int(path.stem))[: -self._spec.keep]:
            old.unlink()
        seconds = self._clock() - at
        self._tell(SaveBegun(step=step, at=at, stall=seconds))
        self._tell(SaveEnded(step=step, seconds=seconds, bytes=size, final=final))


def resume(spec: RunSpec, recommender: Recommender, tell: Tell) -> int:
    """Load the newest committed checkpoint, if there is one; return the step to go on behind."""
    if spec.saver == "torch.save" or not os.path.exists(spec.directory) or not asyncckpt.list_steps(spec.directory):
        return 0
    begin = time.perf_counter()
    report = recommender.load(spec.directory)
    tell(Resumed(step=report.step, bytes=report.bytes_read, seconds=time.perf_counter() - begin))
    return report.step


SAVERS: dict[str, type[AsyncSaver] | type[TorchSaver]] = {"asyncckpt": AsyncSaver, "torch.save": TorchSaver}
