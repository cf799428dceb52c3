"""Collections of TorchRec by their recorded shape; tests/torchrec runs the real ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.adapters import FixedTable, dense_state_of, tables_of
from asyncckpt.adapters.torchrec import PLAIN_COLLECTIONS, SHARDED_COLLECTIONS
from asyncckpt.errors import UnsupportedError, UsageError
from tests.adapters.fake_tbe import FakeTbe, Spec
from tests.worlds.saves import save_one


def named(qualified: str, base: type) -> type:
    """A subclass of base under the qualified name of a class of a library that is not there."""
    module, _, name = qualified.rpartition(".")
    return type(name, (base,), {"__module__": module})


@dataclass
class Shard:
    shard_offsets: list[int]
    shard_sizes: list[int]


@dataclass
class TableConfig:
    """ShardedEmbeddingTable: a table, and what of it is here."""

    name: str
    num_embeddings: int
    embedding_dim: int
    local_cols: int
    local_metadata: Shard | None


def config(name: str, rows: int, dim: int, shard: tuple[int, int, int, int] | None) -> TableConfig:
    """shard is (row, column, rows, columns)."""
    if shard is None:
        return TableConfig(name, rows, dim, dim, None)
    row, column, local_rows, local_cols = shard
    return TableConfig(name, rows, dim, local_cols, Shard([row, column], [local_rows, local_cols]))


class Kernel(nn.Module):
    def __init__(self, configs: list[TableConfig], tbe: nn.Module | None = None) -> None:
        super().__init__()
        specs = [
            Spec(c.local_metadata.shard_sizes[0] if c.local_metadata else c.num_embeddings, c.local_cols)
            for c in configs
        ]
        self._config = type("GroupedEmbeddingConfig", (), {"embedding_tables": configs})()
        self._emb_module = tbe if tbe is not None else FakeTbe(specs)


class Kernels(nn.Module):
    def __init__(self, *kernels: Kernel) -> None:
        super().__init__()
        self._emb_modules = nn.ModuleList(kernels)


class Sharded(nn.Module):
    """Parameters by table, as TorchRec registers them, and lookups that are no children."""

    def __init__(self, *lookups: nn.Module) -> None:
        super().__init__()
        self._lookups = list(lookups)
        self.embedding_bags = nn.ModuleDict()
        for lookup in lookups:
            inner = getattr(lookup, "module", lookup)
            for kernel in getattr(inner, "_emb_modules", []):
                tables = kernel._config.embedding_tables
                for table, weight in zip(tables, kernel._emb_module.split_embedding_weights(), strict=False):
                    bag = nn.Module()
                    bag.register_parameter("weight", nn.Parameter(weight))
                    self.embedding_bags[f"{table.name}"] = bag


def sharded(*lookups: nn.Module, kind: int = 0) -> nn.Module:
    found: nn.Module = named(SHARDED_COLLECTIONS[kind], Sharded)(*lookups)
    return found


def ids_of(table: Any) -> tuple[int, int]:
    assert isinstance(table, FixedTable)
    return table.first_id, table.first_id + len(table)


@pytest.mark.parametrize("kind", [0, 1], ids=["bags", "rows"])
def test_names_and_ids_say_what_is_here(kind: int) -> None:
    table_wise = Kernel([config("t1", 10, 4, (0, 0, 10, 4)), config("t2", 7, 4, (0, 0, 7, 4))])
    row_wise = Kernel([config("t3", 11, 4, (6, 0, 5, 4))])
    column_wise = Kernel([config("t4", 9, 8, (0, 0, 9, 4)), config("t4", 9, 8, (0, 4, 9, 4))])
    grid = Kernel([config("t5", 8, 8, (4, 4, 4, 4))])
    replicated = nn.DataParallel(Kernels(Kernel([config("t6", 3, 2, None)])))
    model = nn.ModuleDict(
        {"ebc": sharded(Kernels(table_wise, row_wise), Kernels(column_wise, grid), Kernels(), replicated, kind=kind)}
    )
    assert {name: ids_of(table) for name, table in tables_of(model).items()} == {
        "ebc.t1": (0, 10),
        "ebc.t2": (0, 7),
        "ebc.t3": (6, 11),
        "ebc.t4.columns_0": (0, 9),
        "ebc.t4.columns_4": (0, 9),
        "ebc.t5.columns_4": (4, 8),
        "ebc.t6": (0, 3),
    }
    # Weights are parameters of children too; they are saved as tables, and only as tables.
    assert list(dense_state_of(model)["module"].state_dict()) == [f"ebc.kernel_{number}.iter" for number in range(5)]


def test_a_row_wise_shard_takes_its_rows_from_a_whole_table(tmp_path: Path) -> None:
    whole = sharded(Kernels(Kernel([config("t3", 11, 4, (0, 0, 11, 4))])))
    save_one(tmp_path, hashtables=whole)
    parts = [sharded(Kernels(Kernel([config("t3", 11, 4, (row, 0, rows, 4))]))) for row, rows in ((0, 6), (6, 5))]
    for part in parts:
        part._lookups[0]._emb_modules[0]._emb_module.weights_host.data.zero_()
        asyncckpt.Loader(tmp_path, part).load()
    found = [part._lookups[0]._emb_modules[0]._emb_module.rows_of(0) for part in parts]
    assert torch.equal(torch.cat(found), whole._lookups[0]._emb_modules[0]._emb_module.rows_of(0))


def test_kernels_without_rows_in_memory_are_refused() -> None:
    ssd = type("SSDTableBatchedEmbeddingBags", (nn.Module,), {})()
    ssd.split_embedding_weights = lambda: []
    with pytest.raises(UnsupportedError, match=r"kernel of tables \['ebc.t1'\] is not supported, found a SSD"):
        tables_of(nn.ModuleDict({"ebc": sharded(Kernels(Kernel([config("t1", 3, 2, None)], tbe=ssd)))}))
    with pytest.raises(UnsupportedError, match="a lookup of a sharded module has no kernels, found a Linear"):
        tables_of(sharded(nn.Linear(1, 1)))


def test_one_name_in_two_kernels_is_refused() -> None:
    kernels = [Kernel([config("t1", 3, 2, None)]) for _ in range(2)]
    with pytest.raises(UsageError, match=r"two kernels of sharded module 'ebc' hold a table 'ebc.t1'"):
        tables_of(nn.ModuleDict({"ebc": sharded(Kernels(*kernels))}))


class Bags(nn.Module):
    def __init__(self, holder: str) -> None:
        super().__init__()
        setattr(self, holder, nn.ModuleDict({"t1": nn.EmbeddingBag(5, 2), "t2": nn.EmbeddingBag(3, 4)}))
        self.register_buffer("extra", torch.ones(2))


@pytest.mark.parametrize(("qualified", "holder"), PLAIN_COLLECTIONS.items(), ids=["bags", "rows"])
def test_plain_collections(tmp_path: Path, qualified: str, holder: str) -> None:
    kind = named(qualified, Bags)
    model, fresh = nn.Sequential(nn.Linear(2, 2), kind(holder)), nn.Sequential(nn.Linear(2, 2), kind(holder))
    assert list(tables_of(model)) == ["1.t1", "1.t2"]
    assert list(tables_of(model[1])) == ["t1", "t2"]
    assert list(dense_state_of(model)["module"].state_dict()) == ["0.weight", "0.bias", "1.extra"]
    save_one(tmp_path, staged=True, hashtables=model, tensors={"model": dense_state_of(model)})
    asyncckpt.Loader(tmp_path, fresh, {"model": dense_state_of(fresh)}).load()
    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
