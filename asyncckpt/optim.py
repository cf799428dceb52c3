"""Optimizers of hash tables, as torch.optim has them for tensors: see docs/tables.md."""

from asyncckpt.tables.optim import SparseAdagrad, SparseAdam, SparseAdamW, SparseFTRL, SparseSGD

__all__ = ["SparseAdagrad", "SparseAdam", "SparseAdamW", "SparseFTRL", "SparseSGD"]
