"""The values of blocks of a save, in an arena, in the live state, or in a tensor that a filter gave instead; and
sources of their bytes.

Each of the *Data has `rows(begin, end)`, contiguous on the CPU, and a `source` of all its bytes. A number without shape
is one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncckpt.devices.current_runtime import device_of
from asyncckpt.devices.fetch import to_host
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.row_runs import spans, window
from asyncckpt.model.source import ByteSource, DeviceRows, RowsSource, SpanSource, as_bytes, byte_view
from asyncckpt.model.table import TableCut
from asyncckpt.native import I64, U8, U64
from asyncckpt.plan.leaf_facts import is_plain
from asyncckpt.plan.save_plan import CutTable, SavePlan
from asyncckpt.plan.state import FlatState
from asyncckpt.snapshot.capture import as_tensor, live_tensors
from asyncckpt.snapshot.overlay import Overlay, rows_of_cut


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
        live_tensors(plan, flat)
        self._plan, self._flat, self._cuts = plan, flat, cuts
        self._overlays = [Overlay.of(item.cut) for item in cuts]

    def rows(self, number: int, begin: int, end: int) -> torch.Tensor:
        """Rows of a block of the plan; of a tensor on the CPU it may be the live memory."""
        if number not in self._plan.columns:
            tensor = self._plan.dense_rows(number, self._flat)
            return to_host(tensor[begin:end] if tensor.shape else tensor)
        table, column = self._plan.columns[number]
        first = self._plan.image.blocks[number].spec.row_begin
        return rows_of_cut(self._cuts[table].cut, self._overlays[table], column, first + begin, first + end)

    def source(self, number: int) -> ByteSource:
        if number not in self._plan.columns:
            return tensor_source(self._plan.dense_rows(number, self._flat))
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


class RunsSource:
    """Rows of a column's contiguous CPU storage."""

    def __init__(self, tensor: torch.Tensor, runs: I64, *, row_bytes: int) -> None:
        self._tensor = tensor
        self._runs = runs
        self._row_bytes = row_bytes

    def pieces(self, begin: int, end: int) -> U64:
        size = self._row_bytes
        first, last = begin // size, -(-end // size)
        found = spans(window(self._runs, first, last), address=self._tensor.data_ptr(), row_bytes=size)
        if len(found):
            found[0] += np.array([begin - first * size, -(begin - first * size)], dtype=np.int64).view(np.uint64)
            found[-1, 1] -= np.uint64(last * size - end)
        return found

    def release(self) -> None:
        """Nothing was made for the pieces."""


def tensor_source(tensor: torch.Tensor) -> ByteSource:
    """The source of one dense tensor."""
    tensor = tensor.detach()
    has_plain_memory = is_plain(tensor)
    if device_of(tensor) is not None and tensor.numel() and (has_plain_memory or tensor.dim()):
        # Of plain memory, just the bytes that are asked for: a single row may be all of it.
        return DeviceRows(byte_view(tensor) if has_plain_memory else tensor)
    if has_plain_memory and tensor.is_cpu:
        return SpanSource(tensor.data_ptr(), tensor)
    if tensor.dim() == 0 or tensor.numel() == 0:
        kept = to_host(tensor)
        return SpanSource(kept.data_ptr(), kept)
    return RowsSource(lambda begin, end: as_bytes(to_host(tensor[begin:end])), row_bytes=tensor.nbytes // len(tensor))


def column_source(cut: TableCut, overlay: Overlay | None, column: str, *, begin: int, end: int) -> ByteSource:
    """The source of rows [begin, end) of a column of a cut before its fence."""
    storage = cut.column(column)
    row_bytes = max(1, storage.nbytes // max(1, len(storage)))
    if overlay is None and storage.is_cpu and storage.is_contiguous() and device_of(storage) is None:
        return RunsSource(storage, window(cut.runs, begin, end), row_bytes=row_bytes)
    return RowsSource(
        lambda first, last: as_bytes(rows_of_cut(cut, overlay, column, begin + first, begin + last)),
        row_bytes=row_bytes,
    )
