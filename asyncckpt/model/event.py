"""What happens in a save, as events: spans of time on threads, and how it ended.

    thread of the caller   call        training waits; in it: lock (for another save or load), cut (take the state
                                       apart, choose the kind, plan), capture (copy into the arena)
    asyncckpt-worker       devices     wait for copies from devices, where there are any
                           write       all shard files of this rank; in it: filter, rows (which are chosen, where some
                                       are), and drain (of the arena), or fill (of a chunk buffer) and sync
    asyncckpt-writer       chunk       one chunk buffer is written, while the other one is filled
    asyncckpt-commit       begin       sweep leftovers, make the attempt's folder
                           prove, publish
    asyncckpt-background   commit      from the proof until it is durable; in it the manifest is written
    asyncckpt-retention    retention   remove old checkpoints
    none                   open        the Saver has opened its directory: `step` is the newest there, or None, and
                                       `time` that of its commit
                           save        from the call to the end of the save, with its result or error
                           compaction  the same of Saver.compact
                           upload      a step is in the store, or is left with an error

What the call notes is handed on after the fence; everything else as it ends. Where nobody listens nothing is noted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from asyncckpt.model.result import SaveResult
from asyncckpt.model.store_url import Place

EventName = Literal[
    "call", "lock", "cut", "capture", "devices", "begin", "filter", "rows", "drain", "fill", "chunk", "sync", "write",
    "prove", "publish", "commit", "retention", "open", "save", "compaction", "upload",
]  # fmt: skip


@dataclass(frozen=True)
class Event:
    """A span of a save that has ended; see above for the names.

    time       when it began, in seconds of UNIX time
    begun      the same by time.perf_counter, to compare and order events of one process
    seconds    how long it took
    thread     the name of the thread, and `thread_id`, its number; "" and 0 for those of no thread
    result     of a "save" or "compaction" that did not fail; result.skipped: it was skipped
    error      of one that failed or was cancelled: a copy without traceback, which would hold the state that was saved
    """

    name: EventName
    step: int | None
    path: Place
    rank: int
    time: float
    begun: float
    seconds: float
    thread: str = ""
    thread_id: int = 0
    result: SaveResult | None = None
    error: BaseException | None = None


def unix_time(begun: float) -> float:
    """Return a time of the performance counter as UNIX time."""
    return time.time() - (time.perf_counter() - begun)


class Recorder:
    """Notes the spans of one save, and hands them on as events once `flow` was called.

    put: takes an event, and neither blocks nor raises.
    """

    def __init__(self, put: Callable[[Event], object], path: Place, *, step: int, rank: int = 0) -> None:
        self.step = step
        self._put, self._path, self._rank = put, path, rank
        self._held: list[tuple[EventName, float, float]] | None = []
        self._caller = threading.current_thread()

    def note(self, name: EventName, begun: float, ended: float | None = None) -> None:
        """Note a span on this thread that ends now, or has."""
        ended = time.perf_counter() if ended is None else ended
        if self._held is None:
            self._hand_on(threading.current_thread(), name, begun, ended)
        else:
            self._held.append((name, begun, ended))

    def flow(self) -> None:
        """Hand on what the call has noted, and from now on everything at once."""
        held, self._held = self._held, None
        for name, begun, ended in held or ():
            self._hand_on(self._caller, name, begun, ended)

    def _hand_on(self, thread: threading.Thread, name: EventName, begun: float, ended: float) -> None:
        self._put(
            Event(
                name=name,
                step=self.step,
                path=self._path,
                rank=self._rank,
                time=unix_time(begun),
                begun=begun,
                seconds=ended - begun,
                thread=thread.name,
                thread_id=thread.native_id or 0,
            )
        )
