"""The door to the CUDA library, with its kernels compiled for the CPU, against NumPy, torch and the core."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncckpt.native import U8, U64, UnusableLibrary, core
from asyncckpt.native.cuda import CudaLibrary, DeviceFailure, load_cuda_library
from tests.cuda_on_cpu import cuda_on_cpu, cuda_on_cpu_controls

STREAM = 0x1234


@pytest.fixture
def cuda(controls: ctypes.CDLL) -> CudaLibrary:
    return cuda_on_cpu()


@pytest.fixture
def controls() -> Iterator[ctypes.CDLL]:
    controls = cuda_on_cpu_controls()
    controls.cuda_on_cpu_set_devices(2)  # A simulated device of an earlier test has set its own number.
    yield controls
    controls.cuda_on_cpu_set_devices(2)
    controls.cuda_on_cpu_fail_after(0, 0)


def table_of(*rows: tuple[int, int, int]) -> U64:
    return np.array(rows, dtype=np.uint64).reshape(-1, 3)


def random_bytes(rng: np.random.Generator, count: int) -> U8:
    return rng.integers(0, 256, count, dtype=np.uint8)


def scattered(rng: np.random.Generator, count: int) -> tuple[U8, U8, U8, U64]:
    """A source, a target, what the target shall be, and segments between their random places."""
    source, target = random_bytes(rng, 1_000_000), random_bytes(rng, 1_000_000)
    expected, at, segments = target.copy(), 0, []
    for _ in range(count):
        bytes = int(rng.integers(0, 2000))
        begin = int(rng.integers(0, len(source) - bytes))
        at += int(rng.integers(0, 20))
        expected[at : at + bytes] = source[begin : begin + bytes]
        segments.append((source.ctypes.data + begin, target.ctypes.data + at, bytes))
        at += bytes
    return source, target, expected, table_of(*segments)


@pytest.mark.parametrize("seed", range(3))
def test_batch_and_single_copies_do_the_same(cuda: CudaLibrary, controls: ctypes.CDLL, seed: int) -> None:
    rng = np.random.default_rng(seed)
    controls.cuda_on_cpu_seed(seed)
    for way in ("copy", "batch", "batch on the device"):
        source, target, expected, segments = scattered(rng, 700)
        assert len(source) == len(target)
        if way == "copy":
            cuda.copy(1, segments, STREAM)
        else:
            table = np.empty(cuda.batch_table_bytes(len(segments)) // 8, dtype=np.uint64)
            other = np.empty_like(table)
            cuda.copy_batch(
                1, segments, table.ctypes.data, STREAM, device_table=other.ctypes.data if way != "batch" else 0
            )
        np.testing.assert_array_equal(target, expected)
        assert controls.cuda_on_cpu_last_stream() == STREAM
        assert controls.cuda_on_cpu_last_device() == 1


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_copied_as_by_the_core(cuda: CudaLibrary, controls: ctypes.CDLL, seed: int) -> None:
    rng = np.random.default_rng(seed)
    controls.cuda_on_cpu_seed(seed)
    for _ in range(8):
        rows_count = int(rng.integers(1, 300))
        count = int(rng.integers(0, rows_count + 1))
        row_bytes = rng.choice([1, 3, 4, 8, 20, 64, 512, 1000], 3)
        sources = [random_bytes(rng, rows_count * int(bytes)) for bytes in row_bytes]
        targets, others = ([np.zeros_like(source) for source in sources] for _ in range(2))
        rows = [rng.permutation(rows_count)[:count].astype(np.int64) for _ in range(2)]
        source_rows, target_rows = rows
        columns, other_columns = (
            table_of(*((s.ctypes.data, t.ctypes.data, b) for s, t, b in zip(sources, those, row_bytes, strict=True)))
            for those in (targets, others)
        )
        cuda.copy_rows(0, columns, source_rows.ctypes.data, target_rows.ctypes.data, count, STREAM)
        core.copy_rows(other_columns, source_rows, target_rows)
        for target, other in zip(targets, others, strict=True):
            np.testing.assert_array_equal(target, other)


def test_rows_without_numbers_keep_their_order(cuda: CudaLibrary) -> None:
    source, target = np.arange(60, dtype=np.int64), np.zeros(60, dtype=np.int64)
    cuda.copy_rows(0, table_of((source.ctypes.data, target.ctypes.data, 16)), None, None, 20, 0)
    np.testing.assert_array_equal(target[:40], source[:40])
    assert not target[40:].any()


@pytest.mark.parametrize("above", [0, 7, 255])
def test_marked_rows_are_copied(cuda: CudaLibrary, rng: np.random.Generator, above: int) -> None:
    marks = rng.integers(0, 15, 500, dtype=np.uint8)
    source, target = (rng.random((500, 9)).astype(np.float32) for _ in range(2))
    expected = target.copy()
    expected[marks > above] = source[marks > above]
    columns = table_of((source.ctypes.data, target.ctypes.data, 36))
    cuda.copy_marked_rows(0, columns, marks.ctypes.data, above, 500, STREAM)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("row_bytes", [0, 1, 4, 12, 64, 200, 512, 777, 2048])
def test_prints_are_those_of_the_core(cuda: CudaLibrary, rng: np.random.Generator, row_bytes: int) -> None:
    ids, rows = random_bytes(rng, 700 * 8), random_bytes(rng, 700 * row_bytes)
    columns = np.array([(ids.ctypes.data, 8), (rows.ctypes.data, row_bytes)], dtype=np.uint64)
    prints = np.zeros(700, dtype=np.uint64)
    cuda.fingerprints(0, columns, 700, prints.ctypes.data, STREAM)
    np.testing.assert_array_equal(prints, core.fingerprints(columns, 700))


def test_the_absence_of_devices_has_a_reason(cuda: CudaLibrary, controls: ctypes.CDLL) -> None:
    cuda.check_usable(1)
    controls.cuda_on_cpu_set_devices(0)
    with pytest.raises(DeviceFailure, match="cudaErrorInsufficientDriver"):
        cuda.check_usable(1)


def test_a_failure_of_cuda_has_its_name_number_and_item(cuda: CudaLibrary, controls: ctypes.CDLL) -> None:
    _source, target, _expected, segments = scattered(np.random.default_rng(1), 5)
    segments[:, 2] = 1
    before = target.copy()
    controls.cuda_on_cpu_fail_after(3, 700)
    with pytest.raises(DeviceFailure, match=r"cudaMemcpyAsync: .* \(cudaErrorIllegalAddress\)") as caught:
        cuda.copy(0, segments, STREAM)
    assert (caught.value.name, caught.value.number, caught.value.item) == ("cudaErrorIllegalAddress", 700, 3)
    assert (target != before).sum() <= 3
    with pytest.raises(DeviceFailure, match="cudaErrorInvalidDevice"):
        cuda.check_usable(9)
    controls.cuda_on_cpu_fail_after(0, 209)
    with pytest.raises(DeviceFailure, match="cudaErrorNoKernelImageForDevice"):
        cuda.check_usable(1)
    cuda.check_usable(1)


def test_host_memory_is_registered_once(cuda: CudaLibrary) -> None:
    memory = core.map_memory(1 << 20)
    cuda.host_register(0, memory.address, memory.bytes)
    with pytest.raises(DeviceFailure, match="cudaErrorHostMemoryAlreadyRegistered"):
        cuda.host_register(1, memory.address, memory.bytes)
    cuda.host_unregister(1, memory.address)
    with pytest.raises(DeviceFailure, match="cudaErrorHostMemoryNotRegistered"):
        cuda.host_unregister(0, memory.address)
    with pytest.raises(ValueError, match="begin a page"):
        cuda.host_register(0, memory.address + 8, 100)
    memory.close()


def test_broken_contracts_are_refused(cuda: CudaLibrary, controls: ctypes.CDLL) -> None:
    launches = controls.cuda_on_cpu_launches()
    columns = table_of((64, 64, 8))
    with pytest.raises(ValueError, match="uint64 array"):
        cuda.copy(0, columns.astype(np.int64), STREAM)
    with pytest.raises(ValueError, match="negative"):
        cuda.copy(-1, columns, STREAM)
    with pytest.raises(ValueError, match="table is NULL"):
        cuda.copy_batch(0, columns, 0, STREAM)
    with pytest.raises(ValueError, match="0 or more"):
        cuda.copy_rows(0, columns, None, None, -1, STREAM)
    with pytest.raises(ValueError, match="from 0 to 255"):
        cuda.copy_marked_rows(0, columns, 64, 256, 1, STREAM)
    with pytest.raises(ValueError, match="prints is NULL"):
        cuda.fingerprints(0, columns[:, :2].copy(), 1, 0, STREAM)
    assert controls.cuda_on_cpu_launches() == launches


def test_a_missing_library_is_unusable(tmp_path: Path) -> None:
    with pytest.raises(UnusableLibrary, match="cannot load"):
        load_cuda_library(tmp_path / "nothing.so")
