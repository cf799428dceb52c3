"""Memory for tensors that takes room on a disk: a mapped file. For what may be larger than memory.

Pages that nobody uses go to the file and come back from it, as the system sees fit. The room is taken before it is
used, so that a full disk is an error here, and not a signal in the middle of a copy.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Sequence

import torch

from asyncckpt import system
from asyncckpt.storage.directory import io_failed

ALIGNMENT = 64
REGION_BYTES = 64 << 20
# Each region takes a descriptor as long as it is mapped, so there are few: one is at least this part of those before.
REGION_SHARE = 8


class FileMemory:
    """Room for tensors in an open file, which is closed with it. The room is free when the file has no name, and no
    tensor is left. None: there is no such file, and tensors take memory."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._end = 0
        self._region: mmap.mmap | None = None
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor, with a storage of its own. IOFailedError when there is no room."""
        size = math.prod(shape) * torch.empty(0, dtype=dtype, device="cpu").element_size()
        if not size or self._fd is None:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        if self._region is None or self._used + size > len(self._region):
            self._region, self._used = self._take(self._region_bytes(size)), 0
        raw = torch.frombuffer(self._region, dtype=torch.uint8, count=size, offset=self._used)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return raw.view(dtype).view(tuple(shape))

    def _region_bytes(self, size: int) -> int:
        """Return how large the next region is: it holds tensors of this size without a rest."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        return -(-max(size, REGION_BYTES, self._end // REGION_SHARE) // size) * size

    def close(self) -> None:
        """Close the file; what was given stays. Idempotent."""
        fd, self._fd, self._region = self._fd, None, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> FileMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, size: int) -> mmap.mmap:
        assert self._fd is not None
        size = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            system.take_room(self._fd, self._end, size)
            region = mmap.mmap(self._fd, size, offset=self._end)
        except OSError as error:
            raise io_failed(f"room for {size} bytes of tensors cannot be had on the disk", error) from error
        self._end += size
        return region
