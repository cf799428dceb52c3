"""Keys and values in the store of a channel, and what has come for a rank there.

All keys are below the number of a call:

    log/<rank>, log/all               an entry for every message, in the order of arrival: its sender, its number among
                                      all that he sent in the call, and of how many further pieces it is
    message/<rank>|all/<from>/<n>     a message; it is there before the log names it
    put/<name>                        what was put

A store takes only a few MiB at once, so values are cut into pieces: the further ones are under piece/<i>/<key>, and are
there before the first one, which holds their number.
"""

from __future__ import annotations

import struct
from typing import Any

PIECE_BYTES = 4 << 20  # The server takes at most 8 MiB.
VALUES_AT_ONCE = 512
_PIECES = struct.Struct(">I")
_ENTRY = struct.Struct(">III")


def log_key(call: int, to: int | None) -> str:
    return f"{call}/log/{'all' if to is None else to}"


def put_key(call: int, name: str) -> str:
    return f"{call}/put/{name}"


def message_key(call: int, to: int | None, *, sender: int, number: int) -> str:
    return f"{call}/message/{'all' if to is None else to}/{sender}/{number}"


def _piece_key(key: str, index: int) -> str:
    return f"piece/{index}/{key}"


def pieces_count(data: bytes) -> int:
    """Return how many pieces follow the first one."""
    return max(0, len(data) - 1) // PIECE_BYTES


def write_value(store: Any, key: str, data: bytes) -> None:
    count = pieces_count(data)
    for index in range(1, count + 1):
        store.set(_piece_key(key, index), data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES])
    store.set(key, _PIECES.pack(count) + data[:PIECE_BYTES])


def find_value(store: Any, key: str) -> bytes | None:
    """Return the data under a key; None when it is not there."""
    store.append(key, b"")  # To ask for a key that is not there would wait for it; nothing is a value of no length.
    first = bytes(store.get(key))
    return _whole(store, key, first) if first else None


def read_values(store: Any, keys: list[str]) -> list[bytes]:
    """Return the data under keys that are there."""
    found: list[bytes] = []
    for begin in range(0, len(keys), VALUES_AT_ONCE):
        some = keys[begin : begin + VALUES_AT_ONCE]
        found += [_whole(store, key, bytes(first)) for key, first in zip(some, store.multi_get(some), strict=True)]
    return found


def _whole(store: Any, key: str, first: bytes) -> bytes:
    (count,) = _PIECES.unpack_from(first)
    further = [bytes(store.get(_piece_key(key, index))) for index in range(1, count + 1)]
    return b"".join([first[_PIECES.size :], *further])


def delete_value(store: Any, key: str, *, pieces: int) -> None:
    """Delete a value that has as many further pieces. Nothing is there to be deleted twice."""
    for name in (key, *(_piece_key(key, index) for index in range(1, pieces + 1))):
        store.delete_key(name)


def log_entry(*, sender: int, number: int, pieces: int) -> bytes:
    return _ENTRY.pack(sender, number, pieces)


class Inbox:
    """What has come for this rank in one call. Only the line's thread uses it."""

    def __init__(self, call: int, rank: int) -> None:
        self._call, self._rank = call, rank
        self._readers: list[int | None] = [rank] if rank == 0 else [rank, None]  # None: what is for all.
        self._taken_bytes = [0] * len(self._readers)

    def look(self, store: Any) -> list[tuple[int, bytes]]:
        """Return messages that came since the last look, as (sender, message); each sender's in their order."""
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
        drop_log(store, self._call, self._rank, taken_bytes=self._taken_bytes[0])


def drop_log(store: Any, call: int, rank: int, *, taken_bytes: int = 0) -> None:
    """Delete the log of a rank, and the messages in it from some byte on."""
    key = log_key(call, rank)
    store.append(key, b"")
    for sender, number, pieces in _ENTRY.iter_unpack(bytes(store.get(key))[taken_bytes:]):
        delete_value(store, message_key(call, rank, sender=sender, number=number), pieces=pieces)
    store.delete_key(key)
