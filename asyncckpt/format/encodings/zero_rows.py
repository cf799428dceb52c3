"""Store only rows that are not all zero bytes, after a bitmap of which ones they are.

Bit i of the bitmap, counted from the lowest of its first byte, is row i; unused bits of the last byte are 0. Bytes
are compared, so a row of -0.0 is stored.
"""

from __future__ import annotations

import numpy as np
import torch

from asyncckpt.format.encodings.form import Form, Malformed, Stage, integer
from asyncckpt.model.block import EncodingStep
from asyncckpt.model.source import byte_view


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
