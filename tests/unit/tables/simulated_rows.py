"""A level of a table on a simulated device: what CudaRowDevice does, by the simulated runtime."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.native import I64
from asyncckpt.tables import hash_table, multi_level
from asyncckpt.tables.pinned_host import PinnedHost
from asyncckpt.tables.row_device import Landing, RowDevice, Values
from tests.simulated_device import SimulatedRuntime
from tests.simulated_device.torch_queue import alias


class SimulatedRows(RowDevice):
    """Columns on a device of a runtime. reads_host: rows of the host are read by the device when their turn has come.

    waits_count: how often the host has waited.
    """

    def __init__(self, runtime: SimulatedRuntime, *, device: int = 0, reads_host: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.is_host = False
        self.runtime, self.number, self.waits_count = runtime, device, 0
        self._reads_host = reads_host
        self._last: Any = None
        self._kept: list[Any] = []

    @property
    def stream(self) -> Any:
        return self.runtime.current_stream(self.number)

    def follow(self) -> None:
        stream = self.stream
        last, self._last = self._last, stream
        if last not in (None, stream):
            self.runtime.hold_back(stream, self.runtime.record(last))

    def new_column(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> torch.Tensor:
        return self.runtime.new_tensor(shape, dtype, self.number)

    def to_device(self, values: torch.Tensor) -> torch.Tensor:
        if self.runtime.device_of(values) is not None:
            return values
        return self.runtime.new_tensor(values.shape, values.dtype, self.number, values=values)

    def take_rows(self, sources: Values, source_rows: I64, targets: Values, target_rows: I64) -> int:
        if not self._reads_host:
            return super().take_rows(sources, source_rows, targets, target_rows)
        index, places = torch.from_numpy(source_rows.copy()), torch.from_numpy(target_rows.copy())
        for name, source in sources.items():
            work = partial(self._copy_rows, alias(source), index, alias(targets[name]), places)
            self.runtime.queue(self.stream, work, name="rows of the host")
        return 0

    def _copy_rows(self, source: torch.Tensor, rows: torch.Tensor, target: torch.Tensor, places: torch.Tensor) -> None:
        self.runtime.check_reachable(np.array([[source.data_ptr(), source.nbytes]]), self.number, "a gather of rows")
        target.index_copy_(0, places, source.index_select(0, rows))

    def begin_to_host(self, values: Values) -> Landing:
        landed = {name: pinned(self.runtime, value.shape, value.dtype) for name, value in values.items()}
        for name, value in values.items():
            landed[name].copy_(value, non_blocking=True)
        return _Landing(self, landed, self.runtime.record(self.stream))

    def let_go(self, column: torch.Tensor) -> None:
        self._kept.append(column)  # As if its stream were recorded, for good.

    def pin(self, address: int, bytes: int) -> None:
        self.runtime.register(address, bytes)

    def unpin(self, address: int) -> None:
        self.wait_for_reads()
        self.runtime.unregister(address)

    def wait_for_reads(self) -> None:
        if self._last is not None:
            self.runtime.record(self._last).wait()


@contextmanager
def tables_on_a_device(
    monkeypatch: pytest.MonkeyPatch, *, seed: int, pin_host_memory: bool = False, **options: Any
) -> Iterator[SimulatedRows]:
    """New tables have their rows, or their cache level, on a simulated device. options: of its runtime."""
    runtime = SimulatedRuntime(seed=seed, **options)
    place = SimulatedRows(runtime, reads_host=pin_host_memory)
    with runtime.installed(), monkeypatch.context() as patch:
        patch.setattr(multi_level, "row_device", lambda device: place)
        patch.setattr(hash_table, "row_device", lambda device: place)
        patch.setattr(multi_level, "pinned_levels", lambda table, device: (place, PinnedHost(place)))
        yield place


class _Landing:
    def __init__(self, place: SimulatedRows, values: Values, event: Any) -> None:
        self._place, self._values, self._event = place, values, event

    def wait(self) -> Values:
        self._place.waits_count += 1
        self._event.wait()
        return self._values


def pinned(runtime: SimulatedRuntime, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    bytes = math.prod(shape) * dtype.itemsize
    return runtime.new_pinned(max(1, bytes))[:bytes].view(dtype).view(shape)
