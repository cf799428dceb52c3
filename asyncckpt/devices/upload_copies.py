"""The kinds of copies that a load queues on a device, from host memory to targets there.

Each may need scratch memory of the device, which all copies of a batch share, one after another.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch

from asyncckpt.devices.batch import Batch
from asyncckpt.devices.contract import ENGINE_COPIES_MAX, LARGE_BYTES
from asyncckpt.devices.slots import runs_of, slots_of
from asyncckpt.native import I64, U64

GAP_BYTES_MAX = 64 << 10
"""A smaller gap between two segments is copied with them: starting another transfer takes longer."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Upload(Protocol):
    """Copies from host memory to one device.

    Bytes go up by the copy engine, in long pieces to scratch memory, and kernels spread them on the device: kernels
    that read the host's memory themselves are slower, and do so only where there is no scratch memory.
    """

    @property
    def scratch_bytes(self) -> int:
        """How much scratch memory of the device the copy takes."""
        ...

    @property
    def scratch_bytes_min(self) -> int:
        """How much of it the copy cannot do without: all or nothing."""
        ...

    def run(self, batch: Batch, scratch: int | None) -> None:
        """Queue the copy on the current side stream. scratch: the address of the memory, aligned to 256; None: none."""
        ...


class SegmentUpload:
    """Segments (source, target, bytes), uint64 [n, 3], of which no two targets overlap.

    window: (address, bytes) of host memory that may also be read between segments. Short segments of it go up together
    with their neighbours, all others one by one.
    """

    scratch_bytes_min = 0

    def __init__(self, segments: U64, *, window: tuple[int, int]) -> None:
        sources, sizes = segments[:, 0].astype(np.int64), segments[:, 2].astype(np.int64)
        begin, size = window
        is_packed = (sources >= begin) & (sources + sizes <= begin + size) & (sizes < LARGE_BYTES)
        self._window = window
        self._alone = np.ascontiguousarray(segments[~is_packed])
        self._packed = segments[is_packed][np.argsort(sources[is_packed], kind="stable")]
        packed = self._packed.view(np.int64)
        # Not more runs than a stream has room for, so a few long gaps go up with the rest.
        gap_bytes_max = max(GAP_BYTES_MAX, size // ENGINE_COPIES_MAX)
        self._runs = runs_of(packed[:, 0], packed[:, 2], gap_bytes_max=gap_bytes_max)
        self._slots, self.scratch_bytes = slots_of(self._runs.ends - self._runs.begins, self._runs.begins)

    def run(self, batch: Batch, scratch: int | None) -> None:
        if len(self._alone):
            batch.kernels.transfer(self._alone, batch, to_host=False)
        if not len(self._packed):
            return
        if scratch is None:
            if batch.is_reachable(*self._window):
                batch.kernels.copy(self._packed, batch)
            else:
                batch.kernels.transfer(self._packed, batch, to_host=False)
            return
        begins, ends, of = self._runs
        slots = self._slots + scratch
        batch.kernels.transfer(np.stack([begins, slots, ends - begins], axis=1).view(np.uint64), batch, to_host=False)
        within = self._packed.copy()
        within.view(np.int64)[:, 0] += (slots - begins)[of]
        batch.kernels.copy(within, batch)


class TensorUpload:
    """Copies a host tensor of any strides to a device tensor; at least one of them is not plain memory.

    Copies the bytes from the first to the last of the values to the device, which picks the values.
    """

    def __init__(self, target: torch.Tensor, values: torch.Tensor) -> None:
        self._target, self._values = target, values
        self.scratch_bytes = self.scratch_bytes_min = _span_bytes(values)

    def run(self, batch: Batch, scratch: int | None) -> None:
        assert scratch is not None
        _bring(self._values.data_ptr(), scratch, self.scratch_bytes, batch)
        memory = batch.runtime.view(scratch, self.scratch_bytes, batch.device).view(self._values.dtype)
        values = memory.as_strided(self._values.shape, self._values.stride(), 0)
        target, values = _as_bits(self._target, values)
        target.copy_(values, non_blocking=True)


class RowUpload:
    """Copies row positions[i] (None: row i) of contiguous host values to row rows[i] of a target on the device.

    positions, rows: int64 [n]; rows are distinct.
    """

    def __init__(
        self, target: torch.Tensor, rows: I64, values: torch.Tensor, positions: I64 | None, batch: Batch
    ) -> None:
        self._target, self._rows, self._values, self._positions = target, rows, values, positions
        self._is_plain = is_plain(target)
        is_read_in_place = self._is_plain and batch.is_reachable(values.data_ptr(), values.nbytes)
        self.scratch_bytes = values.nbytes
        self.scratch_bytes_min = 0 if is_read_in_place else values.nbytes

    def run(self, batch: Batch, scratch: int | None) -> None:
        source = self._values.data_ptr()
        if scratch is not None:
            _bring(source, scratch, self.scratch_bytes, batch)
            source = scratch
        if self._is_plain:
            row_bytes = self._values.nbytes // len(self._values)
            columns = np.array([[source, self._target.data_ptr(), row_bytes]], dtype=np.uint64)
            batch.kernels.copy_rows(columns, self._positions, self._rows, batch)
            return
        memory = batch.runtime.view(source, self.scratch_bytes, batch.device)
        target, values = _as_bits(self._target, memory.view(self._values.dtype).view(self._values.shape))
        if self._positions is not None:
            values = values.index_select(0, _on_device(self._positions, batch))
        target.index_copy_(0, _on_device(self._rows, batch), values)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory holds its values in order, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _span_bytes(values: torch.Tensor) -> int:
    """Return the bytes from the first to the last byte of a non-empty tensor."""
    steps = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    assert math.prod(values.shape) > 0
    return (steps + 1) * values.element_size()


def _bring(source: int, target: int, bytes: int, batch: Batch) -> None:
    batch.kernels.transfer(np.array([[source, target, bytes]], dtype=np.uint64), batch, to_host=False)


def _on_device(rows: I64, batch: Batch) -> torch.Tensor:
    """Return row numbers on the device, int64 [n]."""
    address = batch.device_memory(rows.nbytes)
    _bring(batch.pinned(rows), address, rows.nbytes, batch)
    return batch.runtime.view(address, rows.nbytes, batch.device).view(torch.int64)


def _as_bits(target: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as integers of their size if that is equivalent: devices lack some operations for some dtypes."""
    bits = _BITS.get(target.element_size())
    if bits is None or target.is_conj() or target.is_neg():
        return target, values
    return target.view(bits), values.view(bits)
