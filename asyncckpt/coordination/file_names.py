"""Names below `ranks/` of a checkpoint directory, where ranks without a process group talk.

    ranks/hello-00001-of-00004-<token>          rank 1 of 4 wants to join; the token is drawn anew by each process
    ranks/s-<session>/                          a session, made by rank 0
    ranks/s-<session>/roster                    the tokens of the ranks that it is for
    ranks/s-<session>/in-00001/<call>-<from>-<number>
                                                a message to rank 1
    ranks/s-<session>/put/<call>-<hash of the name>
    ranks/s-<session>/gone/00001                rank 1 has closed
    ranks/s-<session>/<folder>/.t-<token>       a file that is being written

Whatever has another name is left alone.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

import xxhash

RANKS_DIR = "ranks"
ROSTER = "roster"
PUT_DIR = "put"
GONE_DIR = "gone"

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


def new_temporary_name() -> str:
    return f".t-{uuid.uuid4().hex}"


def inbox_dir(rank: int) -> str:
    return f"in-{rank:05d}"


def gone_name(rank: int) -> str:
    return f"{rank:05d}"


def put_name(call: int, name: str) -> str:
    return f"{call:012d}-{xxhash.xxh3_128_hexdigest(name.encode())}"


def call_of_put(name: str) -> int | None:
    match = _PUT.fullmatch(name)
    return int(match.group(1)) if match else None
