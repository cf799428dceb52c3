"""torch modules over several multi-level tables: EmbCacheEmbeddingBagCollection and EmbCacheEmbeddingCollection.

A collection maps features to tables, as TorchRec's EmbeddingBagCollection and EmbeddingCollection do; several features
may share a table, and a feature may be in several tables: its rows of each are then named `<feature>@<table>`. A batch
is a KeyedJaggedTensor, or feature -> (values, offsets): see jagged_batch.py.

All features of a table share one lookup, so that an id counts once per batch for admission, and the cache sees all rows
of the batch at once.

Source of the interface: TorchRec `EmbeddingBagCollection`, `EmbeddingCollection`; the names are those of RecSDK
(torchrec_embcache).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Literal, NamedTuple, SupportsIndex

import torch
from torch import nn

from asyncckpt.errors import UsageError, must_be
from asyncckpt.model.table import Table
from asyncckpt.tables.candidates import CANDIDATES_MAX
from asyncckpt.tables.embedding import HashEmbedding, HashEmbeddingBag
from asyncckpt.tables.initializer import Initializer
from asyncckpt.tables.jagged_batch import feature_of, joined_offsets, joined_weights
from asyncckpt.tables.multi_level import MultiLevelTable
from asyncckpt.tables.noted_tables import note_tables
from asyncckpt.tables.row_device import sent
from asyncckpt.tables.slots import SlotSpec
from asyncckpt.tables.table_arguments import check_name

POOLINGS = ("sum", "mean")


@dataclass(frozen=True)
class EmbCacheTableConfig:
    """One table of a collection: its features, and the arguments of its MultiLevelTable.

    pooling: how an EmbCacheEmbeddingBagCollection combines the rows of a sample, "sum" or "mean"; the other collection
    ignores it. Raises UsageError for wrong names and poolings; the table checks the other arguments.
    """

    name: str
    dim: int
    feature_names: Sequence[str]
    cache_rows: int
    pooling: str = "sum"
    dtype: torch.dtype = torch.float32
    optimizer_slots: Mapping[str, SlotSpec] | None = None
    metadata: Mapping[str, SlotSpec] | None = None
    initializer: Initializer = None
    policy: Literal["lru", "lfu"] = "lru"
    admit_after: int = 1
    candidates_max: int = CANDIDATES_MAX
    capacity: int = 1024
    undo_bytes_max: int = 256 << 20
    pin_host_memory: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)
        names = self.feature_names
        is_sequence = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_sequence or not names or not all(isinstance(name, str) and name for name in names):
            raise must_be(f"feature_names of table {self.name!r}", "a sequence of at least one non-empty str", names)
        if self.pooling not in POOLINGS:
            raise must_be(f"pooling of table {self.name!r}", POOLINGS, self.pooling)

    def new_table(self, *, shard: tuple[int, int], device: torch.device | str) -> MultiLevelTable:
        """Make the table with its cache level on `device`. Raises UsageError like MultiLevelTable."""
        names = {field.name for field in fields(self)} - {"feature_names", "pooling"}
        return MultiLevelTable(**{name: getattr(self, name) for name in names}, shard=shard, device=device)


class JaggedRows(NamedTuple):
    """The rows of one feature: values `[n, dim]` of all samples, and offsets, int64 [batch + 1], of the samples."""

    values: torch.Tensor
    offsets: torch.Tensor


@dataclass(frozen=True)
class PooledRows:
    """Pooled rows by key, with the methods of TorchRec's KeyedTensor: `[batch, dim]` for each key.

    A key is a feature, or `<feature>@<table>` for a feature of several tables; keys are in the order of the configs.
    """

    by_key: Mapping[str, torch.Tensor]

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_key)

    def keys(self) -> list[str]:
        return list(self.by_key)

    def values(self) -> torch.Tensor:
        """Return the rows of all keys side by side, `[batch, sum of dims]`. Raises UsageError for unequal batches."""
        sizes = {key: len(rows) for key, rows in self.by_key.items()}
        if len(set(sizes.values())) > 1:
            raise UsageError("features have different numbers of samples", found=sizes, hint="take them one by one")
        return torch.cat(list(self.by_key.values()), dim=1)

    def length_per_key(self) -> list[int]:
        """Return the dim of every key."""
        return [rows.shape[1] for rows in self.by_key.values()]

    def offset_per_key(self) -> list[int]:
        """Return where each key begins in a row of `values()`, and where the last one ends."""
        return [0, *accumulate(self.length_per_key())]

    def to_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.by_key)


class EmbCacheCollection(nn.Module):
    """What both collections share. Made by their constructors only.

    tables are the configs; shard is (index, count): every table holds the ids whose unsigned value modulo count is
    index, and a training forward refuses other ids. device is that of the cache levels.
    """

    def __init__(
        self,
        tables: Sequence[EmbCacheTableConfig],
        *,
        shard: tuple[int, int] = (0, 1),
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.configs = _checked_configs(tables)
        self._keys = _keys_of(self.configs)
        # A list, not a ModuleDict: torch refuses some names of tables, for example those with a dot.
        self.embeddings = nn.ModuleList(
            self._new_embedding(config, config.new_table(shard=shard, device=device)) for config in self.configs
        )

    def tables(self) -> dict[str, MultiLevelTable]:
        """Return the tables by name, in the order of the configs."""
        return {module.table.name: module.table for module in self._modules_in_order()}  # type: ignore[misc]

    def saved_tables(self) -> dict[str, Table]:
        """Return everything that one checkpoint of this collection holds: the tables, and their companions as
        `<table>.<suffix>`."""
        saved: dict[str, Table] = {}
        for name, table in self.tables().items():
            saved[name] = table
            saved.update({f"{name}.{suffix}": companion for suffix, companion in table.companions().items()})
        return saved

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        note_tables(destination, prefix, self.tables())

    @property
    def step(self) -> int | None:
        """The step that training forwards stamp on the rows they read, where a table has a `last_seen` column.

        Counted from 1, like HashEmbedding.step. None, as it is to begin with: they stamp nothing.
        """
        return self._modules_in_order()[0].step

    @step.setter
    def step(self, step: SupportsIndex | None) -> None:
        for module in self._modules_in_order():
            module.step = step

    def prefetch(self, batch: Any) -> int:
        """Bring the known ids of a coming batch into the caches and return how many rows came.

        Only a hint: it changes nothing that training computes or a checkpoint holds. Raises UsageError for a batch that
        forward refuses.
        """
        count = 0
        for config, module in zip(self.configs, self._modules_in_order(), strict=True):
            parts = [feature_of(batch, name, weighted=False) for name in config.feature_names]
            table: Any = module.table
            count += table.prefetch(torch.cat([part.values for part in parts]))
        return count

    def _modules_in_order(self) -> list[HashEmbedding]:
        return list(self.embeddings)  # type: ignore[arg-type]

    def _new_embedding(self, config: EmbCacheTableConfig, table: MultiLevelTable) -> HashEmbedding:
        raise NotImplementedError


class EmbCacheEmbeddingBagCollection(EmbCacheCollection):
    """Pooled rows per feature.

    is_weighted: the batch must be a KeyedJaggedTensor with weights, and every table must pool by "sum". Otherwise the
    weights of a batch are ignored, as in TorchRec.
    """

    def __init__(
        self,
        tables: Sequence[EmbCacheTableConfig],
        *,
        is_weighted: bool = False,
        shard: tuple[int, int] = (0, 1),
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(tables, shard=shard, device=device)
        self.is_weighted = is_weighted
        wrong = [config.name for config in self.configs if is_weighted and config.pooling != "sum"]
        if wrong:
            raise UsageError("weights need tables that pool by 'sum'", found=wrong)

    def forward(self, batch: Any) -> PooledRows:
        """Return pooled rows, `[batch, dim]` of each key, in the order of the configs. Raises UsageError for a wrong
        batch."""
        pooled: dict[str, torch.Tensor] = {}
        for config, keys, module in zip(self.configs, self._keys, self._modules_in_order(), strict=True):
            parts = [feature_of(batch, name, weighted=self.is_weighted) for name in config.feature_names]
            weights = joined_weights(parts) if self.is_weighted else None
            offsets = sent(joined_offsets(parts), module.table.device)
            rows = module(torch.cat([part.values for part in parts]), offsets, weights)
            pooled.update(zip(keys, rows.split([len(part.offsets) - 1 for part in parts]), strict=True))
        return PooledRows(pooled)

    def _new_embedding(self, config: EmbCacheTableConfig, table: MultiLevelTable) -> HashEmbedding:
        return HashEmbeddingBag(table, mode=config.pooling, include_last_offset=True)


class EmbCacheEmbeddingCollection(EmbCacheCollection):
    """Rows per feature, one for each id, as in sequence models."""

    def forward(self, batch: Any) -> dict[str, JaggedRows]:
        """Return key -> (rows `[n, dim]`, offsets int64 [batch + 1]), in the order of the configs, with the keys of
        PooledRows. Raises UsageError for a wrong batch."""
        found: dict[str, JaggedRows] = {}
        for config, keys, module in zip(self.configs, self._keys, self._modules_in_order(), strict=True):
            parts = [feature_of(batch, name, weighted=False) for name in config.feature_names]
            rows = module(torch.cat([part.values for part in parts])).split([len(part.values) for part in parts])
            for key, part, own in zip(keys, parts, rows, strict=True):
                found[key] = JaggedRows(values=own, offsets=sent(part.offsets, own.device))
        return found

    def _new_embedding(self, config: EmbCacheTableConfig, table: MultiLevelTable) -> HashEmbedding:
        return HashEmbedding(table)


def _checked_configs(tables: object) -> tuple[EmbCacheTableConfig, ...]:
    if not isinstance(tables, Sequence) or not tables:
        raise must_be("tables of a collection", "a list of at least one EmbCacheTableConfig", tables)
    names: set[str] = set()
    for config in tables:
        if not isinstance(config, EmbCacheTableConfig):
            raise must_be("table of a collection", EmbCacheTableConfig, type(config))
        if config.name in names:
            raise UsageError("two tables of a collection have one name", found=config.name)
        names.add(config.name)
        if len(set(config.feature_names)) < len(config.feature_names):
            raise UsageError(f"table {config.name!r} has a feature twice", found=config.feature_names)
    return tuple(tables)


def _keys_of(configs: Sequence[EmbCacheTableConfig]) -> list[list[str]]:
    """Return what the rows of the features of every table are named in an output, all different, as TorchRec does."""
    uses = Counter(feature for config in configs for feature in config.feature_names)
    keys = [
        [f"{feature}@{config.name}" if uses[feature] > 1 else feature for feature in config.feature_names]
        for config in configs
    ]
    taken = [key for key, count in Counter(key for own in keys for key in own).items() if count > 1]
    if taken:
        what = "feature of a collection is named as another one of several tables is in the output"
        raise UsageError(what, found=taken, hint="give it another name")
    return keys
