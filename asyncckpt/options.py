"""Options and limits that rooms share: records that check themselves, and names for the numbers a user may meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from asyncckpt.arguments import as_int, check_choice, check_int, check_seconds, check_type
from asyncckpt.errors import UsageError, must_be

if TYPE_CHECKING:
    import torch

OnBusy = Literal["raise", "wait", "skip", "queue"]
Durability = Literal["fsync", "none"]
HostLevel = Literal["auto", "copy", "first_touch"]
SaveKind = Literal["auto", "full", "delta"]
ON_BUSY = get_args(OnBusy)
DURABILITIES = get_args(Durability)
HOST_LEVELS = get_args(HostLevel)
SAVE_KINDS = get_args(SaveKind)

FILE_TARGET_BYTES = 512 << 20  # A rank writes one shard file per this many bytes, up to `parallel` files.
BLOCK_BYTES_MAX = 1 << 30  # A larger tensor or column is split by rows.
HEADROOM_BYTES_MAX = 24 << 20  # Growing tables have an eighth of room in their regions and behind, at most this much.
CHUNK_BYTES = 64 << 20  # One of the two buffers of a blocking save.
BUSY_DEADLINE_S = 3600.0  # Waiting for the save lock or for an arena.
PEER_DEADLINE_S = 300.0  # Waiting for other ranks to come to a save.
DEVICE_DEADLINE_S = 3600.0  # Waiting for a device to be done with copies, and with what was queued before them.
SAVE_DEADLINE_S = 6 * 3600.0  # Waiting for one background save to end.
RESTORE_DEADLINE_S = 3600.0  # Waiting for other ranks to restore a checkpoint.
# Keys in the metadata of a save at the end of training: by what exception it was ended; and True where the state may be
# that of the middle of a step, so that retention prefers others.
INTERRUPTED, HALF_WAY = "asyncckpt.interrupted", "asyncckpt.half_way"
PARALLEL_MAX = 499  # Files of tables and files of tensors together have numbers of three digits.


@dataclass(frozen=True)
class DeltaPolicy:
    """Decides when a save of kind "auto" is a delta. It is full when any of these limits would be exceeded.

    deltas_max        most deltas after a full checkpoint; a load reads all of them
    bytes_share_max   bytes of these deltas together, as a share of the full one's
    seconds_max       age of the full one; None: no bound
    compact_after     fold a chain of n deltas into a full checkpoint, in the background: see Saver.compact. The limits
                      count from that one then. None: chains stay as they are
    """

    deltas_max: int = 20
    bytes_share_max: float = 1.0
    seconds_max: float | None = None
    compact_after: int | None = None

    def __post_init__(self) -> None:
        check_int("deltas_max", self.deltas_max, at_least=1)
        if self.compact_after is not None:
            check_int("compact_after", self.compact_after, at_least=1)
        for name in ("bytes_share_max", "seconds_max"):
            value = getattr(self, name)
            if value is None and name == "seconds_max":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise must_be(name, "a number above 0", value)


@dataclass(frozen=True)
class KeepPolicy:
    """Which checkpoints stay: those that any of these rules keeps, those that are pinned, and their bases.

    latest       keep the newest n steps, not counting those that were saved half-way (decision 0026)
    every_steps  keep the first checkpoint in every n steps: with 1000, the first in 0 to 999, in 1000 to 1999, ...
    every_hours  likewise by the time of the commit: the first in every n hours of UTC
    best         keep the n checkpoints with the best metric; ties keep the earliest
    metric       the name of a number in the metadata of every save; nan is never best
    mode         which is best, the "min" or the "max"
    """

    latest: int = 1
    every_steps: int | None = None
    every_hours: float | None = None
    best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("latest", "every_steps", "best"):
            object.__setattr__(self, name, as_int(getattr(self, name)))
            check_int(name, getattr(self, name), at_least=1, optional=name != "latest")
        hours = self.every_hours
        if hours is not None and (type(hours) not in (int, float) or not 0 < hours < math.inf):
            raise must_be("every_hours", "a number above 0, or None", hours)
        check_choice("mode", self.mode, ("min", "max"))
        if self.metric is not None:
            check_type("metric", self.metric, str)
        if (self.best is None) != (self.metric is None):
            raise UsageError(
                f"KeepPolicy(best={self.best}) needs metric='NAME', the name of a number in the metadata of every save"
                if self.metric is None
                else f"KeepPolicy(metric={self.metric!r}) needs best=N, the number of checkpoints to keep by it"
            )

    @staticmethod
    def of(keep: int | KeepPolicy | None, *, has_metadata: bool = True) -> KeepPolicy | None:
        """Return the policy that was given, or that of the newest `keep`; None keeps all. UsageError.

        has_metadata: whether saves are given metadata, among which a metric could be.
        """
        if isinstance(keep, KeepPolicy) and keep.metric is not None and not has_metadata:
            raise UsageError("keep has a metric, but saves here are given no metadata", found=keep.metric)
        if keep is None or isinstance(keep, KeepPolicy):
            return keep
        if type(as_int(keep)) is not int or keep < 1:
            raise must_be("keep", "an int of at least 1, a KeepPolicy or None", keep)
        return KeepPolicy(latest=keep)

    def check_metadata(self, metadata: Mapping[str, Any] | None) -> None:
        """Raise UsageError unless the metadata of a save holds the metric."""
        if self.metric is None:
            return
        value = (metadata or {}).get(self.metric)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(
                f"metadata has no number {self.metric!r}, which keep needs to find the best checkpoints",
                found=sorted(metadata or ()) if value is None else value,
                hint=f"pass save(metadata={{{self.metric!r}: ...}}), with nan if it is not known",
            )

    def with_metric(self, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return metadata with the metric: nan where it is not known, as of a step that was not to be saved."""
        try:
            self.check_metadata(metadata)
        except UsageError:
            return {**metadata, str(self.metric): math.nan}
        return metadata


@dataclass(frozen=True)
class BusyPolicy:
    """What a call does while a save or load of this process is in flight, and for how long.

    action    "raise" SaveInProgressError, "wait" for its end, "skip" this save, or "queue" it after saves whose state
              is captured; for whatever may still change the state, a load above all, "queue" waits too
    deadline  seconds that a wait takes, also of "queue" for memory to stage in; then DeadlineError
    """

    action: OnBusy = "wait"
    deadline: float = BUSY_DEADLINE_S

    def __post_init__(self) -> None:
        check_choice("on_busy", self.action, ON_BUSY)
        check_seconds("deadline of on_busy", self.deadline)

    @staticmethod
    def of(
        on_busy: OnBusy | BusyPolicy, *, deadline: float = BUSY_DEADLINE_S, actions: tuple[str, ...] = ON_BUSY
    ) -> BusyPolicy:
        """Return the policy that was given, or named by its action. Raises UsageError if it is not one of `actions`."""
        policy = on_busy if isinstance(on_busy, BusyPolicy) else BusyPolicy(on_busy, deadline)
        check_choice("on_busy", policy.action, actions)
        return policy


@dataclass(frozen=True)
class DeviceOptions:
    """How state on devices, and tables with a level on one, are copied.

    scratch_bytes        memory of each device that a save may use: what fits is copied within the device, so that its
                         streams wait only for that; the rest, and all when 0, goes to the host first
    pinned_memory_limit  bytes of staging memory that may be pinned in this process for copies from devices; None: as
                         much as is needed. Beyond it, the call and the devices wait for slower copies
    streams              streams beside the current ones that change the state (torch.cuda.Stream); saves follow what is
                         queued on them, and they wait for saves
    optimizers           torch optimizers whose parameters and state nothing but their step() changes, called as such
                         (not replayed as a graph, not fused into the backward pass): the next step() waits for the
                         copies of these, and the call, forward and backward do not; on the host, too, and for rows of
                         HashTables there. Tensors of less than 16 KiB are copied in the call. A save fails with
                         UsageError when something else has changed them before
    fingerprints         of tables on devices that have no marks, a full save copies only rows whose fingerprint differs
                         from the one that the arena's row had; takes 8 bytes a row there, for each of two arenas
    host_level           how a multi-level table is saved: "copy" copies both levels while training waits; "first_touch"
                         copies the cache level and exports the host level while training goes on, and keeps the old
                         values of rows that are about to change; "auto" does so when a copy of the host level does not
                         fit into memory
    """

    scratch_bytes: int = 0
    pinned_memory_limit: int | None = None
    streams: Sequence[Any] = ()
    optimizers: Sequence[torch.optim.Optimizer] = ()
    fingerprints: bool = False
    host_level: HostLevel = "auto"

    def __post_init__(self) -> None:
        check_int("scratch_bytes", self.scratch_bytes, at_least=0)
        check_int("pinned_memory_limit", self.pinned_memory_limit, at_least=0, optional=True)
        for name in ("streams", "optimizers"):
            check_type(name, getattr(self, name), Sequence)
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for optimizer in self.optimizers:
            import torch  # Not above: whoever only looks at checkpoints needs it not.

            check_type("one of the optimizers", optimizer, torch.optim.Optimizer)
        check_type("fingerprints", self.fingerprints, bool)
        check_choice("host_level", self.host_level, HOST_LEVELS)


@dataclass(frozen=True)
class UploadOptions:
    """Where and how a Saver uploads its checkpoints in the background (docs/object-stores.md).

    url               a prefix in an object store that is for this directory alone: s3://, gs:// or az://
    parallel          parts of a file that are read and on their way at once, of 16 MiB each (or more: a file has at
                      most 10,000)
    request_deadline  seconds that one request may take; what fails is tried again for twice as long
    deadline          seconds in which a checkpoint is tried again, when the store is busy or cannot be reached. Then
                      the upload has failed; it goes on with the next save, or the next Saver
    """

    url: str
    parallel: int = 4
    request_deadline: float = 30.0
    deadline: float = 600.0

    def __post_init__(self) -> None:
        check_type("url", self.url, str)
        check_int("parallel", self.parallel, at_least=1, at_most=PARALLEL_MAX)
        check_seconds("request_deadline", self.request_deadline, above_zero=True)
        check_seconds("deadline", self.deadline)

    @staticmethod
    def of(upload: str | UploadOptions | None) -> UploadOptions | None:
        """Return the options that were given, or those of a URL. UsageError."""
        if upload is None or isinstance(upload, UploadOptions):
            return upload
        check_type("upload", upload, str)
        return UploadOptions(upload)


@dataclass(frozen=True)
class RankOptions:
    """How the ranks of a job find each other and wait for each other.

    process_group  the ranks are those of this group of torch.distributed, and shard_index and shard_num may be left
                   out. None: several ranks are those of the default group if they are as many, else they find each
                   other by files in the directory
    peer_deadline  seconds that a rank waits for the others to start a save, and (at most 30) for a sign of life during
                   it; then PeerError
    in_turn        the ranks are Savers of this one process, which save a step one after the other: none waits, each
                   writes its part, and the last one commits
    alone          this process saves by itself, whatever torch.distributed says, also tables of which it holds a part;
                   without this, and without a process_group, a Saver of several ranks first waits 10 s for the others
    """

    process_group: Any = None
    peer_deadline: float = PEER_DEADLINE_S
    in_turn: bool = False
    alone: bool = False

    def __post_init__(self) -> None:
        check_seconds("peer_deadline", self.peer_deadline, above_zero=True)
        check_type("in_turn", self.in_turn, bool)
        check_type("alone", self.alone, bool)
        if self.alone and (self.in_turn or self.process_group is not None):
            raise UsageError("a rank that saves alone has neither a process_group nor ranks in turn")
        if self.in_turn and self.process_group is not None:
            raise UsageError("ranks in turn are Savers of one process, and have no process_group")


@dataclass(frozen=True)
class DebugOptions:
    """How much a Saver relies on the marks of tables, and who sees what it does.

    refresh  a full save copies only rows written since the arena was filled, where tables have marks. False: all rows
    audit    every save copies all rows into staging memory, compares them in the background with those of the last one,
             and lists in SaveResult.missed_ids which were changed without a mark. A blocking save is staged too, host
             levels are copied, and UsageError says where that is impossible: with a filter_func, without the memory.
             Of several ranks, each also copies all tensors and tables that others hold too, and what ranks hold is
             compared
    on_event called with every asyncckpt.events.Event of a save, in order, on a thread of its own: what it raises is
             logged, and while it blocks saves go on
    """

    refresh: bool = True
    audit: bool = False
    on_event: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        check_type("refresh", self.refresh, bool)
        check_type("audit", self.audit, bool)
        if self.on_event is not None and not callable(self.on_event):
            raise UsageError("on_event is not callable", found=type(self.on_event))


@dataclass(frozen=True)
class SaveOptions:
    """How a save is done: what a Saver, a StorageWriter and a stager are given in common."""

    parallel: int = 8
    durability: Durability = "fsync"
    host_memory_limit: int | None = None
    keep: KeepPolicy | None = None
    deltas: DeltaPolicy | None = None
    device: DeviceOptions = DeviceOptions()
    debug: DebugOptions = DebugOptions()

    def __post_init__(self) -> None:
        check_int("parallel", self.parallel, at_least=1, at_most=PARALLEL_MAX)
        check_choice("durability", self.durability, DURABILITIES)
        check_int("host_memory_limit", self.host_memory_limit, at_least=0, optional=True)
        if self.keep is not None:
            check_type("keep", self.keep, KeepPolicy)
        if self.deltas is not None:
            check_type("deltas", self.deltas, DeltaPolicy)
        check_type("device", self.device, DeviceOptions)
        check_type("debug", self.debug, DebugOptions)

    @property
    def refreshes(self) -> bool:
        """Whether a full save may copy only what was written since the arena was filled."""
        return self.debug.refresh and not self.debug.audit
