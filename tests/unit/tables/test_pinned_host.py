"""The host level in pinned memory: as much as its columns take, given back when outgrown, never while it is read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.errors import DeviceError, UnsupportedError, UsageError
from asyncckpt.native import PAGE_BYTES, paged
from asyncckpt.native.cuda import CudaLibrary, DeviceFailure
from asyncckpt.tables import MultiLevelTable, pinned_host
from asyncckpt.tables.pinned_host import HostReadingDevice, PinnedHost, pinned_levels
from asyncckpt.tables.row_device import RowDevice
from tests.cuda_on_cpu import cuda_on_cpu, cuda_on_cpu_controls
from tests.simulated_device.library import PlainLibrary
from tests.simulated_device.memory import is_mapped
from tests.unit.tables.fake_cuda import FakeCuda, FakeStream
from tests.unit.tables.multi_level_world import LevelsBesideDict, new_table
from tests.unit.tables.simulated_rows import SimulatedRows, tables_on_a_device
from tests.worlds.rows import batch

pytestmark = [pytest.mark.any_core, pytest.mark.filterwarnings("ignore:cache of table:RuntimeWarning")]

NOTHING, OUT_OF_MEMORY, ILLEGAL_ADDRESS = 0, 2, 700


def pinned_bytes(place: SimulatedRows) -> int:
    return sum(place.runtime.registered.values())


def columns_bytes(table: MultiLevelTable) -> int:
    """Of the host level, in whole pages."""
    return sum(paged(column.nbytes) for column in table._store.columns().values())


def test_as_much_is_pinned_as_the_columns_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when they have grown and shrunk: what was outgrown is not kept."""
    with tables_on_a_device(monkeypatch, seed=1, pin_host_memory=True) as place:
        table = new_table(capacity=5000, pin_host_memory=True)
        assert pinned_bytes(place) == columns_bytes(table) > 5000 * 31
        for rows in (5001, 9000, 40_000):
            table.reserve(rows)
            assert pinned_bytes(place) == columns_bytes(table) > rows * 31
        table.lookup(batch([3, 1]))
        table.shrink()
        assert pinned_bytes(place) == columns_bytes(table) == 4 * PAGE_BYTES
        del table
        gc.collect()
        assert not place.runtime.registered


def grow_while_the_device_reads(monkeypatch: pytest.MonkeyPatch, *, seed: int) -> None:
    """The device comes as late as it can, so most gathers have not run when their columns are outgrown."""
    with tables_on_a_device(monkeypatch, seed=seed, pin_host_memory=True) as place:
        place.runtime.schedule.pace = 0.0
        world = LevelsBesideDict(cache_rows=3, pin_host_memory=True)
        for first in range(0, 24, 3):
            world.train([first, first + 1])
            world.train([first // 2])  # Comes from the host again.
        world.check()


@pytest.mark.parametrize("seed", range(3))
def test_a_table_that_grows_is_read_by_the_device_meanwhile(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    grow_while_the_device_reads(monkeypatch, seed=seed)


def test_memory_that_goes_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(SimulatedRows, "wait_for_reads", lambda place: None)
    with pytest.raises(AssertionError, match="a gather of rows on device 0 touches memory that it cannot reach"):
        grow_while_the_device_reads(monkeypatch, seed=0)


def test_who_holds_an_outgrown_column_may_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with tables_on_a_device(monkeypatch, seed=2, pin_host_memory=True) as place:
        world = LevelsBesideDict(cache_rows=2, pin_host_memory=True)
        world.train([1, 2])
        world.train([3, 4])
        world.find([1])
        column = world.table._store.column("embedding")
        part, values = column[:2], column[:2].clone()
        world.table.reserve(5000)
        assert pinned_bytes(place) == columns_bytes(world.table) + PAGE_BYTES
        del column
        assert torch.equal(part, values)
        del part
        assert pinned_bytes(place) == columns_bytes(world.table)


def test_a_table_that_cannot_grow_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with tables_on_a_device(monkeypatch, seed=3, pin_host_memory=True) as place:
        world = LevelsBesideDict(cache_rows=4, pin_host_memory=True)
        world.train([1, 2])
        place.runtime.refuses_to_pin = True
        with pytest.raises(DeviceError, match="could not be pinned"):
            world.table.reserve(5000)
        place.runtime.refuses_to_pin = False
        assert pinned_bytes(place) == columns_bytes(world.table)
        world.train([2, 3, 4, 5])
        world.check()


# -- CUDA, as far as it can be told without ----------------------------------------------------------------------------


class ReadingHere(HostReadingDevice):
    """A HostReadingDevice whose device is the host; its library copies at once."""

    def __init__(self, library: Any) -> None:
        super().__init__(torch.device("cuda", 1), library)
        self._cuda = FakeCuda()

    def index(self, rows: Any) -> torch.Tensor:
        return torch.from_numpy(rows)


def test_a_device_takes_rows_of_all_columns_from_the_host_in_one_launch() -> None:
    library: Any = PlainLibrary()
    launches: list[int] = []

    class Counting:
        def copy_rows(self, *arguments: Any) -> None:
            launches.append(arguments[0])
            library.copy_rows(*arguments)

    place = ReadingHere(Counting())
    sources = {"wide": torch.arange(40.0).view(8, 5), "narrow": torch.arange(8, dtype=torch.int8)}
    targets = {name: torch.zeros_like(source) for name, source in sources.items()}
    place.take_rows(sources, np.array([7, 0, 3]), targets, np.array([1, 2, 6]))
    assert launches == [1]
    for name, target in targets.items():
        assert torch.equal(target[[1, 2, 6]], sources[name][[7, 0, 3]])
        assert not target[[0, 3, 4, 5, 7]].any()


@pytest.fixture
def library() -> Iterator[CudaLibrary]:
    """The CUDA library compiled for the CPU."""
    cuda_on_cpu_controls().cuda_on_cpu_set_devices(2)
    yield cuda_on_cpu()
    cuda_on_cpu_controls().cuda_on_cpu_fail_after(0, NOTHING)


def is_registered(library: CudaLibrary, address: int) -> bool:
    """Whether it is, as far as the library knows."""
    try:
        library.host_unregister(1, address)
    except DeviceFailure:
        return False
    library.host_register(1, address, PAGE_BYTES)
    return True


class Watching(FakeStream):
    """A stream that sees whether memory is registered while the host waits for it."""

    def __init__(self, library: CudaLibrary, address: int) -> None:
        super().__init__("watching")
        self._library, self._address = library, address
        self.seen: list[bool] = []

    def synchronize(self) -> None:
        self.seen.append(is_registered(self._library, self._address))


def test_a_column_is_given_back_when_the_device_has_read_it(library: CudaLibrary) -> None:
    place = ReadingHere(library)
    host = PinnedHost(place)
    column = host.new_column((1000, 3), dtype=torch.float32)
    address = column.data_ptr()
    assert (column.shape, column.dtype, column.nbytes) == ((1000, 3), torch.float32, 12_000)
    assert is_registered(library, address)
    place._cuda.current = stream = Watching(library, address)
    place.follow()
    del column
    assert stream.seen == [True]
    assert not is_registered(library, address)


def test_a_column_without_elements_needs_nothing(library: CudaLibrary) -> None:
    column = PinnedHost(ReadingHere(library)).new_column((0, 3), dtype=torch.float64)
    assert (column.shape, column.dtype) == ((0, 3), torch.float64)


def test_what_a_lost_device_might_read_stays(library: CudaLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[Any] = []
    monkeypatch.setattr(pinned_host, "_lost", lost)
    column = PinnedHost(ReadingHere(library)).new_column((1000,), dtype=torch.int64)
    address = column.data_ptr()
    cuda_on_cpu_controls().cuda_on_cpu_fail_after(0, ILLEGAL_ADDRESS)
    del column
    assert [memory.address for memory in lost] == [address]
    assert is_mapped(address, 8000)
    library.host_unregister(1, address)


def test_a_forked_child_leaves_it_to_its_parent(library: CudaLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    column = PinnedHost(ReadingHere(library)).new_column((1000,), dtype=torch.int64)
    address = column.data_ptr()
    monkeypatch.setattr(pinned_host.os, "getpid", lambda: -1)
    del column
    monkeypatch.undo()
    assert is_registered(library, address)
    library.host_unregister(1, address)


def test_memory_that_cannot_be_pinned_is_told(library: CudaLibrary) -> None:
    host = PinnedHost(ReadingHere(library))
    cuda_on_cpu_controls().cuda_on_cpu_fail_after(0, OUT_OF_MEMORY)
    with pytest.raises(DeviceError, match=r"8192 bytes for a column .* could not be pinned, found cudaHostRegister"):
        host.new_column((1000,), dtype=torch.int64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_it_is_said_what_cannot_be() -> None:
    with pytest.raises(UnsupportedError, match="pin_host_memory of table 'user' needs CUDA"):
        MultiLevelTable("user", 2, cache_rows=4, pin_host_memory=True)


def test_a_host_table_has_no_use_for_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="pin_host_memory of table 'user' is for a cache on a CUDA device"):
        pinned_levels("user", torch.device("cpu"))


def test_nothing_is_pinned_for_a_device_that_does_not_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("ASYNCCKPT_CUDA", "0")
    cache, host = pinned_levels("user", torch.device("cuda", 0))
    assert not isinstance(cache, HostReadingDevice)
    assert type(host) is RowDevice
