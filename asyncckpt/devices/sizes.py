"""Sizes by which copies are divided."""

from __future__ import annotations

LARGE_BYTES = 1 << 20
"""From this size on a segment is a copy of its own, which the host has to start: that takes it some microseconds."""

PACK_BYTES = 64 << 20
"""Device memory in which short segments are put side by side, where kernels cannot write to the host."""

SLOT_BYTES = 256
"""Slots in device memory lie to a multiple of this as their targets do, so that both are copied by wide loads."""
