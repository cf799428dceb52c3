"""Ranks whose saves wait for the steps of `optimizers=`; run by test_steps.py."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.engine.features.steps import StepFences
from tests.ranks.job_ranks import PEER_DEADLINE_S, WAIT_S_MAX, group_of, raised
from tests.steps import gate as gates

STEPS_COUNT = 8
IDS_COUNT = 40
POLICY = asyncckpt.DeltaPolicy(deltas_max=3, bytes_share_max=1e9)


class SteppedShards:
    """Two parameters that all ranks have, one of each rank's own, and a shard of a table; trained alike by all."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.shared = [torch.nn.Parameter(torch.zeros(size)) for size in (500, 700)]
        self.own = torch.nn.Parameter(torch.zeros(300))
        self.optimizers = [
            torch.optim.SGD(self.shared, lr=1.0, momentum=0.5, foreach=False),
            torch.optim.SGD([self.own], lr=1.0, foreach=False),
        ]
        self.buffer = torch.zeros(50)
        self.table = asyncckpt.HashTable("user", 2, shard=(rank, 2))
        self.step(1)

    @property
    def tensors(self) -> dict[str, Any]:
        named = {f"shared{number}": item for number, item in enumerate(self.shared)}
        return {**named, f"own{self.rank}": self.own, "momentum": self.optimizers[0], "buffer": self.buffer}

    def values(self) -> dict[str, torch.Tensor]:
        found = {name: value for name, value in self.tensors.items() if isinstance(value, torch.Tensor)}
        kept = self.optimizers[0].state
        found |= {f"momentum{number}": kept[item]["momentum_buffer"] for number, item in enumerate(self.shared)}
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def forward(self, number: int) -> None:
        self.buffer.fill_(number)
        ids = torch.arange(number % 3, IDS_COUNT, 3)
        mine = ids[self.table.owns(ids)]
        self.table.insert(mine, torch.full((len(mine), 2), float(number)))

    def step(self, number: int) -> None:
        for parameter in (*self.shared, self.own):
            parameter.grad = torch.full_like(parameter, -float(number))
        for optimizer in self.optimizers:
            optimizer.step()


def saver_of(state: SteppedShards, path: Path, **options: Any) -> asyncckpt.Saver:
    return asyncckpt.Saver(
        state.rank,
        2,
        path=path,
        hashtables={"user": state.table},
        tensors=state.tensors,
        device=asyncckpt.DeviceOptions(optimizers=state.optimizers),
        ranks=asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S),
        **options,
    )


def differences(
    state: SteppedShards, path: Path, step: int, values: dict[str, torch.Tensor], rows: dict[int, float]
) -> list[str]:
    """In what a checkpoint differs from what this rank had at its cut."""
    tree = asyncckpt.load(path, step=step)
    found = {name: tree[name].detach() for name in values if name in tree}
    found |= {f"momentum{n}": tree["momentum"]["state"][n]["momentum_buffer"] for n in (0, 1)}
    table = asyncckpt.HashTable("user", 2, shard=(state.rank, 2))
    asyncckpt.Loader(path, {"user": table}, {}, step=step).load()
    wrong = [name for name, value in values.items() if not torch.equal(found[name], value)]
    return [f"{name} of step {step}" for name in wrong] + ([] if rows_of(table) == rows else [f"rows of step {step}"])


@contextmanager
def gated() -> Iterator[gates.StepGate]:
    with pytest.MonkeyPatch.context() as patch:
        gate = gates.install(patch, chunk_bytes=400)
        try:
            yield gate
        finally:
            gate.open()


def rows_of(table: asyncckpt.HashTable) -> dict[int, float]:
    ids = table.ids()
    return dict(zip(ids.tolist(), table.read(ids)["embedding"][:, 0].tolist(), strict=True))


def at_any_times(rank: int, folder: Path, seeds: list[int]) -> None:
    """Full saves and deltas; how far the background has come before a step, and who waits, differs by rank."""
    group_of(rank, 2, folder)
    for seed in seeds:
        own, state, path = random.Random(1000 * seed + rank), SteppedShards(rank), folder / f"{seed}"
        with gated() as gate, saver_of(state, path, on_busy="queue", deltas=POLICY) as saver:
            saves = []
            for number in range(1, STEPS_COUNT + 1):
                state.forward(number)
                if own.random() < 0.5:
                    gate.shut()
                saves.append((saver.save_async(number), state.values(), rows_of(state.table)))
                state.forward(100 + number)
                if own.random() < 0.3:
                    gate.open()
                    saves[-1][0].result(WAIT_S_MAX)
                gate.open()  # Else a step would wait for the chunk of the background.
                state.step(number)
            kinds = [future.result(WAIT_S_MAX).kind for future, _, _ in saves]
            assert set(kinds) == {"full", "delta"}, kinds
            wrong = [differences(state, path, n, *save[1:]) for n, save in enumerate(saves, 1)]
            assert wrong == [[]] * STEPS_COUNT, wrong


def one_rank_is_refused(rank: int, folder: Path, is_stepping: bool) -> None:
    """What it has changed otherwise, or by a step that did not wait, is named on both ranks; the next save is sound."""
    group_of(rank, 2, folder)
    state, path = SteppedShards(rank), folder / "checkpoints"
    with gated() as gate, saver_of(state, path, on_busy="wait") as saver:
        saver.save_async(1).result(WAIT_S_MAX)
        gate.shut()
        future = saver.save_async(2)
        if rank == 0:
            gate.open()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and is_stepping:
                patch.setattr(StepFences, "before_step", lambda *_: None)
                state.step(2)
            elif rank == 1:
                with torch.no_grad():
                    state.own.mul_(2)
        if rank == 0 and is_stepping:
            state.step(2)
        gate.open()
        assert re.search(r"tensor '(own1|shared\d|momentum.*)' was changed between save_async", str(raised(future)))
        dist.barrier()
        assert asyncckpt.list_steps(path) == [1]
        values = state.values()
        saver.save_async(3).result(WAIT_S_MAX)
        assert differences(state, path, 3, values, rows_of(state.table)) == []
