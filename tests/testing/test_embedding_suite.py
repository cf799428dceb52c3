"""The adapter of torch.nn.Embedding passes the contract suite: a table whose ids are its row numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.adapters import tables_of
from asyncckpt.model.table import Table
from asyncckpt.testing import Contents, TableSuite

ROWS = 40


class EmbeddingSuite(TableSuite):
    cut_kind = "caller"
    failed_load = "undefined"
    fixed_ids = True
    device = "cpu"
    kind: Any = torch.nn.Embedding
    dtype = torch.float32

    @pytest.fixture(autouse=True)
    def _modules(self) -> None:
        self.modules: dict[int, Any] = {}

    def make_table(self) -> Table:
        module = self.kind(ROWS, 3, dtype=self.dtype, device=self.device)
        torch.nn.init.constant_(module.weight, 0.5)
        (table,) = tables_of(torch.nn.Sequential(module)).values()
        self.modules[id(table)] = (module, table)
        return table

    def train(self, table: Any, step: int, seed: int) -> None:
        random = np.random.default_rng([seed, step])
        rows = torch.from_numpy(np.unique(random.integers(0, ROWS, size=10)))
        values = torch.from_numpy(random.standard_normal((len(rows), 3))).to(self.device, self.dtype)
        with torch.no_grad():
            self.modules[id(table)][0].weight[rows] = values

    def contents(self, table: Any) -> Contents:
        return {"id": torch.arange(ROWS), "embedding": self.modules[id(table)][0].weight}


class TestEmbedding(EmbeddingSuite):
    pass


class TestEmbeddingBag(EmbeddingSuite):
    kind = torch.nn.EmbeddingBag


class TestEmbeddingOfHalves(EmbeddingSuite):
    dtype = torch.bfloat16
