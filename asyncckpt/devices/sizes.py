"""Sizes that decide how copies are split."""

from __future__ import annotations

LARGE_BYTES = 1 << 20
"""A segment of at least this size is a copy of its own; starting it takes the host some microseconds."""

PACK_BYTES = 64 << 20
"""Device memory in which short segments are packed if kernels cannot write to the host."""

SLOT_BYTES = 256
"""Slots in device memory are aligned like their targets modulo this, so that wide loads can copy both."""
