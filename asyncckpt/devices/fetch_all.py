"""Many tensors from devices to the host, now and in one go: a round trip for all, instead of one for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncckpt.devices.chosen import runtime
from asyncckpt.devices.host_copies import HostCopies
from asyncckpt.devices.sizes import SLOT_BYTES


def to_host_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values of tensors on devices as contiguous CPU memory, which they share. Waits for them, as `to_host` does.

    DeviceError.
    """
    found = runtime()
    copies = HostCopies(found)
    sizes = np.array([tensor.numel() * tensor.element_size() for tensor in tensors], dtype=np.int64)
    room = -(-sizes // SLOT_BYTES) * SLOT_BYTES
    if found is None or not room.sum():
        return [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
    memory = found.new_pinned(int(room.sum()))
    places: list[torch.Tensor] = []
    segments: dict[int, list[tuple[int, int, int]]] = {}
    for tensor, begin, size in zip(tensors, (np.cumsum(room) - room).tolist(), sizes.tolist(), strict=True):
        device = found.device_of(tensor)
        assert device is not None
        place = memory[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        places.append(place)
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            segments.setdefault(device, []).append((tensor.data_ptr(), place.data_ptr(), size))
        else:
            copies.on(device).add_tensor(place, tensor)
    for device, own in segments.items():
        copies.on(device).add(np.array(own, dtype=np.uint64), tensors)
    copies.launch(reachable=[(int(memory.data_ptr()), memory.numel())]).settle()
    return places
