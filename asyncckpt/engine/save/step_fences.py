"""Optimizers whose next step waits for the copies of a save, so that forward and backward need not.

Parameters and the state of an optimizer change in its step only, if its owner says so. A hook before the step lets the
current streams wait until they are copied; everything else of a state is waited for at the save.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from asyncckpt.devices.host_copies import Pending
from asyncckpt.native import U64


class StepFences:
    """The optimizers of one Saver. Hooks go when it does."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        self._optimizers = list(optimizers)
        self._pending: list[Pending] = []
        own = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            fences = own()
            if fences is not None:
                fences.wait()

        for optimizer in self._optimizers:
            handle = optimizer.register_step_pre_hook(before_step)
            weakref.finalize(self, handle.remove).atexit = False

    def memory(self) -> U64:
        """(address, bytes) of all tensors that only steps change, uint64 [n, 2]."""
        tensors = [tensor for item in self._optimizers for tensor in _tensors(item) if not tensor.is_meta]
        found = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        return np.array(found, dtype=np.uint64).reshape(-1, 2)

    def expect(self, pending: Pending) -> None:
        """The next step waits for these copies, on the device."""
        self._pending = [item for item in self._pending if item.devices]
        if self._optimizers and pending.devices:
            self._pending.append(pending)

    def wait(self) -> None:
        """Let the current streams of this thread wait for them."""
        for pending in self._pending:
            pending.fence()


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield _local(parameter)
            state = optimizer.state.get(parameter, {})
            yield from (_local(value) for value in state.values() if isinstance(value, torch.Tensor))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What a DTensor holds on this rank."""
    local = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(local, torch.Tensor)
    return local
