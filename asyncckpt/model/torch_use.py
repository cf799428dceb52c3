"""How this process uses torch at this moment: with devices, or in a function that torch traces."""

from __future__ import annotations

import numpy as np
import torch

from asyncckpt.errors import UsageError

# Runtimes that stand in for that of CUDA, in tests: devices/current_runtime.py.
instead: list[object] = []
_MEMORY = np.zeros(1, dtype=np.uint8)
_ADDRESS = _MEMORY.ctypes.data


def uses_devices() -> bool:
    """Return whether tensors may be on a device: only in a process that has started CUDA."""
    return bool(instead) or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def check_not_traced(what: str) -> None:
    """Raise UsageError, naming the call `what`, in a function that torch traces or transforms.

    Its tensors are not over the memory that they are given there, but copies of it.
    """
    made = torch.from_numpy(_MEMORY)
    try:
        if type(made) is torch.Tensor and made.data_ptr() == _ADDRESS:
            return
    except RuntimeError:  # It has none: torch.func.grad.
        pass
    raise UsageError(f"{what} was called in a function that torch traces or transforms", hint="call it outside")
