"""Filters on rows and columns: keep fewer rows, store smaller numbers, leave out zeros, compress.

    from asyncckpt import filters

    asyncckpt.Saver(..., filters=[
        filters.keep_rows("user", lambda columns: columns["count"] >= 3),
        filters.cast("user@embedding", torch.bfloat16),
        filters.skip_zero_rows("user@sum"),
        filters.compress("zstd", level=1),
    ])

They run in the background on the staged copy; training pays nothing but the cores they use. A table is named by its
name, a column as `table@column`, a dense tensor by its dotted name. A name with `*`, `?` or `[...]` is a pattern: it
takes what fits and passes over the rest. What is named outright must be there and must fit, else UsageError when the
Saver is made, or FilterError where that is only known when it saves.

The manifest records what was done and a load undoes it: tables and tensors get their own dtypes and shapes back. Ids
are always stored as they are.
"""

from __future__ import annotations

import torch

from asyncckpt.errors import FilterError, UsageError, Words, must_be
from asyncckpt.format.dtypes import supported_dtypes
from asyncckpt.format.encodings.lossless import LEVEL_MAX, LEVEL_MIN, zstandard
from asyncckpt.format.encodings.numbers import FLOATS, INTEGERS
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.pipeline.filter_rules import EncodeBlocks, KeepRows, Predicate, RowFilter, check_filters

__all__ = [
    "FilterError",
    "RowFilter",
    "WriteBlock",
    "cast",
    "check_filters",
    "compress",
    "keep_rows",
    "quantize",
    "skip_zero_rows",
]


def keep_rows(table: str, predicate: Predicate) -> RowFilter:
    """Save only the rows of a table that the predicate wants.

    predicate: called with the columns of some rows, a mapping of name -> CPU tensor [n, *row_shape], `id` among them;
    returns which rows to keep, bool [n]. It is asked for windows of at most 64 MiB, so it must judge each row by
    itself; the tensors are copies, so what it writes to them changes nothing. It runs on a background thread. With
    several filters of a table, a row must be kept by all.

    In a delta only rows that were touched are asked for. One that is not kept is taken out of the checkpoint; rows that
    were not touched stay as an earlier save has judged them. What raises or gives no bool per row is a FilterError.
    """
    if not callable(predicate):
        raise UsageError("predicate of keep_rows is not callable", found=type(predicate))
    return KeepRows(_name(table), predicate)


def cast(name: str, dtype: torch.dtype) -> RowFilter:
    """Store a column or dense tensor in a smaller dtype: floats as smaller floats, integers as smaller integers.

    Floats are rounded to the nearest: by at most 2^-8 of their size for bfloat16, 2^-11 for float16 (and 2^-25 below
    its normal range). A number beyond the range of the smaller dtype is a FilterError, and so is an infinite one where
    that has none.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS | INTEGERS:
        expected = sorted(str(known) for known in supported_dtypes() if known in FLOATS | INTEGERS)
        raise UsageError("cast goes to a float or integer dtype", found=Words(dtype), expected=expected)
    return EncodeBlocks(_name(name), {"kind": "cast", "dtype": str(dtype).removeprefix("torch.")})


def quantize(name: str, bits: int = 8) -> RowFilter:
    """Store the rows of a float column or dense tensor as codes of 8 or 4 bits with a scale and a bias each.

    A row is all numbers of one id (of one index of the first dimension). Every number comes back to within half the
    row's scale, beside the rounding to its own dtype. Where range is the row's greatest number less its least one:

        8 bits   abs(loaded - x) <= (range + abs(least) * 2**-23) / 509
        4 bits   abs(loaded - x) <= (range + abs(least) * 2**-10) / 29    (or 2**-24, where that is more)

    The layout is that of FBGEMM's fused rows. A row with a number that is not finite, or too large for its scale and
    bias (with 4 bits from 65504 on), is a FilterError.
    """
    if type(bits) is not int or bits not in (8, 4):
        raise must_be("bits of quantize", "8 or 4", bits)
    return EncodeBlocks(_name(name), {"kind": "quantize", "bits": bits})


def skip_zero_rows(name: str) -> RowFilter:
    """Store only those rows of a column or dense tensor that are not all zero bytes, and a bit per row. Lossless."""
    return EncodeBlocks(_name(name), {"kind": "skip_zero_rows"})


def compress(codec: str = "zstd", *, level: int = 1, name: str = "*") -> RowFilter:
    """Compress columns and dense tensors, all but ids, after shuffling their bytes. Lossless.

    level: 1 (fast) to 22. Blocks that do not become smaller are stored as they are. What is compressed is held in
    memory, in its stored size, until it is written. UnsupportedError where the package zstandard is missing.
    """
    if codec != "zstd":
        raise must_be("codec of compress", "'zstd'", codec)
    if type(level) is not int or not LEVEL_MIN <= level <= LEVEL_MAX:
        raise must_be("level of compress", f"an int in [{LEVEL_MIN}, {LEVEL_MAX}]", level)
    zstandard()
    return EncodeBlocks(_name(name), {"kind": "zstd", "level": level})


def _name(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise must_be("the name that a filter is for", "a name or pattern", name)
    return name
