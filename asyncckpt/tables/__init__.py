"""Sparse tables: HashTable, the torch modules that read it and the optimizers that update it."""

from asyncckpt.tables.embedding import HashEmbedding, HashEmbeddingBag
from asyncckpt.tables.hash_table import HashTable
from asyncckpt.tables.initializer import Uniform
from asyncckpt.tables.optim import SparseAdagrad, SparseSGD
from asyncckpt.tables.slots import Slot

__all__ = ["HashEmbedding", "HashEmbeddingBag", "HashTable", "Slot", "SparseAdagrad", "SparseSGD", "Uniform"]
