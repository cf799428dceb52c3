"""Which rows were marked since somebody asked, collected on the device of their numbers.

On a CUDA device a mark is queued on the current stream, behind the mark before on whichever stream that was. `take`
waits on the host until the device has come to the last mark, and for nothing that was queued behind it: it reads the
mask on a stream of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncckpt.errors import DeviceError
from asyncckpt.native import I64, core

# The mask is read in parts of so many rows, which bounds the memory of the device that the row numbers take.
PART_ROWS = 1 << 24


class RowMask:
    """A byte for each of rows_count rows. One thread at a time."""

    def __init__(self, rows_count: int, device: torch.device) -> None:
        self.device = device
        self._mask = torch.zeros(rows_count, dtype=torch.uint8, device=device)

    def mark(self, rows: torch.Tensor) -> None:
        """Mark rows, int64 [n] on the device; each may be mentioned often."""
        self._mask.index_fill_(0, rows, 1)

    def take(self) -> I64:
        """Return the marked rows, ascending int64 [n]. The mask is used up: nothing may be marked any more.

        DeviceError.
        """
        return core.marked(self._mask.cpu().numpy(), 0)


class CudaRowMask(RowMask):
    """A RowMask on a CUDA device. cuda: torch.cuda, or what stands for it in a test."""

    def __init__(self, rows_count: int, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        super().__init__(rows_count, device)
        self._cuda = cuda
        # Of the zeros.
        self._last: Any = cuda.current_stream(device).record_event()

    def mark(self, rows: torch.Tensor) -> None:
        stream = self._cuda.current_stream(self.device)
        stream.wait_event(self._last)
        super().mark(rows)
        self._last = stream.record_event()

    def take(self) -> I64:
        stream = self._cuda.Stream(self.device)
        try:
            with self._cuda.stream(stream):
                stream.wait_event(self._last)
                # Found on the device: of what was touched there is mostly less than a mask of all rows.
                parts = [
                    torch.nonzero(self._mask[begin : begin + PART_ROWS]).view(-1).cpu().numpy() + begin
                    for begin in range(0, len(self._mask), PART_ROWS)
                ]
        except RuntimeError as error:
            raise DeviceError(f"the marks of rows could not be read from their device: {error}") from error
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def row_mask(rows_count: int, device: torch.device) -> RowMask:
    """An empty mask on a device."""
    return CudaRowMask(rows_count, device) if device.type == "cuda" else RowMask(rows_count, device)
