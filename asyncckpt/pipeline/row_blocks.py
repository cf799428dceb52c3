"""Cut a filtered column or tensor into blocks, each with the source of its stored bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from asyncckpt.errors import FilterError
from asyncckpt.format.encodings import ENCODED_BYTES_MAX, Encoded, StoredAs, Unfit, encode, stored_as
from asyncckpt.model.block import BlockSpec, EncodingStep
from asyncckpt.model.source import RowsSource, SpanSource, as_bytes
from asyncckpt.native import U8
from asyncckpt.options import BLOCK_BYTES_MAX
from asyncckpt.pipeline.filter_types import OutBlock, Rows
from asyncckpt.plan.image import split_rows


@dataclass(frozen=True)
class FilteredRows:
    """The rows of a column, or of a tensor, that are written; a number without shape is one row.

    spec:       of all of them, as they are; a part of a large tensor keeps its place in it
    row_name:   what an error calls a row
    """

    spec: BlockSpec
    dtype: torch.dtype
    steps: tuple[EncodingStep, ...]
    rows: Rows
    row_name: Callable[[int], str]
    replaced: bool = False


def blocks_of(column: FilteredRows, *, enter_state: Callable[[], None]) -> Iterator[OutBlock]:
    """The blocks of a column in the order of its rows; those that are encoded beforehand hold their bytes.

    Raises FilterError when an encoding cannot take a value.
    """
    for part in split_rows(column.spec, bytes_max=ENCODED_BYTES_MAX if column.steps else BLOCK_BYTES_MAX):
        steps = column.steps
        stored = stored_as(column.dtype, part.shape, steps)
        if stored is None:
            enter_state()
            encoded = _encoded(column, part, steps, 0, _rows_count(part))
            if any(stored_as(column.dtype, part.shape, (step,)) is None for step in encoded.steps):
                held = SpanSource(encoded.raw.ctypes.data, encoded.raw)
                yield OutBlock(_stored_spec(part, encoded.stored, encoded.steps), held, column.replaced)
                continue
            # What did not become smaller need not be held.
            steps, stored = encoded.steps, encoded.stored
        spec = _stored_spec(part, stored, steps) if steps else part
        yield OutBlock(spec, _source(column, part, spec), column.replaced)


def _source(column: FilteredRows, part: BlockSpec, spec: BlockSpec) -> RowsSource:
    """The bytes of a block whose size is known, made when they are asked for."""

    def made(begin: int, end: int) -> U8:
        if spec.encoding:
            return _encoded(column, part, spec.encoding, begin, end).raw
        return as_bytes(_rows(column, part, begin, end))

    return RowsSource(made, row_bytes=max(1, spec.bytes // max(1, _rows_count(part))))


def _encoded(column: FilteredRows, part: BlockSpec, steps: tuple[EncodingStep, ...], begin: int, end: int) -> Encoded:
    try:
        return encode(_rows(column, part, begin, end), steps)
    except Unfit as error:
        kinds = " and ".join(step["kind"] for step in steps)
        where = "" if error.row is None else f" in {column.row_name(_place(column, part) + begin + error.row)}"
        raise FilterError(f"block {part.name!r} cannot be stored by {kinds}: {error}{where}") from error


def _rows(column: FilteredRows, part: BlockSpec, begin: int, end: int) -> torch.Tensor:
    place = _place(column, part)
    return column.rows(place + begin, place + end)


def _place(column: FilteredRows, part: BlockSpec) -> int:
    """Where a part begins among the rows of its column."""
    return part.row_begin - column.spec.row_begin


def _stored_spec(part: BlockSpec, stored: StoredAs, steps: tuple[EncodingStep, ...]) -> BlockSpec:
    return replace(
        part,
        stored_dtype=stored.dtype,
        stored_itemsize=stored.itemsize,
        stored_shape=stored.shape,
        encoding=steps,
    )


def _rows_count(spec: BlockSpec) -> int:
    return spec.shape[0] if spec.shape else 1
