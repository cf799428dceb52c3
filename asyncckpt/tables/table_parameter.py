"""What an optimizer has in place of a parameter: the rows of a table that wait for an update.

torch's tools look at `.grad` of what an optimizer's groups list, and change it in place: GradScaler unscales it,
clip_grad_norm_ scales it, zero_grad drops it. A table has no tensor with a gradient of its shape. So its parameter is a
leaf without rows, whose `grad` is `[n, dim]`: one row for each of the n distinct ids with a pending gradient, summed
over all mentions and forwards. That is the gradient of the whole table without its rows of zeros, so it has the same
norm and the same infinities.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch

from asyncckpt.errors import UsageError
from asyncckpt.tables.embedding import HashEmbedding, TrainableTable
from asyncckpt.tables.gradients import PendingRows, merged


class TableParameter(torch.Tensor):
    """The parameter of a table in one optimizer: `[0, dim]`, in the table's dtype and on its device.

    `grad` is the sum of what is pending in `modules`, None if nothing is; it may be changed in place, or set to None,
    which drops it. A gradient that comes later is added to it.
    """

    table: TrainableTable
    modules: tuple[HashEmbedding, ...]

    # What torch computes of it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as nn.Parameter does

    def __new__(cls, table: TrainableTable, modules: Sequence[HashEmbedding]) -> TableParameter:
        data = torch.empty((0, table.dim), dtype=table.embedding.dtype, device=table.device)
        made: TableParameter = torch.Tensor._make_subclass(cls, data, True)
        made.table, made.modules = table, tuple(modules)
        return made

    def __reduce_ex__(self, _: Any) -> Any:
        return TableParameter, (self.table, self.modules)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableParameter:
        return TableParameter(deepcopy(self.table, memo), deepcopy(self.modules, memo))

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes what only torch passes
        return f"TableParameter({self.table.name!r}, dim={self.shape[1]})"

    def pending(self) -> PendingRows | None:
        """Return what is pending, as one entry; None if nothing is."""
        return merged([module.pending for module in self.modules])

    def drop(self) -> None:
        """Drop what is pending."""
        for module in self.modules:
            module.pending.drop()

    @property
    def grad(self) -> torch.Tensor | None:
        entry = self.pending()
        return None if entry is None else entry.leaf.grad

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is None:
            self.drop()
            return
        entry = self.pending()
        now = None if entry is None else entry.leaf.grad
        found = (value.shape, value.dtype, value.device) if isinstance(value, torch.Tensor) else type(value)
        if entry is None or now is None or found != (now.shape, now.dtype, now.device):
            expected = "None, or a tensor like the pending gradient"
            raise UsageError(f"gradient of table {self.table.name!r} is wrong", found=found, expected=expected)
        entry.leaf.grad = value
