"""Sparse tables: HashTable, MultiLevelTable, the torch modules that read them, the optimizers that update them."""

from asyncckpt.tables.embedding import HashEmbedding, HashEmbeddingBag
from asyncckpt.tables.hash_table import HashTable
from asyncckpt.tables.initializer import Uniform
from asyncckpt.tables.multi_level import MultiLevelTable
from asyncckpt.tables.optim import SparseAdagrad, SparseAdam, SparseAdamW, SparseFTRL, SparseSGD
from asyncckpt.tables.slots import Slot
from asyncckpt.tables.table_statistics import CacheStatistics, TableStatistics

__all__ = [
    "CacheStatistics",
    "HashEmbedding",
    "HashEmbeddingBag",
    "HashTable",
    "MultiLevelTable",
    "Slot",
    "SparseAdagrad",
    "SparseAdam",
    "SparseAdamW",
    "SparseFTRL",
    "SparseSGD",
    "TableStatistics",
    "Uniform",
]
