"""What a write filter sees: one named column or dense tensor of one rank, on the staged copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.table import Role


@dataclass(eq=False)
class WriteBlock:
    """One write block (RecIS' interface `tensor_name()`, `slice_info()`, and more).

    A filter gets a list of these in the background and returns a list: it may drop, keep, reorder and replace blocks.
    `data` is a view of the staged copy, valid only while the filter runs; do not change it in place, use
    `replace`.
    """

    _spec: BlockSpec
    _fetch: Callable[[], torch.Tensor]
    _data: torch.Tensor | None = None
    _name: str | None = None
    _origin: WriteBlock | None = field(default=None, repr=False)

    def tensor_name(self) -> str:
        """Return `table@column`, or the name of a dense tensor."""
        return self._name if self._name is not None else self._spec.name

    def slice_info(self) -> str:
        """Return `begin@end@size` of the ids in a table's block (unsigned id modulo size), or one space."""
        return self._spec.slice_info

    @property
    def table(self) -> str | None:
        return None if self._spec.table is None else self.tensor_name().rpartition("@")[0]

    @property
    def column(self) -> str | None:
        return None if self._spec.table is None else self.tensor_name().rpartition("@")[2]

    @property
    def role(self) -> Role:
        return self._spec.role

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype if self._data is not None else self._declared_dtype()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of this block, which is a range of rows for a tensor over 1 GiB."""
        return tuple(self._data.shape) if self._data is not None else self._spec.shape

    @property
    def row_begin(self) -> int:
        """First row of the whole tensor that this block holds."""
        return self._spec.row_begin

    @property
    def data(self) -> torch.Tensor:
        return self._data if self._data is not None else self._fetch()

    @property
    def replaced(self) -> bool:
        return self._origin is not None

    def replace(self, *, data: torch.Tensor | None = None, name: str | None = None) -> WriteBlock:
        """Return a block to write instead of this one: other values (as many rows in a table), or another name."""
        if data is None and name is None:
            raise UsageError("replace() needs data or a name")
        return WriteBlock(
            _spec=self._spec,
            _fetch=self._fetch,
            _data=self._data if data is None else data,
            _name=self._name if name is None else name,
            _origin=self,
        )

    def _declared_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self._spec.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def __repr__(self) -> str:
        return f"WriteBlock({self.tensor_name()!r}, {self.dtype!s}, {list(self.shape)}, role={self.role.value})"
