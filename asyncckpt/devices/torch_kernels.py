"""Copies by torch's own operations, for devices on which the CUDA library is missing or does not run.

The twin of library_kernels.py. Every segment costs the host some microseconds, and rows go through memory of the
device, because torch writes only whole tensors to the host.
"""

from __future__ import annotations

import torch

from asyncckpt.devices.batch import Batch
from asyncckpt.devices.contract import Runtime
from asyncckpt.native import I64, U64


class TorchKernels:
    """Implements contract.Kernels; addresses become tensors by Runtime.view."""

    name = "torch"
    reaches_host = False

    def __init__(self, runtime: Runtime, device: int) -> None:
        self._runtime = runtime
        self._device = device

    def copy(self, segments: U64, batch: Batch) -> None:
        views = [
            (self._runtime.view(target, size, self._device), self._runtime.view(source, size, self._device))
            for source, target, size in segments.tolist()
        ]
        torch._foreach_copy_([target for target, _ in views], [source for _, source in views], non_blocking=True)

    def transfer(self, segments: U64, batch: Batch, *, to_host: bool) -> None:
        source_device, target_device = (self._device, None) if to_host else (None, self._device)
        for source, target, size in batch.within_pinned(segments).tolist():
            target_view = self._runtime.view(target, size, target_device)
            target_view.copy_(self._runtime.view(source, size, source_device), non_blocking=True)

    def copy_rows(self, columns: U64, source_rows: I64 | None, target_rows: I64 | None, batch: Batch) -> None:
        sources = None if source_rows is None else self._index(source_rows, batch)
        targets = None if target_rows is None else self._index(target_rows, batch)
        for source, target, row_bytes in columns.tolist():
            rows = self._rows(source, row_bytes, source_rows, len(_given(source_rows, target_rows)))
            if sources is not None:
                rows = rows.index_select(0, sources)
            places = self._rows(target, row_bytes, target_rows, len(rows))
            if targets is None:
                places.copy_(rows)
            else:
                places.index_copy_(0, targets, rows)

    def _index(self, rows: I64, batch: Batch) -> torch.Tensor:
        pinned = self._runtime.view(batch.pinned(rows), rows.nbytes, None)
        index = self._runtime.view(batch.device_memory(rows.nbytes), rows.nbytes, self._device)
        index.copy_(pinned, non_blocking=True)
        return index.view(torch.int64)

    def _rows(self, address: int, row_bytes: int, rows: I64 | None, count: int) -> torch.Tensor:
        """Return the rows of a column up to the last used one, uint8 `[n, row_bytes]`."""
        end = count if rows is None else int(rows.max(initial=-1)) + 1
        return self._runtime.view(address, end * row_bytes, self._device).view(end, row_bytes)


def _given(source_rows: I64 | None, target_rows: I64 | None) -> I64:
    rows = target_rows if source_rows is None else source_rows
    assert rows is not None
    return rows
