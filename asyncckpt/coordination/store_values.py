"""Keys and values in the store of a channel.

All keys are below the number of a call:

    log/<rank>, log/all               an entry for every message, in the order of arrival (store_inbox.py)
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


def log_key(call: int, to: int | None) -> str:
    return f"{call}/log/{'all' if to is None else to}"


def put_key(call: int, name: str) -> str:
    return f"{call}/put/{name}"


def message_key(call: int, to: int | None, *, sender: int, number: int) -> str:
    return f"{call}/message/{'all' if to is None else to}/{sender}/{number}"


def _piece_key(key: str, index: int) -> str:
    return f"piece/{index}/{key}"


def pieces_count(data: bytes) -> int:
    """How many pieces follow the first one."""
    return max(0, len(data) - 1) // PIECE_BYTES


def write_value(store: Any, key: str, data: bytes) -> None:
    count = pieces_count(data)
    for index in range(1, count + 1):
        store.set(_piece_key(key, index), data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES])
    store.set(key, _PIECES.pack(count) + data[:PIECE_BYTES])


def find_value(store: Any, key: str) -> bytes | None:
    """The data under a key, None when it is not there."""
    store.append(key, b"")  # To ask for a key that is not there would wait for it; nothing is a value of no length.
    first = bytes(store.get(key))
    return _whole(store, key, first) if first else None


def read_values(store: Any, keys: list[str]) -> list[bytes]:
    """The data under keys that are there."""
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
