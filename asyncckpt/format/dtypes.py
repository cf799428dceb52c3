"""Which torch dtype is stored under which safetensors dtype.

A dtype that safetensors lacks is stored as a view: complex numbers as pairs of floats (one more dimension of 2),
packed and exotic 8-bit types as bytes. The manifest names the true dtype, the safetensors header the stored one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncckpt.errors import UnsupportedError


@dataclass(frozen=True)
class StoredDtype:
    """A true dtype and how it is stored in a shard file. `pair` adds a trailing dimension of 2."""

    dtype: torch.dtype
    name: str
    stored: str
    itemsize: int
    pair: bool = False

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape, 2) if self.pair else shape

    @property
    def stored_itemsize(self) -> int:
        return self.itemsize // 2 if self.pair else self.itemsize


_STORED_AS_ITSELF = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
_STORED_AS_BYTES = ("float8_e8m0fnu", "float4_e2m1fn_x2", "bits8")
_STORED_AS_PAIR = {"complex128": "F64", "complex32": "F16"}
# Every supported dtype that this torch has.
_BY_NAME = {
    name: StoredDtype(dtype=dtype, name=name, stored=code, itemsize=dtype.itemsize, pair=name in _STORED_AS_PAIR)
    for name, code in (_STORED_AS_ITSELF | dict.fromkeys(_STORED_AS_BYTES, "U8") | _STORED_AS_PAIR).items()
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
_BY_DTYPE = {entry.dtype: entry for entry in _BY_NAME.values()}

# Bytes of one element of every dtype that a shard header may name.
STORED_ITEMSIZE = {entry.stored: entry.stored_itemsize for entry in _BY_NAME.values()}


def supported_dtypes() -> tuple[torch.dtype, ...]:
    """Return every dtype that makes the round trip."""
    return tuple(_BY_DTYPE)


def stored_dtype(dtype: torch.dtype, *, owner: str) -> StoredDtype:
    """Return how `dtype` is stored; UnsupportedError naming `owner` (a tensor or column) when it is not."""
    entry = _BY_DTYPE.get(dtype)
    if entry is None:
        raise UnsupportedError(
            f"tensor {owner!r} cannot be saved",
            found=str(dtype),
            expected="one of asyncckpt.checkpoints.supported_dtypes()",
            hint="dequantize it, or store it as a view of a plain dtype",
        )
    return entry


def known_dtype(name: str) -> StoredDtype | None:
    """Return the dtype a manifest names; None when this version, or this torch, has none such."""
    return _BY_NAME.get(name)


def dtype_by_name(name: str, *, owner: str) -> StoredDtype:
    """Return the dtype a manifest names; UnsupportedError naming `owner` where there is none."""
    entry = known_dtype(name)
    if entry is None:
        raise UnsupportedError(
            f"tensor {owner!r} has a dtype that this version cannot read", found=name, expected=sorted(_BY_NAME)
        )
    return entry
