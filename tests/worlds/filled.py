"""A loop whose state tells its step: what a checkpoint of another step's state would be seen by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import asyncckpt

STEPS = 23


class Filled:
    """A state that tells its step: a tensor behind a dict, another one, an optimizer, and the rows of a table."""

    def __init__(self) -> None:
        self.x, self.y = torch.nn.Parameter(torch.zeros(1)), torch.zeros(1 << 16)
        self.optimizer = torch.optim.SGD([self.x], lr=1.0)
        self.table = asyncckpt.HashTable("t", 1)

    def open(self, path: Path | str, **options: Any) -> asyncckpt.Checkpointer:
        state = {"x": {"v": self.x.data}, "y": self.y, "optimizer": self.optimizer, "t": self.table}
        return asyncckpt.Checkpointer(path, every=10, **options, **state)

    def train(self, step: int) -> None:
        self.x.grad = -torch.ones(1)
        self.optimizer.step()
        self.y.fill_(step)
        self.table.insert(torch.tensor([step]), torch.full((1, 1), float(step)))

    def run(self, ckpt: asyncckpt.Checkpointer, first: int = 1) -> None:
        for step in range(first, STEPS + 1):
            self.train(step)
            ckpt.step(step)
            ckpt._periodic.drain()


def check_all(path: Path | str) -> list[int]:
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
