"""The small job that the tests of several ranks run: its state at a step follows from the step alone.

Numbers are small integers in float32, so sums over ranks come out the same in every order, and what a load gives can be
compared bit by bit with what a run without any fault would hold at that step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import asyncckpt

DIM = 4
IDS = np.concatenate([np.arange(-20, 60), [-(2**63), 2**63 - 1, 2**62 + 1]]).astype(np.int64)


class RankTraining:
    """Every rank owns its ids of a hash table and holds all of a dense model.

    group: the ranks that train together; None: they do not talk, each computes what the sum over all would be.
    """

    def __init__(self, rank: int, ranks_count: int, group: Any = None) -> None:
        self.rank, self.ranks_count, self._group = rank, ranks_count, group
        self.step = 0
        self.table = asyncckpt.HashTable(
            "user", DIM, optimizer_slots={"sum": torch.float32}, shard=(rank, ranks_count), capacity=16
        )
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
        for parameter in (*self.model.parameters(), *self.model.buffers()):
            parameter.data.zero_()

    @property
    def tensors(self) -> dict[str, Any]:
        """Read anew at every save: pairs would keep the step of today."""
        return {"model": self.model, "progress": _Progress(self)}

    def train(self) -> None:
        """One step: rows of some ids are inserted or changed, and the model by a sum over all ranks."""
        self.step += 1
        mine = IDS[IDS.view(np.uint64) % np.uint64(self.ranks_count) == np.uint64(self.rank)]
        mine = mine[: 4 + 3 * self.step]
        rows = torch.from_numpy(mine % 97).to(torch.float32)[:, None] * self.step + torch.arange(DIM)
        self.table.insert(mine, rows, sum=rows * 2)
        for parameter in self.model.parameters():
            parameter.data -= self._sum_over_ranks(torch.full_like(parameter, float(self.step * (self.rank + 1))))

    def scramble(self) -> None:
        """Change everything: what is saved was taken before."""
        self.table.insert(self.table.ids(), torch.full((len(self.table), DIM), -7.0))
        for parameter in self.model.parameters():
            parameter.data.fill_(-7.0)
        self.step = -7

    def _sum_over_ranks(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return gradient / (self.rank + 1) * sum(range(1, self.ranks_count + 1))
        dist.all_reduce(gradient, group=self._group)
        return gradient


class _Progress:
    """The step and the rank, as plain values that follow the training."""

    def __init__(self, training: RankTraining) -> None:
        self._training = training

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._training.step, "rank": self._training.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._training.step = state["step"]


def run_alone(steps: int, ranks_count: int) -> list[RankTraining]:
    """All ranks of a job after so many steps, without a process group and without any fault."""
    ranks = [RankTraining(rank, ranks_count) for rank in range(ranks_count)]
    for _ in range(steps):
        for training in ranks:
            training.train()
    return ranks


def image(*ranks: RankTraining) -> dict[str, Any]:
    """Everything that ranks hold together, whichever of them holds which row; equal for equal states."""
    rows: dict[int, tuple[bytes, bytes]] = {}
    for training in ranks:
        table, ids = training.table, training.table.ids()
        numbers = training.table.used_rows()
        columns = zip(ids.tolist(), table.embedding[numbers], table.slot("sum")[numbers], strict=True)
        for id, embedding, total in columns:
            assert id not in rows, f"two ranks hold the row of {id}"
            rows[id] = (embedding.numpy().tobytes(), total.numpy().tobytes())
    models = [{name: value.tolist() for name, value in training.model.state_dict().items()} for training in ranks]
    assert all(model == models[0] for model in models), "ranks disagree about the model"
    return {"rows": rows, "model": models[0], "step": ranks[0].step}


def load_whole(path: Any, step: int | None = None) -> tuple[int, dict[str, Any]]:
    """Load a step (default: the newest) into one rank; which step it was, and its image."""
    training = RankTraining(0, 1)
    report = asyncckpt.Loader(path, {"user": training.table}, training.tensors, step=step, verify="before").load()
    return int(report.step), image(training)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What is not as expected, in a few words."""
    rows, wanted = found["rows"], expected["rows"]
    texts = [f"{name} is {found[name]}, expected {expected[name]}" for name in expected if name != "rows"]
    texts = [text for name, text in zip(("model", "step"), texts, strict=True) if found[name] != expected[name]]
    for what, ids in (
        ("are missing", wanted.keys() - rows.keys()),
        ("are too many", rows.keys() - wanted.keys()),
        ("have other values", {id for id in rows.keys() & wanted.keys() if rows[id] != wanted[id]}),
    ):
        texts += [f"{len(ids)} of {len(wanted)} rows {what}: {sorted(ids)[:5]}"] if ids else []
    return texts
