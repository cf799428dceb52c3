"""The memory of leaves: what a leaf must be like to be saved or loaded into as its plain values, and which share it.

By their addresses, what is tied is stored once, what overlaps is told apart:

    the same elements in the same memory     tied: one of them has blocks, for all
    memory that overlaps in any other way    each has blocks of its own, and the manifest says where in that memory
    the same storage, but apart              nothing is shared
    alone, dense, but in another order       as what overlaps: an optimizer's state keeps the strides of its parameter,
                                             which fused steps ask for (torch.channels_last)

Left out are leaves that are spread over ranks, or lie on devices whose addresses mean nothing here; conjugated and
negated views; and, except tied ones, leaves with several elements in one place (other than by a stride of 0), and
memory that is larger by over 16 MiB than all that lies in it.

Of tied leaves the one with the smallest path is stored. So ranks that tie different ones of them, and write each
other's replicas, leave none out: each is stored, or tied to one with a smaller path.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from asyncckpt.errors import UnsupportedError, UsageError, Words
from asyncckpt.format.dtypes import stored_dtype
from asyncckpt.format.tree import tensor_names, tensor_paths
from asyncckpt.model.sharing import NOTHING_SHARED, SharedMemory, SharedView, Sharing, TiedLeaf
from asyncckpt.native import U64
from asyncckpt.plan.module_state import tensors_of
from asyncckpt.plan.state import STATE_DEPTH_MAX, FlatState

if TYPE_CHECKING:
    from asyncckpt.plan.leaf_facts import LeafMemory

BLOW_UP_BYTES_MAX = 16 << 20
ALIGNMENT = 16  # Of the largest elements.
_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the values of a strided tensor are its memory, one after the other."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def check_leaf(tensor: torch.Tensor, name: str, *, kind_alone: bool = False) -> None:
    """Refuse what cannot be saved as its plain values; UnsupportedError or UsageError naming the tensor.

    kind_alone: pass over what may change before a save.
    """
    kind = type(tensor)
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        if kind_alone:
            return
        raise UsageError(f"tensor {name!r} is not initialised", found=kind.__name__)
    if tensor.is_meta and not kind_alone:
        hint = "module.to_empty(device=...) gives a module memory to load into"
        raise UnsupportedError(f"tensor {name!r} is on the meta device and has no data", hint=hint)
    if is_transformed(tensor):
        raise UnsupportedError(
            f"tensor {name!r} is one of a transform of torch.func, which has no memory",
            hint="save outside of it, and what it returns",
        )
    if kind.__torch_dispatch__ is not _PLAIN_DISPATCH:
        raise UnsupportedError(
            f"tensor {name!r} is of a subclass whose storage is not its value",
            found=Words(f"{kind.__module__}.{kind.__qualname__}"),
            hint="save what it is made of, such as DTensor.to_local()",
        )
    if tensor.is_quantized or tensor.layout is not torch.strided or tensor.is_nested:
        from asyncckpt.plan.layouts import kind_of

        if kind_alone and kind_of(tensor):
            return
        found = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedError(
            f"tensor {name!r} has a layout that cannot be saved", found=found, hint="save its parts as dense tensors"
        )
    if kind_alone:
        return
    stored_dtype(tensor.dtype, owner=name)
    check_extent(tensor, name)


def check_kinds(value: Any, path: tuple[Any, ...] = (), parents: tuple[int, ...] = ()) -> None:
    """Refuse tensors that no save takes, where they can be seen without asking an object for its state.

    UnsupportedError naming one. So a job ends when its Saver is made, not when it has trained until the first save.
    """
    if isinstance(value, torch.nn.Module):
        value = tensors_of(value)
    if isinstance(value, torch.Tensor):
        # What is spread is asked for its parts in a save; what is fake may be so only here.
        if not any(hasattr(value, name) for name in ("__tensor_flatten__", "local_shards", "fake_mode")):
            # Keys that cannot be stored are told by a save; as decimal digits some cannot even be shown.
            name = ".".join(hex(key) if type(key) is int and key.bit_length() > 64 else str(key) for key in path)
            check_leaf(value, name, kind_alone=True)
    elif type(value) in (dict, OrderedDict, list, tuple) and id(value) not in parents and len(path) <= STATE_DEPTH_MAX:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            check_kinds(item, (*path, key), (*parents, id(value)))


def check_leaves(flat: FlatState) -> None:
    """Do it with all of a state of which no plan has been made."""
    for tensor, name in zip(flat.tensors, tensor_names(flat.tree), strict=True):
        check_leaf(tensor, name)


def check_extent(tensor: torch.Tensor, name: str) -> None:
    """Raise UsageError unless the storage holds all elements, and writing them out blows no expanded tensor up."""
    if tensor.numel() == 0:
        return
    storage_bytes = tensor.untyped_storage().nbytes()
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if (last + 1) * tensor.element_size() > storage_bytes:
        raise UsageError(
            f"tensor {name!r} has a freed or shrunk storage",
            found=Words(f"{storage_bytes} bytes"),
            expected=f"{(last + 1) * tensor.element_size()} bytes",
        )
    logical_bytes = math.prod(tensor.shape) * tensor.element_size()
    if logical_bytes > storage_bytes + BLOW_UP_BYTES_MAX:
        raise UsageError(
            f"tensor {name!r} is an expanded view that would be written out",
            found=Words(f"{logical_bytes} bytes"),
            expected=f"about its storage's {storage_bytes} bytes",
            hint="save the tensor it was expanded from, or call .contiguous()",
        )


# -- shared memory -----------------------------------------------------------------------------------------------------


def sharing_of(flat: FlatState, memory: LeafMemory, names: Sequence[str]) -> Sharing:
    """Return what leaves share. names: those of all leaves."""
    grouped, begins = {leaf for group in memory.overlapping for leaf in group}, memory.begins
    groups = memory.overlapping + [[leaf] for leaf in memory.turned if leaf not in grouped]
    if not groups:
        return NOTHING_SHARED
    paths = [json.dumps(path) for path in tensor_paths(flat.tree)]
    tied: list[TiedLeaf] = []
    memories: list[SharedMemory] = []
    for group in groups:
        alike: dict[object, list[int]] = defaultdict(list)
        for leaf in group:
            tensor = flat.tensors[leaf]
            place = int(begins[leaf]), tensor.dtype, tensor.shape, tensor.stride(), tensor.device
            alike[place].append(leaf)
        stored = []
        for leaves in alike.values():
            first, *others = sorted(leaves, key=paths.__getitem__)
            tied += [TiedLeaf(names[leaf], leaf, first) for leaf in others]
            stored.append(first)
        memories += _memories(flat, stored, begins)
    return Sharing(tuple(tied), tuple(memories))


def _memories(flat: FlatState, leaves: Sequence[int], begins: U64) -> Iterator[SharedMemory]:
    """Return the memory of leaves that overlap, one for each device."""
    by_device: dict[torch.device, list[int]] = defaultdict(list)
    for leaf in leaves:
        tensor = flat.tensors[leaf]
        if int(begins[leaf]) % tensor.element_size() == 0 and not overlaps_itself(once(tensor)):
            by_device[tensor.device].append(leaf)
    for own in by_device.values():
        tensors = [flat.tensors[leaf] for leaf in own]
        addresses = [int(begins[leaf]) for leaf in own]
        begin = min(addresses) // ALIGNMENT * ALIGNMENT
        size = max(at + span_bytes(tensor) for at, tensor in zip(addresses, tensors, strict=True)) - begin
        is_shared = len(own) > 1 or not tensors[0].is_contiguous()  # One alone is the stored one of tied leaves.
        if is_shared and size <= sum(tensor.nbytes for tensor in tensors) + BLOW_UP_BYTES_MAX:
            places = zip(own, addresses, tensors, strict=True)
            views = tuple(SharedView(leaf, at - begin, tuple(tensor.stride())) for leaf, at, tensor in places)
            yield SharedMemory(size, views)


def once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with one of those elements that a stride of 0 repeats."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether two indices may share memory: some dimension does not step over all that smaller strides span."""
    spanned = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < spanned:
            return True
        spanned += stride * (size - 1)
    return False


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to past the last element."""
    return span(tensor.shape, tensor.stride()) * tensor.element_size()


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory there are from the first to past the last one; 0 where there are none."""
    if not math.prod(shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def memory_of(tensor: Any) -> object:
    """Return where a tensor is, or what of a spread one is here: the same for a parameter and for what is loaded.

    The same memory as other numbers, such as a view of another dtype, is another place.
    """
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.layout is not torch.strided or local.is_nested or hasattr(local, "__tensor_flatten__"):
        return id(tensor)  # It is in several places.
    address = local.data_ptr() if local.numel() else 0
    form = tuple(local.shape), local.stride(), local.dtype, local.is_conj(), local.is_neg()
    return (address, *form) if address else None
