"""Encode, store, decode: what the tests of encodings share."""

from __future__ import annotations

from typing import Any

import torch

from asyncckpt.format.encodings import (
    Encoded,
    decode,
    encode,
    stored_as,
)
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.table import Role

SKIP: dict[str, Any] = {"kind": "skip_zero_rows"}
ZSTD: dict[str, Any] = {"kind": "zstd", "level": 1}


def cast(dtype: torch.dtype) -> dict[str, Any]:
    return {"kind": "cast", "dtype": str(dtype).removeprefix("torch.")}


def quantize(bits: int) -> dict[str, Any]:
    return {"kind": "quantize", "bits": bits}


def spec_of(values: torch.Tensor, encoded: Encoded) -> BlockSpec:
    return BlockSpec(
        name="user@embedding",
        role=Role.WEIGHT,
        dtype=str(values.dtype).removeprefix("torch."),
        stored_dtype=encoded.stored.dtype,
        stored_itemsize=encoded.stored.itemsize,
        shape=tuple(values.shape),
        stored_shape=encoded.stored.shape,
        encoding=encoded.steps,
    )


def round_trip(values: torch.Tensor, steps: list[dict[str, Any]]) -> torch.Tensor:
    encoded = encode(values, steps)
    spec = spec_of(values, encoded)
    assert spec.bytes == encoded.raw.nbytes
    expected = stored_as(values.dtype, tuple(values.shape), steps)
    assert expected is None or expected == encoded.stored
    loaded = decode(encoded.raw.copy(), spec)
    assert (loaded.dtype, loaded.shape) == (values.dtype, values.shape)
    assert loaded.is_contiguous()
    return loaded
