"""Small tensors and arrays inside a state dict as plain values, which every rank has for itself.

torch.Tensor             {"tensor": (dtype, shape, bytes)}
numpy array or scalar    {"array": (dtype, shape, bytes)}
mapping                  {"dict": {key: value}}
list, tuple, others      themselves
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from asyncckpt.errors import IncompatibleError
from asyncckpt.format.dtypes import supported_dtypes
from asyncckpt.model.source import as_bytes
from asyncckpt.plan.leaf_memory import check_leaf


def to_plain(value: Any) -> Any:
    """Return a state dict without tensors and arrays. Their bytes are copied."""
    if isinstance(value, torch.Tensor):
        check_leaf(value, "of a data loader")
        data = as_bytes(value.detach().cpu().resolve_conj().resolve_neg().contiguous()).tobytes()
        return {"tensor": (str(value.dtype).removeprefix("torch."), tuple(value.shape), data)}
    if isinstance(value, (np.ndarray, np.generic)):
        return {"array": (value.dtype.str, tuple(value.shape), value.tobytes())}
    if isinstance(value, Mapping):
        return {"dict": {key: to_plain(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        items = [to_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def from_plain(value: Any) -> Any:
    """Return what to_plain was given, in memory of its own. IncompatibleError for what to_plain did not make."""
    if isinstance(value, (list, tuple)):
        items = [from_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, Mapping):
        return value
    try:
        ((kind, body),) = value.items()
        if kind == "dict":
            return {key: from_plain(item) for key, item in body.items()}
        dtype, shape, data = body
        return {"tensor": _tensor, "array": _array}[kind](dtype, shape, data)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise IncompatibleError(
            f"a saved state has a value of no known form: {error}", found=repr(value)[:80]
        ) from error


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    kind = vars(torch).get(dtype)  # Not getattr, for which torch would import modules.
    if kind not in supported_dtypes():
        raise ValueError(f"{dtype} is not a dtype")
    flat = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind, device="cpu")
    return flat.reshape(shape)


def _array(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    if np.dtype(dtype).hasobject or math.prod(shape) * np.dtype(dtype).itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for {dtype} {shape}")
    array = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()
    return array if shape else array[()]
