"""A channel between ranks that are threads of one process: for tests, benches and trying things out.

It loses nothing, and it counts what passes.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable

from asyncckpt.errors import DeadlineError, PeerError


class MemoryExchange:
    """What the channels of one job share. Everything belongs to the one lock; each rank has a condition of its own.

    sent_count and sent_bytes count messages as they are sent, a broadcast once; received_count and received_bytes as
    they are received.
    """

    def __init__(self, ranks_count: int) -> None:
        lock = threading.Lock()
        self.ranks_count = ranks_count
        self.arrivals = [threading.Condition(lock) for _ in range(ranks_count)]
        self.data_changed = threading.Condition(lock)
        self.inboxes: defaultdict[tuple[int, int], list[tuple[int, bytes]]] = defaultdict(list)
        self.data: dict[tuple[int, str], bytes] = {}
        self.is_closed = False
        self.sent_count = self.sent_bytes = self.received_count = self.received_bytes = 0

    def channel(self, rank: int) -> MemoryChannel:
        return MemoryChannel(self, rank)


class MemoryChannel:
    """One rank's side of an exchange. All end when rank 0 closes, as they do where rank 0 is the server."""

    def __init__(self, exchange: MemoryExchange, rank: int) -> None:
        self._exchange = exchange
        self.rank = rank
        self.ranks_count = exchange.ranks_count

    def send(self, call: int, to: int | None, message: bytes) -> None:
        exchange = self._exchange
        with exchange.data_changed:
            self._check_open()
            exchange.sent_count += 1
            exchange.sent_bytes += len(message)
            for target in range(1, self.ranks_count) if to is None else (to,):
                exchange.inboxes[call, target].append((self.rank, message))
                exchange.arrivals[target].notify()

    def receive(self, call: int, timeout_s: float) -> list[tuple[int, bytes]]:
        exchange, key = self._exchange, (call, self.rank)
        with exchange.arrivals[self.rank]:
            self._wait(exchange.arrivals[self.rank], lambda: key in exchange.inboxes, timeout_s)
            self._check_open()
            messages = exchange.inboxes.pop(key, [])
            exchange.received_count += len(messages)
            exchange.received_bytes += sum(len(message) for _, message in messages)
            return messages

    def put(self, call: int, name: str, data: bytes) -> None:
        with self._exchange.data_changed:
            self._check_open()
            self._exchange.data[call, name] = bytes(data)
            self._exchange.data_changed.notify_all()

    def get(self, call: int, name: str, timeout_s: float) -> bytes:
        data = self._exchange.data
        with self._exchange.data_changed:
            self._wait(self._exchange.data_changed, lambda: (call, name) in data, timeout_s)
            self._check_open()
            if (call, name) not in data:
                raise DeadlineError(f"{name!r} of save call {call} did not come within {timeout_s:g} s")
            return data[call, name]

    def forget(self, call: int) -> None:
        with self._exchange.data_changed:
            for inbox in [key for key in self._exchange.inboxes if key[0] <= call]:
                del self._exchange.inboxes[inbox]
            for name in [key for key in self._exchange.data if key[0] <= call]:
                del self._exchange.data[name]

    def close(self) -> None:
        if self.rank != 0:
            return
        with self._exchange.data_changed:
            self._exchange.is_closed = True
            for condition in (*self._exchange.arrivals, self._exchange.data_changed):
                condition.notify_all()

    def _wait(self, condition: threading.Condition, has_come: Callable[[], bool], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not (has_come() or self._exchange.is_closed):
            left_s = until - time.monotonic()
            if left_s <= 0 or not condition.wait(left_s):
                return

    def _check_open(self) -> None:
        if self._exchange.is_closed:
            raise PeerError("the channel between the ranks is gone", rank=0, cause="rank 0 has closed it")
