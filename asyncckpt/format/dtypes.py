"""Which torch dtype is stored under which safetensors dtype.

A dtype that safetensors lacks is stored as a view: complex numbers as pairs of floats (one more dimension of 2),
packed and exotic 8-bit types as bytes. The manifest names the true dtype, the safetensors header the stored one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from asyncckpt.errors import UnsupportedError, Words

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StoredDtype:
    """A true dtype and how it is stored in a shard file. `pair` adds a trailing dimension of 2."""

    name: str
    stored: str
    itemsize: int
    pair: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The true dtype; UnsupportedError where this torch has none such."""
        found = _of_torch().get(self.name)
        if found is None:
            raise UnsupportedError(f"this version of torch has no dtype {self.name!r}", expected=sorted(_of_torch()))
        return found

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape, 2) if self.pair else shape

    @property
    def stored_itemsize(self) -> int:
        return self.itemsize // 2 if self.pair else self.itemsize


# Stored as itself: the code of safetensors, and the bytes of one element.
_STORED_AS_ITSELF = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}
_STORED_AS_BYTES = ("float8_e8m0fnu", "float4_e2m1fn_x2", "bits8")
_STORED_AS_PAIR = {"complex128": ("F64", 16), "complex32": ("F16", 4)}
_BY_NAME = {
    name: StoredDtype(name=name, stored=code, itemsize=itemsize, pair=name in _STORED_AS_PAIR)
    for name, (code, itemsize) in (
        _STORED_AS_ITSELF | dict.fromkeys(_STORED_AS_BYTES, ("U8", 1)) | _STORED_AS_PAIR
    ).items()
}

# Bytes of one element of every dtype that a shard header may name.
STORED_ITEMSIZE = {entry.stored: entry.stored_itemsize for entry in _BY_NAME.values()}


@cache
def _of_torch() -> dict[str, torch.dtype]:
    """Return every supported dtype that this torch has. torch is imported here: a manifest is read without it."""
    import torch

    found = {name: getattr(torch, name, None) for name in _BY_NAME}
    return {name: dtype for name, dtype in found.items() if isinstance(dtype, torch.dtype)}


@cache
def _by_dtype() -> dict[torch.dtype, StoredDtype]:
    return {dtype: _BY_NAME[name] for name, dtype in _of_torch().items()}


def supported_dtypes() -> tuple[torch.dtype, ...]:
    """Return every dtype that makes the round trip."""
    return tuple(_by_dtype())


def stored_dtype(dtype: torch.dtype, *, owner: str) -> StoredDtype:
    """Return how `dtype` is stored; UnsupportedError naming `owner` (a tensor or column) when it is not."""
    entry = _by_dtype().get(dtype)
    if entry is None:
        raise UnsupportedError(
            f"tensor {owner!r} cannot be saved",
            found=Words(dtype),
            expected="one of asyncckpt.checkpoints.supported_dtypes()",
            hint="dequantize it, or store it as a view of a plain dtype",
        )
    return entry


def known_dtype(name: str) -> StoredDtype | None:
    """Return the dtype that a manifest names, also one that this torch lacks; None when this version has none such."""
    return _BY_NAME.get(name)


def is_in_torch(name: str) -> bool:
    """Return whether this torch has the dtype that a manifest names."""
    return name in _of_torch()


def array_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of an array, with every 0 in its shape counted as 1: torch cannot make the strides otherwise."""
    return (math.prod(shape) or math.prod(max(1, size) for size in shape)) * itemsize


def is_stored_as(tensor: torch.Tensor, name: str, *, owner: str) -> bool:
    """Return whether a tensor has its values in memory as an array of this dtype has them in a file."""
    return tensor.dtype is dtype_by_name(name, owner=owner).dtype and not tensor.is_conj() and not tensor.is_neg()


def dtype_by_name(name: str, *, owner: str) -> StoredDtype:
    """Return the dtype a manifest names; UnsupportedError naming `owner` where there is none."""
    entry = known_dtype(name)
    if entry is None or not is_in_torch(name):
        raise UnsupportedError(
            f"tensor {owner!r} has a dtype that this version cannot read", found=name, expected=sorted(_of_torch())
        )
    return entry
