"""Adapter for FBGEMM's table batched embeddings (TBE): SplitTableBatchedEmbeddingBagsCodegen.

One TBE holds many tables, their rows and the states of its fused optimizer. `split_embedding_weights()` and
`split_optimizer_states()` give views of the live memory by table, which are the columns `embedding`, `momentum1`,
`momentum2`, on the host, on a device and in managed memory alike. Tables behind a device cache are overlaid (see
fbgemm_cache.py). dense_state_of saves the iteration counters. The learning rate and the other arguments of the
optimizer are not state: they come from the constructor, or from a scheduler.

Source of the interface: fbgemm_gpu 1.8.0, detected by attributes, without importing it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from asyncckpt.adapters.fbgemm_cache import CachedTable, TbeCache
from asyncckpt.adapters.lookup_hooks import marks_of_table
from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.model.table import Table
from asyncckpt.modules.fixed_table import FixedTable
from asyncckpt.modules.registry import is_kind, register_adapter
from asyncckpt.modules.walk import joined
from asyncckpt.tables.slots import EMBEDDING_COLUMN

MODULE = "fbgemm_gpu.split_table_batched_embeddings_ops_training"
SPLIT_TBE = f"{MODULE}.SplitTableBatchedEmbeddingBagsCodegen"
DENSE_TBE = f"{MODULE}.DenseTableBatchedEmbeddingBagsCodegen"
KEY_VALUE_TBE = "fbgemm_gpu.tbe.ssd.training.SSDTableBatchedEmbeddingBags"

NO_OPTIMIZER = "none"  # The value of OptimType.NONE.
ADAM = "adam"  # The value of OptimType.ADAM.
COUNTERS = ("iter", "iter_cpu", "max_counter")
_MEMORIES = tuple(
    f"{state}_{place}"
    for state in ("weights", "momentum1", "momentum2", "prev_iter", "row_counter")
    for place in ("dev", "host", "uvm")
)


@dataclass(frozen=True)
class TablePlace:
    """The name of a table of a TBE, the id of its first row, and the rows of all parts (None: it is the only one)."""

    name: str
    first_id: int = 0
    ids_end: int | None = None


def tbe_tables(tbe: Any, places: Sequence[TablePlace]) -> dict[str, Table]:
    """Return the tables of a TBE in its order, one per place. Raises UnsupportedError, UsageError for equal names."""
    if not is_kind(tbe, frozenset((SPLIT_TBE, DENSE_TBE))):
        shown = [place.name for place in places]
        what = f"the embedding kernel of tables {shown} is not supported"
        raise UnsupportedError(what, found=type(tbe), expected="a split or dense table batched embedding")
    views = _TbeViews(tbe)
    if len(views) != len(places):
        raise UnsupportedError("a TBE holds another number of tables than it has names", found=len(views))
    cache = TbeCache.of(tbe, weights=views.weights)
    tables: dict[str, Table] = {}
    for index, place in enumerate(places):
        if place.name in tables:
            raise UsageError(f"a TBE holds two tables with the name {place.name!r}")
        tables[place.name] = _table(tbe, views, cache, index, place)
    return tables


def is_fused(tbe: Any) -> bool:
    """Return whether a TBE has an optimizer of its own, which changes rows in the backward."""
    return bool(getattr(getattr(tbe, "optimizer", None), "value", NO_OPTIMIZER) != NO_OPTIMIZER)


def tbe_counters(tbe: Any) -> dict[str, torch.Tensor]:
    """Return the counters that a TBE's optimizer needs besides the rows; its state dict lacks some of them."""
    found = {name: getattr(tbe, name, None) for name in COUNTERS}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def split_tbe_tables(tbe: Any, name: str) -> Mapping[str, Table]:
    """Return the tables of a TBE outside of a collection, named by its `table_names`, else `table_<index>`."""
    count = len(tbe.embedding_specs)
    given = list(getattr(tbe, "table_names", None) or [])
    names = given if len(given) == count else [f"table_{index}" for index in range(count)]
    return tbe_tables(tbe, [TablePlace(joined(name, table)) for table in names])


def refuse_key_value_tbe(tbe: Any, name: str) -> Mapping[str, Table]:
    """Refuse a TBE over an SSD or a key-value store: one cut cannot get its rows."""
    raise UnsupportedError(f"module {name!r} keeps its rows in a key-value store", found=type(tbe))


class _TbeViews:
    """Views of all tables of a TBE, made once, because that takes a call over all tables."""

    def __init__(self, tbe: Any) -> None:
        self._tbe = tbe
        self.weights: list[torch.Tensor] = list(tbe.split_embedding_weights())
        self._states = _states_by_table(tbe, tables_count=len(self.weights))
        self._addresses = self._live_addresses()

    def __len__(self) -> int:
        return len(self.weights)

    def columns(self, index: int) -> dict[str, torch.Tensor]:
        """Return the columns of a table. Raises UsageError if the TBE has other memory now."""
        if self._live_addresses() != self._addresses:
            raise UsageError("a TBE has moved since its tables were made", hint="call tables_of again")
        return {EMBEDDING_COLUMN: self.weights[index], **self._states[index]}

    def _live_addresses(self) -> list[int]:
        memories = [getattr(self._tbe, name, None) for name in _MEMORIES]
        return [memory.data_ptr() for memory in memories if isinstance(memory, torch.Tensor)]


def _table(tbe: Any, views: _TbeViews, cache: TbeCache, index: int, place: TablePlace) -> Table:
    kind = partial(CachedTable, cache=cache, index=index) if cache.holds(index) else FixedTable
    live, marks = partial(views.columns, index), partial(marks_of_table, tbe, index)
    fused = tbe if is_fused(tbe) else None
    return kind(place.name, live, first_id=place.first_id, ids_end=place.ids_end, marks=marks, in_backward_of=fused)


def _states_by_table(tbe: Any, *, tables_count: int) -> list[dict[str, torch.Tensor]]:
    """Return the optimizer states of every table by name. For plain SGD, FBGEMM returns no list per table."""
    none: list[dict[str, torch.Tensor]] = [{} for _ in range(tables_count)]
    if not is_fused(tbe) or not hasattr(tbe, "split_optimizer_states"):
        return none
    states = list(tbe.split_optimizer_states())
    if not states:
        return none
    if len(states) != tables_count:
        raise UnsupportedError("a TBE has optimizer states of another number of tables", found=len(states))
    names = _state_names(tbe, count=len(states[0]))
    return [dict(zip(names, of_table, strict=True)) for of_table in states]


def _state_names(tbe: Any, *, count: int) -> list[str]:
    """Return the names of one table's states, in the order of split_optimizer_states(): row-wise ones come last."""
    has_counter = getattr(tbe, "_used_rowwise_adagrad_with_counter", False)
    by_row = []
    if has_counter or getattr(tbe, "_used_rowwise_adagrad_with_global_weight_decay", False):
        by_row.append("prev_iter")
    if has_counter or (tbe.optimizer.value == ADAM and getattr(tbe, "use_rowwise_bias_correction", False)):
        by_row.append("row_counter")
    return [*(f"momentum{number + 1}" for number in range(count - len(by_row))), *by_row]


register_adapter(SPLIT_TBE, split_tbe_tables, rest=tbe_counters)
register_adapter(KEY_VALUE_TBE, refuse_key_value_tbe)
