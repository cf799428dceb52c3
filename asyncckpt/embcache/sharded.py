"""The collections of one rank: their tables hold the ids that the rank owns, by unsigned value modulo the ranks.

Which ids go to which rank is the caller's to arrange (in TorchRec it is the input distribution's); a training forward
refuses ids of another rank. Source of the names: RecSDK (torchrec_embcache).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncckpt.embcache.ranks import which_rank
from asyncckpt.tables.emb_cache_modules import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingCollection,
    EmbCacheTableConfig,
)


class EmbCacheShardedEmbeddingBagCollection(EmbCacheEmbeddingBagCollection):
    """An EmbCacheEmbeddingBagCollection of one rank; rank and world_size come from torch.distributed, else they are
    given. Raises UsageError."""

    def __init__(
        self,
        tables: Sequence[EmbCacheTableConfig],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        is_weighted: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(tables, is_weighted=is_weighted, shard=which_rank(rank, world_size), device=device)


class EmbCacheShardedEmbeddingCollection(EmbCacheEmbeddingCollection):
    """An EmbCacheEmbeddingCollection of one rank; rank and world_size come from torch.distributed, else they are given.
    Raises UsageError."""

    def __init__(
        self,
        tables: Sequence[EmbCacheTableConfig],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(tables, shard=which_rank(rank, world_size), device=device)
