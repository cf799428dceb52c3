"""How the ranks of a process group meet at a store of their own.

1. Every rank draws the number of this meeting from the group's default store: how many channels it has opened on this
   group before. All ranks open in the same order, so the numbers are alike, even if a process was restarted.
2. Rank 0 of the group starts a TCPStore, leaves a random name in it, and announces its addresses and that name through
   the default store.
3. The others try the addresses in turn and take the one that leads to a store with that name. An address may lead
   elsewhere: the same loopback address belongs to every host.
4. Where rank 0 gives up at once, it leaves the cause in the default store, for those that come when its own is gone.

No collective is called, and the default store is not waited in: others use its connection too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

from asyncckpt.coordination.channel import Pauses
from asyncckpt.coordination.rank_store import LineBroken, StoreLine
from asyncckpt.errors import CorruptError, PeerError
from asyncckpt.format.strict_json import dumps, loads

PROBE_S_MAX = 3.0  # For one address, before the next one is tried.
# For a first answer where somebody listens: torch looks up names on both sides, which a slow DNS server takes 5 s for.
ANSWER_S_MAX = 15.0
MEET_PAUSE_S_MAX = 0.05
_DISCARD_PORT = 9
_SOMEWHERE = "192.0.2.1"  # Reserved for documentation: asked for the way only, nothing is sent.


@dataclass(frozen=True)
class StoreAddress:
    """Where the store of rank 0 is: hosts to try, port, and the name by which it is recognized."""

    hosts: tuple[str, ...]
    port: int
    name: str

    def encode(self) -> bytes:
        return dumps([list(self.hosts), self.port, self.name])

    @staticmethod
    def decode(raw: bytes) -> StoreAddress:
        """CorruptError for what `encode` did not make."""
        owner = "the address of rank 0's store"
        match loads(raw, owner=owner):
            case [[*hosts], int(port), str(name)] if all(isinstance(host, str) for host in hosts):
                return StoreAddress(tuple(map(str, hosts)), port, name)
        raise CorruptError(f"{owner} was not written by asyncckpt", found=raw[:200])


def serve_for(place: Any, *, timeout_s: float) -> Any:
    """Start a store, as rank 0, and announce it. `place`: the part of the default store that belongs to the group."""
    number = place.add("opened/0", 1)
    store, address = serve(timeout_s=timeout_s)
    place.set(f"address/{number}", address.encode())
    place.add(f"announced/{number}", 1)
    return store


def connect_to_announced(place: Any, *, rank: int, until: float) -> Any:
    """Return a connection to it, on the other ranks; PeerError when there is none until then (time.monotonic)."""
    number, begun = place.add(f"opened/{rank}", 1), time.monotonic()
    pauses = Pauses(pause_s_max=MEET_PAUSE_S_MAX)
    # Every kind of store, in every version of torch, adds without waiting for a key.
    while not place.add(f"announced/{number}", 0):
        if not pauses.pause(until):
            cause = f"it has not announced its address within {until - begun:.1f} s"
            raise PeerError("no channel to rank 0", rank=0, cause=cause)

    def check() -> None:
        if place.add(f"left/{number}", 0):
            cause = bytes(place.get(f"cause/{number}")).decode("utf-8", "replace")
            raise PeerError("rank 0 has left before this rank came", rank=0, cause=cause)

    return connect(StoreAddress.decode(bytes(place.get(f"address/{number}"))), until=until, check=check)


def leave_cause(place: Any, cause: str) -> None:
    """Say, as rank 0, why it leaves the meeting that it has opened last."""
    number = place.add("opened/0", 0)
    place.set(f"cause/{number}", cause.encode("utf-8"))
    place.add(f"left/{number}", 1)


def serve(*, timeout_s: float) -> tuple[Any, StoreAddress]:
    """Start a TCPStore in this process; return it and its address."""
    tcp_store: Any = import_module("torch.distributed").TCPStore
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    try:
        store: Any = tcp_store("localhost", 0, is_master=True, **options)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        store = tcp_store("localhost", 0, is_master=True, use_libuv=False, **options)  # A build of torch without it.
    address = StoreAddress(own_hosts(), store.port, uuid.uuid4().hex)
    store.add(address.name, 1)
    return store, address


def connect(address: StoreAddress, *, until: float, check: Callable[[], None] = lambda: None) -> Any:
    """Return a connection to the store at an address; PeerError when none of its hosts leads there until then.

    check: called after each round of tries; it may raise.
    """
    pauses = Pauses(pause_s_max=0.5)
    while True:
        for host in address.hosts:
            left_s = until - time.monotonic()
            if left_s > 0 and _is_there(host, address.port, timeout_s=min(PROBE_S_MAX, left_s)):
                store = _try(host, address, timeout_s=min(ANSWER_S_MAX, left_s))
                if store is not None:
                    return store
        check()
        if not pauses.pause(until):
            cause = f"its store is at none of {list(address.hosts)}, port {address.port}"
            raise PeerError("no channel to rank 0", rank=0, cause=cause)


def own_hosts() -> tuple[str, ...]:
    """Return names and addresses of this host at which others may reach it, best first."""
    master = os.environ.get("MASTER_ADDR", "")
    found = [address for host in (master, _SOMEWHERE) if host for address in _addresses_towards(host)]
    if master and _is_here(master):
        found.append(master)
    found += [socket.gethostname(), "127.0.0.1", "::1"]
    # A loopback address leads elsewhere from every other host, so it comes last.
    found.sort(key=_is_loopback)
    return tuple(dict.fromkeys(found))


def _addresses_towards(host: str) -> Iterator[str]:
    """Yield addresses of the interfaces that lead towards a host. Connecting a datagram socket sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                yield str(probe.getsockname()[0])


def _is_here(host: str) -> bool:
    """Return whether a host name is one of this machine: only then a socket can be bound to it."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(target)
                return True
    return False


def _is_loopback(host: str) -> bool:
    return host in ("::1", "localhost") or host.startswith("127.")


def _is_there(host: str, port: int, *, timeout_s: float) -> bool:
    """Return whether somebody listens. Asked first, because TCPStore logs the stack of every failed try."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def _try(host: str, address: StoreAddress, *, timeout_s: float) -> Any:
    """Return a connection to the store at a host; None when there is another store, none, or no answer."""
    tcp_store: Any = import_module("torch.distributed").TCPStore
    timeout = timedelta(seconds=timeout_s)
    line = StoreLine(lambda: tcp_store(host, address.port, is_master=False, wait_for_workers=False, timeout=timeout))
    try:
        asked = line.ask(lambda store: store if store.add(address.name, 0) else None)
        return asked.result() if asked.wait(timeout_s) else None
    except LineBroken:
        return None
    finally:
        line.hang_up()
