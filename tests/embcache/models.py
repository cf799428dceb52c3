"""A small model of dense layers and two collections, its batches, and a copy of every bit of its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import asyncckpt
from asyncckpt.embcache import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection, EmbCacheTableConfig, Saver
from tests.worlds.rows import table_image

Batch = dict[str, tuple[torch.Tensor, torch.Tensor]]
Image = dict[str, dict[int, bytes]]
FEATURES = ("clicks", "likes", "ads", "query")
# Few ids, so that they come again, of both signs and up to the ends of int64.
IDS = torch.cat([torch.arange(-60, 60), torch.tensor([-(2**63), -(2**63) + 1, 2**63 - 1, 2**63 - 2])])


def config(name: str = "user", features: Iterable[str] = ("clicks", "likes"), **options: Any) -> EmbCacheTableConfig:
    chosen: dict[str, Any] = {
        "dim": 4,
        "cache_rows": 40,
        "optimizer_slots": {"sum": torch.float32},
        "metadata": {"last_seen": torch.int64, "count": torch.int64},
        "initializer": asyncckpt.nn.Uniform(0.1, seed=7),
        "capacity": 8,
    }
    return EmbCacheTableConfig(name=name, feature_names=tuple(features), **{**chosen, **options})


class CachedNet(nn.Module):
    """Tables `user` (two features), `ad` (mean) and `word` (one row per id), and a dense layer."""

    def __init__(self, shard: tuple[int, int] = (0, 1), *, admit_after: int = 1, **options: Any) -> None:
        super().__init__()
        ads = config("ad", ("ads",), dim=3, pooling="mean", admit_after=admit_after)
        self.shard = shard
        self.bags = EmbCacheEmbeddingBagCollection([config(**options), ads], shard=shard)
        self.below = nn.ModuleDict({"words": EmbCacheEmbeddingCollection([config("word", ("query",))], shard=shard)})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.head = nn.Linear(4, 1)
        self.adagrad = asyncckpt.optim.SparseAdagrad(self, lr=0.1)

    def forward(self, batch: Batch) -> torch.Tensor:
        pooled, words = self.bags(batch), self.below["words"](batch)
        return self.head(pooled["clicks"] + pooled["likes"]).sum() + pooled["ads"].sum() + words["query"].values.sum()

    def train_step(self, step: int) -> None:
        self.bags.step = self.below["words"].step = step
        batch = make_batch(step, shard=self.shard)
        self.bags.prefetch(make_batch(step + 1, shard=self.shard))
        self.adagrad.zero_grad()
        self(batch).square().backward()
        self.adagrad.step()

    def trained(self, steps: range) -> CachedNet:
        for step in steps:
            self.train_step(step)
        return self


def make_batch(seed: int, *, shard: tuple[int, int] = (0, 1), samples: int = 5) -> Batch:
    """Random ids per feature; of a shard only those it owns."""
    generator = torch.Generator().manual_seed(seed)
    batch = {}
    for feature in FEATURES:
        lengths = torch.randint(0, 4, (samples,), generator=generator)
        values = IDS[torch.randint(len(IDS), (int(lengths.sum()),), generator=generator)]
        kept = torch.from_numpy(values.numpy().view(np.uint64) % np.uint64(shard[1]) == np.uint64(shard[0]))
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        counts = torch.tensor(
            [int(kept[a:b].sum()) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
        )
        batch[feature] = (values[kept], torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
    return batch


def image(net: CachedNet) -> Image:
    """A copy of every bit of all tables, and of the counts of candidates."""
    copied: Image = {}
    for collection in (net.bags, net.below["words"]):
        for name, table in collection.tables().items():
            copied[name] = table_image(table)
            for suffix, companion in table.companions().items():
                ids, counts = companion.counts()
                copied[f"{name}.{suffix}"] = {
                    id: count.to_bytes(8, "little") for id, count in zip(ids.tolist(), counts.tolist(), strict=True)
                }
    return copied


def union(images: Iterable[Image]) -> Image:
    """The images of several ranks together; an id in two of them is an error."""
    whole: Image = {}
    for one in images:
        for name, rows in one.items():
            assert not whole.setdefault(name, {}).keys() & rows.keys()
            whole[name].update(rows)
    return whole


def owners(rows: dict[int, bytes], world_size: int) -> set[int]:
    """The ranks that own the ids of a table, by their unsigned value."""
    return {id % 2**64 % world_size for id in rows}


def load_ranks(found: Sequence[CachedNet], path: Path, *, step: int | None = None, **options: Any) -> Image:
    """Load the nets of all ranks, one after the other; without `world_size` the tables say how many they are."""
    for net in found:
        rank, world_size = net.shard
        with Saver(rank=rank, **options) as saver:
            report = saver.load(net, path, step=step)
        own = image(net)
        assert report.rows == {name: len(rows) for name, rows in own.items()}
        assert all(owners(rows, world_size) <= {rank} for rows in own.values())
    return union(map(image, found))
