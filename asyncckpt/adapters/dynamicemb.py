"""dynamicemb (NVIDIA recsys-examples): `BatchedDynamicEmbeddingTablesV2`, tables on a GPU with or without a cache.

Experimental: tested against recorded shapes of the interface, never with the library itself; making a table warns.

Source of the interface: dynamicemb's `batched_dynamicemb_tables.py` and `key_value_table.py`. A module holds several
logical tables over shared levels: an optional write-back cache, then a storage of one level, or of two (HybridStorage:
on the device and on the host). What a cut reads, and what it must not call:

1. It reads the levels one by one, newest first; the first one that holds a key wins. `flush()` would write every cached
   row into the storage, which can grow and evict; `export_keys_values` of a HybridStorage erases keys from its host
   level; `split_embedding_weights()` returns dummies.
2. It reads values with `load_from_flat_single_table` in the table's own dtype. Its rows are the slots of the keys; but
   in tables that never evict, the scores are the rows, so the score is not state there and is not saved.
3. Timestamps count from the start of a device's clock, so they are saved as age, as in dynamicemb's own files.
4. Optimizer states are saved in the width of dynamicemb's own files, without padding.

A load empties the logical table in every level and writes its rows with `_load_key_values` (a HybridStorage: `insert`).
The cache can only be reset as a whole: rows of the module's other tables are flushed first, which keeps their values.

Not saved: the counts of an admission counter.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.adapters.export_only import ExportOnlyTable, Rows, split_columns
from asyncckpt.adapters.prefetch_stream import follow_prefetch
from asyncckpt.errors import IncompatibleError, UnsupportedError, warn
from asyncckpt.model.own_rank import own_rank
from asyncckpt.model.table import ID_COLUMN, Column, Role, TableSchema
from asyncckpt.model.table_shard import buckets_of
from asyncckpt.modules.registry import register_adapter
from asyncckpt.modules.walk import joined
from asyncckpt.native import I64, core
from asyncckpt.tables.slots import EMBEDDING_COLUMN, ID

MODULE_KIND = "dynamicemb.batched_dynamicemb_tables.BatchedDynamicEmbeddingTablesV2"
OPTIMIZER_COLUMN = "optimizer_state"
AGE_COLUMN = "age"
BATCH_ROWS = 1 << 16

# Name of a score policy -> the columns of its score words, in the order they have in memory.
SCORE_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "timestamp": (AGE_COLUMN,),
    "frequency": ("frequency",),
    "step": ("score",),
    "customized": ("score",),
    "lru_lfu": (AGE_COLUMN, "frequency"),
    "index": (),
}


class DynamicEmbTable(ExportOnlyTable):
    """One logical table of a `BatchedDynamicEmbeddingTablesV2`. Implements `Table` and `OwnsIds`.

    Make cuts and loads on the training thread and its current stream, between two steps. Raises UnsupportedError for an
    unknown storage or score policy.
    """

    def __init__(
        self, name: str, module: Any, table_id: int, *, shard: tuple[int, int] = (0, 1), replicated: bool = False
    ) -> None:
        warn("asyncckpt: saving tables of dynamicemb is experimental, and was never tested with dynamicemb itself")
        self._module = module
        self._table_id = table_id
        self._tiers = _tiers(module.tables, name)
        state = self._tiers[-1]
        self._score_columns = _score_columns(self._tiers, module.cache, name)
        self._dim = int(state.table_emb_dims_cpu[table_id])
        device = getattr(self._tiers[0], "device", None)
        schema = self._make_schema(state)
        place = None if device is None else torch.device(device)
        super().__init__(name, schema, shard=shard, replicated=replicated, device=place)

    @property
    def in_backward_of(self) -> torch.nn.Module | None:
        return self._module if isinstance(self._module, torch.nn.Module) else None

    def owned(self, ids: I64) -> NDArray[np.bool_]:
        """Return which of ids (int64 [n]) this rank holds: by the signed remainder, dynamicemb's own rule."""
        begin, end, size = buckets_of(self.shard)
        rest = ids % size
        return np.asarray((rest >= begin) & (rest < end))

    def _make_schema(self, state: Any) -> TableSchema:
        dtype = state.emb_dtype
        columns = [
            ID,
            Column(name=EMBEDDING_COLUMN, dtype=dtype, row_shape=(self._dim,), role=Role.WEIGHT),
        ]
        width = self._optimizer_width(state)
        if width:
            columns.append(Column(name=OPTIMIZER_COLUMN, dtype=dtype, row_shape=(width,), role=Role.OPTIMIZER))
        for name in self._score_columns:
            columns.append(Column(name=name, dtype=torch.int64, row_shape=(), role=Role.METADATA))
        return TableSchema(columns=tuple(columns))

    def _optimizer_width(self, state: Any) -> int:
        """Return how many elements of a row's optimizer state are saved."""
        width = int(state.table_value_dims_cpu[self._table_id]) - self._dim
        ckpt_width = getattr(state.optimizer, "get_ckpt_state_dim", None)
        # Zero means that nothing is cut off.
        return min(width, int(ckpt_width(self._dim)) or width) if ckpt_width is not None else width

    # -- export --------------------------------------------------------------------------------------------------------

    def _export(self) -> Rows:
        follow_prefetch(self._module)
        now = self._clock() if AGE_COLUMN in self._score_columns else 0
        levels = [self._module.cache._state] if self._module.cache is not None else []
        parts: list[dict[str, torch.Tensor]] = []
        for level in [*levels, *self._tiers]:
            rows = self._export_level(level, now)
            parts.append(_without_ids_of(parts, rows))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _export_level(self, state: Any, now: int) -> dict[str, torch.Tensor]:
        batches = [self._no_rows()]
        policy = state.score_policy.name
        exported = state.key_index_map._batched_export_keys_scores(
            [policy], state.device, table_id=self._table_id, batch_size=BATCH_ROWS, return_index=True
        )
        for keys, scores_by_name, slots in exported:
            scores = scores_by_name[policy]
            never_evicts = getattr(state, "no_eviction_next_index", None) is not None
            rows = (scores if never_evicts else slots).to(device=state.device, dtype=torch.int64)
            values = _library(state).load_from_flat_single_table(state, rows, self._table_id)
            saved = values[:, : self._dim + self._optimizer_width(state)]
            batch = split_columns(saved, self.schema(), (EMBEDDING_COLUMN, OPTIMIZER_COLUMN))
            batch |= self._score_batch(state, scores, slots, now)
            batches.append({ID_COLUMN: keys.to("cpu", torch.int64, copy=True), **batch})
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def _score_batch(self, state: Any, scores: torch.Tensor, slots: torch.Tensor, now: int) -> dict[str, torch.Tensor]:
        if not self._score_columns:
            return {}
        words = scores.view(-1, 1)
        if len(self._score_columns) > 1:  # Only the first word is exported with the keys.
            words = state.key_index_map.gather_score_blocks(self._table_id, slots)
        found = {}
        for index, name in enumerate(self._score_columns):
            word = words[:, index].to("cpu", torch.int64, copy=True)
            found[name] = (now - word).clamp_(min=0) if name == AGE_COLUMN else word
        return found

    def _clock(self) -> int:
        library = _library(self._tiers[-1])
        clock = getattr(library, "device_timestamp", None) or import_module("dynamicemb_extensions").device_timestamp
        return int(clock())

    # -- write back ----------------------------------------------------------------------------------------------------

    def _first_value(self, column: str) -> float:
        return float(self._tiers[-1].initial_optim_state) if column == OPTIMIZER_COLUMN else 0.0

    def _replace(self, rows: Rows) -> None:
        follow_prefetch(self._module)
        self._drop_cache()
        self._clear()
        try:
            self._write(rows)
        except BaseException:
            self._clear()
            raise

    def _drop_cache(self) -> None:
        """Drop all cached rows, after those of other tables were flushed to the storage."""
        cache = self._module.cache
        if cache is None:
            return
        others = [number for number in range(len(self._module.table_names)) if number != self._table_id]
        if any(int(cache._state.key_index_map.size(number)) for number in others):
            self._module.flush()
        self._module.reset_cache_states()

    def _clear(self) -> None:
        """Erase the table's keys from every level of the storage."""
        for state in self._tiers:
            exported = state.key_index_map._batched_export_keys_scores(
                [state.score_policy.name], state.device, table_id=self._table_id, batch_size=BATCH_ROWS
            )
            # Collect all keys first: the map must not change during the export.
            for keys in [batch[0] for batch in exported]:
                state.key_index_map.erase(keys, self._table_ids(keys))
            for next_row in ("no_eviction_next_index", "no_eviction_next_index_dev"):
                tensor = getattr(state, next_row, None)
                if tensor is not None:
                    tensor[self._table_id] = 0

    def _write(self, rows: Rows) -> None:
        count = len(rows[ID_COLUMN])
        storage = self._module.tables
        counts = torch.zeros(len(self._module.table_names), dtype=torch.int64, device="cpu")
        counts[self._table_id] = count
        if hasattr(storage, "collect_table_sizes"):
            storage.collect_table_sizes(non_blocking=False)
        storage.expand_if_need(counts)
        now = self._clock() if AGE_COLUMN in self._score_columns else 0
        for begin in range(0, count, BATCH_ROWS):
            self._write_batch({name: column[begin : begin + BATCH_ROWS] for name, column in rows.items()}, now)
        kept = sum(int(state.key_index_map.size(self._table_id)) for state in self._tiers)
        if kept != count:
            what = f"dynamicemb table {self.name!r} is too small for the checkpoint: rows were evicted"
            raise IncompatibleError(what, found=kept, expected=count, hint="give it a larger max_capacity")
        self._continue_steps(rows)

    def _write_batch(self, rows: Rows, now: int) -> None:
        state = self._tiers[0]
        keys = rows[ID_COLUMN].to(state.device)
        embeddings = rows[EMBEDDING_COLUMN].to(state.device)
        states = rows[OPTIMIZER_COLUMN].to(state.device) if OPTIMIZER_COLUMN in rows else None
        scores = self._scores(rows, now)
        scores = None if scores is None else scores.to(state.device)
        library = _library(state)
        if len(self._tiers) == 1:
            library._load_key_values(state, keys, embeddings, scores, states, self._table_id)
            return
        values = embeddings
        if states is not None:
            pad = library.pad_optimizer_states_from_checkpoint
            first = state.initial_optim_state
            padded = pad(state.optimizer, self._dim, states, first, state.emb_dtype, state.device)
            values = torch.cat([embeddings, padded], dim=1)
        # Into the device level; what does not fit there goes to the host level.
        self._module.tables.insert(keys, self._table_ids(keys), values, scores)

    def _scores(self, rows: Rows, now: int) -> torch.Tensor | None:
        words = [(now - rows[name]).clamp(min=0) if name == AGE_COLUMN else rows[name] for name in self._score_columns]
        if not words:
            return None
        return words[0] if len(words) == 1 else torch.stack(words, dim=1)

    def _continue_steps(self, rows: Rows) -> None:
        """Continue the module's step count from the newest row, so that new rows are not evicted first."""
        scores = getattr(self._module, "_scores", None)
        name = self._module.table_names[self._table_id]
        if self._tiers[-1].score_policy.name == "step" and scores is not None and len(rows["score"]):
            scores[name] = max(int(scores.get(name, 0)), int(rows["score"].max()) + 1)

    def _table_ids(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.full((len(keys),), self._table_id, dtype=torch.int64, device=keys.device)


def dynamicemb_tables(module: Any, name: str) -> Mapping[str, DynamicEmbTable]:
    """Make the tables of a `BatchedDynamicEmbeddingTablesV2`: the factory for `register_adapter`.

    Each rank's module holds the ids whose remainder modulo the number of ranks is the rank, or all of them, where it
    spreads them over one rank. Raises UnsupportedError for another distribution of ids over several ranks.
    """
    index, count = _ranks(module)
    tables = {}
    for table_id, table_name in enumerate(module.table_names):
        whole = joined(name, table_name)
        spread = getattr(module._dynamicemb_options[table_id], "dist_type", "roundrobin")
        if count > 1 and spread != "roundrobin":
            what = f"dynamicemb table {whole!r} distributes its ids over ranks in an unknown way"
            raise UnsupportedError(what, found=spread, expected="roundrobin")
        tables[whole] = DynamicEmbTable(whole, module, table_id, shard=(index, count), replicated=count == 1)
    return tables


def _ranks(module: Any) -> tuple[int, int]:
    """Return (rank, number of ranks) of a module's rows; older modules do not say, and mean all ranks."""
    rank, everyone = own_rank(None, None)
    count = int(getattr(module, "_shard_world_size", everyone))
    return (rank if count > 1 else 0), count


def _tiers(storage: Any, table: str) -> list[Any]:
    """Return the states of a storage, newest first."""
    if hasattr(storage, "_hbm") and hasattr(storage, "_host"):
        return [storage._hbm, storage._host]
    if hasattr(storage, "_state"):
        return [storage._state]
    what = f"storage of dynamicemb table {table!r} is unknown"
    raise UnsupportedError(what, found=type(storage), expected="DynamicEmbStorage or HybridStorage")


def _score_columns(tiers: list[Any], cache: Any, table: str) -> tuple[str, ...]:
    """Return the columns of the scores, which must be the same in all levels."""
    policies = [state.score_policy.name for state in tiers]
    known = SCORE_COLUMNS.get(policies[-1])
    if known == ():
        return ()
    levels = [*policies, *([cache._state.score_policy.name] if cache is not None else [])]
    if known is None or len(set(levels)) > 1:
        what = f"scores of dynamicemb table {table!r} cannot be saved"
        raise UnsupportedError(what, found=levels, expected=f"one of {[*SCORE_COLUMNS]} in all levels")
    if len(known) > 1 and len(tiers) > 1:
        raise UnsupportedError(f"dynamicemb table {table!r} has several score words in a HybridStorage")
    return known


def _without_ids_of(newer: list[dict[str, torch.Tensor]], rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = [part[ID_COLUMN].numpy() for part in newer]
    count = sum(len(part) for part in ids)
    if not count:
        return rows
    held = core.id_map(count)
    for part in ids:
        held.insert(part)
    kept = torch.from_numpy(held.find(rows[ID_COLUMN].numpy()) < 0)
    return {name: column[kept] for name, column in rows.items()}


def _library(state: Any) -> Any:
    """Return dynamicemb's module that defines the state's class, without importing the library."""
    return sys.modules[type(state).__module__]


register_adapter(MODULE_KIND, dynamicemb_tables)
