"""Adapters for TorchRec's embedding collections: plain ones, and sharded ones under DistributedModelParallel.

A plain EmbeddingBagCollection or EmbeddingCollection holds one nn.EmbeddingBag or nn.Embedding a table. A sharded one
holds, per sharding type, lookups with FBGEMM kernels: `_lookups[*]._emb_modules[*]`, each with a TBE in `_emb_module`
and its tables, in the same order, in `_config.embedding_tables`. These are the tables of this rank; the TBE's views are
the live memory, including fused optimizer states.

Ids are row numbers of the whole table, and a table keeps its own name if its rows have all columns:

    table-wise, data parallel   `t1`, all rows
    row-wise                    `t1`, the rows from shard_offsets[0]; a load takes these rows from any other sharding
    column-wise                 `t1.columns_<shard_offsets[1]>`, all rows, some of the columns
    table-row-wise, grid        both of the above

A managed collision (ZCH) module maps raw ids to row numbers; dense_state_of saves the map's tensors, see zch.py.

Source of the interface: torchrec 1.8.0, detected by attributes, without importing it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from asyncckpt.adapters.fbgemm import TablePlace, tbe_counters, tbe_tables
from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.model.table import Table
from asyncckpt.modules.embeddings import has_own_weight, own_weight, rest_besides, weight_table
from asyncckpt.modules.registry import register_adapter
from asyncckpt.modules.walk import joined, unwrapped

PLAIN_COLLECTIONS = {
    "torchrec.modules.embedding_modules.EmbeddingBagCollection": "embedding_bags",
    "torchrec.modules.embedding_modules.EmbeddingCollection": "embeddings",
}
SHARDED_COLLECTIONS = (
    "torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection",
    "torchrec.distributed.embedding.ShardedEmbeddingCollection",
)


def sharded_tables(collection: Any, name: str) -> Mapping[str, Table]:
    """Return this rank's tables of a sharded collection. Raises UnsupportedError for kernels without rows in memory."""
    tables: dict[str, Table] = {}
    for kernel in kernels_of(collection):
        places = [_place(config, name) for config in kernel._config.embedding_tables]
        for table_name, table in tbe_tables(kernel._emb_module, places).items():
            if table_name in tables:
                raise UsageError(f"two kernels of sharded module {name!r} hold a table {table_name!r}")
            tables[table_name] = table
    return tables


def sharded_rest(collection: Any) -> Mapping[str, torch.Tensor]:
    """Return the counters of the fused optimizers, one set per kernel."""
    return {
        f"kernel_{number}.{counter}": tensor
        for number, kernel in enumerate(kernels_of(collection))
        for counter, tensor in tbe_counters(kernel._emb_module).items()
    }


class PlainCollection:
    """The adapter for a plain collection, whose tables are the children of its attribute `holder`."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    def tables(self, collection: torch.nn.Module, name: str) -> Mapping[str, Table]:
        """Return one table for every embedding, its weight."""
        return {
            joined(name, table): weight_table(joined(name, table), module)
            for table, module in self._embeddings(collection)
        }

    def rest(self, collection: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        """Return what a subclass adds."""
        return rest_besides(collection, [own_weight(module) for _, module in self._embeddings(collection)])

    def _embeddings(self, collection: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        children = getattr(collection, self._holder).named_children()
        return ((name, module) for name, module in children if has_own_weight(module))


def kernels_of(collection: Any) -> Iterator[Any]:
    """Yield the FBGEMM kernels of a sharded collection. Raises UnsupportedError for a lookup without any."""
    for lookup in collection._lookups:
        # Lookups of data parallel tables are wrapped in DistributedDataParallel.
        inner: Any = unwrapped(lookup)
        if not hasattr(inner, "_emb_modules"):
            raise UnsupportedError("a lookup of a sharded module has no kernels", found=type(inner))
        yield from inner._emb_modules


def _place(config: Any, name: str) -> TablePlace:
    row, column = _offsets(config)
    own_name = joined(name, config.name)
    if int(config.local_cols) != int(config.embedding_dim):
        own_name = f"{own_name}.columns_{column}"
    return TablePlace(name=own_name, first_id=row, ids_end=int(config.num_embeddings))


def _offsets(config: Any) -> tuple[int, int]:
    metadata = config.local_metadata
    if metadata is None:
        return 0, 0  # Every rank holds the whole table.
    row, *columns = metadata.shard_offsets
    return int(row), int(columns[0]) if columns else 0


for _kind, _holder in PLAIN_COLLECTIONS.items():
    _plain = PlainCollection(_holder)
    register_adapter(_kind, _plain.tables, rest=_plain.rest)
for _kind in SHARDED_COLLECTIONS:
    register_adapter(_kind, sharded_tables, rest=sharded_rest)
