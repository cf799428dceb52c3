"""The device of these tests, and the few things that they do with its streams.

ASYNCCKPT_GPU_TESTS_DEVICE=cpu runs their bodies with tensors of the host, where streams are nothing and order is the
program's: it shows that the tests themselves are sound, and nothing about devices.

`python -m tests.gpu.device` says which device there is, and fails without one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch

DEVICE = os.environ.get("ASYNCCKPT_GPU_TESTS_DEVICE", "cuda")
IS_CUDA = DEVICE.startswith("cuda")
LONG_CYCLES = 400_000_000  # Of the device's clock, about 0.2 s: far longer than anything that the host does meanwhile.
SHORT_CYCLES = 2_000_000


def why_none() -> str:
    """Why the tests cannot run; empty when they can."""
    if not IS_CUDA:
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False: no driver, or no device"
    return ""


def new_stream(device: str = DEVICE) -> Any:
    """A stream of our own; None on the host."""
    return torch.cuda.Stream(device) if IS_CUDA else None


def current_stream(device: str = DEVICE) -> Any:
    return torch.cuda.current_stream(device) if IS_CUDA else None


def on(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Make a stream current."""
    return torch.cuda.stream(stream) if IS_CUDA else contextlib.nullcontext()


def keep_busy(cycles: int = LONG_CYCLES) -> None:
    """Queue work that takes a while on the current stream, without touching memory."""
    if IS_CUDA:
        torch.cuda._sleep(cycles)


def is_busy(stream: Any) -> bool:
    """Whether the device has not yet done all that is queued on a stream; nothing can be told of the host."""
    return not stream.query() if IS_CUDA else True


def wait_for(stream: Any, other: Any) -> None:
    """Let what is queued on a stream from now on wait for what is queued on another one."""
    if IS_CUDA:
        stream.wait_stream(other)


def synchronize() -> None:
    if IS_CUDA:
        torch.cuda.synchronize()


def main() -> int:
    reason = why_none()
    if reason:
        print(f"the GPU suite cannot run here: {reason}", file=sys.stderr)
        return 1
    if IS_CUDA:
        for number in range(torch.cuda.device_count()):
            name, capability = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
            print(f"cuda:{number} {name} sm_{capability[0]}{capability[1]}, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
