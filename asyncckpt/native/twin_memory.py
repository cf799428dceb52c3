"""Memory by its address, as the portable twin sees it."""

from __future__ import annotations

import ctypes


def memory_at(address: int, bytes: int) -> memoryview:
    """Return the bytes at an address; the caller keeps them alive."""
    return memoryview((ctypes.c_uint8 * bytes).from_address(address)).cast("B") if bytes else memoryview(bytearray())
