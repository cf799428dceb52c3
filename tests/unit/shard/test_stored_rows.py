"""Bytes out of a stored block: what was read is held until it was copied, and no longer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncckpt.errors import CorruptError
from asyncckpt.format.manifest import BlockFacts
from asyncckpt.model.block import BlockSpec, PlacedBlock
from asyncckpt.model.table import Role
from asyncckpt.native import core
from asyncckpt.shard import stored_rows
from asyncckpt.shard.stored_rows import copied_spec, stored_source

ROWS, ROW_BYTES, WINDOW_BYTES, CHUNK_BYTES = 1000, 24, 1000, 700


class Reader:
    """One stored block in memory."""

    has_digests = True

    def __init__(self, raw: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._raw = raw
        spec = BlockSpec(
            name="w",
            role=Role.DENSE,
            dtype="uint8",
            stored_dtype="U8",
            stored_itemsize=1,
            shape=(ROWS, ROW_BYTES),
            stored_shape=(ROWS, ROW_BYTES),
        )
        digester = core.digester()
        digester.update(raw.ctypes.data, raw.nbytes)
        placed = PlacedBlock(spec=spec, key="w", file_index=0, offset=0)
        self._block = BlockFacts(placed=placed, digest=digester.end(), filtered=False)
        self._queue: list[tuple[int, int, int]] = []

    def add(self, number: int, address: int, *, begin: int, bytes: int) -> None:
        self._queue.append((address, begin, bytes))

    def run(self) -> None:
        for address, begin, size in self._queue:
            ctypes.memmove(address, self._raw[begin:].ctypes.data, size)
        self._queue.clear()

    def block(self, number: int) -> BlockFacts:
        return self._block

    def check(self, number: int, digest: bytes) -> None:
        if digest != self._block.digest:
            raise CorruptError("damaged")


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "WINDOW_BYTES", WINDOW_BYTES)


@pytest.mark.parametrize(
    "chosen", [lambda: None, lambda: np.arange(0, ROWS, 7), lambda: np.array([ROWS - 1])], ids=["all", "some", "last"]
)
def test_only_what_was_not_copied_is_held(chosen: Callable[[], Any]) -> None:
    raw = np.random.default_rng(0).integers(0, 256, ROWS * ROW_BYTES, dtype=np.uint8)
    rows, reader = chosen(), Reader(raw)
    source = stored_source(reader, 0, rows)
    size = copied_spec(reader.block(0).placed.spec, rows).bytes
    found = bytearray()
    for begin in range(0, size, CHUNK_BYTES):
        end = min(size, begin + CHUNK_BYTES)
        for address, count in source.pieces(begin, end).tolist():
            found += ctypes.string_at(address, count)
        source.release()
        assert sum(len(held) for _, held in source._held) <= WINDOW_BYTES  # type: ignore[attr-defined]
    assert not source._held  # type: ignore[attr-defined]
    expected = raw if rows is None else raw.reshape(ROWS, ROW_BYTES)[rows]
    assert bytes(found) == expected.tobytes()


def test_the_last_bytes_of_a_damaged_block_are_never_given() -> None:
    raw = np.zeros(ROWS * ROW_BYTES, dtype=np.uint8)
    reader = Reader(raw)
    raw[-1] = 1
    source = stored_source(reader, 0, None)
    source.pieces(0, CHUNK_BYTES)
    with pytest.raises(CorruptError):
        source.pieces(CHUNK_BYTES, raw.nbytes)
