"""Channels between ranks that are threads of one process."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from asyncckpt.errors import DeadlineError


@dataclass
class Wire:
    """What the ranks share."""

    ranks_count: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    inboxes: dict[tuple[int, int], list[tuple[int, bytes]]] = field(default_factory=lambda: defaultdict(list))
    left: dict[tuple[int, str], bytes] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)

    def channels(self) -> list[MemoryChannel]:
        return [MemoryChannel(self, rank) for rank in range(self.ranks_count)]


class MemoryChannel:
    """A Channel."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire = wire
        self.rank = rank
        self.ranks_count = wire.ranks_count
        self.is_closed = False

    def send(self, call: int, to: int | None, message: bytes) -> None:
        with self.wire.changed:
            others = [rank for rank in range(self.ranks_count) if rank != self.rank] if to is None else [to]
            for rank in others:
                self.wire.inboxes[call, rank].append((self.rank, message))
            self.wire.changed.notify_all()

    def receive(self, call: int, timeout_s: float) -> list[tuple[int, bytes]]:
        with self.wire.changed:
            self.wire.changed.wait_for(lambda: self.wire.inboxes[call, self.rank], timeout_s)
            return self.wire.inboxes.pop((call, self.rank), [])

    def put(self, call: int, name: str, data: bytes) -> None:
        with self.wire.changed:
            self.wire.left[call, name] = data
            self.wire.changed.notify_all()

    def get(self, call: int, name: str, timeout_s: float) -> bytes:
        with self.wire.changed:
            if not self.wire.changed.wait_for(lambda: (call, name) in self.wire.left, timeout_s):
                raise DeadlineError(f"{name} did not come", found=time.monotonic())
            return self.wire.left[call, name]

    def forget(self, call: int) -> None:
        with self.wire.changed:
            self.wire.forgotten.append(call)
            for key in [key for key in self.wire.left if key[0] == call]:
                del self.wire.left[key]

    def close(self) -> None:
        self.is_closed = True
