"""Every limit of the format, and the checks that keep writers within them.

Readers refuse what is beyond a limit, because a damaged or hostile file could ask for any amount of memory or time. So
writers must refuse it first: a checkpoint that is acknowledged can be read. Both use these constants, always as
`limits.NAME`, so that a test can lower one for both.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncckpt.errors import UnsupportedError, UsageError, Words
from asyncckpt.format.dtypes import StoredDtype, array_bytes, known_dtype
from asyncckpt.model.block import BlockSpec, TableFacts

I64_MAX = 2**63 - 1

# Arrays.
DIMENSIONS_MAX = 64  # As stored: of complex128 and complex32, which are stored as pairs, one less.
ARRAY_BYTES_MAX = I64_MAX  # With every dimension of 0 counted as 1.
ENCODING_STEPS_MAX = 8

# Files.
HEADER_BYTES_MAX = 100_000_000  # The limit of the safetensors library.
HEADER_ARRAYS_MAX = 10_000_000
RANKS_MAX = 100_000  # Rank numbers in file names have five digits,
FILES_MAX = 1_000_000  # numbers of the files of a rank three to six,
STEP_MAX = 10**12 - 1  # and steps twelve.

# Manifests. What is counted is counted for every rank by itself.
MANIFEST_BYTES_MAX = 1 << 30
CHAIN_STEPS_MAX = 10_000  # Parents of a delta: far above any chain worth loading.
FEATURES_MAX = 1000
BLOCKS_MAX = 10_000_000
TABLES_MAX = 1_000_000
TABLE_FILTERS_MAX = 1000
VALUES_MAX = 10_000_000
COVERAGE_WORK_MAX = 50_000_000  # Boxes that are compared to see whether the parts of a tensor make up a whole.

# Nesting. A value takes up to three levels of JSON for each of its own, inside the manifest's.
JSON_DEPTH_MAX = 256
VALUE_DEPTH_MAX = (JSON_DEPTH_MAX - 16) // 3
TREE_DEPTH_MAX = 256
INTEGER_DIGITS_MAX = 4000  # Of a number that is written in decimal digits: Python limits these too.
KEY_BITS_MAX = 13_000  # Of an int that is a key: about as many digits.


def check_array(name: str, shape: Sequence[int], stored: StoredDtype) -> None:
    """Refuse an array of a shape that no reader takes: UnsupportedError that names it."""
    check_shape(name, shape, itemsize=stored.itemsize, extra_dimensions=int(stored.pair))


def check_shape(name: str, shape: Sequence[int], *, itemsize: int, extra_dimensions: int = 0) -> None:
    """Refuse the same, by itemsize. extra_dimensions: how many more the stored array has."""
    if len(shape) + extra_dimensions > DIMENSIONS_MAX:
        raise UnsupportedError(
            f"tensor {name!r} has too many dimensions",
            found=len(shape),
            expected=f"at most {DIMENSIONS_MAX - extra_dimensions}",
            hint="save a view of fewer dimensions, for example tensor.flatten()",
        )
    if array_bytes(shape, itemsize) > ARRAY_BYTES_MAX:
        raise UnsupportedError(
            f"tensor {name!r} has a shape that is too large",
            found=tuple(shape),
            expected=f"at most {ARRAY_BYTES_MAX} bytes, a dimension of 0 counted as 1",
            hint="save a view of fewer dimensions, for example tensor.flatten()",
        )


def check_block(spec: BlockSpec) -> None:
    """Refuse the same of a block, its whole and its stored form; only the bytes for a dtype unknown here."""
    stored = known_dtype(spec.dtype)
    for shape in (spec.shape, spec.whole_shape):
        if shape is not None and stored is not None:
            check_array(spec.name, shape, stored)
    check_shape(spec.name, spec.stored_shape, itemsize=spec.stored_itemsize)
    if len(spec.encoding) > ENCODING_STEPS_MAX:
        raise UnsupportedError(
            f"block {spec.name!r} is encoded in too many steps", found=len(spec.encoding), expected=ENCODING_STEPS_MAX
        )


def check_tables_count(tables: Sequence[TableFacts]) -> None:
    """Refuse more tables, or filters of one, than a reader takes: UsageError."""
    _check_count("tables of a rank", len(tables), TABLES_MAX)
    for table in tables:
        _check_count(f"filters of table {table.name!r}", len(table.filters), TABLE_FILTERS_MAX)


def check_blocks_count(count: int) -> None:
    """Refuse more blocks than a manifest may list: UsageError."""
    _check_count("blocks of a rank", count, BLOCKS_MAX, hint="save fewer, larger tensors")


def check_values_count(count: int, *, last: str | None = None) -> None:
    """Refuse more plain values than a manifest may hold: UsageError. last: where they are."""
    where = "" if last is None else f", up to {last}"
    _check_count(f"plain values of a rank{where}", count, VALUES_MAX, hint="save long lists of numbers as a tensor")


def check_chain_length(count: int) -> None:
    """Refuse a delta with more parents than a reader follows: UsageError."""
    _check_count(
        "checkpoints below a delta", count, CHAIN_STEPS_MAX, hint="save a full checkpoint: kind='full' or 'auto'"
    )


def check_manifest_bytes(count: int, *, last: str | None = None) -> None:
    """Refuse a manifest, or text that goes into one, that is too large to be read: UsageError. last: where it is."""
    if count > MANIFEST_BYTES_MAX:
        where = "" if last is None else f" with the plain values up to {last}"
        raise UsageError(
            f"the manifest{where} would be too large to be read",
            found=Words(f"{count} bytes"),
            expected=f"at most {MANIFEST_BYTES_MAX}",
            hint="plain values, metadata and names are kept in it: save large ones as tensors, for example of uint8",
        )


def _check_count(what: str, count: int, most: int, *, hint: str | None = None) -> None:
    if count > most:
        raise UsageError(f"there are too many {what}", found=count, expected=f"at most {most}", hint=hint)
