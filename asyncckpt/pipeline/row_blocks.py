"""Cut a filtered column or tensor into blocks, each with the source of its stored bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from asyncckpt.errors import FilterError
from asyncckpt.format.encodings import ENCODED_BYTES_MAX, Encoded, StoredAs, Unfit, encode, stored_as
from asyncckpt.model.block import BlockSpec, EncodingStep
from asyncckpt.model.source import ByteSource
from asyncckpt.options import BLOCK_BYTES_MAX
from asyncckpt.pipeline.row_sources import U8, HeldSource, RecentWindows, Rows, RowsSource
from asyncckpt.pipeline.staged_state import OutBlock


@dataclass(frozen=True)
class FilteredRows:
    """The rows of a column, or of a tensor, that are written; a number without shape is one row.

    spec:       of all of them, as they are; a part of a large tensor keeps its place in it
    rows:       rows [begin, end) of them
    owns:       whether `rows` gives memory that stays as it is, and not only until its next call
    row_name:   what an error calls a row
    """

    spec: BlockSpec
    dtype: torch.dtype
    steps: tuple[EncodingStep, ...]
    rows: Rows
    owns: bool
    row_name: Callable[[int], str]


def blocks_of(column: FilteredRows, *, recent: RecentWindows, go_on: Callable[[], None]) -> Iterator[OutBlock]:
    """The blocks of a column in the order of its rows; those that are encoded beforehand hold their bytes.

    Raises FilterError when an encoding cannot take a value.
    """
    for part in split(column.spec, bytes_max=ENCODED_BYTES_MAX if column.steps else BLOCK_BYTES_MAX):
        steps = column.steps
        stored = stored_as(column.dtype, part.shape, steps)
        if stored is None:
            go_on()
            encoded = _encoded(column, part, steps, 0, rows_count(part))
            if any(stored_as(column.dtype, part.shape, (step,)) is None for step in encoded.steps):
                held = HeldSource(encoded.raw)
                yield OutBlock(_stored_spec(part, encoded.stored, encoded.steps), held)
                continue
            # What did not become smaller need not be held.
            steps, stored = encoded.steps, encoded.stored
        spec = _stored_spec(part, stored, steps) if steps else part
        yield OutBlock(spec, _source(column, part, spec, recent))


def split(spec: BlockSpec, *, bytes_max: int) -> list[BlockSpec]:
    """Cut a block into parts of whole rows, each of at most bytes_max; a single larger row stays whole."""
    if spec.bytes <= bytes_max or rows_count(spec) < 2:
        return [spec]
    step = max(1, bytes_max // (spec.bytes // spec.shape[0]))
    parts = []
    for begin in range(0, spec.shape[0], step):
        count = min(step, spec.shape[0] - begin)
        parts.append(
            replace(
                spec,
                shape=(count, *spec.shape[1:]),
                stored_shape=(count, *spec.stored_shape[1:]),
                row_begin=spec.row_begin + begin,
                whole_shape=spec.whole_shape or spec.shape,
            )
        )
    return parts


def rows_count(spec: BlockSpec) -> int:
    return spec.shape[0] if spec.shape else 1


def _source(column: FilteredRows, part: BlockSpec, spec: BlockSpec, recent: RecentWindows) -> ByteSource:
    """The bytes of a block whose size is known, made when they are asked for."""
    count = rows_count(part)

    def plain(begin: int, end: int) -> U8:
        rows = _rows(column, part, begin, end)
        # The next part of the column may be asked for before this one's last rows have been copied.
        if part.is_part and end == count and not column.owns:
            rows = rows.clone()
        raw: U8 = rows.reshape(-1).view(torch.uint8).numpy()
        return raw

    def encoded(begin: int, end: int) -> U8:
        return _encoded(column, part, spec.encoding, begin, end).raw

    return RowsSource(encoded if spec.encoding else plain, row_bytes=max(1, spec.bytes // max(1, count)), recent=recent)


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
