"""The columns of a table as Arrow has them, and back.

    float32 [n]          a number in every row; likewise bool, integers of 8 to 64 bits, float16, float64
    float32 [n, 16]      a list of fixed size in every row, here of 16 numbers
    float32 [n, 2, 8]    the same list of 16; the file's metadata has the shape
    bfloat16, float8     as float32, which holds all of their numbers; the file's metadata has the dtype

Nothing is null. The file's metadata, under the key `asyncckpt`, is JSON: {"columns": {name: {"role": ..., "dtype": ...,
"row_shape": [...]}}}. Files of other programs lack it, and need not have it.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.errors import CheckpointError, CorruptError, UnsupportedError, Words
from asyncckpt.format import limits
from asyncckpt.format.dtypes import dtype_by_name, known_dtype
from asyncckpt.format.strict_json import Fields, loads
from asyncckpt.model.source import as_bytes
from asyncckpt.model.table import ID_COLUMN, Role
from asyncckpt.native import U8
from asyncckpt.storage.directory import io_failed
from asyncckpt.tables.embedding import COUNT_COLUMN, LAST_SEEN_COLUMN
from asyncckpt.tables.slots import EMBEDDING_COLUMN

METADATA_KEY = b"asyncckpt"
ROW_BYTES_MAX = 64 << 20
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
# What Arrow calls a dtype, by its name here.
ARROW_NAMES = {"bool": "bool", "float16": "halffloat", "float32": "float", "float64": "double"}
ARROW_NAMES |= {name: name for name in _INTEGERS}
_DTYPES = {arrow: name for name, arrow in ARROW_NAMES.items()}
WIDENED = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
_ROLES = {ID_COLUMN: Role.ID, EMBEDDING_COLUMN: Role.WEIGHT}
_ROLES |= dict.fromkeys((COUNT_COLUMN, LAST_SEEN_COLUMN), Role.METADATA)


def pyarrow() -> ModuleType:
    """Return the package pyarrow, with its module of Parquet. Raises UnsupportedError if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UnsupportedError(
            "Parquet needs the package pyarrow, which is not installed", hint="pip install 'asyncckpt[parquet]'"
        ) from error
    found: ModuleType = pyarrow
    return found


@contextlib.contextmanager
def arrow_errors(owner: str) -> Iterator[None]:
    """Raise what pyarrow says about a file as one of our errors."""
    arrow = pyarrow()
    try:
        yield
    except CheckpointError:
        raise
    except NotImplementedError as error:
        raise UnsupportedError(f"{owner} cannot be read by pyarrow: {_line(error)}") from error
    except (arrow.ArrowException, OSError, ValueError, OverflowError, IndexError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise io_failed(f"{owner} cannot be read", error) from error
        raise CorruptError(f"{owner} is damaged: {_line(error)}") from error


@dataclass(frozen=True)
class ParquetColumn:
    """A column of a table, and how it is in a file: `width` numbers in a row, None: one number.

    key: what the file calls it, where that is another name.
    """

    name: str
    role: Role
    dtype: str
    row_shape: tuple[int, ...]
    key: str = ""

    @property
    def width(self) -> int | None:
        return math.prod(self.row_shape) if self.row_shape else None

    @property
    def stored_dtype(self) -> str:
        return "float32" if self.dtype in WIDENED else self.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * dtype_by_name(self.dtype, owner=self.name).itemsize

    def field(self) -> Any:
        """Return the field of Arrow's schema. UnsupportedError for a dtype that it lacks."""
        arrow = pyarrow()
        if self.stored_dtype not in ARROW_NAMES:
            what = f"column {self.name!r} has a dtype that Parquet does not have"
            raise UnsupportedError(what, found=self.dtype, expected=[*ARROW_NAMES, *WIDENED])
        if self.row_bytes == 0 or self.row_bytes > ROW_BYTES_MAX:
            raise UnsupportedError(f"column {self.name!r} has rows that Parquet does not have", found=self.row_shape)
        kind = arrow.type_for_alias(ARROW_NAMES[self.stored_dtype])
        if self.width is not None:
            kind = arrow.list_(arrow.field("element", kind, nullable=False), self.width)
        return arrow.field(self.name, kind, nullable=False)

    def to_arrow(self, raw: U8) -> Any:
        """Return rows, given as their bytes, as an array of Arrow. The bytes are used, and must stay."""
        arrow = pyarrow()
        if self.dtype in WIDENED:
            narrow = torch.from_numpy(raw).view(dtype_by_name(self.dtype, owner=self.name).dtype)
            raw = as_bytes(narrow.to(torch.float32))
        kind = arrow.type_for_alias(ARROW_NAMES[self.stored_dtype])
        if self.dtype == "bool":
            values = arrow.array(raw.view(np.bool_))
        else:
            count = len(raw) // (kind.bit_width // 8)
            values = arrow.Array.from_buffers(kind, count, [None, arrow.py_buffer(raw)])
        if self.width is None:
            return values
        return arrow.FixedSizeListArray.from_arrays(values, type=self.field().type)

    def to_bytes(self, array: Any, owner: str) -> U8:
        """Return the bytes of rows that Arrow has read. CorruptError for nulls, and lists of other sizes."""
        count = len(array)
        flat = array if self.width is None else array.flatten()
        if array.null_count or flat.null_count:
            raise CorruptError(f"{owner} has nulls in column {self.name!r}", hint="fill or drop them before the import")
        if self.width is not None:
            sizes = np.asarray(array.value_lengths().to_numpy(zero_copy_only=False))
            wrong = sizes[sizes != self.width]
            if len(wrong) or len(flat) != count * self.width:
                what = f"{owner} has lists of different sizes in column {self.name!r}"
                raise CorruptError(what, found=wrong[:1].tolist(), expected=f"{self.width} in every row")
        values = np.ascontiguousarray(flat.to_numpy(zero_copy_only=False))
        if self.dtype not in WIDENED:
            return values.view(np.uint8).reshape(-1)
        narrow, are_exact = _narrowed(values, dtype_by_name(self.dtype, owner=self.name).dtype)
        if not are_exact:
            what = f"{owner} has numbers in column {self.name!r} that are not {self.dtype}, which its metadata declares"
            raise CorruptError(what)
        return narrow


def _narrowed(wide: NDArray[np.float32], dtype: torch.dtype) -> tuple[U8, bool]:
    """Return the bytes of numbers of a narrower dtype, found by their bits: torch makes one NaN of all; and whether all
    were found."""
    bits = wide.view(np.uint32)
    if dtype is torch.bfloat16:
        return (bits >> 16).astype(np.uint16).view(np.uint8), not (bits & 0xFFFF).any()
    known = torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(torch.float32).numpy().view(np.uint32)
    order = np.argsort(known, kind="stable")
    found = order[np.minimum(np.searchsorted(known[order], bits), 255)]
    return found.astype(np.uint8), bool((known[found] == bits).all())


def schema_of(columns: Sequence[ParquetColumn]) -> Any:
    """Return the schema of a file. UnsupportedError."""
    described = {c.name: {"role": c.role.value, "dtype": c.dtype, "row_shape": list(c.row_shape)} for c in columns}
    metadata = {METADATA_KEY: json.dumps({"columns": described}).encode()}
    return pyarrow().schema([column.field() for column in columns], metadata=metadata)


def columns_of(schema: Any, widths: Mapping[str, int], names: Mapping[str, str], owner: str) -> list[ParquetColumn]:
    """Return the columns of a file. widths: of lists that have no fixed size. names: what they are called here.
    CorruptError, UnsupportedError."""
    described = _described(schema, owner)
    found = [_column(field, names.get(field.name, field.name), widths, described, owner) for field in schema]
    taken = [column.name for column in found]
    if len(set(taken)) != len(taken) or len(set(schema.names)) != len(found):
        raise CorruptError(f"{owner} has a column twice", found=taken)
    return found


def _column(
    field: Any, name: str, widths: Mapping[str, int], described: Mapping[str, Fields], owner: str
) -> ParquetColumn:
    """Return a column of a file, with what its metadata says of it."""
    if not name or "@" in name or name.startswith("#"):
        raise UnsupportedError(f"{owner} has a column of a name that tables do not have", found=name)
    types = pyarrow().types
    row_shape: tuple[int, ...] = ()
    kind = field.type
    if types.is_fixed_size_list(kind):
        kind, row_shape = kind.value_type, (kind.list_size,)
    elif types.is_list(kind) or types.is_large_list(kind):
        kind, row_shape = kind.value_type, (widths.get(field.name, 0),)
    dtype = _DTYPES.get(str(kind))
    if dtype is None:
        what = f"{owner} has a column {field.name!r} of a type that tables do not have"
        hint = "write the file without it; numbers, and lists of numbers of one size, can be imported"
        raise UnsupportedError(what, found=Words(field.type), hint=hint)
    role = _ROLES.get(name, Role.OPTIMIZER if dtype.startswith("float") else Role.METADATA)
    if field.name in described:
        own = described[field.name]
        said = own.text("dtype")
        role = _role(own, name)
        shape = tuple(
            size for size in own.items("row_shape", count_max=limits.DIMENSIONS_MAX) if type(size) is int and size > 0
        )
        if math.prod(shape) != math.prod(row_shape) or bool(shape) != bool(row_shape):
            raise own.wrong("row_shape", f"{math.prod(row_shape)} numbers in a row")
        if said != dtype and not (said in WIDENED and dtype == "float32" and known_dtype(said) is not None):
            raise own.wrong("dtype", dtype)
        dtype, row_shape = said, shape
    column = ParquetColumn(name, role, dtype, row_shape, key=field.name)
    if name == ID_COLUMN and (dtype != "int64" or row_shape):
        raise UnsupportedError(f"{owner} has ids of a wrong form", found=Words(field.type), expected="int64")
    if row_shape and not 0 < column.row_bytes <= ROW_BYTES_MAX:
        what = f"{owner} has rows in column {field.name!r} that tables do not have"
        raise UnsupportedError(what, found=row_shape, expected=f"1 to {ROW_BYTES_MAX} bytes, the same in every row")
    return column


def _described(schema: Any, owner: str) -> dict[str, Fields]:
    """Return what the metadata of a file says of its columns, if we have written it."""
    raw = (schema.metadata or {}).get(METADATA_KEY)
    if raw is None:
        return {}
    where = f"metadata {METADATA_KEY.decode()!r}"
    columns = Fields(
        Fields(loads(raw, owner=owner), owner=owner, where=where).value("columns"), owner=owner, where=where
    )
    return {name: Fields(columns.value(name), owner=owner, where=f"{where} of {name!r}") for name in columns.members}


def _role(own: Fields, name: str) -> Role:
    said = own.text("role")
    fits = said in (Role.WEIGHT.value, Role.OPTIMIZER.value, Role.METADATA.value)
    if (said == Role.ID.value) != (name == ID_COLUMN) or (name != ID_COLUMN and not fits):
        raise own.wrong("role", "the purpose of a column")
    return Role(said)


def _line(error: BaseException) -> str:
    """Return the first line of what pyarrow says."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
