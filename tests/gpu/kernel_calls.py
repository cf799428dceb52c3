"""Calls of all kernels of the CUDA library, each beside NumPy. `python -m tests.gpu.kernel_calls` makes them once, for
compute-sanitizer (test_sanitizer.py); test_kernels.py makes more of them.

With tensors of the host the library is the one that has the same kernels compiled for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.native import core
from asyncckpt.native.cuda import CudaLibrary, load_cuda_library
from tests.gpu.device import DEVICE, IS_CUDA, current_stream, synchronize

Bytes = NDArray[np.uint8]
GUARD = 0xA5
ROW_BYTES = (1, 2, 4, 7, 8, 12, 16, 20, 33, 64, 128, 512, 516, 2048)


def load() -> CudaLibrary:
    if IS_CUDA:
        library = load_cuda_library()
        library.check_usable(0)
        return library
    from tests.cuda_on_cpu import cuda_on_cpu_library

    return load_cuda_library(cuda_on_cpu_library())


class Memory:
    """Memory of the device and pinned memory of the host, and the library with a stream."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.library = load()
        self.device = torch.device(DEVICE).index or 0
        self._kept: list[torch.Tensor] = []

    @property
    def stream(self) -> int:
        return int(current_stream().cuda_stream) if IS_CUDA else 0

    def put(self, array: NDArray[Any], *, on_host: bool = False) -> torch.Tensor:
        """A copy in memory that kernels can touch, uint8 [bytes]."""
        raw = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy())
        held = (raw.pin_memory() if IS_CUDA else raw) if on_host else raw.to(DEVICE)
        self._kept.append(held)
        return held

    def guarded(self, bytes: int, *, on_host: bool = False) -> torch.Tensor:
        return self.put(np.full(bytes, GUARD, dtype=np.uint8), on_host=on_host)

    def bytes(self, count: int) -> Bytes:
        return self.random.integers(0, 256, count, dtype=np.uint8)

    def read(self, tensor: torch.Tensor) -> Bytes:
        """What is there when the device has come to here."""
        synchronize()
        found: Bytes = tensor.cpu().numpy()
        return found


def copy_long(world: Memory, *, bytes: int = 300_007) -> None:
    """Segments by the copy engine, in every direction."""
    values = world.bytes(bytes)
    host, back = world.put(values, on_host=True), world.guarded(bytes, on_host=True)
    first, second = world.guarded(bytes), world.guarded(bytes)
    for source, target in ((host, first), (first, second), (second, back)):
        segments = np.array([[source.data_ptr(), target.data_ptr(), bytes]], dtype=np.uint64)
        world.library.copy(world.device, segments, world.stream)
    assert np.array_equal(world.read(back), values)


def copy_batch(world: Memory, *, count: int = 300, to_host: bool = False, device_table: bool = False) -> None:
    """Many segments of any size and alignment in one launch; nothing beside them is written."""
    sizes = world.random.integers(0, 700, count)
    few = sizes[:: max(1, count // 5)]
    few[:] = np.resize([20_001, 0, 1, 4096, 4097], len(few))
    source_begins = np.cumsum(sizes + world.random.integers(0, 40, count)) - sizes
    target_begins = np.cumsum(sizes + world.random.integers(0, 40, count)) - sizes
    values = world.bytes(int(source_begins[-1] + sizes[-1]))
    target_bytes = int(target_begins[-1] + sizes[-1] + 64)
    source, target = world.put(values), world.guarded(target_bytes, on_host=to_host)
    segments = np.stack([source_begins, target_begins, sizes], axis=1).astype(np.uint64)
    expected = np.full(target_bytes, GUARD, dtype=np.uint8)
    for begin, end, size in segments.tolist():
        expected[end : end + size] = values[begin : begin + size]
    segments[:, 0] += np.uint64(source.data_ptr())
    segments[:, 1] += np.uint64(target.data_ptr())
    table_bytes = world.library.batch_table_bytes(count)
    table = world.guarded(table_bytes, on_host=True)
    own = world.guarded(table_bytes).data_ptr() if device_table else 0
    shuffled = np.ascontiguousarray(segments[world.random.permutation(count)])
    world.library.copy_batch(world.device, shuffled, table.data_ptr(), world.stream, device_table=own)
    assert np.array_equal(world.read(target), expected)


def copy_rows(
    world: Memory, *, row_bytes: int = 512, rows: int = 500, count: int = 200, by: str = "both", to_host: bool = False
) -> None:
    """Rows of two columns by index, one of them at an odd address."""
    widths = (row_bytes, 3)
    sources = [world.bytes(rows * width + 1) for width in widths]
    held = [world.put(values) for values in sources]
    targets = [world.guarded(rows * width + 1, on_host=to_host) for width in widths]
    source_rows = world.random.permutation(rows)[:count] if by in ("both", "source") else None
    target_rows = world.random.permutation(rows)[:count] if by in ("both", "target") else None
    shifts = (0, 1)
    columns = np.array(
        [
            [one.data_ptr() + shift, other.data_ptr() + shift, width]
            for one, other, width, shift in zip(held, targets, widths, shifts, strict=True)
        ],
        dtype=np.uint64,
    )
    addresses = [
        None if rows is None else world.put(rows.astype(np.int64)).data_ptr() for rows in (source_rows, target_rows)
    ]
    world.library.copy_rows(world.device, columns, addresses[0], addresses[1], count, world.stream)
    every = np.arange(count)
    for values, target, width, shift in zip(sources, targets, widths, shifts, strict=True):
        expected = np.full(rows * width + 1, GUARD, dtype=np.uint8)
        into = expected[shift : shift + rows * width].reshape(rows, width)
        taken = values[shift : shift + rows * width].reshape(rows, width)
        into[every if target_rows is None else target_rows] = taken[every if source_rows is None else source_rows]
        assert np.array_equal(world.read(target), expected)


def copy_marked_rows(world: Memory, *, row_bytes: int = 48, to_host: bool = False) -> None:
    """Rows whose mark is above a bound."""
    rows, above = 600, 7
    values, marks = world.bytes(rows * row_bytes), world.random.integers(0, 16, rows, dtype=np.uint8)
    source, target = world.put(values), world.guarded(rows * row_bytes, on_host=to_host)
    columns = np.array([[source.data_ptr(), target.data_ptr(), row_bytes]], dtype=np.uint64)
    held = world.put(marks)
    world.library.copy_marked_rows(world.device, columns, held.data_ptr(), above, rows, world.stream)
    expected = np.full((rows, row_bytes), GUARD, dtype=np.uint8)
    expected[marks > above] = values.reshape(rows, row_bytes)[marks > above]
    assert np.array_equal(world.read(target), expected.reshape(-1))


def fingerprints(world: Memory, *, widths: tuple[int, ...] = (8, 3, 64, 130, 250, 1030)) -> None:
    """The prints of rows are those of the host."""
    rows = 90
    values = [world.bytes(rows * width) for width in widths]
    on_host = np.array([[one.ctypes.data, width] for one, width in zip(values, widths, strict=True)], dtype=np.uint64)
    held = [world.put(one) for one in values]
    columns = np.array([[one.data_ptr(), width] for one, width in zip(held, widths, strict=True)], dtype=np.uint64)
    prints = world.guarded(8 * rows)
    world.library.fingerprints(world.device, columns, rows, prints.data_ptr(), world.stream)
    assert np.array_equal(world.read(prints).view(np.uint64), core.fingerprints(on_host, rows))


def registered_memory(world: Memory) -> None:
    """Kernels write to host memory that is registered, at its own address."""
    with_pages = core.map_memory(2 << 20)
    view = with_pages.view()
    view[:] = GUARD
    values = world.bytes(5000)
    source = world.put(values)
    world.library.host_register(world.device, with_pages.address, 2 << 20)
    try:
        segments = np.array([[source.data_ptr(), with_pages.address + 4096 + 3, len(values)]], dtype=np.uint64)
        table = world.guarded(world.library.batch_table_bytes(1), on_host=True)
        world.library.copy_batch(world.device, segments, table.data_ptr(), world.stream)
        synchronize()
        assert np.array_equal(view[4099 : 4099 + len(values)], values)
        assert (view[:4099] == GUARD).all()
        assert (view[4099 + len(values) :] == GUARD).all()
    finally:
        world.library.host_unregister(world.device, with_pages.address)
        with_pages.close()


def nothing(world: Memory) -> None:
    """Calls of no work are no calls."""
    none = np.empty((0, 3), dtype=np.uint64)
    table = world.guarded(max(8, world.library.batch_table_bytes(0)), on_host=True)
    world.library.copy(world.device, none, world.stream)
    world.library.copy_batch(world.device, none, table.data_ptr(), world.stream)
    world.library.copy_rows(world.device, none, None, table.data_ptr(), 0, world.stream)
    synchronize()


CALLS: tuple[Callable[[Memory], None], ...] = (
    copy_long,
    copy_batch,
    lambda world: copy_batch(world, to_host=True),
    lambda world: copy_batch(world, to_host=True, device_table=True),
    *(lambda world, size=size: copy_rows(world, row_bytes=size) for size in ROW_BYTES),
    lambda world: copy_rows(world, to_host=True),
    copy_marked_rows,
    fingerprints,
    registered_memory,
    nothing,
)


def main() -> None:
    for seed, call in enumerate(CALLS):
        call(Memory(seed))
    print(f"{len(CALLS)} calls made")


if __name__ == "__main__":
    main()
