"""Files below `ranks/` of a checkpoint directory, where ranks without a process group talk.

    ranks/hello-00001-of-00004-<token>          rank 1 of 4 wants to join; each process draws a new token
    ranks/s-<session>/                          a session, made by rank 0
    ranks/s-<session>/roster                    the tokens of the ranks that it is for
    ranks/s-<session>/in-00001/<call>-<from>-<number>
                                                a message to rank 1
    ranks/s-<session>/put/<call>-<hash of the name>
    ranks/s-<session>/gone/00001                rank 1 has closed
    ranks/s-<session>/<folder>/.t-<token>       a file that is being written

Whatever has another name is left alone. A file is there in full or not at all: it is written under a temporary name and
renamed, and begins with a digest of the rest, so that neither a reader that comes early nor a file system that shows a
name before its bytes can make half a message of it. Nothing is synced, for nothing of it outlives the job.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from dataclasses import dataclass

import xxhash

from asyncckpt.coordination.channel import Pauses
from asyncckpt.errors import CorruptError, Words
from asyncckpt.storage.directory import Directory, io_failed

RANKS_DIR = "ranks"
ROSTER = "roster"
PUT_DIR = "put"
GONE_DIR = "gone"

FIRST_PAUSE_S = 0.002
PAUSE_S_MAX = 0.1
_DIGEST_BYTES = 16
_HELLO = re.compile(r"hello-([0-9]{5})-of-([0-9]{5})-([0-9a-f]{32})")
_SESSION = re.compile(r"s-[0-9a-f]{32}")
_MESSAGE = re.compile(r"([0-9]{12})-([0-9]{5})-([0-9]{10})")
_PUT = re.compile(r"([0-9]{12})-[0-9a-f]{32}")


@dataclass(frozen=True)
class Hello:
    """One process that wants to join as a rank."""

    rank: int
    ranks_count: int
    token: str

    @property
    def name(self) -> str:
        return f"hello-{self.rank:05d}-of-{self.ranks_count:05d}-{self.token}"


@dataclass(frozen=True)
class MessageName:
    """One message in the folder of its reader; `number` counts, from 0, what its sender sent there in this call."""

    call: int
    sender: int
    number: int

    @property
    def name(self) -> str:
        return f"{self.call:012d}-{self.sender:05d}-{self.number:010d}"


def hello_of(name: str) -> Hello | None:
    match = _HELLO.fullmatch(name)
    return Hello(int(match.group(1)), int(match.group(2)), match.group(3)) if match else None


def message_of(name: str) -> MessageName | None:
    match = _MESSAGE.fullmatch(name)
    return MessageName(*map(int, match.groups())) if match else None


def new_session_name() -> str:
    return f"s-{uuid.uuid4().hex}"


def is_session(name: str) -> bool:
    return _SESSION.fullmatch(name) is not None


def inbox_dir(rank: int) -> str:
    return f"in-{rank:05d}"


def gone_name(rank: int) -> str:
    return f"{rank:05d}"


def put_name(call: int, name: str) -> str:
    return f"{call:012d}-{xxhash.xxh3_128_hexdigest(name.encode())}"


def call_of_put(name: str) -> int | None:
    match = _PUT.fullmatch(name)
    return int(match.group(1)) if match else None


def new_pauses() -> Pauses:
    """Pauses between two looks at folders."""
    return Pauses(pause_s_max=PAUSE_S_MAX, first_s=FIRST_PAUSE_S)


def write_whole(folder: Directory, name: str, data: bytes) -> None:
    """Make a file of a new name; ConflictError when there is one, IOFailedError."""
    temporary = f".t-{uuid.uuid4().hex}"
    fd, _ = folder.create_file(temporary)
    try:
        try:
            for part in (xxhash.xxh3_128_digest(data), data):
                _write_all(fd, part)
        finally:
            os.close(fd)
        folder.publish(temporary, name)
    except BaseException as error:
        with contextlib.suppress(Exception):
            folder.remove_file(temporary)
        if isinstance(error, OSError):
            raise io_failed(f"file {str(folder.path / name)!r} cannot be written", error) from error
        raise


def read_whole(folder: Directory, name: str, *, bytes_max: int) -> bytes:
    """Return what `write_whole` wrote; NotFoundError, CorruptError for anything else, IOFailedError."""
    raw = folder.read_file(name, bytes_max=bytes_max + _DIGEST_BYTES)
    data = raw[_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(data) != raw[:_DIGEST_BYTES]:
        raise CorruptError(f"{str(folder.path / name)!r} is not what was written", found=Words(f"{len(raw)} bytes"))
    return data


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
