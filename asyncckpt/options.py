"""Options and limits that rooms share: names for every number that a user may meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from asyncckpt.errors import UsageError

OnBusy = Literal["raise", "wait", "skip", "queue"]
Durability = Literal["fsync", "none"]
HostLevel = Literal["auto", "copy", "first_touch"]
SaveKind = Literal["auto", "full", "delta"]
ON_BUSY = ("raise", "wait", "skip", "queue")
DURABILITIES = ("fsync", "none")
HOST_LEVELS = ("auto", "copy", "first_touch")
SAVE_KINDS = ("auto", "full", "delta")

FILE_TARGET_BYTES = 512 << 20  # A rank writes one shard file per this many bytes, up to `parallel` files.
BLOCK_BYTES_MAX = 1 << 30  # A larger tensor or column is split by rows.
HEADROOM_BYTES_MAX = 24 << 20  # Growing tables have an eighth of room in their regions and behind, at most this much.
CHUNK_BYTES = 64 << 20  # One of the two buffers of a blocking save.
BUSY_DEADLINE_S = 3600.0  # Waiting for the save lock or for an arena.
PEER_DEADLINE_S = 300.0  # Waiting for other ranks to come to a save.
DEVICE_DEADLINE_S = 3600.0  # Waiting for a device to be done with copies, and with what was queued before them.
SAVE_DEADLINE_S = 6 * 3600.0  # Waiting for one background save to end.
PARALLEL_MAX = 499  # Files of tables and files of tensors together have numbers of three digits.


@dataclass(frozen=True)
class DeltaPolicy:
    """When a save of kind "auto" is a delta: it is a full checkpoint when any bound would be passed.

    deltas_max        deltas behind one full checkpoint; a load reads them all
    bytes_share_max   bytes of these deltas together, as a share of the full one's
    seconds_max       age of the full one; None: no bound
    """

    deltas_max: int = 20
    bytes_share_max: float = 1.0
    seconds_max: float | None = None

    def __post_init__(self) -> None:
        if type(self.deltas_max) is not int or self.deltas_max < 1:
            raise UsageError("deltas_max is wrong", found=self.deltas_max, expected="an int of at least 1")
        for name in ("bytes_share_max", "seconds_max"):
            value = getattr(self, name)
            if value is None and name == "seconds_max":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise UsageError(f"{name} is wrong", found=value, expected="a number above 0")


@dataclass(frozen=True)
class SaveOptions:
    """How a save is done; the validated arguments of a Saver."""

    parallel: int = 8
    durability: Durability = "fsync"
    host_memory_limit: int | None = None
    keep_latest: int | None = None
    busy_deadline_s: float = BUSY_DEADLINE_S
    host_level: HostLevel = "auto"
    refresh: bool = True
    audit: bool = False
    deltas: DeltaPolicy | None = None
    device_scratch_bytes: int = 0
    device_prints: bool = False
    pinned_memory_limit: int | None = None
    streams: tuple[Any, ...] = ()
