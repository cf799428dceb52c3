"""What a leaf must be like to be saved, or to be loaded into, as its plain values."""

from __future__ import annotations

import math

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.format.dtypes import stored_dtype

BLOW_UP_BYTES_MAX = 16 << 20
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the values of a strided tensor are its memory, one behind the other."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def check_leaf(tensor: torch.Tensor, name: str) -> None:
    """Refuse what cannot be saved as its plain values; UnsupportedError or UsageError naming the tensor."""
    kind = type(tensor)
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        raise UsageError(f"tensor {name!r} is not initialised", found=kind.__name__)
    if tensor.is_meta:
        raise UnsupportedError(f"tensor {name!r} is on the meta device and has no data")
    if is_transformed(tensor):
        raise UnsupportedError(
            f"tensor {name!r} is one of a transform of torch.func, which has no memory",
            hint="save outside of it, and what it returns",
        )
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
    """Raise UsageError unless the storage holds all elements, and writing them out blows no expanded tensor up."""
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
