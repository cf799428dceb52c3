"""The values of one block of a save: in an arena, in the live state, or in a tensor that a filter gave instead.

Each has `rows(begin, end)`, contiguous on the CPU, and a `source` of all its bytes. A number without shape is one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncckpt.devices.fetch import to_host
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.source import ByteSource, SpanSource
from asyncckpt.native import U8
from asyncckpt.plan.save_plan import CutTable, SavePlan
from asyncckpt.plan.state import FlatState
from asyncckpt.snapshot.capture import as_tensor, check_storages, dense_rows
from asyncckpt.snapshot.overlay import Overlay, rows_of_cut
from asyncckpt.snapshot.source import column_source, tensor_source


class TensorData:
    """A tensor on any device, with any strides."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def whole(self) -> torch.Tensor:
        return to_host(self._tensor)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return to_host(self._tensor[begin:end] if self._tensor.shape else self._tensor)

    def source(self) -> ByteSource:
        return tensor_source(self._tensor)


class ArenaData:
    """Bytes of an arena, which whoever uses them holds."""

    def __init__(self, raw: U8, spec: BlockSpec) -> None:
        self._raw = raw
        self._spec = spec

    def whole(self) -> torch.Tensor:
        return as_tensor(self._raw, self._spec)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.whole()[begin:end] if self._spec.shape else self.whole()

    def source(self) -> ByteSource:
        return SpanSource(self._raw.ctypes.data, self._raw)


class LiveState:
    """The live state of a save without an arena, until its cut is fenced.

    UsageError for a tensor whose storage was freed or shrunk since the plan was made.
    """

    def __init__(self, plan: SavePlan, flat: FlatState, cuts: Sequence[CutTable]) -> None:
        check_storages(plan, flat)
        self._plan, self._flat, self._cuts = plan, flat, cuts
        self._overlays = [Overlay.of(item.cut) for item in cuts]

    def rows(self, number: int, begin: int, end: int) -> torch.Tensor:
        """Rows of a block of the plan; of a tensor on the CPU it may be the live memory."""
        if number not in self._plan.columns:
            tensor = dense_rows(self._plan, self._flat, number)
            return to_host(tensor[begin:end] if tensor.shape else tensor)
        table, column = self._plan.columns[number]
        first = self._plan.image.blocks[number].spec.row_begin
        return rows_of_cut(self._cuts[table].cut, self._overlays[table], column, first + begin, first + end)

    def source(self, number: int) -> ByteSource:
        if number not in self._plan.columns:
            return tensor_source(dense_rows(self._plan, self._flat, number))
        table, column = self._plan.columns[number]
        spec = self._plan.image.blocks[number].spec
        begin, end = spec.row_begin, spec.row_begin + spec.shape[0]
        return column_source(self._cuts[table].cut, self._overlays[table], column, begin=begin, end=end)


class LiveData:
    """A block of the live state. What a filter function looks at is a copy, and the copy is written."""

    def __init__(self, state: LiveState, number: int, spec: BlockSpec) -> None:
        self._state = state
        self._number = number
        self._rows_count = spec.shape[0] if spec.shape else 1
        self._copied: TensorData | None = None

    def whole(self) -> torch.Tensor:
        if self._copied is None:
            self._copied = TensorData(self._state.rows(self._number, 0, self._rows_count).clone())
        return self._copied.whole()

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self._state.rows(self._number, begin, end) if self._copied is None else self._copied.rows(begin, end)

    def source(self) -> ByteSource:
        return self._state.source(self._number) if self._copied is None else self._copied.source()
