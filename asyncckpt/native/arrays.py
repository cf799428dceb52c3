"""What both implementations ask of the arrays that they are given, checked before any address is used."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncckpt.native.contract import I64, PAGE_BYTES, U64, FileImage


def check_table(array: U64, *, columns_count: int, name: str) -> None:
    """Raise ValueError unless `array` is a C-contiguous uint64 array [n, columns_count]."""
    fits = array.dtype == np.uint64 and array.ndim == 2 and array.shape[1] == columns_count
    if not (fits and array.flags.c_contiguous):
        raise ValueError(f"{name} must be a C-contiguous uint64 array [n, {columns_count}], found {_shown(array)}")


def check_flags(array: NDArray[np.int32], *, count: int, name: str) -> None:
    """Raise ValueError unless `array` is an int32 array of `count` values."""
    if array.dtype != np.int32 or array.shape != (count,):
        raise ValueError(f"{name} must be an int32 array [{count}], found {_shown(array)}")


def check_ids(ids: I64) -> I64:
    """Return `ids` as a C-contiguous array; raise ValueError unless it is int64 [n]."""
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError(f"ids must be an int64 array [n], found {_shown(ids)}")
    return np.ascontiguousarray(ids)


def check_file(file: FileImage, item: int) -> None:
    """Raise ValueError unless a file that is written with O_DIRECT starts on a page."""
    if file.direct and file.bytes and file.address % PAGE_BYTES:
        raise ValueError(f"file {item} is direct but its address {file.address:#x} is not a multiple of {PAGE_BYTES}")


def _shown(array: NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"
