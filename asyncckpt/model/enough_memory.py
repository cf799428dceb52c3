"""The sizes in a checkpoint may be more than there is memory for: an error that names what it was needed for."""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from asyncckpt.errors import CheckpointError, IOFailedError

# torch has an error of its own for devices alone, and these words for hosts. The last two are NumPy's, of what has more
# bytes than there are addresses.
_SAYS = (
    "allocate memory",
    "not enough memory",
    "out of memory",
    "Storage size calculation overflowed",
    "array is too big",
    "Maximum allowed dimension exceeded",
)
# Where in torch it is, which says nothing to others.
_OF_TORCH = re.compile(r"^\[enforce fail at [^]]*\] [^.]*\. (DefaultCPUAllocator: )?")


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Raise what NumPy, torch and the core say when there is no memory for `what` as IOFailedError, ENOMEM."""
    try:
        yield
    except (MemoryError, RuntimeError, ValueError, IOFailedError) as error:
        raise_lack_of_memory(error, what)
        raise


def raise_lack_of_memory(error: Exception, what: str) -> None:
    """Raise IOFailedError where an error says that there is no memory, also for a part of `what`."""
    if isinstance(error, IOFailedError) and error.errno == errno.ENOMEM and what not in error.what:
        raise IOFailedError(f"{error.what}, in {what}", errno=errno.ENOMEM, hint=error.hint) from error.__cause__
    if isinstance(error, CheckpointError):
        return
    if isinstance(error, MemoryError) or any(says in str(error) for says in _SAYS):
        lines = _OF_TORCH.sub("", str(error).strip()).splitlines() or ["nothing says how much was asked for"]
        limits = sys.modules.get("asyncckpt.staging.limits")  # Above this one; loads have it.
        there = "" if limits is None else f"; {limits.spare_bytes()} bytes are to spare"
        lack = f"there is not enough memory for {what}: {lines[0]}{there}"
        hint = "free memory, raise the limit of the container, or read less at once"
        raise IOFailedError(lack, errno=errno.ENOMEM, hint=hint) from error
