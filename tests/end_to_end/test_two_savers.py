"""Random programs of two Savers in one directory, beside compactions, retention and strays.

Each Saver trains and saves a table and a tensor of its own. Calls may be refused, saves may fail: whatever is
acknowledged and still listed must verify, and load bit for bit as it was at one of the calls that were acknowledged for
its step (retention may free a step, which the other Saver then saves anew).
"""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, IndeterminateError
from tests.worlds.rows import rows_of

pytestmark = [pytest.mark.random, pytest.mark.timeout(200)]

PROGRAMS_COUNT = 40
STEPS_END = 60
IDS_COUNT = 40
WAIT_S_MAX = 60.0
OPERATIONS = {"train": 6, "save": 9, "cancel": 1, "compact": 4, "wait": 2, "look": 3, "stray": 1, "reopen": 2}

# What a save held: the name of the Saver, its tensor, and the rows of its table.
Image = tuple[str, torch.Tensor, dict[int, tuple[float, ...]]]


class SaverAndState:
    """One Saver and what it saves."""

    def __init__(self, name: str, path: Path, choices: random.Random) -> None:
        self.name = name
        self.table = asyncckpt.HashTable(name, 2)
        self.tensor = torch.zeros(choices.choice([0, 1, 7, 5000]))
        self.saver = asyncckpt.Saver(
            path=path,
            hashtables={name: self.table},
            tensors={f"{name}x": self.tensor},
            parallel=choices.choice([1, 3]),
            keep=choices.choice([None, None, 1, 2, 3]),
            on_busy=choices.choice(["queue", "wait"]),
            deltas=choices.choice([None, asyncckpt.DeltaPolicy(deltas_max=4, bytes_share_max=100.0)]),
            durability=choices.choice(["fsync", "none"]),
        )

    def train(self, choices: random.Random) -> None:
        ids = torch.tensor(sorted(choices.sample(range(IDS_COUNT), choices.randint(1, 9))))
        self.table.insert(ids, torch.tensor([[choices.random(), choices.random()] for _ in ids]))
        self.tensor.add_(1.5)
        if choices.random() < 0.3:
            self.table.remove(torch.tensor(choices.sample(range(IDS_COUNT), 3)))

    def image(self) -> Image:
        return self.name, self.tensor.clone(), rows_of(self.table)


class ProgramOfTwoSavers:
    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.choices = random.Random(seed)
        self.trainers = [SaverAndState(name, path, self.choices) for name in "ab"]
        self.begun: list[tuple[asyncckpt.SaveFuture, Image]] = []
        self.acknowledged: dict[int, list[Image]] = defaultdict(list)

    def run(self) -> None:
        for _ in range(self.choices.randint(8, 30)):
            [operation] = self.choices.choices(list(OPERATIONS), list(OPERATIONS.values()))
            number = self.choices.randrange(len(self.trainers))
            self.tolerate(getattr(self, operation), number)
        self.take_outcomes(WAIT_S_MAX)
        for trainer in self.trainers:
            self.end(trainer)
        for step in asyncckpt.list_steps(self.path):
            self.check(step)

    def tolerate(self, function: Any, *arguments: Any) -> bool:
        """Whether it did not raise. A call may be refused; nothing may be damaged, nor in doubt."""
        try:
            function(*arguments)
        except (CorruptError, IndeterminateError):
            raise
        except CheckpointError:
            return False
        return True

    def end(self, trainer: SaverAndState) -> None:
        """Each call raises one error that nobody has asked for."""
        while not self.tolerate(trainer.saver.close):
            pass

    def take_outcomes(self, timeout: float) -> None:
        rest = []
        for future, image in self.begun:
            if not timeout and not future.done():
                rest.append((future, image))
            elif self.tolerate(future.result, timeout) and not future.result(0).skipped:
                self.acknowledged[future.result(0).step].append(image)
        self.begun = rest

    # -- operations ----------------------------------------------------------------------------------------------------

    def train(self, number: int) -> None:
        self.trainers[number].train(self.choices)

    def save(self, number: int) -> None:
        trainer, image = self.trainers[number], self.trainers[number].image()
        kind = self.choices.choice(["auto", "full", "delta"])
        step = self.choices.choice([None, None, None, self.choices.randrange(STEPS_END)])
        if self.choices.random() < 0.25:
            result = trainer.saver.save(step, kind=kind)
            self.acknowledged[result.step].append(image)
        else:
            self.begun.append((trainer.saver.save_async(step, kind=kind), image))

    def cancel(self, _: int) -> None:
        if self.begun:
            self.begun[-1][0].cancel()

    def compact(self, number: int) -> None:
        step = self.choices.choice([None, *asyncckpt.list_steps(self.path)])
        if self.choices.random() < 0.7:
            self.trainers[number].saver.compact(step)
        else:
            asyncckpt.compact(self.path, step)

    def wait(self, number: int) -> None:
        self.trainers[number].saver.wait_idle(WAIT_S_MAX)

    def look(self, _: int) -> None:
        """A step that retention removes meanwhile is no longer listed afterwards."""
        self.take_outcomes(0.0)
        steps = [step for step in asyncckpt.list_steps(self.path) if step in self.acknowledged]
        if not steps:
            return
        step = self.choices.choice(steps)
        try:
            self.check(step)
        except CheckpointError:
            if step in asyncckpt.list_steps(self.path):
                self.check(step)

    def stray(self, _: int) -> None:
        step = self.choices.choice([3, *asyncckpt.list_steps(self.path)])
        (self.path / "data" / f"{step:012d}-{self.choices.getrandbits(128):032x}").mkdir()

    def reopen(self, number: int) -> None:
        old = self.trainers[number]
        self.end(old)
        self.trainers[number] = SaverAndState(old.name, self.path, self.choices)

    # -- the oracle ----------------------------------------------------------------------------------------------------

    def check(self, step: int) -> None:
        asyncckpt.verify(self.path, step)
        in_flight = [image for future, image in self.begun if future.step == step]
        images = [*self.acknowledged.get(step, []), *in_flight]
        assert not images or any(self.holds(step, image) for image in images), f"step {step} is none that was saved"

    def holds(self, step: int, image: Image) -> bool:
        name, tensor, rows = image
        table, loaded = asyncckpt.HashTable(name, 2), torch.zeros_like(tensor)
        targets: dict[str, Any] = {"hashtables": {name: table}, "tensors": {f"{name}x": loaded}}
        try:
            asyncckpt.Loader(self.path, step=step, on_busy="wait", **targets).load()
        except IncompatibleError:
            return False  # The other Saver's.
        return torch.equal(loaded, tensor) and rows_of(table) == rows


@pytest.mark.parametrize("number", range(4))
def test_what_is_acknowledged_and_listed_is_what_was_saved(
    tmp_path: Path, base_seed: int, runs_factor: int, number: int
) -> None:
    for seed in range(number, PROGRAMS_COUNT * runs_factor, 4):
        path = tmp_path / str(seed)
        try:
            ProgramOfTwoSavers(path, base_seed + seed).run()
        except BaseException:
            print(f"seed {base_seed + seed}")
            raise
