"""What must stay the same for a plan to be reused, read from thousands of tensors in a few milliseconds.

`LeafFacts` holds everything that the image depends on and everything that makes a raw copy safe: type, dtype,
shape, strides, device, conjugate and negative bits. Addresses and sizes of storages may change from save to save and
are read each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
_Reader = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class LeafFacts:
    """Facts of all leaves: their types, and with the function that reads it each other fact."""

    types: list[type]
    facts: tuple[tuple[_Reader, list[Any]], ...]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> LeafFacts:
        """Read the facts of tensors that passed check_leaf."""
        read: list[_Reader] = [torch.Tensor.size, _kind, torch.Tensor.stride, torch.Tensor.is_neg]
        if not all(tensor.is_cpu for tensor in tensors):
            read.append(torch.Tensor.get_device)
        if any(tensor.dtype.is_complex for tensor in tensors):
            read.append(torch.Tensor.is_conj)
        facts = tuple((read_fact, list(map(read_fact, tensors))) for read_fact in read)
        return LeafFacts(types=list(map(type, tensors)), facts=facts)

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the facts of tensors.

        Compared one by one and let go: thousands of tuples kept alive at once would start a full garbage collection.
        """
        if len(tensors) != len(self.types) or not all(map(is_, map(type, tensors), self.types)):
            return False
        try:
            return all(all(map(eq, map(read_fact, tensors), known)) for read_fact, known in self.facts)
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
