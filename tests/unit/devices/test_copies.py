"""The kinds of copies: every way to the host brings the same bytes there, and no byte beside them."""

from __future__ import annotations

import mmap
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncckpt.devices import copies as copies_module
from asyncckpt.devices import library_kernels
from asyncckpt.devices.batch import Batch
from asyncckpt.devices.copies import Copy, RowCopy, SegmentCopy, TensorCopy
from asyncckpt.native import U64
from tests.simulated_device import SimulatedRuntime
from tests.simulated_device.runtime import KernelsChoice

pytestmark = [pytest.mark.any_core, pytest.mark.usefixtures("one_thread")]

TARGET_BYTES = 256 << 10
GUARD = 0xA5
PAGE_BYTES = 4096
SEEDS = range(5)

every_kernels = pytest.mark.parametrize("kernels", ["plain", "library", "torch"])
is_pinned = pytest.mark.parametrize("pinned", [True, False])


class CopyMemory:
    """A device with garbage in its memory, and host memory to copy to."""

    def __init__(self, kernels: KernelsChoice, seed: int, *, pinned: bool) -> None:
        self.runtime = SimulatedRuntime(1, seed=seed, kernels=kernels)
        self.random = random.Random(seed)
        self.source_bytes = np.frombuffer(self.random.randbytes(TARGET_BYTES), dtype=np.uint8)
        self.source = self.runtime.new_tensor((TARGET_BYTES,), torch.uint8, values=torch.tensor(self.source_bytes))
        self._map = mmap.mmap(-1, TARGET_BYTES)
        self.target = np.frombuffer(self._map, dtype=np.uint8)
        self.target[:] = GUARD
        self.expected = self.target.copy()
        if pinned:
            self.runtime.register(self.target_address, TARGET_BYTES)
        self.reachable = [(self.target_address, TARGET_BYTES)] if pinned else []

    @property
    def target_address(self) -> int:
        return int(self.target.ctypes.data)

    def copy(self, *copies: Copy, by_scratch: bool = False) -> None:
        """Do copies one after the other."""
        batch = Batch(self.runtime, 0, reachable=self.reachable)
        batch.follow()
        for copy in copies:
            if by_scratch:
                bytes, halves = copy.by_scratch()
                for work in halves(batch.device_memory(bytes)):
                    batch.enqueue(partial(work, batch))
            else:
                batch.enqueue(partial(copy.run, batch))
        batch.settle(batch.record())

    def pin_some(self) -> None:
        """Pin pages here and there, some side by side, each range for itself."""
        page = 0
        while page < TARGET_BYTES // PAGE_BYTES:
            pages = self.random.randrange(1, 5)
            if page + pages <= TARGET_BYTES // PAGE_BYTES and self.random.random() < 0.6:
                self.reachable.append((self.target_address + page * PAGE_BYTES, pages * PAGE_BYTES))
                self.runtime.register(*self.reachable[-1])
            page += pages

    def segments(self, count: int, bytes_max: int) -> NDArray[np.uint64]:
        """Segments that do not overlap, in no order, some side by side; `expected` is what they bring."""
        found, at = [], self.random.randrange(100)
        for _ in range(count):
            bytes = self.random.randrange(1, bytes_max)
            if at + bytes > TARGET_BYTES:
                break
            begin = self.random.randrange(TARGET_BYTES - bytes)
            found.append((self.source.data_ptr() + begin, self.target_address + at, bytes))
            self.expected[at : at + bytes] = self.source_bytes[begin : begin + bytes]
            at += bytes + self.random.choice([0, 0, 1, 300])
        self.random.shuffle(found)
        return np.array(found, dtype=np.uint64).reshape(-1, 3)

    def rows(self, *, has_sources: bool, has_targets: bool) -> RowCopy:
        """Rows of a few columns; `expected` is what they bring."""
        count, room = self.random.randrange(1, 40), 50
        source_rows = np.array(self.random.choices(range(room), k=count), dtype=np.int64) if has_sources else None
        target_rows = np.array(self.random.sample(range(room), k=count), dtype=np.int64) if has_targets else None
        columns, begin, at = [], self.random.randrange(8), self.random.randrange(8)
        for row_bytes in self.random.choices([1, 4, 20, 512, 1000], k=self.random.randrange(1, 4)):
            columns.append((self.source.data_ptr() + begin, self.target_address + at, row_bytes))
            for i in range(count):
                source = begin + row_bytes * (i if source_rows is None else int(source_rows[i]))
                target = at + row_bytes * (i if target_rows is None else int(target_rows[i]))
                self.expected[target : target + row_bytes] = self.source_bytes[source : source + row_bytes]
            begin, at = begin + row_bytes * room + 3, at + row_bytes * room + 3
        return RowCopy(np.array(columns, dtype=np.uint64), source_rows, target_rows)

    def check(self) -> None:
        assert np.array_equal(self.target, self.expected)
        self.runtime.check()


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which copies are divided, as small as the copies of these tests."""
    monkeypatch.setattr(copies_module, "LARGE_BYTES", 4000)
    monkeypatch.setattr(copies_module, "PACK_BYTES", 10_000)
    monkeypatch.setattr(copies_module, "LONG_BYTES", 1000)
    monkeypatch.setattr(copies_module, "LONG_MAX", 3)
    monkeypatch.setattr(library_kernels, "LARGE_BYTES", 4000)


@pytest.mark.usefixtures("small_limits")
def test_long_segments_are_aligned_like_their_sources() -> None:
    segments = np.array([[4096, 10_010, 2000], [8192, 12_010, 10], [16_384, 12_020, 3000]], dtype=np.uint64)
    _, halves = SegmentCopy(segments).by_scratch()
    asked: list[list[list[int]]] = []

    class Kernels:
        def copy(self, segments: U64, batch: Batch) -> None:
            asked.append(segments.tolist())

    batch: Any = SimpleNamespace(kernels=Kernels(), is_reachable=lambda *place: True)
    for work in halves(1 << 20):
        work(batch)
    inward, outward = asked
    assert [target % 256 for _, target, _ in inward] == [0, 12_010 % 256, 0]
    assert [[target, size] for _, target, size in outward] == segments[:, 1:].tolist()


@every_kernels
@is_pinned
@pytest.mark.parametrize("by_scratch", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("small_limits")
def test_segments(kernels: KernelsChoice, pinned: bool, by_scratch: bool, seed: int) -> None:
    world = CopyMemory(kernels, seed, pinned=pinned)
    copy = SegmentCopy(world.segments(world.random.choice([1, 3, 40]), world.random.choice([2, 50, 6000])))
    world.copy(copy, by_scratch=by_scratch)
    world.check()


@every_kernels
@is_pinned
@pytest.mark.parametrize("by_scratch", [False, True])
@pytest.mark.parametrize(("has_sources", "has_targets"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("small_limits")
def test_rows(
    kernels: KernelsChoice, pinned: bool, by_scratch: bool, has_sources: bool, has_targets: bool, seed: int
) -> None:
    world = CopyMemory(kernels, seed, pinned=pinned)
    world.copy(world.rows(has_sources=has_sources, has_targets=has_targets), by_scratch=by_scratch)
    world.check()


@is_pinned
@pytest.mark.parametrize("by_scratch", [False, True])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["strided", "conjugated", "negated", "expanded", "number"])
def test_tensors(pinned: bool, by_scratch: bool, seed: int, kind: str) -> None:
    world = CopyMemory("plain", seed, pinned=pinned)
    values = torch.randn(6, 7, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))
    device = world.runtime.new_tensor((6, 7), torch.complex64, values=values)
    views = {
        "strided": lambda tensor: tensor.t()[1:, ::2],
        "conjugated": lambda tensor: tensor.conj(),
        "negated": lambda tensor: tensor.conj().imag,
        "expanded": lambda tensor: tensor[:1].expand(3, 7),
        "number": lambda tensor: tensor[2, 3].conj(),
    }
    expected = views[kind](values).resolve_conj().resolve_neg().contiguous()
    target = torch.from_numpy(world.target[64 : 64 + expected.nbytes]).view(expected.dtype).view(expected.shape)
    world.copy(TensorCopy(target, views[kind](device)), by_scratch=by_scratch)
    raw = expected.reshape(-1).view(torch.uint8).numpy()
    world.expected[64 : 64 + raw.size] = raw
    world.check()


@every_kernels
@pytest.mark.parametrize("by_scratch", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("small_limits")
def test_copies_over_the_borders_of_pinned_ranges(kernels: KernelsChoice, by_scratch: bool, seed: int) -> None:
    """Each alone is refused by the copy engine, as test_a_copy_over_the_border_of_a_pinned_range_is_refused shows."""
    world = CopyMemory(kernels, seed, pinned=False)
    world.pin_some()
    world.copy(SegmentCopy(world.segments(40, world.random.choice([50, 9000, 60_000]))), by_scratch=by_scratch)
    world.check()
    world.copy(world.rows(has_sources=True, has_targets=True), by_scratch=by_scratch)
    world.check()
    values = torch.arange(30_000, dtype=torch.int32).view(100, 300).t()
    raw = values.contiguous().view(torch.uint8).reshape(-1).numpy()
    device = world.runtime.new_tensor((100, 300), torch.int32, values=values.t()).t()
    at = 4 * world.random.randrange(TARGET_BYTES // 8)
    target = torch.from_numpy(world.target[at : at + raw.size]).view(torch.int32).view(values.shape)
    world.copy(TensorCopy(target, device), by_scratch=by_scratch)
    world.expected[at : at + raw.size] = raw
    world.check()


@pytest.mark.parametrize("by_scratch", [False, True])
@pytest.mark.usefixtures("small_limits")
def test_many_long_segments_do_not_fill_the_queue_of_a_stream(
    by_scratch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy of the copy engine is an operation; the host would wait for room."""
    monkeypatch.setattr(library_kernels, "ENGINE_COPIES_MAX", 5, raising=False)
    world = CopyMemory("plain", 3, pinned=True)
    world.runtime.schedule.run_all()
    world.runtime.schedule.pace, world.runtime.schedule.depth_max = 0.0, 20
    sizes = [world.random.randrange(4000, 9000) for _ in range(30)]
    begins = np.cumsum([0, *sizes[:-1]])
    found = [(world.source.data_ptr() + b, world.target_address + b, s) for b, s in zip(begins, sizes, strict=True)]
    world.expected[: sum(sizes)] = world.source_bytes[: sum(sizes)]
    world.copy(SegmentCopy(np.array(found, dtype=np.uint64)), by_scratch=by_scratch)
    assert world.runtime.schedule.waits_for_room_count == 0
    world.check()


@pytest.mark.usefixtures("small_limits")
def test_without_memory_left_a_strided_tensor_goes_in_parts_that_there_is_memory_for() -> None:
    for kernels in ("plain", "torch"):
        world = CopyMemory(kernels, 1, pinned=True)
        values = torch.arange(60_000, dtype=torch.int16).view(2, 3, 100, 100).transpose(2, 3)
        source = world.runtime.new_tensor((2, 3, 100, 100), torch.int16, values=values.transpose(2, 3)).transpose(2, 3)
        world.runtime.allocation_bytes_max = 25_000
        target = torch.from_numpy(world.target[: values.nbytes]).view(torch.int16).view(values.shape)
        world.copy(TensorCopy(target, source))
        world.expected[: values.nbytes] = values.contiguous().view(torch.uint8).reshape(-1).numpy()
        world.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_parts_of_a_split_are_all_of_it_and_fit(seed: int) -> None:
    for make in (
        lambda world: SegmentCopy(world.segments(20, world.random.choice([40, 3000]))),
        lambda world: world.rows(has_sources=True, has_targets=True),
        lambda world: world.rows(has_sources=True, has_targets=False),
        lambda world: world.rows(has_sources=False, has_targets=True),
    ):
        whole = make(CopyMemory("plain", seed, pinned=True))
        sizes = {0, 1, 255, whole.bytes // 3, whole.bytes, whole.bytes + 511, 2 * whole.bytes + 100_000}
        for bytes_max in sorted(sizes):
            world = CopyMemory("plain", seed, pinned=True)
            first, last = make(world).split(bytes_max)
            world.runtime.schedule.run_all()
            parts = [part for part in (first, last) if part is not None]
            assert sum(part.bytes for part in parts) == whole.bytes
            assert last is None or last.by_scratch()[0] <= bytes_max
            if bytes_max > 2 * whole.bytes + 50_000:
                assert first is None
            begin = min(part.targets[0] for part in parts)
            end = max(part.targets[1] for part in parts)
            assert world.target_address <= begin < end <= world.target_address + TARGET_BYTES
            if first is not None:
                world.copy(first)
            if last is not None:
                world.copy(last, by_scratch=True)
            world.check()


def test_without_memory_left_short_segments_go_one_by_one() -> None:
    for kernels in ("plain", "torch"):
        world = CopyMemory(kernels, 1, pinned=False)
        segments = world.segments(9, 50)
        world.runtime.is_out_of_memory = True
        world.copy(SegmentCopy(segments))
        world.check()
