"""A random training beside saves whose copies are held back: every checkpoint holds its cut, or is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncckpt
from tests.steps.gate import StepGate

WAIT_S_MAX = 30


@dataclass
class OpenSave:
    """A save that has not been looked at. changed: what a refusal may name, for it was changed while it was open.

    open_parts: those of the training that the save has perhaps not copied yet.
    """

    future: asyncckpt.SaveFuture
    values: Any
    open_parts: set[int]
    changed: set[str] = field(default_factory=set)


class HeldProgram:
    """A subclass says what is trained, by `actions`, `begin` and `wrong_in`."""

    actions_count: int
    saves_max: int

    def __init__(self, seed: int, path: Path, gate: StepGate) -> None:
        self.random, self.path, self.gate = random.Random(seed), path, gate
        self.number = 0
        self.saves: dict[int, OpenSave] = {}

    def actions(self, saver: asyncckpt.Saver) -> list[Callable[[], None]]:
        raise NotImplementedError

    def begin(self, saver: asyncckpt.Saver) -> OpenSave:
        raise NotImplementedError

    def wrong_in(self, step: int, values: Any) -> list[str]:
        raise NotImplementedError

    def hold(self) -> None:
        self.gate.shut()

    def wait_staged(self) -> None:
        self.gate.open()
        for save in self.saves.values():
            save.future.wait_staged(WAIT_S_MAX)
            save.open_parts.clear()

    def save(self, saver: asyncckpt.Saver) -> None:
        if len(self.saves) >= self.saves_max:
            return
        self.number += 1
        if sum(not save.future.done() for save in self.saves.values()) >= 2:
            self.gate.open()  # There are two arenas.
        try:
            self.saves[self.number] = self.begin(saver)
        except asyncckpt.UsageError:  # Of an earlier one that was refused; it is looked at in the end, too.
            return

    def check(self) -> list[str]:
        """Return what is wrong in any checkpoint, or with any refusal."""
        found = []
        for number, save in self.saves.items():
            error = save.future.exception(WAIT_S_MAX)
            if error is None:
                found += [f"step {number}, {what}" for what in self.wrong_in(number, save.values)]
                continue
            assert isinstance(error, asyncckpt.UsageError), error
            if not any(name in str(error) for name in save.changed):
                found.append(f"step {number} was refused: {error}")
        return found

    def wrong(self, saver: asyncckpt.Saver) -> list[str]:
        """Run all of it, and return what is wrong then."""
        with saver:
            try:
                for _ in range(self.actions_count):
                    self.random.choice(self.actions(saver))()
                self.gate.open()
                return self.check()
            finally:
                self.gate.open()
                for save in self.saves.values():
                    save.future.exception(WAIT_S_MAX)


def is_wrong(run: Callable[..., list[str]], *arguments: Any) -> bool:
    try:
        return run(*arguments) != []
    except Exception:
        return True
