"""Modules over hash tables, and initializers of rows, as torch.nn has them for tensors: see docs/tables.md."""

from asyncckpt.tables.embedding import HashEmbedding, HashEmbeddingBag
from asyncckpt.tables.initializer import Uniform

__all__ = ["HashEmbedding", "HashEmbeddingBag", "Uniform"]
