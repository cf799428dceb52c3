"""Staged tables that count what is asked of them, and a reader of blocks that asks as a writer of files does."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.format.dtypes import stored_dtype
from asyncckpt.format.encodings import decode
from asyncckpt.model.block import BlockSpec, TableFacts
from asyncckpt.model.source import ByteSource, RowsSource, as_bytes
from asyncckpt.model.table import Role
from asyncckpt.pipeline.filter_types import OutBlock, StagedBlock, StagedColumn, StagedTable

NO_IDS = np.empty(0, dtype=np.int64)
_ROLES = {"id": Role.ID, "embedding": Role.WEIGHT}


def spec_of(name: str, values: torch.Tensor) -> BlockSpec:
    stored = stored_dtype(values.dtype, owner=name)
    table, _, column = name.rpartition("@")
    return BlockSpec(
        name=name,
        role=_ROLES.get(column, Role.OPTIMIZER) if table else Role.DENSE,
        dtype=stored.name,
        stored_dtype=stored.stored,
        stored_itemsize=stored.stored_itemsize,
        shape=tuple(values.shape),
        stored_shape=stored.stored_shape(tuple(values.shape)),
        table=table or None,
        column=column if table else None,
        slice_info="0@1@1" if table else " ",
    )


@dataclass
class CountedRows:
    """Rows of an array, copied. rows_max: how many were asked for at once, at most."""

    values: torch.Tensor
    rows_max: int = 0

    def rows(self, begin: int, end: int) -> torch.Tensor:
        if not self.values.shape:
            return self.values
        assert 0 <= begin <= end <= len(self.values)
        self.rows_max = max(self.rows_max, end - begin)
        return self.values[begin:end].clone()

    def source(self) -> RowsSource:
        count = len(self.values) if self.values.shape else 1
        return RowsSource(
            lambda begin, end: as_bytes(self.rows(begin, end)), row_bytes=max(1, self.values.nbytes // max(1, count))
        )


def staged_table(
    name: str,
    columns: Mapping[str, torch.Tensor],
    *,
    kept: NDArray[np.int64] | None = None,
    removed: NDArray[np.int64] = NO_IDS,
    whole: bool = True,
) -> StagedTable:
    return StagedTable(
        facts=TableFacts(name=name, rows_count=len(columns["id"]), shard=(0, 1), whole=whole),
        columns=tuple(
            StagedColumn(spec=spec_of(f"{name}@{column}", values), blocks=(staged_dense(f"{name}@{column}", values),))
            for column, values in columns.items()
        ),
        kept=kept,
        removed=removed,
    )


def staged_dense(name: str, values: torch.Tensor) -> StagedBlock:
    return StagedBlock(spec=spec_of(name, values), data=CountedRows(values))


def read_blocks(blocks: Sequence[OutBlock], *, chunk_bytes: int) -> list[NDArray[np.uint8]]:
    """The stored bytes of all blocks, one behind the other: each chunk is copied when all of it was asked for."""
    begins = np.cumsum([0, *(block.spec.bytes for block in blocks)]).tolist()
    raw = bytearray()
    for begin in range(0, begins[-1], chunk_bytes):
        end = min(begin + chunk_bytes, begins[-1])
        found: list[list[int]] = []
        asked: list[ByteSource] = []
        for block, at in zip(blocks, begins, strict=False):
            first, last = max(begin, at), min(end, at + block.spec.bytes)
            if first < last:
                pieces = block.source.pieces(first - at, last - at).tolist()
                assert sum(size for _, size in pieces) == last - first
                found += pieces
                asked.append(block.source)
        raw += b"".join(ctypes.string_at(address, size) for address, size in found)
        for source in asked:
            source.release()
    everything = np.frombuffer(bytes(raw), dtype=np.uint8)
    return [everything[at : at + block.spec.bytes].copy() for block, at in zip(blocks, begins, strict=False)]


def load_blocks(blocks: Sequence[OutBlock], *, chunk_bytes: int = 1 << 20) -> dict[str, torch.Tensor]:
    """The array of every name, its parts joined; checks that parts cover their whole."""
    parts: dict[str, list[tuple[BlockSpec, torch.Tensor]]] = {}
    for block, raw in zip(blocks, read_blocks(blocks, chunk_bytes=chunk_bytes), strict=True):
        parts.setdefault(block.spec.name, []).append((block.spec, decode(raw, block.spec)))
    loaded = {}
    for name, found in parts.items():
        if len(found) == 1 and not found[0][0].is_part:
            loaded[name] = found[0][1]
            continue
        ends = np.cumsum([found[0][0].row_begin, *(spec.shape[0] for spec, _ in found)])
        assert [spec.row_begin for spec, _ in found] == ends[:-1].tolist()
        assert {spec.whole_shape for spec, _ in found} == {(int(ends[-1]), *found[0][0].shape[1:])}
        loaded[name] = torch.cat([values for _, values in found])
    return loaded
