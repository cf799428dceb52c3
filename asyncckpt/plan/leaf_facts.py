"""What must stay the same for a plan to be reused, read from thousands of tensors in a few milliseconds.

`same_facts` holds everything that shape the image depends on and everything that makes a raw copy safe: type, dtype,
shape, strides, device, conjugate and negative bits, storage size. Addresses may change from save to save and are read
each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, eq, is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.format.dtypes import stored_dtype

BLOW_UP_BYTES_MAX = 16 << 20
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
_kind = attrgetter("dtype", "is_cpu", "layout")


@dataclass(frozen=True)
class LeafFacts:
    """Facts of all leaves."""

    types: list[type]
    shapes: list[torch.Size]
    kinds: list[Any]
    strides: list[Any]
    negated: list[bool]
    conjugated: list[bool]
    devices: list[int]

    @cached_property
    def has_devices(self) -> bool:
        """Whether any is elsewhere than on the CPU."""
        return any(not is_cpu for _, is_cpu, _ in self.kinds)

    @cached_property
    def has_complex(self) -> bool:
        """Whether any can be conjugated at all."""
        return any(dtype.is_complex for dtype, _, _ in self.kinds)

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> LeafFacts:
        types = list(map(type, tensors))
        try:
            return LeafFacts(
                types=types,
                shapes=list(map(torch.Tensor.size, tensors)),
                kinds=list(map(_kind, tensors)),
                strides=list(map(torch.Tensor.stride, tensors)),
                negated=list(map(torch.Tensor.is_neg, tensors)),
                conjugated=list(map(torch.Tensor.is_conj, tensors)),
                devices=list(map(torch.Tensor.get_device, tensors)),
            )
        except (
            RuntimeError,
            ValueError,
        ):  # Sparse, nested and uninitialised ones have no strides; check_leaf names them.
            return LeafFacts(types=types, shapes=[], kinds=[], strides=[], negated=[], conjugated=[], devices=[])

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the facts of tensors, which have the types already known to have them.

        Compared one by one and let go: thousands of tuples kept alive at once would start a full garbage collection.
        """
        if len(tensors) != len(self.shapes) or not all(map(is_, map(type, tensors), self.types)):
            return False
        try:
            return (
                all(map(eq, map(torch.Tensor.size, tensors), self.shapes))
                and all(map(eq, map(_kind, tensors), self.kinds))
                and all(map(eq, map(torch.Tensor.stride, tensors), self.strides))
                and all(map(eq, map(torch.Tensor.is_neg, tensors), self.negated))
                and (not self.has_devices or all(map(eq, map(torch.Tensor.get_device, tensors), self.devices)))
                and (not self.has_complex or all(map(eq, map(torch.Tensor.is_conj, tensors), self.conjugated)))
            )
        except (RuntimeError, ValueError):  # One is of a kind now that has no sizes or strides.
            return False


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the values of a strided tensor are its memory, one behind the other."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def addresses(tensors: Sequence[torch.Tensor]) -> NDArray[np.uint64]:
    """Address of every tensor's first element, uint64 [n]."""
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), dtype=np.uint64, count=len(tensors))


def shrunk_storages(
    tensors: Sequence[torch.Tensor], *, bytes: NDArray[np.int64], itemsizes: NDArray[np.int64]
) -> list[int]:
    """Which contiguous tensors' storages were freed or shrunk: a raw copy would read foreign memory."""
    count = len(tensors)
    storages = map(torch.Tensor.untyped_storage, tensors)
    held = np.fromiter(map(torch.UntypedStorage.nbytes, storages), dtype=np.int64, count=count)
    begins = np.fromiter(map(torch.Tensor.storage_offset, tensors), dtype=np.int64, count=count) * itemsizes
    return [int(index) for index in np.flatnonzero((bytes > 0) & (begins + bytes > held))]


def check_leaf(tensor: torch.Tensor, name: str) -> None:
    """Refuse what cannot be saved as its plain values; UnsupportedError or UsageError naming the tensor."""
    kind = type(tensor)
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise UsageError(f"tensor {name!r} is not initialised", found=kind.__name__)
    if tensor.is_meta:
        raise UnsupportedError(f"tensor {name!r} is on the meta device and has no data")
    if kind.__torch_dispatch__ is not _PLAIN_DISPATCH:
        raise UnsupportedError(
            f"tensor {name!r} is of a subclass whose storage is not its value",
            found=f"{kind.__module__}.{kind.__qualname__}",
            hint="save what it is made of, for example DTensor.to_local()",
        )
    if tensor.is_quantized or tensor.layout is not torch.strided or tensor.is_nested:
        found = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedError(
            f"tensor {name!r} has a layout that cannot be saved", found=found, hint="save its parts as dense tensors"
        )
    stored_dtype(tensor.dtype, owner=name)
    check_extent(tensor, name)


def check_extent(tensor: torch.Tensor, name: str) -> None:
    """The storage holds all elements, and writing them out does not blow an expanded tensor up."""
    if tensor.numel() == 0:
        return
    storage_bytes = tensor.untyped_storage().nbytes()
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if (last + 1) * tensor.element_size() > storage_bytes:
        raise UsageError(
            f"tensor {name!r} has a freed or shrunk storage",
            found=f"{storage_bytes} bytes",
            expected=f"{(last + 1) * tensor.element_size()} bytes",
        )
    logical_bytes = math.prod(tensor.shape) * tensor.element_size()
    if logical_bytes > storage_bytes + BLOW_UP_BYTES_MAX:
        raise UsageError(
            f"tensor {name!r} is an expanded view that would be written out",
            found=f"{logical_bytes} bytes",
            expected=f"about its storage's {storage_bytes} bytes",
            hint="save the tensor it was expanded from, or call .contiguous()",
        )
