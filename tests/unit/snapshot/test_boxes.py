"""Random boxes of a tensor into random boxes of memory: every element comes to its place, and no other changes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.errors import CorruptError
from asyncckpt.format import manifest
from asyncckpt.format.dtypes import stored_dtype
from asyncckpt.format.encodings import encode
from asyncckpt.format.manifest import BlockFacts
from asyncckpt.model.block import BlockSpec, PlacedBlock, overlap
from asyncckpt.model.sharded import Piece
from asyncckpt.model.table import Role
from asyncckpt.native import TwinCore, core, twin
from asyncckpt.plan.contents import StoredDense
from asyncckpt.plan.load_plan import DenseLoad, LoadPlan
from asyncckpt.plan.load_targets import InPlace
from asyncckpt.snapshot import boxes, windows
from asyncckpt.snapshot.restore import OpenLoads, restore, uploads_of_load
from tests.worlds.bits import raw_of, taken

Box = tuple[tuple[int, int], ...]


@dataclass
class MemoryReader:
    """A BlockReader over blocks in memory that notes which bytes of them were read."""

    verify: bool
    blocks: list[tuple[BlockFacts, bytes]] = field(default_factory=list)
    passed_over: set[int] = field(default_factory=set)
    checked: dict[int, tuple[int, int]] = field(default_factory=dict)
    reads: list[tuple[int, int, int]] = field(default_factory=list)
    _queue: list[tuple[int, int, int, int]] = field(default_factory=list)

    def put(self, spec: BlockSpec, raw: bytes) -> None:
        placed = PlacedBlock(spec=spec, key=spec.name, file_index=0, offset=0)
        digest, *leaves = digest_rows(raw)
        facts = BlockFacts(placed=placed, digest=digest, filtered=False, leaf_digests=b"".join(leaves))
        self.blocks.append((facts, raw))

    def add(self, number: int, address: int, *, begin: int, bytes: int) -> None:
        self._queue.append((number, address, begin, bytes))

    def run(self) -> None:
        queue, self._queue = self._queue, []
        for number, address, begin, size in queue:
            facts, raw = self.blocks[number]
            assert 0 <= begin <= begin + size <= len(raw)
            self.reads.append((number, begin, size))
            source = np.frombuffer(raw, dtype=np.uint8)
            if size:
                core.copy(np.array([[source.ctypes.data + begin, address, size]], dtype=np.uint64))
            if self.verify and size == facts.placed.spec.bytes:
                self.check(number, digest_rows(raw)[0])

    def block(self, number: int) -> BlockFacts:
        return self.blocks[number][0]

    def check(self, number: int, digest: bytes, *, begin: int = 0, end: int | None = None) -> None:
        facts, raw = self.blocks[number]
        end = len(raw) if end is None else end
        if digest != facts.digest_of(begin, end):
            raise CorruptError(f"block {number}")
        self.checked[number] = begin, end

    def pass_over(self, number: int) -> None:
        self.passed_over.add(number)


def digest_rows(raw: bytes) -> list[bytes]:
    """The digest of a block, then those of its leaves."""
    array = np.frombuffer(raw, dtype=np.uint8)
    digester = windows.core.digester()
    digester.update(array.ctypes.data, array.size)
    return [row.tobytes() for row in digester.end_rows()]


@pytest.fixture
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> int:
    """Leaves of 64 bytes; returns their size."""
    for module in (manifest, twin):
        monkeypatch.setattr(module, "LEAF_BYTES", 64)
    monkeypatch.setattr(windows, "core", TwinCore())
    return 64


def cut(rng: random.Random, shape: tuple[int, ...], times: int) -> list[Box]:
    """Boxes that make up a whole: cut again and again at random."""
    found: list[Box] = [tuple((0, size) for size in shape)]
    for _ in range(times):
        box = found.pop(rng.randrange(len(found)))
        dimension = rng.randrange(len(shape))
        low, high = box[dimension]
        at = rng.randint(low, high)  # Either side may be empty.
        for half in ((low, at), (at, high)):
            found.append((*box[:dimension], half, *box[dimension + 1 :]))
    return found


def some_values(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    size = torch.empty(0, dtype=dtype).element_size() * math.prod(shape)
    raw = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return ((raw % 2).bool() if dtype is torch.bool else raw.view(dtype)).reshape(shape)


def spec_of(tensor: torch.Tensor, box: Box, whole: tuple[int, ...]) -> BlockSpec:
    stored, shape = stored_dtype(tensor.dtype, owner="w"), tuple(tensor.shape)
    begins = tuple(low for low, _ in box)
    return BlockSpec(
        name="w",
        role=Role.DENSE,
        dtype=stored.name,
        stored_dtype=stored.stored,
        stored_itemsize=stored.stored_itemsize,
        shape=shape,
        stored_shape=stored.stored_shape(shape),
        leaf=0,
        row_begin=begins[0],
        whole_shape=whole,
        column_begins=begins[1:] if any(begins[1:]) else (),
    )


def room_for(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a box: contiguous, a part of something larger, or with its dimensions in another order."""
    kind = rng.randrange(3)
    if kind == 0:
        return some_values(rng, shape, dtype)
    if kind == 1:
        larger = some_values(rng, tuple(size + 2 for size in shape), dtype)
        return larger[tuple(slice(1, 1 + size) for size in shape)]
    return some_values(rng, tuple(reversed(shape)), dtype).permute(*reversed(range(len(shape))))


def load_into(pieces: list[Piece], whole: torch.Tensor, reader: MemoryReader) -> None:
    shape = tuple(whole.shape)
    numbers = tuple(range(len(reader.blocks)))
    stored = StoredDense(name="w", path=("w",), blocks=numbers, dtype=str(whole.dtype).split(".")[1], shape=shape)
    target = InPlace(name="w", path=("w",), whole_shape=shape, dtype=whole.dtype, pieces=tuple(pieces))
    load = DenseLoad(target=target, source=stored)
    plan = LoadPlan(dense=(load,), tables=(), objects=(), missing=(), unexpected=(), info={})
    assert restore(plan, reader, clear=True, opened=OpenLoads()) == {}


def cases() -> Iterator[Any]:
    dtypes = list(asyncckpt.checkpoints.supported_dtypes())
    for seed in range(40):
        yield pytest.param(seed, dtypes[seed % len(dtypes)], id=f"{seed}-{str(dtypes[seed % len(dtypes)])[6:]}")


@pytest.mark.parametrize(("seed", "dtype"), list(cases()))
def test_boxes_are_verified_by_the_leaves_that_hold_them(
    seed: int, dtype: torch.dtype, small_leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_boxes_into_boxes(seed, dtype, True, monkeypatch)


@pytest.mark.parametrize("window_bytes", [1, 100, 1 << 20])
def test_only_leaves_with_something_wanted_are_read_and_verified(
    window_bytes: int, small_leaves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", window_bytes)
    whole = torch.arange(200.0).reshape(20, 10)  # Rows of 40 bytes.
    wanted = range(7 * 40, 12 * 40)
    begin, end = wanted.start // small_leaves * small_leaves, -(-wanted.stop // small_leaves) * small_leaves
    for at in range(0, whole.nbytes, 8):
        reader = MemoryReader(verify=True)
        reader.put(spec_of(whole, ((0, 20), (0, 10)), (20, 10)), raw_of(whole))
        facts, raw = reader.blocks[0]
        reader.blocks[0] = (facts, raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        target = torch.zeros(5, 10)
        if begin <= at < end:
            with pytest.raises(CorruptError, match="block 0"):
                load_into([Piece(target, (7, 0))], whole, reader)
        else:
            load_into([Piece(target, (7, 0))], whole, reader)
            assert torch.equal(target, whole[7:12])
        assert sum(size for _, _, size in reader.reads) == end - begin


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("seed", "dtype"), list(cases()))
def test_boxes_into_boxes(seed: int, dtype: torch.dtype, verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(windows, "WINDOW_BYTES", rng.choice([1, 40, 300, 1 << 20]))
    monkeypatch.setattr(boxes, "RUN_BYTES_MIN", rng.choice([1, 50, 1 << 20]))
    shape = tuple(rng.randint(1, 9) for _ in range(rng.randint(1, 4)))
    whole = some_values(rng, shape, dtype)
    reader = MemoryReader(verify=verify)
    for box in cut(rng, shape, rng.randint(0, 6)):
        part = taken(whole, box)
        reader.put(spec_of(part, box, shape), raw_of(part))
    targets = [box for box in cut(rng, shape, rng.randint(0, 6)) if rng.random() < 0.7]
    pieces = [
        Piece(room_for(rng, tuple(high - low for low, high in box), dtype), tuple(low for low, _ in box))
        for box in targets
    ]
    load_into(pieces, whole, reader)
    for box, piece in zip(targets, pieces, strict=True):
        assert raw_of(piece.tensor) == raw_of(taken(whole, box)), box
    check_reads(reader, targets)


def check_reads(reader: MemoryReader, targets: list[Box]) -> None:
    """Each block is read at most once, whole where it is verified, and not at all where nothing of it is wanted."""
    for number, (facts, raw) in enumerate(reader.blocks):
        spec = facts.placed.spec
        wanted = any(
            overlap(spec.begin, spec.shape, [low for low, _ in box], [high - low for low, high in box])
            for box in targets
        )
        spans = sorted((begin, begin + size) for owner, begin, size in reader.reads if owner == number)
        if not wanted:
            assert not spans
            assert number in reader.passed_over
            continue
        assert number not in reader.passed_over
        if reader.verify:
            assert reader.checked[number] == (spans[0][0], spans[-1][1])
            assert facts.leaf_digests or reader.checked[number] == (0, len(raw))
            assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
        else:
            assert sum(end - begin for begin, end in spans) <= len(raw)


def test_a_single_number() -> None:
    for verify in (True, False):
        reader = MemoryReader(verify=verify)
        value = torch.tensor(1.5)
        spec = replace(spec_of(value[None], ((0, 1),), (1,)), shape=(), stored_shape=(), whole_shape=None)
        reader.put(spec, raw_of(value))
        target = torch.zeros(3)
        load_into([Piece(target[1], ())], value, reader)
        load_into([Piece(torch.zeros((), dtype=torch.complex64).conj().real, ())], value, reader)
        assert target.tolist() == [0, 1.5, 0]


def test_untouched_memory_around_a_box_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 32)
    whole = torch.arange(60.0).reshape(6, 10)
    reader = MemoryReader(verify=True)
    reader.put(spec_of(whole, ((0, 6), (0, 10)), (6, 10)), raw_of(whole))
    around = torch.full((8, 8), -1.0)
    load_into([Piece(around[2:6, 1:5], (1, 3))], whole, reader)
    expected = torch.full((8, 8), -1.0)
    expected[2:6, 1:5] = whole[1:5, 3:7]
    assert torch.equal(around, expected)


def test_whole_rows_are_read_straight_into_place_without_verification() -> None:
    whole = torch.arange(4000.0).reshape(100, 40)
    reader = MemoryReader(verify=False)
    for low, high in ((0, 60), (60, 100)):
        part = whole[low:high]
        reader.put(spec_of(part, ((low, high), (0, 40)), (100, 40)), raw_of(part))
    target = torch.zeros(30, 40)
    load_into([Piece(target, (40, 0))], whole, reader)
    assert torch.equal(target, whole[40:70])
    assert sorted(reader.reads) == [(0, 40 * 160, 20 * 160), (1, 0, 10 * 160)]


def test_long_runs_of_columns_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes, "RUN_BYTES_MIN", 64)
    whole = torch.arange(400.0).reshape(10, 40)
    reader = MemoryReader(verify=False)
    reader.put(spec_of(whole, ((0, 10), (0, 40)), (10, 40)), raw_of(whole))
    target = torch.zeros(5, 16)
    load_into([Piece(target, (3, 8))], whole, reader)
    assert torch.equal(target, whole[3:8, 8:24])
    assert sum(size for _, _, size in reader.reads) == target.nbytes
    short = torch.zeros(5, 15)
    reader.reads.clear()
    load_into([Piece(short, (3, 8))], whole, reader)
    assert torch.equal(short, whole[3:8, 8:23])
    assert sum(size for _, _, size in reader.reads) == 5 * 160  # The rows that hold them.


def test_memory_stays_small_where_one_row_is_larger_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a block of a single row is ever held beside its target."""
    monkeypatch.setattr(windows, "WINDOW_BYTES", 1000)
    whole = torch.arange(2 * 5 * 4000.0).reshape(2, 5, 4000)
    reader = MemoryReader(verify=True)
    reader.put(spec_of(whole, ((0, 2), (0, 5), (0, 4000)), (2, 5, 4000)), raw_of(whole))
    target = torch.zeros(2, 2, 3999)
    load_into([Piece(target, (0, 2, 1))], whole, reader)
    assert torch.equal(target, whole[:, 2:4, 1:])
    assert max(size for _, _, size in reader.reads) <= 1000


def encoded_block(whole: torch.Tensor, steps: Any) -> tuple[BlockSpec, bytes]:
    found = encode(whole, steps)
    spec = replace(
        spec_of(whole, tuple((0, size) for size in whole.shape), tuple(whole.shape)),
        stored_dtype=found.stored.dtype,
        stored_itemsize=found.stored.itemsize,
        stored_shape=found.stored.shape,
        encoding=found.steps,
    )
    return spec, found.raw.tobytes()


@pytest.mark.parametrize("begin", [(0, 0), (1, 2)])
def test_encoded_blocks(begin: tuple[int, int]) -> None:
    whole = torch.zeros(30, 40).index_fill_(0, torch.tensor([3, 7]), 2.0)
    reader = MemoryReader(verify=False)
    reader.put(*encoded_block(whole, ({"kind": "zstd", "level": 1},)))
    target = torch.full((25, 30), -1.0)
    load_into([Piece(target, begin)], whole, reader)
    assert torch.equal(target, whole[begin[0] : begin[0] + 25, begin[1] : begin[1] + 30])


@pytest.mark.parametrize("window_bytes", [64, 1 << 20])
def test_damage_outside_of_what_is_wanted_is_found(window_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", window_bytes)
    whole = torch.arange(200.0).reshape(20, 10)
    reader = MemoryReader(verify=True)
    reader.put(spec_of(whole, ((0, 20), (0, 10)), (20, 10)), raw_of(whole))
    facts, raw = reader.blocks[0]
    reader.blocks[0] = (facts, raw[:-1] + b"\x7f")
    with pytest.raises(CorruptError, match="block 0"):
        load_into([Piece(torch.zeros(2, 2), (0, 0))], whole, reader)


def test_without_devices_values_are_put_at_once() -> None:
    target, strided = torch.zeros(3), torch.zeros(3, 2)[:, 0]
    with uploads_of_load() as uploads:
        assert uploads is None
        windows.put(target, torch.ones(3), uploads)
        windows.put(strided, torch.ones(3), uploads)
    assert target.tolist() == strided.tolist() == [1, 1, 1]
