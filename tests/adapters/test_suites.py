"""Tables of fixed rows pass the contract suite: an nn.Embedding, and tables of a TBE with and without a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from asyncckpt.adapters import FixedTable, tables_of
from asyncckpt.testing import Contents, TableSuite
from tests.adapters.fake_tbe import FakeTbe, Spec


class FixedSuite(TableSuite):
    """Whoever trains keeps away from a cut; a load that fails leaves rows from before and from the checkpoint."""

    cut_kind = "caller"
    failed_load = "undefined"
    fixed_ids = True


class TestEmbedding(FixedSuite):
    """The weight of an nn.Embedding."""

    def make_table(self) -> FixedTable:
        torch.manual_seed(0)
        module = nn.Embedding(11, 4)
        (table,) = tables_of(module).values()
        table.module = module  # type: ignore[attr-defined]
        assert isinstance(table, FixedTable)
        return table

    def train(self, table: Any, step: int, seed: int) -> None:
        random = np.random.default_rng([seed, step])
        with torch.no_grad():
            for row in random.integers(0, 11, 5).tolist():
                table.module.weight[row] += torch.from_numpy(random.standard_normal(4)).float()

    def contents(self, table: Any) -> Contents:
        return {"id": table.ids().clone(), "embedding": table.module.weight.detach().clone()}


class TestHostTbe(FixedSuite):
    """A table of a TBE on the host."""

    cached = False
    dim = 3

    def make_table(self) -> FixedTable:
        # Table 0 is wider, so rows of table 1 do not fill the cache's width; features share table 1.
        specs = [Spec(6, 5, cached=self.cached), Spec(12, self.dim, cached=self.cached)]
        tbe = FakeTbe(specs, feature_table_map=[0, 1, 1], cache_sets=3)
        table = tables_of(tbe)["table_1"]
        table.tbe = tbe  # type: ignore[attr-defined]
        assert isinstance(table, FixedTable)
        return table

    def train(self, table: Any, step: int, seed: int) -> None:
        random = np.random.default_rng([seed, step])
        rows = {0: random.integers(0, 6, 2).tolist(), 1: random.integers(0, 12, 4).tolist()}
        table.tbe.train_step(step, rows)

    def contents(self, table: Any) -> Contents:
        momentum = table.tbe.split_optimizer_states()[1][0].clone()
        return {"id": table.ids().clone(), "embedding": table.tbe.rows_of(1), "momentum1": momentum}


class TestCachedTbe(TestHostTbe):
    """A table of a TBE behind its cache."""

    cached = True

    def internals(self, table: Any) -> Contents:
        return {name: tensor.detach().clone() for name, tensor in table.tbe.named_buffers()}
