"""torch modules over several multi-level tables: EmbCacheEmbeddingBagCollection and EmbCacheEmbeddingCollection.

A collection maps features to tables, as TorchRec's EmbeddingBagCollection and EmbeddingCollection do; several features
may share a table. A batch is a KeyedJaggedTensor, or feature -> (values, offsets): see jagged_batch.py.

All features of a table share one lookup, so that an id counts once per batch for admission, and the cache sees all rows
of the batch at once.

Source of the interface: TorchRec `EmbeddingBagCollection`, `EmbeddingCollection`; the names are those of RecSDK
(torchrec_embcache).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from asyncckpt.errors import UsageError
from asyncckpt.model.table import Table
from asyncckpt.tables.candidates import CANDIDATES_MAX
from asyncckpt.tables.embedding import HashEmbedding, HashEmbeddingBag
from asyncckpt.tables.initializer import Initializer
from asyncckpt.tables.jagged_batch import feature_of, joined_offsets, joined_weights
from asyncckpt.tables.multi_level import MultiLevelTable
from asyncckpt.tables.row_device import sent
from asyncckpt.tables.slots import SlotSpec

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
        if not isinstance(self.name, str) or not self.name or "@" in self.name:
            raise UsageError("name of a table is wrong", found=self.name, expected="a non-empty str without '@'")
        names = self.feature_names
        is_sequence = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_sequence or not names or not all(isinstance(name, str) and name for name in names):
            expected = "a sequence of at least one non-empty str"
            raise UsageError(f"feature_names of table {self.name!r} are wrong", found=names, expected=expected)
        if self.pooling not in POOLINGS:
            raise UsageError(f"pooling of table {self.name!r} is wrong", found=self.pooling, expected=POOLINGS)

    def new_table(self, *, shard: tuple[int, int], device: torch.device | str) -> MultiLevelTable:
        """Make the table with its cache level on `device`. Raises UsageError like MultiLevelTable."""
        names = {field.name for field in fields(self)} - {"feature_names", "pooling"}
        return MultiLevelTable(**{name: getattr(self, name) for name in names}, shard=shard, device=device)


class JaggedRows(NamedTuple):
    """The rows of one feature: values `[n, dim]` of all samples, and offsets, int64 [batch + 1], of the samples."""

    values: torch.Tensor
    offsets: torch.Tensor


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

    @property
    def step(self) -> int | None:
        """The step that training forwards stamp on the rows they read, where a table has a `last_seen` column.

        None, as it is to begin with: they stamp nothing.
        """
        return self._modules_in_order()[0].step

    @step.setter
    def step(self, step: int | None) -> None:
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

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        """Return feature -> `[batch, dim]`, in the order of the configs. Raises UsageError for a wrong batch."""
        pooled: dict[str, torch.Tensor] = {}
        for config, module in zip(self.configs, self._modules_in_order(), strict=True):
            parts = [feature_of(batch, name, weighted=self.is_weighted) for name in config.feature_names]
            weights = joined_weights(parts) if self.is_weighted else None
            offsets = sent(joined_offsets(parts), module.table.device)
            rows = module(torch.cat([part.values for part in parts]), offsets, weights)
            pooled.update(zip(config.feature_names, rows.split([len(part.offsets) - 1 for part in parts]), strict=True))
        return pooled

    def _new_embedding(self, config: EmbCacheTableConfig, table: MultiLevelTable) -> HashEmbedding:
        return HashEmbeddingBag(table, mode=config.pooling, include_last_offset=True)


class EmbCacheEmbeddingCollection(EmbCacheCollection):
    """Rows per feature, one for each id, as in sequence models."""

    def forward(self, batch: Any) -> dict[str, JaggedRows]:
        """Return feature -> (rows `[n, dim]`, offsets int64 [batch + 1]), in the order of the configs.

        Raises UsageError for a wrong batch.
        """
        found: dict[str, JaggedRows] = {}
        for config, module in zip(self.configs, self._modules_in_order(), strict=True):
            parts = [feature_of(batch, name, weighted=False) for name in config.feature_names]
            rows = module(torch.cat([part.values for part in parts])).split([len(part.values) for part in parts])
            for name, part, own in zip(config.feature_names, parts, rows, strict=True):
                found[name] = JaggedRows(values=own, offsets=sent(part.offsets, own.device))
        return found

    def _new_embedding(self, config: EmbCacheTableConfig, table: MultiLevelTable) -> HashEmbedding:
        return HashEmbedding(table)


def _checked_configs(tables: object) -> tuple[EmbCacheTableConfig, ...]:
    if not isinstance(tables, Sequence) or not tables:
        raise UsageError("tables of a collection are wrong", found=tables, expected="at least one EmbCacheTableConfig")
    names: set[str] = set()
    owners: dict[str, str] = {}
    for config in tables:
        if not isinstance(config, EmbCacheTableConfig):
            raise UsageError("table of a collection is wrong", found=type(config), expected=EmbCacheTableConfig)
        if config.name in names:
            raise UsageError("two tables of a collection have one name", found=config.name)
        names.add(config.name)
        for feature in config.feature_names:
            if feature in owners:
                what = f"feature {feature!r} of table {config.name!r} is taken by table {owners[feature]!r}"
                raise UsageError(what, hint="a feature belongs to one table; give it a second name")
            owners[feature] = config.name
    return tuple(tables)
