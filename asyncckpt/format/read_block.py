"""Decode and check one block of a manifest: its fields agree with each other and with its file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncckpt.errors import CorruptError
from asyncckpt.format import limits
from asyncckpt.format.dtypes import STORED_ITEMSIZE, StoredDtype, known_dtype
from asyncckpt.format.fields import Fields
from asyncckpt.format.header import HEADER_ALIGNMENT
from asyncckpt.format.manifest import BlockFacts, FileFacts
from asyncckpt.model.block import REMOVED_COLUMN, BlockSpec, EncodingStep, PlacedBlock
from asyncckpt.model.table import Role

_PAD_NAME = re.compile(r"#pad\.[0-9]+")


def read_block(fields: Fields, files: Sequence[FileFacts], *, first_file: int = 0) -> BlockFacts:
    """One element of `blocks`; CorruptError naming block or field.

    files: of the part that the block belongs to; the first of them is the file of number first_file among all.
    """
    name = fields.text("name")
    size = fields.integer("bytes")
    shape = fields.integers("shape", count_max=limits.DIMENSIONS_MAX)
    dtype = known_dtype(fields.text("dtype"))
    itemsize = 1 if dtype is None else dtype.itemsize
    row_begin = fields.optional_integer("row_begin")
    whole = None if row_begin is None else fields.integers("whole_shape", count_max=limits.DIMENSIONS_MAX)
    column_begins = _column_begins(fields, shape, whole)
    if max(limits.array_bytes(shape, itemsize), limits.array_bytes(whole or (), itemsize)) > limits.ARRAY_BYTES_MAX:
        raise CorruptError(f"{fields.owner}: block {name!r} has a shape of impossible size", found=whole or shape)
    file_index = fields.integer("file", at_most=len(files) - 1)
    encoding = _encoding(fields)
    stored = _stored(fields, dtype, shape, size, is_encoded=bool(encoding))
    spec = BlockSpec(
        name=name,
        role=_role(fields),
        dtype=fields.text("dtype"),
        stored_dtype=stored[0],
        stored_itemsize=stored[1],
        shape=shape,
        stored_shape=stored[2],
        table=fields.optional_text("table"),
        column=fields.optional_text("column"),
        leaf=fields.optional_integer("leaf"),
        row_begin=row_begin or 0,
        whole_shape=whole,
        column_begins=column_begins,
        slice_info=fields.optional_text("slice") or " ",
        encoding=encoding,
    )
    _check_role(fields, spec)
    offset = fields.integer("offset", at_least=files[file_index].header_bytes)
    if size != spec.bytes or offset + size > files[file_index].bytes:
        raise CorruptError(
            f"{fields.owner}: block {name!r} does not fit its shape or its file",
            found=f"{size} bytes at {offset}",
            expected=f"{spec.bytes} bytes within {files[file_index].bytes}",
        )
    key = fields.optional_text("key")
    placed = PlacedBlock(spec=spec, key=name if key is None else key, file_index=first_file + file_index, offset=offset)
    return BlockFacts(placed=placed, digest=fields.digest("digest"), filtered=fields.flag("filtered", default=False))


def _column_begins(fields: Fields, shape: Sequence[int], whole: Sequence[int] | None) -> tuple[int, ...]:
    """Where a box begins in the dimensions but the first; empty where it holds whole rows."""
    if fields.absent("column_begins"):
        return ()
    begins = fields.integers("column_begins", count_max=limits.DIMENSIONS_MAX)
    if whole is None or not any(begins) or len(begins) + 1 != len(shape):
        raise CorruptError(f"{fields.owner}: {fields.where}.column_begins is wrong", found=begins, expected=whole)
    return begins


def _encoding(fields: Fields) -> tuple[EncodingStep, ...]:
    """The steps, each with its kind; whether they are known is for whoever decodes the block."""
    if fields.absent("encoding"):
        return ()
    steps = fields.objects("encoding", count_max=limits.ENCODING_STEPS_MAX)
    if not steps or not all(step.text("kind") for step in steps):
        raise CorruptError(f"{fields.owner}: {fields.where}.encoding is wrong", expected="steps with their kinds")
    return tuple(fields.items("encoding", count_max=limits.ENCODING_STEPS_MAX))


def _stored(
    fields: Fields, dtype: StoredDtype | None, shape: tuple[int, ...], size: int, *, is_encoded: bool
) -> tuple[str, int, tuple[int, ...]]:
    """Dtype, itemsize and shape in the shard file. Of what this version does not know, only the bytes are known."""
    if not is_encoded:
        return ("", 1, (size,)) if dtype is None else (dtype.stored, dtype.stored_itemsize, dtype.stored_shape(shape))
    stored = Fields(fields.value("stored"), owner=fields.owner, where=f"{fields.where}.stored")
    code = stored.text("dtype")
    stored_shape = stored.integers("shape", count_max=limits.DIMENSIONS_MAX)
    if dtype is None or code not in STORED_ITEMSIZE:
        return "", 1, (size,)
    if limits.array_bytes(stored_shape, STORED_ITEMSIZE[code]) > limits.ARRAY_BYTES_MAX:
        raise CorruptError(f"{fields.owner}: {fields.where}.stored is of impossible size", found=stored_shape)
    return code, STORED_ITEMSIZE[code], stored_shape


def _role(fields: Fields) -> Role:
    text = fields.text("role")
    try:
        role = Role(text)
    except ValueError:
        raise CorruptError(f"{fields.owner}: {fields.where}.role is unknown", found=text) from None
    return role


def _check_role(fields: Fields, spec: BlockSpec) -> None:
    """Whether the block is a table's, dense, or a pad, agrees with its name and its form."""
    if spec.role in (Role.DENSE, Role.PAD):
        fits = spec.table is None and spec.column is None
    else:
        # Parts are put together by name, columns are filled by table and column: the two must be the same.
        fits = spec.table is not None and spec.column is not None and spec.name == f"{spec.table}@{spec.column}"
    if not fits:
        raise CorruptError(
            f"{fields.owner}: {fields.where} is neither a table's nor dense",
            found=(spec.role.value, spec.table, spec.column),
        )
    plain = not spec.encoding and len(spec.shape) == 1
    if spec.role is Role.PAD:
        fits = plain and not spec.is_part and spec.leaf is None and _PAD_NAME.fullmatch(spec.name) is not None
        fits = fits and spec.dtype == "uint8" and spec.bytes < HEADER_ALIGNMENT
    elif spec.role is Role.REMOVED:
        fits = plain and spec.column == REMOVED_COLUMN and spec.dtype == "int64"
    if not fits:
        raise CorruptError(
            f"{fields.owner}: block {spec.name!r} has not the form of its role",
            found=(spec.role.value, spec.dtype, spec.shape),
        )
