"""The sizes in a checkpoint may be more than there is memory for: an error that names what it was needed for."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from asyncckpt.errors import IOFailedError

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


@contextmanager
def enough_memory(what: str) -> Iterator[None]:
    """Raise what NumPy, torch and the core say when there is no memory for `what` as IOFailedError, ENOMEM."""
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        raise_lack_of_memory(error, what)
        raise


def raise_lack_of_memory(error: Exception, what: str) -> None:
    """Raise IOFailedError where an error says that there is no memory."""
    if isinstance(error, MemoryError) or any(says in str(error) for says in _SAYS):
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise IOFailedError(f"there is not enough memory for {what}: {lines[0]}", errno=errno.ENOMEM) from error
