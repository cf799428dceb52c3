"""The header of a shard file: plain safetensors, padded with spaces so that data starts on a page.

    8 bytes little-endian length, JSON object, spaces up to a multiple of 4096, then the arrays without gaps

The header names the attempt and the step it belongs to, so that files of two saves can never be taken for one. Its text
is rendered once per plan; `stamp` writes attempt and step of a save into their fixed places.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from asyncckpt.errors import CorruptError, UnsupportedError
from asyncckpt.format import limits
from asyncckpt.format.dtypes import STORED_ITEMSIZE
from asyncckpt.format.names import Attempt
from asyncckpt.format.strict_json import Fields, loads, looks_like
from asyncckpt.model.block import BlockSpec

HEADER_ALIGNMENT = 4096
_ATTEMPT_HOLE = "0" * 32
_STEP_HOLE = "0" * 12


@dataclass(frozen=True)
class HeaderTemplate:
    """A rendered header with holes for attempt and step."""

    text: bytes
    attempt_at: int
    step_at: int

    def stamp(self, attempt: Attempt) -> bytes:
        """Return the header's bytes for one attempt."""
        raw = bytearray(self.text)
        raw[self.attempt_at : self.attempt_at + 32] = attempt.id.encode("ascii")
        raw[self.step_at : self.step_at + 12] = f"{attempt.step:012d}".encode("ascii")
        return bytes(raw)


@dataclass(frozen=True)
class HeaderEntry:
    """One array of a shard file; offset counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """A decoded header: the attempt that it names, and its arrays."""

    attempt: str | None
    entries: dict[str, HeaderEntry]


def render_header(blocks: Sequence[tuple[str, BlockSpec]], *, rank: int) -> HeaderTemplate:
    """Render the header of a file whose arrays are (key, spec) in file order."""
    metadata = f'"asyncckpt.attempt":"{_ATTEMPT_HOLE}","asyncckpt.step":"{_STEP_HOLE}","asyncckpt.rank":"{rank}"'
    parts = [f'"__metadata__":{{"format":"pt",{metadata}}}']
    end = 0
    for key, spec in blocks:
        limits.check_block(spec)
        begin, end = end, end + spec.bytes
        shape = ",".join(map(str, spec.stored_shape))
        name = json.dumps(key, ensure_ascii=False)
        parts.append(f'{name}:{{"dtype":"{spec.stored_dtype}","shape":[{shape}],"data_offsets":[{begin},{end}]}}')
    body = ("{" + ",".join(parts) + "}").encode("utf-8")
    total = -(-(len(body) + 8) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    names = [key for key, _ in blocks]
    if total > limits.HEADER_BYTES_MAX or len(blocks) >= limits.HEADER_ARRAYS_MAX:
        raise UnsupportedError(
            f"the names and shapes of tensors are too long for one shard file, that of {max(names, key=len)[:80]!r}",
            found=f"{total} bytes for {len(blocks)} tensors",
            expected=f"at most {limits.HEADER_BYTES_MAX} bytes",
            hint="save fewer tensors, or shorten their names",
        )
    text = struct.pack("<Q", total - 8) + body.ljust(total - 8)
    attempt_at = text.index(_ATTEMPT_HOLE.encode(), 8)
    step_at = text.index(_STEP_HOLE.encode(), attempt_at + 32)
    return HeaderTemplate(text=text, attempt_at=attempt_at, step_at=step_at)


def header_length(prefix: bytes, *, file_bytes: int, owner: str) -> int:
    """Return bytes of the header including its length field, from the first 8 bytes of a file."""
    if len(prefix) < 8:
        raise CorruptError(f"{owner} is too short for a safetensors header", found=len(prefix), expected="8 bytes")
    (length,) = struct.unpack("<Q", prefix[:8])
    if length > limits.HEADER_BYTES_MAX or length + 8 > file_bytes:
        raise CorruptError(
            f"{owner} has an impossible header length",
            found=length,
            expected=f"at most {min(limits.HEADER_BYTES_MAX, file_bytes - 8)}",
            hint=looks_like(prefix),
        )
    return int(length) + 8


def decode_header(raw: bytes, *, file_bytes: int, owner: str) -> Header:
    """Check and decode the header in `raw` (header_length bytes): no gaps, no overlaps, nothing behind the last."""
    body = loads(raw[8:].rstrip(b" "), owner=f"header of {owner}")
    fields = Fields(body, owner=owner, where="header")
    metadata = body.get("__metadata__", {})
    if type(metadata) is not dict or len(body) > limits.HEADER_ARRAYS_MAX:
        raise CorruptError(f"{owner} has a header of no known form")
    entries = {name: _entry(fields, name, base=len(raw), owner=owner) for name in body if name != "__metadata__"}
    end = len(raw)
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if entry.offset != end:
            raise CorruptError(f"{owner}: array {name!r} overlaps or leaves a hole", found=entry.offset, expected=end)
        end += entry.bytes
    if end != file_bytes:
        raise CorruptError(f"{owner} has the wrong size", found=file_bytes, expected=end)
    return Header(attempt=metadata.get("asyncckpt.attempt"), entries=entries)


def _entry(header: Fields, name: str, *, base: int, owner: str) -> HeaderEntry:
    fields = Fields(header.value(name), owner=owner, where=f"array {name!r}")
    dtype = fields.text("dtype")
    shape = fields.integers("shape", count_max=limits.DIMENSIONS_MAX)
    offsets = fields.integers("data_offsets", count_max=2)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptError(f"{owner}: array {name!r} has wrong data_offsets", found=offsets, expected="[begin, end]")
    count = offsets[1] - offsets[0]
    # How large an element of an unknown dtype is, is not known; its array cannot be used, but be passed over.
    if dtype in STORED_ITEMSIZE and math.prod(shape) * STORED_ITEMSIZE[dtype] != count:
        raise CorruptError(
            f"{owner}: array {name!r} has data_offsets that do not fit",
            found=offsets,
            expected=f"{math.prod(shape) * STORED_ITEMSIZE[dtype]} bytes",
        )
    return HeaderEntry(dtype=dtype, shape=shape, offset=base + offsets[0], bytes=count)
