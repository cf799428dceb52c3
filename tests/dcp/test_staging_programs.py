"""Random programs of saves through two writers and two stagers, beside staged states that are held.

Each program draws a few states: dtypes, shapes, strides, views of one storage, tied tensors. It saves and stages them,
trains in between, saves what it has staged, whole, renamed, or with parts left out. Whatever was saved is loaded at
once and must be, bit for bit, what the state was at the call; and so must be what is still staged, to the end.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
from asyncckpt.dcp import AsyncStager, SavePlanner, StorageReader, StorageWriter
from asyncckpt.engine.process.background import retainer
from asyncckpt.plan import image
from asyncckpt.staging.pool import ArenaState, pool
from tests.dcp.model import blank, differences, image_of

pytestmark = [
    pytest.mark.random,
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
]

PROGRAMS_COUNT = 12
WAIT_S_MAX = 60.0
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
OPERATIONS = {"train": 4, "save": 3, "async_save": 6, "stage": 3, "save_staged": 5, "repeat": 3, "drop": 2, "renew": 1}

Image = dict[str, Any]
State = dict[str, Any]


class DrawnStates:
    """States, from a source of random numbers."""

    def __init__(self, choices: random.Random) -> None:
        self.choices = choices
        self.generator = torch.Generator().manual_seed(choices.getrandbits(32))

    def raw(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Any bit patterns, but of bools."""
        top = 2 if dtype is torch.bool else 256
        whole = torch.randint(0, top, (count * dtype.itemsize,), dtype=torch.uint8, generator=self.generator)
        return whole.view(dtype)

    def tensor(self) -> torch.Tensor:
        dtype = self.choices.choice(DTYPES)
        shape = self.choices.choice([(), (0, 3), (1,), (7,), (64,), (3, 5), (16, 8), (2, 3, 4), (700,), (41, 33)])
        base = self.raw(torch.Size(shape).numel(), dtype).reshape(shape)
        return self.choices.choice(self.views())(base)

    def views(self) -> list[Callable[[torch.Tensor], torch.Tensor]]:
        return [
            lambda base: base,
            lambda base: base,
            lambda base: torch.nn.Parameter(base, requires_grad=base.is_floating_point()),
            lambda base: base.transpose(0, -1) if base.dim() else base,
            lambda base: base[::2] if base.dim() else base,
            lambda base: base[1:] if base.dim() and len(base) > 1 else base,
            lambda base: base[..., -1:] if base.dim() else base,
            lambda base: base.expand(3, *base.shape),
            lambda base: base.conj() if base.is_complex() else base,
            lambda base: base.conj().imag if base.is_complex() else base,
        ]

    def state(self) -> State:
        tensors = [self.tensor() for _ in range(self.choices.randint(1, 9))]
        tensors += [self.raw(50, torch.float32) for _ in range(self.choices.choice([0, 2, 5]))]  # May change places.
        tensors += [self.choice(tensors) for _ in range(self.choices.choice([0, 0, 1, 3]))]  # Tied.
        of_one_storage = self.raw(600, torch.float32)
        for begin in self.choices.sample(range(0, 500, 20), self.choices.choice([0, 0, 2, 4])):
            tensors.append(of_one_storage[begin : begin + 90])  # They may overlap.
        self.choices.shuffle(tensors)
        return self.named(tensors)

    def choice(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[self.choices.randrange(len(tensors))]

    def named(self, tensors: list[torch.Tensor]) -> State:
        """In one of the structures that states have; with a plain value."""
        names = {f"w.{index}": tensor for index, tensor in enumerate(tensors)}
        return self.choices.choice(
            [
                {**names, "epoch": self.choices.randrange(99)},
                {"model": names, "list": [tensors[0], {"lr": self.choices.random()}]},
            ]
        )

    def of_staged(self, staged: State) -> State:
        """What somebody may save of a staged state: all of it, in another order, or parts."""
        tensors = tensors_of(staged)
        kind = self.choices.choice(["whole", "whole", "swapped", "swapped", "shuffled", "parts", "twice"])
        if kind == "whole":
            return staged
        if kind == "swapped":
            return self.swapped(staged, [tensor for tensor in tensors if tensor.shape == (50,)])
        if kind == "shuffled":
            self.choices.shuffle(tensors)
        elif kind == "parts":
            tensors = tensors[self.choices.randrange(len(tensors)) :]
            tensors = [each[1:] if each.dim() and self.choices.random() < 0.3 else each for each in tensors]
        else:
            tensors += [self.choice(tensors), torch.arange(5.0)]
        return self.named(tensors)

    def swapped(self, state: Any, alike: list[torch.Tensor]) -> Any:
        """The same structure, with tensors that are alike in the places of each other."""
        if isinstance(state, dict):
            return {key: self.swapped(value, alike) for key, value in state.items()}
        if isinstance(state, list):
            return [self.swapped(value, alike) for value in state]
        return self.choice(alike) if any(state is each for each in alike) else state


def tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for child in children for tensor in tensors_of(child)]


class StagingProgram:
    def __init__(self, path: Path, seed: int) -> None:
        self.choices = random.Random(seed)
        self.drawn = DrawnStates(self.choices)
        self.writers = [
            StorageWriter(
                path / name,
                parallel=self.choices.choice([1, 3]),
                durability="none",
                keep=self.choices.choice([None, 2]),
                host_memory_limit=self.choices.choice([None, None, None, 0]),
            )
            for name in "ab"
        ]
        self.stagers = [AsyncStager(host_memory_limit=self.choices.choice([None, None, 0])) for _ in range(2)]
        self.states = [self.drawn.state() for _ in range(3)]
        self.staged: list[tuple[State, Image]] = []

    def run(self) -> None:
        for _ in range(self.choices.randint(10, 25)):
            [operation] = self.choices.choices(list(OPERATIONS), list(OPERATIONS.values()))
            getattr(self, operation)()
        while self.staged:
            assert differences(image_of(self.staged[-1][0]), self.staged.pop()[1]) == []
        gc.collect()
        assert all(arena.state is ArenaState.FREE for arena in pool._arenas)
        retainer.submit(int).result(WAIT_S_MAX)  # It is behind the retention of the last save.
        for path in {writer.checkpoint_id for writer in self.writers}:
            assert not Path(path).exists() or asyncckpt.verify(path).strays == ()

    # -- operations ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        for tensor in tensors_of(self.choices.choice(self.states)):
            self.change(tensor)

    def save(self) -> None:
        state = self.choices.choice(self.states)
        self.save_now(state, image_of(state), self.choices.choice(self.writers))

    def async_save(self) -> None:
        state, writer = self.choices.choice(self.states), self.choices.choice(self.writers)
        expected, stager = image_of(state), self.choice_of_stager()
        saved = dcp.async_save(state, storage_writer=writer, planner=self.planner(), **stager)
        for tensor in tensors_of(state):
            self.change(tensor)
        getattr(saved, "upload_completion", saved).result(WAIT_S_MAX)
        self.check(writer, state, expected)

    def stage(self) -> None:
        self.staged.append(self.stage_now(self.choices.choice(self.states)))

    def save_staged(self) -> None:
        if self.staged:
            self.save_some(*self.choices.choice(self.staged), self.choices.choice(self.writers))

    def repeat(self) -> None:
        """From the second time on, the state is staged where the writer's plan wants it."""
        state, writer = self.choices.choice(self.states), self.choices.choice(self.writers)
        for is_first in (True, False, False):
            staged, expected = self.stage_now(state)
            if is_first:
                self.save_now(staged, expected, writer)
            else:
                self.save_some(staged, expected, writer)

    def drop(self) -> None:
        if self.staged:
            del self.staged[self.choices.randrange(len(self.staged))]

    def renew(self) -> None:
        """Other tensors of other sizes; or the same sizes in another order."""
        number = self.choices.randrange(len(self.states))
        tensors = [tensor.clone() for tensor in tensors_of(self.states[number])]
        self.choices.shuffle(tensors)
        self.states[number] = self.choices.choice([self.drawn.state(), self.drawn.named(tensors)])

    # ------------------------------------------------------------------------------------------------------------------

    def stage_now(self, state: State) -> tuple[State, Image]:
        expected = image_of(state)
        staged = self.choices.choice([*self.stagers, *self.writers]).stage(state)
        assert isinstance(staged, dict)
        for tensor in tensors_of(state):
            self.change(tensor)
        return staged, expected

    def save_some(self, staged: State, expected: Image, writer: StorageWriter) -> None:
        state = self.drawn.of_staged(staged)
        self.save_now(state, expected if state is staged else image_of(state), writer)

    def save_now(self, state: State, expected: Image, writer: StorageWriter) -> None:
        dcp.save(state, storage_writer=writer, planner=self.planner())
        self.check(writer, state, expected)

    def check(self, writer: StorageWriter, state: State, expected: Image) -> None:
        found = blank(state)
        dcp.load(found, storage_reader=StorageReader(writer.checkpoint_id, verify=self.choices.random() < 0.5))
        assert differences(image_of(found), expected) == []

    def change(self, tensor: torch.Tensor) -> None:
        """Write other bits into its memory, also that of a view."""
        with torch.no_grad():
            own = tensor.detach()
            if tensor.dim() and not tensor.stride(0) and tensor.numel():
                own = own[0]  # Expanded.
            own.copy_(self.drawn.raw(own.numel(), own.dtype).reshape(own.shape))

    def planner(self) -> Any:
        return self.choices.choice([None, SavePlanner()])

    def choice_of_stager(self) -> dict[str, Any]:
        return self.choices.choice([{}, *({"async_stager": stager} for stager in self.stagers)])


@pytest.mark.parametrize("lane", range(4))
def test_what_is_saved_is_what_was_there_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base_seed: int, runs_factor: int, lane: int
) -> None:
    if lane % 2:  # Several files, and tensors that are split over blocks.
        monkeypatch.setattr(image, "FILE_TARGET_BYTES", 4_000)
        monkeypatch.setattr(image, "BLOCK_BYTES_MAX", 2_500)
    for seed in range(lane, PROGRAMS_COUNT * runs_factor, 4):
        print(f"seed {base_seed + seed}")
        StagingProgram(tmp_path / str(seed), base_seed + seed).run()
