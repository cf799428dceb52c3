"""A run that draws from everything: dropout, shuffling, NumPy and Python augmentation, a hash table, AdamW.

As a script it resumes the run of a directory: arguments are the path and the number of steps in all.
"""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import asyncckpt
from asyncckpt.trainer_state import DataPosition, ResumableSampler, RngState, StepCounter, TrainerState

SAMPLES_COUNT = 90


class Noisy(Dataset[Any]):
    """Features and ids; the features with noise that is drawn in the main process."""

    def __len__(self) -> int:
        return SAMPLES_COUNT

    def __getitem__(self, index: int) -> Any:
        noise = np.random.standard_normal(4).astype(np.float32) + np.float32(random.gauss(0.0, 1.0))
        return torch.full((4,), float(index)) + torch.from_numpy(noise), torch.tensor([index % 37, -index])


class ResumedRun:
    """A model, its optimizers, a table and the trainer's state. group: the ranks that train together."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        rank, ranks_count = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.ranks = {"rank": rank, "ranks_count": ranks_count}
        self.table = asyncckpt.HashTable("item", 4, initializer=asyncckpt.nn.Uniform(0.1), shard=(rank, ranks_count))
        self.bag = asyncckpt.nn.HashEmbeddingBag(self.table)
        # What a BatchNorm has counted is not the same on all ranks.
        norm = torch.nn.BatchNorm1d(16) if group is None else torch.nn.LayerNorm(16)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), norm, torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sgd = asyncckpt.optim.SparseSGD(self.bag, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.adam, 0.9)
        loader = DataLoader(Noisy(), batch_size=7, sampler=ResumableSampler(SAMPLES_COUNT, seed=3, **self.ranks))
        self.trainer = TrainerState(
            StepCounter(),
            RngState(**self.ranks),
            DataPosition(loader),
            scheduler=self.scheduler,
            table_optimizer=self.sgd,
        )
        self.tables = {"item": self.table}
        self.state = {"model": self.model, "adam": self.adam, "trainer": self.trainer}

    def train(self, *, until: int, saver: asyncckpt.Saver | None = None, save_at: int = -1) -> list[str]:
        """Train up to a step, a save in the middle; a digest of every batch and of the weights behind it."""
        assert self.trainer.data is not None
        digests = []
        while int(self.trainer.step) < until:
            for features, all_ids in self.trainer.data:
                ids = all_ids * self.ranks["ranks_count"] + self.ranks["rank"]  # Those of the own shard.
                loss = self.model(torch.cat([features, self.bag(ids)], dim=1)).square().mean()
                self.adam.zero_grad()
                self.sgd.zero_grad()
                loss.backward()
                if self.group is not None:
                    for parameter in self.model.parameters():
                        dist.all_reduce(parameter.grad, group=self.group)
                self.adam.step()
                self.sgd.step()
                self.scheduler.step()
                digests.append(self.digest(features, ids))
                if self.trainer.step.advance() == save_at and saver is not None:
                    saver.save_async(save_at)
                if int(self.trainer.step) >= until:
                    break
        return digests

    def digest(self, *batch: torch.Tensor) -> str:
        """Of everything that the next step depends on."""
        ids = torch.arange(-SAMPLES_COUNT, SAMPLES_COUNT) * self.ranks["ranks_count"] + self.ranks["rank"]
        rows = self.table.lookup(ids, insert=False)
        hashed = hashlib.blake2b(digest_size=8)
        for tensor in (*batch, *self.model.state_dict().values(), rows, self.table.embedding[rows[rows >= 0]]):
            hashed.update(tensor.detach().numpy().tobytes())
        return hashed.hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    path, until = Path(sys.argv[1]), int(sys.argv[2])
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    run = ResumedRun()
    report = asyncckpt.Loader(path, hashtables=run.tables, tensors=run.state).load()
    assert report.step == int(run.trainer.step)
    print("\n".join(run.train(until=until)))


if __name__ == "__main__":
    main()
