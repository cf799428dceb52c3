"""Copy tensors from devices to the host and wait for them: for saves by windows, without an arena."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from asyncckpt.devices.contract import Stream
from asyncckpt.devices.current_runtime import device_of, runtime
from asyncckpt.devices.host_copies import HostCopies
from asyncckpt.devices.slots import slots_of
from asyncckpt.devices.uploads import is_plain


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as contiguous CPU memory, the tensor itself if it is that already; waits for the copy.

    Work queued on this thread's current stream comes first; work queued elsewhere must be done (`wait_for`). Raises
    DeviceError.
    """
    if device_of(tensor) is None:
        return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return to_host_all([tensor.detach()])[0]


def to_host_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of devices in one shared piece of CPU memory, each contiguous: one round trip for all of them.

    Waits for the copies like `to_host`. Raises DeviceError.
    """
    found = runtime()
    copies = HostCopies(found)
    sizes = np.array([tensor.numel() * tensor.element_size() for tensor in tensors], dtype=np.int64)
    begins, memory_bytes = slots_of(sizes)
    if found is None or not memory_bytes:
        return [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
    memory = found.new_pinned(memory_bytes)
    places: list[torch.Tensor] = []
    segments: dict[int, list[tuple[int, int, int]]] = {}
    for tensor, begin, size in zip(tensors, begins.tolist(), sizes.tolist(), strict=True):
        device = found.device_of(tensor)
        assert device is not None
        place = memory[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        places.append(place)
        if is_plain(tensor):
            segments.setdefault(device, []).append((tensor.data_ptr(), place.data_ptr(), size))
        else:
            copies.on(device).add_tensor(place, tensor)
    for device, own in segments.items():
        copies.on(device).add(np.array(own, dtype=np.uint64), tensors)
    copies.launch(reachable=[(int(memory.data_ptr()), memory.numel())]).settle()
    return places


def wait_for(tensors: Iterable[torch.Tensor], *, streams: Sequence[Stream] = ()) -> None:
    """Wait for everything that this thread has queued on the devices of these tensors, and for `streams`.

    Raises DeviceError.
    """
    found = runtime()
    if found is None:
        return
    devices = {found.device_of(tensor) for tensor in tensors} - {None}
    current = [found.current_stream(device) for device in devices if device is not None]
    for event in [found.record(stream) for stream in (*current, *streams)]:
        event.wait()
