"""How ranks come to the store of rank 0: which addresses it tells, and which of them the others take."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from asyncckpt.coordination import store_address
from asyncckpt.coordination.store_address import (
    StoreAddress,
    connect,
    connect_to_announced,
    leave_cause,
    own_hosts,
    serve,
    serve_for,
)
from asyncckpt.errors import CorruptError, PeerError
from tests.ranks.channels import DEADLINE_S
from tests.ranks.processes import free_port

pytestmark = pytest.mark.any_core


@pytest.fixture
def listener(capfd: pytest.CaptureFixture[str]) -> Iterator[socket.socket]:
    """Somebody who listens and never answers. Who waits for him says much when he goes; that is not for the screen."""
    threads = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server
    for thread in set(threading.enumerate()) - threads:
        thread.join(DEADLINE_S)
    capfd.readouterr()


def soon() -> float:
    return time.monotonic() + 0.3


def test_the_address_of_one_meeting_is_not_that_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank counts the meetings for itself; the numbers are alike, in whichever order the ranks come."""
    place = dist.HashStore()
    first, second = (StoreAddress(("host",), port, "name") for port in (1, 2))
    announced = iter([first, second])
    monkeypatch.setattr(store_address, "serve", lambda *, timeout_s: ("store", next(announced)))
    monkeypatch.setattr(store_address, "connect", lambda address, *, until, check: address)
    for _ in range(2):
        assert serve_for(place, timeout_s=DEADLINE_S) == "store"
    for rank, address in ((2, first), (1, first), (1, second), (2, second)):
        assert connect_to_announced(place, rank=rank, until=soon()) == address
    with pytest.raises(PeerError, match="not announced its address") as caught:
        connect_to_announced(place, rank=1, until=soon())
    assert caught.value.rank == 0


def test_who_comes_late_hears_why_rank_0_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and of the meeting that is meant."""
    place = dist.HashStore()
    nowhere = StoreAddress(("127.0.0.1",), free_port(), "name")
    monkeypatch.setattr(store_address, "serve", lambda *, timeout_s: ("store", nowhere))
    serve_for(place, timeout_s=DEADLINE_S)
    leave_cause(place, "it cannot open the checkpoint directory: held by others")
    serve_for(place, timeout_s=DEADLINE_S)
    with pytest.raises(PeerError, match=r"rank 0 has left before this rank came: it cannot open .* held by others"):
        connect_to_announced(place, rank=1, until=time.monotonic() + 10 * DEADLINE_S)
    with pytest.raises(PeerError, match="none of"):
        connect_to_announced(place, rank=1, until=soon())


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'[["a"], "1", "x"]', b'[[1], 1, "x"]', b"[" * 100_000, b"\xff"])
def test_an_address_of_somebody_else_is_refused(raw: bytes) -> None:
    with pytest.raises(CorruptError, match="address of rank 0's store"):
        StoreAddress.decode(raw)


def test_connecting_takes_the_host_that_leads_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others listen at the same port elsewhere: none, and a store of another job."""
    store, address = serve(timeout_s=DEADLINE_S)
    tried: list[str] = []
    attempt = store_address._try

    def try_host(host: str, wanted: StoreAddress, *, timeout_s: float) -> object:
        tried.append(host)
        named = StoreAddress(wanted.hosts, wanted.port, wanted.name if host == "127.0.0.1" else "another job")
        return attempt("127.0.0.1", named, timeout_s=timeout_s)

    monkeypatch.setattr(store_address, "_try", try_host)
    hosts = ("no.such.host.invalid", "localhost", "127.0.0.1")
    found = connect(StoreAddress(hosts, address.port, address.name), until=time.monotonic() + DEADLINE_S)
    assert tried == ["localhost", "127.0.0.1"]
    found.set("key", b"value")
    assert store.get("key") == b"value"


def test_nobody_there_is_told_with_all_that_was_tried() -> None:
    address = StoreAddress(("127.0.0.1", "no.such.host.invalid"), free_port(), "name")
    with pytest.raises(PeerError, match=r"none of \['127.0.0.1', 'no.such.host.invalid'\], port") as caught:
        connect(address, until=soon())
    assert caught.value.rank == 0


def test_somebody_who_never_answers_is_left(listener: socket.socket) -> None:
    address = StoreAddress(("127.0.0.1",), listener.getsockname()[1], "name")
    with pytest.raises(PeerError, match="none of"):
        connect(address, until=soon())


def test_own_hosts_puts_loopback_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    hosts = own_hosts()
    is_loopback = [store_address._is_loopback(host) for host in hosts]
    assert is_loopback == sorted(is_loopback)
    assert {"127.0.0.1", socket.gethostname(), "localhost"} <= set(hosts)
    assert len(set(hosts)) == len(hosts)


def test_the_master_is_named_only_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.77")  # Reserved for documentation: no host has it.
    assert "192.0.2.77" not in own_hosts()
