"""Multi-level tables in the shape of RecSDK (torchrec_embcache): collections, and a Saver that finds them in a model.

from asyncckpt.embcache import Saver

saver = Saver()                              # the rank comes from torch.distributed
saver.save(model, "save_dir/sparse")         # or save_async: training goes on at once
saver.load(model, "save_dir/sparse")         # also what RecSDK wrote
"""

from asyncckpt.embcache.load_ranks import SparseLoadReport
from asyncckpt.embcache.path_rules import PathRules
from asyncckpt.embcache.saver import Saver
from asyncckpt.embcache.sharded import EmbCacheShardedEmbeddingBagCollection, EmbCacheShardedEmbeddingCollection
from asyncckpt.tables.emb_cache_modules import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingCollection,
    EmbCacheTableConfig,
    JaggedRows,
    PooledRows,
)

__all__ = [
    "EmbCacheEmbeddingBagCollection",
    "EmbCacheEmbeddingCollection",
    "EmbCacheShardedEmbeddingBagCollection",
    "EmbCacheShardedEmbeddingCollection",
    "EmbCacheTableConfig",
    "JaggedRows",
    "PathRules",
    "PooledRows",
    "Saver",
    "SparseLoadReport",
]
