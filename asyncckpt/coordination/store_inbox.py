"""What has come for one rank in one call, read from its logs in the store of a channel.

A log has an entry for every message: who sent it, its number among all that he sent in the call, and of how many
further pieces it is.
"""

from __future__ import annotations

import struct
from typing import Any

from asyncckpt.coordination.store_values import delete_value, log_key, message_key, read_values

_ENTRY = struct.Struct(">III")


def log_entry(*, sender: int, number: int, pieces: int) -> bytes:
    return _ENTRY.pack(sender, number, pieces)


class Inbox:
    """What has come for this rank in one call. Only the line's thread uses it."""

    def __init__(self, call: int, rank: int) -> None:
        self._call = call
        self._readers: list[int | None] = [rank] if rank == 0 else [rank, None]  # None: what is for all.
        self._taken_bytes = [0] * len(self._readers)

    def look(self, store: Any) -> list[tuple[int, bytes]]:
        """Messages that came since the last look, as (sender, message); each sender's in their order."""
        keys = [log_key(self._call, to) for to in self._readers]
        for key in keys:
            store.append(key, b"")  # To ask for a key that is not there would wait for it.
        logs = [bytes(log) for log in store.multi_get(keys)]
        new = [
            (number, sender, to, pieces)
            for to, taken_bytes, log in zip(self._readers, self._taken_bytes, logs, strict=True)
            for sender, number, pieces in _ENTRY.iter_unpack(log[taken_bytes:])
        ]
        if not new:
            return []
        self._taken_bytes = [len(log) for log in logs]
        new.sort(key=lambda entry: entry[0])  # Rank 0 speaks to one and to all, and counts both in one.
        found = [message_key(self._call, to, sender=sender, number=number) for number, sender, to, _ in new]
        messages = read_values(store, found)
        for key, (_, _, to, pieces) in zip(found, new, strict=True):
            if to is not None:
                delete_value(store, key, pieces=pieces)
        # The own log is emptied, unless more has come meanwhile; in a long call it would become large.
        if store.compare_set(keys[0], logs[0], b"") == b"":
            self._taken_bytes[0] = 0
        return [(sender, message) for (_, sender, _, _), message in zip(new, messages, strict=True)]

    def drop(self, store: Any) -> None:
        """Delete the log of this rank, and the messages in it that were not read."""
        rank, key = self._readers[0], log_key(self._call, self._readers[0])
        store.append(key, b"")
        for sender, number, pieces in _ENTRY.iter_unpack(bytes(store.get(key))[self._taken_bytes[0] :]):
            delete_value(store, message_key(self._call, rank, sender=sender, number=number), pieces=pieces)
        store.delete_key(key)
