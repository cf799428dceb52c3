"""Channels between ranks that are threads of one process: both kinds, behind one function."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from asyncckpt.coordination.channel import Channel
from asyncckpt.coordination.file_channel import FileChannel, open_file_channel
from asyncckpt.coordination.rank_store import StoreLine
from asyncckpt.coordination.store_address import StoreAddress, connect, serve
from asyncckpt.coordination.store_channel import StoreChannel
from asyncckpt.storage.directory import Directory

T = TypeVar("T")

DEADLINE_S = 20.0
KINDS = ("store", "file")


@contextlib.contextmanager
def channels(kind: str, ranks_count: int, folder: Path) -> Iterator[list[Channel]]:
    """One channel per rank; all are closed at the end, rank 0 last. kind: one of KINDS, or "own store"."""
    made: Sequence[Channel]
    if kind == "file":
        made = file_channels(ranks_count, folder)
    else:
        made = store_channels(ranks_count) if kind == "store" else own_store_channels(ranks_count)
    try:
        yield list(made)
    finally:
        for channel in reversed(made):
            channel.close()


def store_channels(ranks_count: int) -> list[StoreChannel]:
    """Channels over connections that are there already: making one asks a name server, which may take seconds."""
    name = os.urandom(8).hex()
    stores = shared_stores()[:ranks_count]
    lines = [StoreLine(partial(dist.PrefixStore, name, store)) for store in stores]
    return [StoreChannel(line, rank=rank, ranks_count=ranks_count) for rank, line in enumerate(lines)]


@cache
def shared_stores() -> list[dist.Store]:
    """A server, and connections for three further ranks."""
    store, address = serve(timeout_s=DEADLINE_S)
    until = time.monotonic() + DEADLINE_S
    return [store, *(connect(address, until=until) for _ in range(3))]


def own_store_channels(ranks_count: int) -> list[StoreChannel]:
    """Channels whose store ends with rank 0."""
    address: list[StoreAddress] = []

    def serve_first() -> dist.Store:
        store, told = serve(timeout_s=DEADLINE_S)
        address.append(told)
        return store

    first = StoreLine(serve_first)
    assert first.ask(lambda store: None).wait(DEADLINE_S)
    until = time.monotonic() + DEADLINE_S
    lines = [first, *(StoreLine(lambda: connect(address[0], until=until)) for _ in range(1, ranks_count))]
    return [StoreChannel(line, rank=rank, ranks_count=ranks_count) for rank, line in enumerate(lines)]


def file_channels(ranks_count: int, folder: Path) -> list[FileChannel]:
    with Directory.open(folder) as root:
        return at_once(partial(open_at, root, rank=rank, ranks_count=ranks_count) for rank in range(ranks_count))


def open_at(root: Directory, *, rank: int, ranks_count: int, deadline_s: float = DEADLINE_S) -> FileChannel:
    return open_file_channel(root, rank=rank, ranks_count=ranks_count, deadline_s=deadline_s)


def at_once(functions: Iterator[Callable[[], T]]) -> list[T]:
    """Run every function on a thread of its own; the results, or the first error."""
    tasks = list(functions)
    with ThreadPoolExecutor(len(tasks)) as threads:
        return [future.result(2 * DEADLINE_S) for future in [threads.submit(task) for task in tasks]]


def gather(channel: Channel, call: int, count: int) -> list[tuple[int, bytes]]:
    """The next messages of a call, as many as are expected and not one more."""
    found: list[tuple[int, bytes]] = []
    until = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < until, f"{len(found)} of {count} messages came: {found[:10]}"
        found += channel.receive(call, 0.5)
    assert len(found) == count, found[:10]
    return found


class StuckStore:
    """A store whose server does not answer; `free` ends that."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., bytes]:
        def stuck(*_: object) -> bytes:
            self.free.wait(DEADLINE_S)
            raise RuntimeError("Connection reset by peer\nframe #0: a stack")

        return stuck
