"""Masks of rows: what is marked, and on a GPU behind what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from asyncckpt.adapters import row_mask as row_mask_module
from asyncckpt.adapters.row_mask import CudaRowMask, RowMask, row_mask
from asyncckpt.errors import DeviceError

CPU = torch.device("cpu")


class NotingStream:
    """Notes what it is given to do; an event is the number of things before it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done: list[Any] = []

    def record_event(self) -> tuple[str, int]:
        return self.name, len(self.done)

    def wait_event(self, event: tuple[str, int]) -> None:
        self.done.append(("wait", event))


class CudaAtOnce:
    """torch.cuda, whose work is done at once."""

    def __init__(self) -> None:
        self.streams = [NotingStream("training")]

    def current_stream(self, device: torch.device) -> NotingStream:
        return self.streams[-1]

    def Stream(self, device: torch.device) -> NotingStream:
        return NotingStream("own")

    @contextmanager
    def stream(self, stream: NotingStream) -> Iterator[None]:
        self.streams.append(stream)
        yield
        self.streams.pop()


@pytest.mark.parametrize("make", [row_mask, lambda count, device: CudaRowMask(count, device, cuda=CudaAtOnce())])
@pytest.mark.parametrize("part_rows", [3, 1000])
def test_marked_rows_come_ascending_and_once(monkeypatch: pytest.MonkeyPatch, make: Any, part_rows: int) -> None:
    monkeypatch.setattr(row_mask_module, "PART_ROWS", part_rows)
    mask: RowMask = make(10, CPU)
    for rows in ([7, 2, 7], [], [0, 9]):
        mask.mark(torch.tensor(rows, dtype=torch.int64))
    found = mask.take()
    assert (found.dtype, found.tolist()) == ("int64", [0, 2, 7, 9])
    assert make(0, CPU).take().tolist() == []


def test_marks_and_reading_come_one_behind_the_other() -> None:
    cuda = CudaAtOnce()
    mask = CudaRowMask(4, CPU, cuda=cuda)
    training, other = cuda.streams[0], NotingStream("other")
    mask.mark(torch.tensor([1]))
    with cuda.stream(other):
        mask.mark(torch.tensor([2]))
    assert training.done == [("wait", ("training", 0))]  # For the zeros.
    assert other.done == [("wait", ("training", 1))]
    training.done.append("a backward, which is not waited for")
    opened: list[NotingStream] = []
    make_stream = cuda.Stream
    cuda.Stream = lambda device: opened.append(make_stream(device)) or opened[-1]  # type: ignore[method-assign, func-returns-value]
    assert mask.take().tolist() == [1, 2]
    assert opened[0].done == [("wait", ("other", 1))]


def test_a_device_that_fails_is_told_of() -> None:
    class Lost(CudaAtOnce):
        @contextmanager
        def stream(self, stream: NotingStream) -> Iterator[None]:
            yield
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(DeviceError, match="the marks of rows could not be read from their device: CUDA error"):
        CudaRowMask(3, CPU, cuda=Lost()).take()
