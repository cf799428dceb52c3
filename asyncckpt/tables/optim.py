"""Optimizers for the tables under HashEmbedding modules: they update only the rows that got a gradient.

Modules that share a table count as one: their gradients are summed per id, in the order of the modules and of the
forwards of each module, before a single update of the row. So the result depends on ids and batch order, never on row
numbers, and a run that was resumed from a checkpoint is bit-equal to one that was not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from asyncckpt.errors import UsageError
from asyncckpt.model.table import Role
from asyncckpt.signals import uninterrupted
from asyncckpt.tables.embedding import HashEmbedding, TrainableTable
from asyncckpt.tables.gradients import sum_per_id
from asyncckpt.tables.row_values import RowValues


class _SparseOptimizer:
    """What both optimizers share: the modules, and how gradients get to the rows of their tables."""

    def __init__(self, modules: nn.Module | Iterable[nn.Module], lr: float) -> None:
        self.lr = _checked_number("lr", lr)
        self._modules = _hash_modules(modules)

    @uninterrupted
    def step(self) -> None:
        """Update the rows with a pending gradient and drop the gradients; skip ids removed since their forward.

        Call it on the training thread. Waits for a cut of the table until its fence.
        """
        with torch.no_grad():
            for table, modules in self._modules_by_table():
                gradients = [entry for module in modules for entry in module.pending.take()]
                if not gradients:
                    continue
                ids, summed = sum_per_id(gradients)
                with table.rows(ids) as rows:
                    self._update(rows, summed)

    def zero_grad(self) -> None:
        """Drop all pending gradients."""
        for module in self._modules:
            module.pending.drop()

    def state_dict(self) -> dict[str, float]:
        """Return the hyper-parameters; optimizer rows are slots of the tables and saved with them."""
        return {"lr": self.lr}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Set the hyper-parameters, all or none. Raises UsageError."""
        names = self.state_dict().keys()
        if not isinstance(state, Mapping) or set(state) != set(names):
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state)
            raise UsageError("state of a sparse optimizer is wrong", found=found, expected=sorted(names))
        checked = {name: _checked_number(name, state[name]) for name in names}
        for name, value in checked.items():
            setattr(self, name, value)

    def _update(self, rows: RowValues, gradient: torch.Tensor) -> None:
        """Update rows by their gradient, `[n, dim]` in the table's dtype. Of ids that are gone, both are dropped."""
        raise NotImplementedError

    def _modules_by_table(self) -> list[tuple[TrainableTable, list[HashEmbedding]]]:
        groups: dict[int, tuple[TrainableTable, list[HashEmbedding]]] = {}
        for module in self._modules:
            groups.setdefault(id(module.table), (module.table, []))[1].append(module)
        return list(groups.values())


class SparseSGD(_SparseOptimizer):
    """Stochastic gradient descent, `row -= lr * gradient`, on rows that got a gradient.

    modules: a module, or several, that hold HashEmbedding or HashEmbeddingBag somewhere. Raises UsageError.
    """

    def _update(self, rows: RowValues, gradient: torch.Tensor) -> None:
        rows.embedding.add_(gradient, alpha=-self.lr)


class SparseAdagrad(_SparseOptimizer):
    """Adagrad on rows that got a gradient; the sums of squares live in an optimizer slot of each table.

    A slot as wide as the embedding gives Adagrad as in torch.optim.Adagrad; one of row shape () gives row-wise Adagrad,
    which adds the mean square of the row's gradient. Computes in float32 or wider, so a float32 slot of a float16 table
    loses nothing. Raises UsageError if a table lacks the slot or it has another shape.
    """

    def __init__(
        self, modules: nn.Module | Iterable[nn.Module], lr: float, eps: float = 1e-10, slot: str = "sum"
    ) -> None:
        super().__init__(modules, lr)
        self.eps = _checked_number("eps", eps)
        self._slot = slot
        for table, _ in self._modules_by_table():
            _check_sum_slot(table, slot)

    def state_dict(self) -> dict[str, float]:
        return {"lr": self.lr, "eps": self.eps}

    def _update(self, rows: RowValues, gradient: torch.Tensor) -> None:
        embedding, sums = rows.embedding, rows[self._slot]
        dtype = torch.promote_types(torch.promote_types(embedding.dtype, sums.dtype), torch.float32)
        values, row_sums = embedding.to(dtype), sums.to(dtype)
        gradient = gradient.to(dtype)
        if row_sums.dim() == 1:
            row_sums.add_(gradient.square().mean(dim=1))
            divisors = row_sums.sqrt().add_(self.eps).unsqueeze(1)
        else:
            row_sums.addcmul_(gradient, gradient)
            divisors = row_sums.sqrt().add_(self.eps)
        values.addcdiv_(gradient, divisors, value=-self.lr)
        rows[self._slot] = row_sums.to(sums.dtype)
        rows.embedding = values.to(embedding.dtype)


def _hash_modules(modules: object) -> list[HashEmbedding]:
    roots = [modules] if isinstance(modules, nn.Module) else modules
    if not isinstance(roots, Iterable):
        raise UsageError(
            "modules of a sparse optimizer are wrong", found=type(modules), expected="nn.Module or several"
        )
    found: dict[int, HashEmbedding] = {}
    for root in roots:
        if not isinstance(root, nn.Module):
            raise UsageError("module of a sparse optimizer is wrong", found=type(root), expected=nn.Module)
        found.update((id(module), module) for module in root.modules() if isinstance(module, HashEmbedding))
    if not found:
        raise UsageError("modules of a sparse optimizer hold no HashEmbedding or HashEmbeddingBag", found=modules)
    return list(found.values())


def _check_sum_slot(table: TrainableTable, name: str) -> None:
    column = table.schema().column(name)
    is_slot = column is not None and column.role is Role.OPTIMIZER and column.dtype.is_floating_point
    if column is None or not is_slot or column.row_shape not in ((), (table.dim,)):
        expected = f"a floating-point optimizer slot of row shape ({table.dim},) or ()"
        raise UsageError(f"slot {name!r} of table {table.name!r} is wrong", found=column, expected=expected)


def _checked_number(name: str, value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:  # type: ignore[arg-type,operator]
        raise UsageError(f"{name} of a sparse optimizer is wrong", found=value, expected="a finite number >= 0")
    return float(value)  # type: ignore[arg-type]
