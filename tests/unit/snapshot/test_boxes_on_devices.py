"""Random boxes of a tensor into random boxes of device memory, through windows of a few bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.devices import library_kernels, uploads
from asyncckpt.errors import CorruptError, DeviceError, SaveCancelledError
from asyncckpt.model.sharded import Piece
from asyncckpt.snapshot import windows
from tests.simulated_device import SimulatedRuntime
from tests.unit.snapshot import test_boxes as of_boxes
from tests.unit.snapshot.test_boxes import Box, MemoryReader, encoded_block, load_into, raw_of, some_values, spec_of
from tests.worlds.bits import taken

pytestmark = pytest.mark.any_core  # What is read is the same as on the host, and so is how.


def on_device(runtime: SimulatedRuntime, rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """(memory for a box on a device, what lies around it, its values before): contiguous, a part, or turned round."""
    kind, device = rng.randrange(3), rng.randrange(runtime.devices_count)
    around_shape = tuple(size + 2 for size in shape) if kind == 1 else tuple(reversed(shape)) if kind == 2 else shape
    before = some_values(rng, around_shape, dtype)
    around = runtime.new_tensor(around_shape, dtype, device, values=before)
    return part_of(around, kind, shape), around, part_of(before, kind, shape), before


def part_of(around: torch.Tensor, kind: int, shape: tuple[int, ...]) -> torch.Tensor:
    if kind == 1:
        return around[tuple(slice(1, 1 + size) for size in shape)]
    return around.permute(*reversed(range(len(shape)))) if kind == 2 else around


def cases() -> Iterator[Any]:
    dtypes = list(asyncckpt.checkpoints.supported_dtypes())
    for seed in range(24):
        kernels = "library" if seed % 10 == 9 else ("plain", "torch")[seed % 2]
        yield pytest.param(
            seed, dtypes[seed % len(dtypes)], kernels, id=f"{seed}-{str(dtypes[seed % len(dtypes)])[6:]}"
        )


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("seed", "dtype", "kernels"), list(cases()))
def test_boxes_into_boxes_of_devices(
    seed: int, dtype: torch.dtype, kernels: Any, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(windows, "WINDOW_BYTES", rng.choice([1, 40, 300, 20_000]))
    for module in (uploads, library_kernels):
        monkeypatch.setattr(module, "LARGE_BYTES", rng.choice([1, 100, 1 << 20]))
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 4)))
    whole = some_values(rng, shape, dtype)
    reader = MemoryReader(verify=verify)
    for box in of_boxes.cut(rng, shape, rng.randint(0, 6)):
        part = taken(whole, box)
        reader.put(spec_of(part, box, shape), raw_of(part))
    wanted = [box for box in of_boxes.cut(rng, shape, rng.randint(0, 6)) if rng.random() < 0.7]
    runtime = SimulatedRuntime(rng.choice([1, 2]), seed=seed, kernels=kernels)
    with runtime.installed():
        pieces, memories = [], []
        for box in wanted:
            size = tuple(high - low for low, high in box)
            place, around, own, before = on_device(runtime, rng, size, dtype)
            pieces.append(Piece(place, tuple(low for low, _ in box)))
            own.copy_(taken(whole, box))
            memories.append((around, before))
        load_into(pieces, whole, reader)
        found = [raw_of(runtime.read(around)) for around, _ in memories]
    assert found == [raw_of(expected) for _, expected in memories]
    of_boxes.check_reads(reader, wanted)


def test_pieces_on_the_host_and_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one block, and even of one window."""
    monkeypatch.setattr(windows, "WINDOW_BYTES", 500)
    whole = torch.arange(400.0).reshape(20, 20)
    reader = MemoryReader(verify=True)
    reader.put(spec_of(whole, ((0, 20), (0, 20)), (20, 20)), raw_of(whole))
    runtime = SimulatedRuntime(2, seed=4)
    with runtime.installed():
        places = [
            torch.zeros(20, 7),
            *(runtime.new_tensor((20, width), torch.float32, i) for i, width in ((0, 6), (1, 7))),
        ]
        load_into([Piece(place, (0, at)) for place, at in zip(places, (0, 7, 13), strict=True)], whole, reader)
        found = torch.cat([runtime.read(place) for place in places], dim=1)
    assert torch.equal(found, whole)


@pytest.mark.parametrize("steps", [({"kind": "zstd", "level": 1},), ({"kind": "quantize", "bits": 8},)])
@pytest.mark.parametrize("kernels", ["plain", "torch"])
def test_encoded_blocks(steps: Any, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 64)
    whole = torch.zeros(30, 40).index_fill_(0, torch.tensor([3, 7]), 2.0)
    runtime = SimulatedRuntime(seed=9, kernels=kernels)
    with runtime.installed():
        for begin, shape in (((0, 0), (30, 40)), ((1, 2), (25, 30))):
            reader = MemoryReader(verify=True)
            reader.put(*encoded_block(whole, steps))
            target = runtime.new_tensor(shape, torch.float32)
            load_into([Piece(target, begin)], whole, reader)
            loaded = runtime.read(target)
            expected = whole[begin[0] : begin[0] + shape[0], begin[1] : begin[1] + shape[1]]
            assert torch.equal(loaded, expected)


def test_a_single_number_and_nothing() -> None:
    runtime = SimulatedRuntime(seed=3)
    value = torch.tensor(1.5)
    with runtime.installed():
        reader = MemoryReader(verify=True)
        spec = replace(spec_of(value[None], ((0, 1),), (1,)), shape=(), stored_shape=(), whole_shape=None)
        reader.put(spec, raw_of(value))
        target = runtime.new_tensor((3,), torch.float32, values=torch.zeros(3))
        load_into([Piece(target[1], ())], value, reader)
        empty = torch.zeros(0, 3)
        reader = MemoryReader(verify=True)
        reader.put(spec_of(empty, ((0, 0), (0, 3)), (0, 3)), b"")
        load_into([Piece(runtime.new_tensor((0, 3), torch.float32), (0, 0))], empty, reader)
        found = runtime.read(target)
    assert found.tolist() == [0, 1.5, 0]


@dataclass
class FailingReader(MemoryReader):
    """Raises in the n-th call of `run` that has something to read."""

    error: Exception | None = None
    runs_left: int = 0

    def run(self) -> None:
        if self._queue:
            self.runs_left -= 1
            if self.runs_left < 0 and self.error is not None:
                raise self.error
        super().run()


def several_blocks(reader: MemoryReader) -> tuple[torch.Tensor, list[Box]]:
    whole = torch.arange(400.0).reshape(40, 10)
    boxes: list[Box] = [((low, low + 10), (0, 10)) for low in range(0, 40, 10)]
    for box in boxes:
        part = taken(whole, box)
        reader.put(spec_of(part, box, (40, 10)), raw_of(part))
    return whole, boxes


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("error", [CorruptError("ended"), SaveCancelledError("cancelled")])
def test_what_was_launched_is_awaited_when_a_read_fails(
    error: Exception, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the memory of targets and windows would be used by others while the device still works on it."""
    monkeypatch.setattr(windows, "WINDOW_BYTES", 100)
    reader = FailingReader(verify=True, error=error, runs_left=seed)
    whole, _ = several_blocks(reader)
    runtime = SimulatedRuntime(seed=seed, kernels=("plain", "torch")[seed % 2])
    with runtime.installed():
        target = runtime.new_tensor((40, 10), torch.float32, values=torch.full((40, 10), -1.0))
        with pytest.raises(type(error), match=str(error)):
            load_into([Piece(target, (0, 0))], whole, reader)
        side = runtime.side_stream(0)
        assert not [operation for operation in side.queue if operation.work is not None]


def test_damage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 64)
    reader = MemoryReader(verify=True)
    whole, _ = several_blocks(reader)
    facts, raw = reader.blocks[2]
    reader.blocks[2] = (facts, raw[:-1] + b"\x7f")
    runtime = SimulatedRuntime(seed=5)
    with runtime.installed():
        target = runtime.new_tensor((40, 10), torch.float32)
        with pytest.raises(CorruptError, match="block 2"):
            load_into([Piece(target, (0, 0))], whole, reader)


@pytest.mark.parametrize("at", range(8))
def test_a_device_that_is_lost(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 200)
    reader = MemoryReader(verify=True)
    whole, _ = several_blocks(reader)
    runtime = SimulatedRuntime(seed=at, kernels=("plain", "torch")[at % 2])
    with runtime.installed():
        target = runtime.new_tensor((40, 10), torch.float32)
        runtime.fail_operation(at)
        with pytest.raises(DeviceError, match="device failed"):
            load_into([Piece(target, (0, 0))], whole, reader)
        runtime.recover()
