"""The model: item2vec over three hash tables, with a small MLP that bends an item towards the file it stands in."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import asyncckpt
from demo.batches import Batch

ITEMS, CONTEXTS, FILES = "items", "contexts", "files"
ROW_LR = 0.2
MLP_LR = 1e-3
MLP_HIDDEN = 64
# Each center is scored against all negatives; their mean weighs as much as this many.
NEGATIVES_WEIGHT = 8.0
COLD_ROWS_AT_ONCE = 4096  # They pass through the cache level, if there is one.

DemoTable = asyncckpt.HashTable | asyncckpt.MultiLevelTable


class Recommender:
    """Tables, MLP, both optimizers and the step: all that a checkpoint holds.

    cold_rows_count rows are put into both item tables at once, which no batch ever reads: a table in service is mostly
    cold, and a save has to take it whole all the same. device: of the MLP and, with cache_rows, of the cache
    level of each table; the rows themselves are on the host.
    """

    def __init__(
        self, *, dim: int, seed: int, cold_rows_count: int = 0, device: str = "cpu", cache_rows: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self._device = device
        self.tables: dict[str, DemoTable] = {
            name: _table(name, dim, seed=seed + index, device=device, cache_rows=cache_rows)
            for index, name in enumerate((ITEMS, CONTEXTS, FILES))
        }
        self._embeddings = {name: asyncckpt.nn.HashEmbedding(table) for name, table in self.tables.items()}
        self._mlp = nn.Sequential(nn.Linear(2 * dim, MLP_HIDDEN), nn.ReLU(), nn.Linear(MLP_HIDDEN, dim))
        self._mlp.to(device)
        self._row_optimizer = asyncckpt.optim.SparseAdagrad(self._embeddings.values(), lr=ROW_LR)
        self._optimizer = torch.optim.Adam(self._mlp.parameters(), lr=MLP_LR)
        # The step is read at every save; what is here is what the checkpoint says.
        self.state: dict[str, Any] = {"model": self._mlp, "optim": self._optimizer, "step": 0}
        self._insert_cold_rows(cold_rows_count, seed)

    def train(self, batch: Batch, step: int) -> float:
        """Do one step and return its loss."""
        for embedding in self._embeddings.values():
            embedding.step = step
        self._optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._row_optimizer.step()
        self.state["step"] = step
        return float(loss.detach())

    def load(self, directory: str) -> asyncckpt.LoadReport:
        """Take over the newest checkpoint of a directory."""
        report = asyncckpt.Loader(directory, hashtables=self.tables, tensors=self.state).load()
        self.state["step"] = report.values["step"]
        return report

    def _loss(self, batch: Batch) -> torch.Tensor:
        items = self._embeddings[ITEMS](batch.centers)
        files = self._embeddings[FILES](batch.files)
        queries = items + self._mlp(torch.cat([items, files], dim=1))
        contexts = self._embeddings[CONTEXTS](torch.cat([batch.pair_contexts, batch.negatives]))
        near, random = contexts.split([batch.pair_contexts.numel(), batch.negatives.numel()])
        near_scores = (queries.index_select(0, batch.pair_centers.to(self._device)) * near).sum(dim=1)
        random_scores = queries @ random.T
        near_loss = functional.softplus(-near_scores).sum()
        random_loss = functional.softplus(random_scores).mean(dim=1).sum() * NEGATIVES_WEIGHT
        return (near_loss + random_loss) / batch.centers.numel()

    def _insert_cold_rows(self, count: int, seed: int) -> None:
        if count:
            bounds = np.iinfo(np.int64)
            ids = np.random.default_rng(seed).integers(bounds.min, bounds.max, size=count, endpoint=True)
            for name in (ITEMS, CONTEXTS):
                for part in torch.from_numpy(ids).split(COLD_ROWS_AT_ONCE):
                    self.tables[name].lookup(part)


def _table(name: str, dim: int, *, seed: int, device: str, cache_rows: int) -> DemoTable:
    options: dict[str, Any] = {
        "optimizer_slots": {"sum": torch.float32},
        "metadata": {"last_seen": torch.int64},
        "initializer": asyncckpt.nn.Uniform(0.5 / dim, seed=seed),
    }
    if not cache_rows:
        return asyncckpt.HashTable(name, dim, **options)
    return asyncckpt.MultiLevelTable(name, dim, cache_rows=cache_rows, device=device, **options)


def used_columns(table: DemoTable) -> dict[str, torch.Tensor]:
    """Return column -> its rows in use, `id` included; copies on the host."""
    ids = table.ids()
    return {"id": ids, **table.read(ids)}
