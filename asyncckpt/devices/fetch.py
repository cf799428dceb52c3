"""One tensor from a device to the host, now: for what goes a window at a time, without an arena."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from asyncckpt.devices.batch import Batch
from asyncckpt.devices.chosen import runtime
from asyncckpt.devices.contract import Stream
from asyncckpt.devices.copies import TensorCopy


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as contiguous CPU memory; the tensor itself when it is that already. Waits for it.

    What was queued for the tensor on this thread's current stream has its effect; work queued elsewhere must be done
    (`wait_for`). DeviceError.
    """
    found = runtime()
    device = None if found is None else found.device_of(tensor)
    if found is None or device is None:
        return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    target = found.new_pinned(max(1, tensor.numel() * tensor.element_size()))[: tensor.numel() * tensor.element_size()]
    values = target.view(tensor.dtype).view(tensor.shape)
    if values.numel():
        batch = Batch(found, device)
        batch.follow()
        batch.enqueue(partial(TensorCopy(values, tensor.detach()).run, batch))
        batch.settle(batch.record())
    return values


def wait_for(tensors: Iterable[torch.Tensor], *, streams: Sequence[Stream] = ()) -> None:
    """Wait until all is done that this thread has queued on the devices of these tensors, and all that is on `streams`.

    DeviceError.
    """
    found = runtime()
    if found is None:
        return
    devices = {found.device_of(tensor) for tensor in tensors} - {None}
    current = [found.current_stream(device) for device in devices if device is not None]
    for event in [found.record(stream) for stream in (*current, *streams)]:
        event.wait()
