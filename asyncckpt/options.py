"""Options and limits that rooms share: names for every number that a user may meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OnBusy = Literal["raise", "wait", "skip", "queue"]
Durability = Literal["fsync", "none"]
HostLevel = Literal["auto", "copy", "first_touch"]
ON_BUSY = ("raise", "wait", "skip", "queue")
DURABILITIES = ("fsync", "none")
HOST_LEVELS = ("auto", "copy", "first_touch")

FILE_TARGET_BYTES = 512 << 20  # A rank writes one shard file per this many bytes, up to `parallel` files.
BLOCK_BYTES_MAX = 1 << 30  # A larger tensor or column is split by rows.
HEADROOM_BYTES_MAX = 48 << 20  # An arena of growing tables is touched ahead by an eighth, at most this much.
CHUNK_BYTES = 64 << 20  # One of the two buffers of a blocking save.
BUSY_DEADLINE_S = 3600.0  # Waiting for the save lock or for an arena.
SAVE_DEADLINE_S = 6 * 3600.0  # Waiting for one background save to end.
PARALLEL_MAX = 999


@dataclass(frozen=True)
class SaveOptions:
    """How a save is done; the validated arguments of a Saver."""

    parallel: int = 8
    durability: Durability = "fsync"
    host_memory_limit: int | None = None
    keep_latest: int | None = None
    busy_deadline_s: float = BUSY_DEADLINE_S
    host_level: HostLevel = "auto"
