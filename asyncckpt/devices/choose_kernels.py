"""Choose the kernels of a device: those of the CUDA library if they run, else torch's own operations.

ASYNCCKPT_CUDA=0 chooses torch's; ASYNCCKPT_CUDA=1 makes it an error when the library cannot be used.
"""

from __future__ import annotations

import logging
import os

from asyncckpt.devices.contract import Kernels, Runtime
from asyncckpt.devices.library_kernels import LibraryKernels
from asyncckpt.devices.torch_kernels import TorchKernels
from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.native import UnusableLibrary
from asyncckpt.native.cuda import DeviceFailure, load_cuda_library

ENVIRONMENT_VARIABLE = "ASYNCCKPT_CUDA"

_log = logging.getLogger("asyncckpt")


def choose_kernels(runtime: Runtime, device: int) -> Kernels:
    """Return the kernels for a device. Raises UsageError for a wrong variable, UnsupportedError if 1 is impossible."""
    wish = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if wish not in ("", "0", "1"):
        raise UsageError(f"{ENVIRONMENT_VARIABLE} is wrong", found=wish, expected="0, 1 or unset")
    if wish == "0":
        return TorchKernels(runtime, device)
    try:
        library = load_cuda_library()
        library.check_usable(device)
    except (UnusableLibrary, DeviceFailure) as error:
        if wish == "1":
            raise UnsupportedError(
                f"{ENVIRONMENT_VARIABLE}=1 but the CUDA library cannot be used on device {device}", found=str(error)
            ) from error
        _log.warning("asyncckpt: torch copies on device %d, slower for small tensors and rows: %s", device, error)
        return TorchKernels(runtime, device)
    return LibraryKernels(runtime, device, library)
