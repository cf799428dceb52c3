"""Tensors that shared memory when they were saved share it again, when they are loaded.

Each is loaded into memory of its own first, and moves to the memory that it shares if all that lie there can have their
values there. So no value depends on what the manifest says of memory: of ranks, one may have shared what another one,
whose blocks are stored, had apart. One alone that fills its memory in an order of its own may be loaded so at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from asyncckpt.errors import CorruptError
from asyncckpt.format.tree import Path, path_name
from asyncckpt.model.enough_memory import enough_memory
from asyncckpt.model.sharing import SharedView
from asyncckpt.plan.leaf_memory import BLOW_UP_BYTES_MAX, once, overlaps_itself, span
from asyncckpt.plan.overlapping_targets import same_bits


def shared_again(
    loaded: Mapping[Path, torch.Tensor], shared: Sequence[tuple[int, Mapping[Path, SharedView]]]
) -> dict[Path, torch.Tensor]:
    """Return loaded tensors as views of the memory that they shared; tied ones are the same tensor.

    shared: as of Contents. Only tensors on one device share memory. CorruptError for views beyond their memory.
    """
    views: dict[int, torch.Tensor] = {}
    for bytes, places in shared:
        by_device: dict[torch.device, list[tuple[torch.Tensor, SharedView]]] = defaultdict(list)
        for path, view in places.items():
            if path in loaded:
                _check(path, loaded[path], view, bytes)
                by_device[loaded[path].device].append((loaded[path], view))
        for own in by_device.values():
            if len(own) > 1 or own[0][0].stride() != own[0][1].strides:
                views |= _views(own)
    return {path: views.get(id(tensor), tensor) for path, tensor in loaded.items()}


def orders_alone(shared: Sequence[tuple[int, Mapping[Path, SharedView]]]) -> dict[Path, tuple[int, ...]]:
    """Return the strides of tensors that have their memory alone. shared: as of Contents."""
    return {path: view.strides for _, places in shared if len(places) == 1 for path, view in places.items()}


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements of a tensor fill its memory, each a place of its own."""
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != filled:
            return False
        filled *= size
    return True


def _views(own: Sequence[tuple[torch.Tensor, SharedView]]) -> dict[int, torch.Tensor]:
    """Return the views for tensors by their identities; none where these do not fit into it together."""
    size = max(_end(tensor, view) for tensor, view in own)
    if size > sum(tensor.nbytes for tensor, _ in own) + BLOW_UP_BYTES_MAX:
        return {}
    # What lies between the views is not there.
    with enough_memory(f"tensors that share memory, {size} bytes"):
        memory = torch.zeros(size, dtype=torch.uint8, device=own[0][0].device)
    found = [(tensor, _view(memory, tensor, view)) for tensor, view in own]
    for tensor, shown in found:
        first = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in shown.stride())
        shown[first].copy_(tensor[first])
    return {id(tensor): shown for tensor, shown in found} if all(same_bits(*pair) for pair in found) else {}


def _check(path: Path, tensor: torch.Tensor, view: SharedView, bytes: int) -> None:
    fits = len(view.strides) == tensor.dim() and view.offset % tensor.element_size() == 0
    if not fits or _end(tensor, view) > bytes:
        raise CorruptError(f"tensor {path_name(path)!r} does not fit the memory that it shares", found=view)


def _end(tensor: torch.Tensor, view: SharedView) -> int:
    return view.offset + span(tensor.shape, view.strides) * tensor.element_size()


def _view(memory: torch.Tensor, like: torch.Tensor, view: SharedView) -> torch.Tensor:
    with torch.inference_mode(False):
        tensor = torch.empty(0, dtype=like.dtype, device=memory.device)
        tensor.set_(memory.untyped_storage(), view.offset // like.element_size(), like.shape, view.strides)
    if overlaps_itself(once(tensor)):
        raise CorruptError("a tensor overlaps itself in the memory that it shares", found=view)
    return tensor
