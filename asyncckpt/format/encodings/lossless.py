"""Store arrays in fewer bytes without loss: zstd over shuffled bytes, and rows without those of zeros.

Shuffled are the first bytes of all numbers, then the second ones, and so on. High bytes of neighbours are similar and
low ones are noise, so they compress better apart. A frame contains the size of its content, which is compared with the
block's shape before decompression.

Rows that are not all zero bytes stand after a bitmap of which ones they are. Bit i of the bitmap, counted from the
lowest of its first byte, is row i; unused bits of the last byte are 0. Bytes are compared, so a row of -0.0 is stored.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from asyncckpt.errors import UnsupportedError
from asyncckpt.format.encodings.form import Form, Malformed, Stage, integer
from asyncckpt.model.block import EncodingStep
from asyncckpt.model.source import byte_view

LEVEL_MIN, LEVEL_MAX = 1, 22
_LANE_MAX = 16  # Bytes of the largest number, complex128.


class Zstd:
    members = frozenset({"level", "shuffle"})

    def misfit(self, form: Form, step: EncodingStep) -> str | None:
        return "it is compressed already" if form.stage is Stage.COMPRESSED else None

    def encode(self, values: torch.Tensor, form: Form, step: EncodingStep) -> tuple[torch.Tensor, EncodingStep] | None:
        if not form.bytes:
            return None
        level = integer(step, "level", at_least=LEVEL_MIN, at_most=LEVEL_MAX)
        compressor = zstandard().ZstdCompressor(level=level, write_content_size=True)
        frame = compressor.compress(_shuffled(byte_view(values), form.lane).numpy())
        if len(frame) >= form.bytes:
            return None
        return torch.frombuffer(bytearray(frame), dtype=torch.uint8), {**step, "shuffle": form.lane}

    def stored(self, form: Form, step: EncodingStep) -> Form:
        integer(step, "level", at_least=LEVEL_MIN, at_most=LEVEL_MAX)
        integer(step, "shuffle", at_least=1, at_most=_LANE_MAX)
        return Form(dtype=torch.uint8, shape=(1,), lane=1, stage=Stage.COMPRESSED)

    def decode(self, stored: torch.Tensor, form: Form, step: EncodingStep) -> torch.Tensor:
        zstd = zstandard()
        raw = stored.numpy()
        try:
            size = zstd.get_frame_parameters(raw).content_size
            if size != form.bytes:
                raise Malformed(f"its zstd frame holds {size} bytes, not {form.bytes}")
            content = zstd.ZstdDecompressor().decompress(raw, max_output_size=form.bytes, allow_extra_data=False)
        except zstd.ZstdError as error:
            raise Malformed(f"its zstd frame is damaged: {error}") from error
        if len(content) != form.bytes:
            raise Malformed(f"its zstd frame holds {len(content)} bytes, not {form.bytes}")
        shuffled = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return _unshuffled(shuffled, step["shuffle"]).view(form.dtype).reshape(form.shape)


def zstandard() -> ModuleType:
    """Return the package zstandard. Raises UnsupportedError if it is not installed."""
    try:
        import zstandard
    except ImportError as error:
        raise UnsupportedError(
            "zstd needs the package zstandard, which is not installed", hint="pip install 'asyncckpt[zstd]'"
        ) from error
    return zstandard


def _shuffled(raw: torch.Tensor, lane: int) -> torch.Tensor:
    """Return byte 0 of every lane, then byte 1, ...; bytes after the last whole lane stay at the end."""
    whole = len(raw) // lane * lane
    if lane == 1 or whole == 0:
        return raw
    return torch.cat([raw[:whole].reshape(-1, lane).t().reshape(-1), raw[whole:]])


def _unshuffled(raw: torch.Tensor, lane: int) -> torch.Tensor:
    whole = len(raw) // lane * lane
    if lane == 1 or whole == 0:
        return raw
    return torch.cat([raw[:whole].reshape(lane, -1).t().reshape(-1), raw[whole:]])


class SkipZeroRows:
    members = frozenset({"rows"})

    def misfit(self, form: Form, step: EncodingStep) -> str | None:
        if form.stage is not Stage.ARRAY:
            return "its bytes are packed already"
        return None if form.shape else "it has no rows"

    def encode(self, values: torch.Tensor, form: Form, step: EncodingStep) -> tuple[torch.Tensor, EncodingStep] | None:
        if not form.bytes:
            return None
        rows = byte_view(values).reshape(form.shape[0], form.row_bytes)
        used = _used(rows)
        count = int(used.sum())
        if _bitmap_bytes(form) + count * form.row_bytes >= form.bytes:
            return None
        bitmap = torch.from_numpy(np.packbits(used.numpy(), bitorder="little"))
        return torch.cat([bitmap, rows[used].reshape(-1)]), {**step, "rows": count}

    def stored(self, form: Form, step: EncodingStep) -> Form:
        count = integer(step, "rows", at_least=0, at_most=form.shape[0])
        size = _bitmap_bytes(form) + count * form.row_bytes
        if size >= form.bytes:
            raise Malformed(f"{count} of {form.shape[0]} rows take no less than all")
        return Form(dtype=torch.uint8, shape=(size,), lane=form.lane, stage=Stage.PACKED)

    def decode(self, stored: torch.Tensor, form: Form, step: EncodingStep) -> torch.Tensor:
        ends = _bitmap_bytes(form)
        bits = np.unpackbits(stored[:ends].numpy(), bitorder="little")
        used = torch.from_numpy(bits[: form.shape[0]]).bool()
        if bits[form.shape[0] :].any() or int(used.sum()) != step["rows"]:
            raise Malformed("its bitmap of rows does not fit the number of rows")
        rows = torch.zeros((form.shape[0], form.row_bytes), dtype=torch.uint8, device="cpu")
        rows[used] = stored[ends:].reshape(-1, form.row_bytes)
        return rows.reshape(-1).view(form.dtype).reshape(form.shape)


def _bitmap_bytes(form: Form) -> int:
    return -(-form.shape[0] // 8)


def _used(rows: torch.Tensor) -> torch.Tensor:
    """Return which rows, uint8 [n, bytes], have a nonzero byte: bool [n]."""
    if rows.shape[1] % 8 == rows.storage_offset() % 8 == rows.data_ptr() % 8 == 0:
        return (rows.view(torch.int64) != 0).any(dim=1)
    return (rows != 0).any(dim=1)
