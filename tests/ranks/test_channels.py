"""What every channel does, for both kinds; ranks are threads here."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from asyncckpt.coordination import file_channel, store_channel
from asyncckpt.coordination.channel import Channel
from asyncckpt.coordination.file_channel import FileChannel
from asyncckpt.coordination.rank_store import StoreLine
from asyncckpt.coordination.store_channel import StoreChannel
from asyncckpt.errors import DeadlineError, IOFailedError, PeerError, UsageError
from asyncckpt.storage.directory import Directory
from tests.ranks.channels import DEADLINE_S, KINDS, StuckStore, at_once, channels, gather

pytestmark = pytest.mark.any_core


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """A test may give others."""
    return str(request.param)


@pytest.fixture
def pair(kind: str, tmp_path: Path) -> Iterator[list[Channel]]:
    with channels(kind, 2, tmp_path) as made:
        yield made


@pytest.fixture
def four(kind: str, tmp_path: Path) -> Iterator[list[Channel]]:
    with channels(kind, 4, tmp_path) as made:
        yield made


def numbered(rank: int, count: int) -> list[tuple[int, bytes]]:
    return [(rank, f"{rank} {number}".encode()) for number in range(count)]


def test_messages_of_each_sender_come_in_order_and_once(four: list[Channel]) -> None:
    def speak(channel: Channel) -> None:
        for _, message in numbered(channel.rank, 40):
            channel.send(1, 0, message)

    found = at_once(partial(speak, channel) if channel.rank else partial(gather, channel, 1, 120) for channel in four)[
        0
    ]
    assert found is not None
    for rank in (1, 2, 3):
        assert [item for item in found if item[0] == rank] == numbered(rank, 40)
    assert four[0].receive(1, 0.05) == []


def test_rank_0_speaks_to_one_and_to_all_in_one_order(four: list[Channel]) -> None:
    rng = random.Random(5)
    expected: dict[int, list[tuple[int, bytes]]] = {1: [], 2: [], 3: []}
    for number in range(60):
        to = rng.choice([None, None, 1, 2, 3])
        four[0].send(1, to, b"%d" % number)
        for rank in expected if to is None else [to]:
            expected[rank].append((0, b"%d" % number))
        if number == 30:  # Some is read before the rest is sent.
            early = {rank: four[rank].receive(1, DEADLINE_S) for rank in expected}
    for rank, messages in expected.items():
        assert early[rank] + gather(four[rank], 1, len(messages) - len(early[rank])) == messages
    assert four[0].receive(1, 0.01) == []


def test_ranks_other_than_0_may_speak_to_each_other_and_to_themselves(four: list[Channel]) -> None:
    four[1].send(1, 2, b"to a neighbour")
    four[0].send(1, 0, b"to myself")
    assert gather(four[2], 1, 1) == [(1, b"to a neighbour")]
    assert gather(four[0], 1, 1) == [(0, b"to myself")]
    assert four[1].receive(1, 0.01) == four[3].receive(1, 0.01) == []


def test_calls_do_not_mix(pair: list[Channel]) -> None:
    first, second = pair
    for call in (2, 1, 3, 1):
        second.send(call, 0, b"call %d" % call)
        first.send(call, None, b"answer %d" % call)
    assert gather(first, 1, 2) == [(1, b"call 1")] * 2
    assert gather(first, 3, 1) == [(1, b"call 3")]
    assert gather(second, 2, 1) == [(0, b"answer 2")]
    assert gather(second, 1, 2) == [(0, b"answer 1")] * 2
    assert gather(first, 2, 1) == [(1, b"call 2")]
    second.put(1, "part", b"of call 1")
    second.put(2, "part", b"of call 2")
    assert [first.get(call, "part", DEADLINE_S) for call in (2, 1)] == [b"of call 2", b"of call 1"]


@pytest.mark.parametrize("size", [0, 1, 4 << 20, (4 << 20) + 1, 9 << 20])
def test_messages_may_have_any_size(pair: list[Channel], size: int) -> None:
    message = os.urandom(size)
    pair[1].send(1, 0, message)
    pair[0].send(1, None, message)
    assert gather(pair[0], 1, 1) == [(1, message)]
    assert gather(pair[1], 1, 1) == [(0, message)]


@pytest.mark.parametrize(("name", "size"), [("part/1", 20 << 20), ("", 1), ("Ünïcode ./..\n" * 40, 0)])
def test_what_is_put_is_there_for_all_and_stays(four: list[Channel], size: int, name: str) -> None:
    data = os.urandom(size)
    four[1].put(7, name, data)
    assert [four[rank].get(7, name, DEADLINE_S) for rank in (0, 1, 3, 0)] == [data] * 4


def test_get_waits_for_what_is_put_later(pair: list[Channel]) -> None:
    asked = threading.Event()

    def put() -> bytes:
        asked.wait(DEADLINE_S)
        pair[1].put(1, "late", b"data")
        return b""

    def get() -> bytes:
        with pytest.raises(DeadlineError, match="'late' of call 1 did not come"):
            pair[0].get(1, "late", 0.01)
        asked.set()
        return pair[0].get(1, "late", DEADLINE_S)

    assert at_once(iter((put, get)))[1] == b"data"


def test_receive_waits_for_what_is_sent_later(pair: list[Channel]) -> None:
    asked = threading.Event()

    def send() -> list[tuple[int, bytes]]:
        asked.wait(DEADLINE_S)
        pair[0].send(1, None, b"late")
        return []

    def receive() -> list[tuple[int, bytes]]:
        assert pair[1].receive(1, 0.02) == []
        assert pair[1].receive(1, 0.0) == []
        asked.set()
        return pair[1].receive(1, DEADLINE_S)

    assert at_once(iter((send, receive)))[1] == [(0, b"late")]


def test_sends_from_other_threads_while_one_receives(pair: list[Channel]) -> None:
    def speak(channel: Channel, to: int) -> None:
        for number in range(100):
            channel.send(1, to, b"%d" % number)

    hearing = [partial(gather, channel, 1, 200) for channel in pair]
    speaking = [partial(speak, channel, 1 - channel.rank) for channel in pair for _ in range(2)]
    for found in at_once(iter([*hearing, *speaking]))[:2]:
        assert found is not None
        assert sorted(int(message) for _, message in found) == sorted([*range(100)] * 2)


@pytest.mark.parametrize("forgotten", [(1, 2), (2,)])
def test_forget_leaves_nothing_of_a_call_and_those_before_it(
    four: list[Channel], tmp_path: Path, forgotten: tuple[int, ...]
) -> None:
    before = stored(four, tmp_path)
    for call in (1, 2):
        for channel in four[1:]:
            channel.send(call, 0, b"read")
            channel.put(call, f"part/{channel.rank}", bytes(5 << 20))
            channel.put(call, f"unasked/{channel.rank}", b"data")
        gather(four[0], call, 3)
        four[0].send(call, None, bytes(5 << 20))
        four[0].send(call, 2, b"read by nobody")
        gather(four[1], call, 1)
        for channel in four[1:]:
            assert len(four[0].get(call, f"part/{channel.rank}", DEADLINE_S)) == 5 << 20
            channel.send(call, 0, b"read by nobody")
    assert stored(four, tmp_path) > before + 10
    for call in forgotten:
        for channel in four if call == 1 else four[::-1]:
            channel.forget(call)
            settle(four)  # Whoever is first.
    assert stored(four, tmp_path) == before


def test_forgetting_one_call_leaves_the_next_alone(pair: list[Channel]) -> None:
    for call in (1, 2):
        pair[1].send(call, 0, b"message")
        pair[0].send(call, None, b"answer")
        pair[1].put(call, "part", b"data")
    settle(pair)
    for channel in pair:
        channel.forget(1)
    assert gather(pair[0], 2, 1) == [(1, b"message")]
    assert gather(pair[1], 2, 1) == [(0, b"answer")]
    assert pair[0].get(2, "part", DEADLINE_S) == b"data"
    assert pair[0].receive(1, 0.01) == []


def stored(made: list[Channel], folder: Path) -> int:
    """How many keys or files there are, when all ranks have done what they were told."""
    if isinstance(made[0], FileChannel):
        return len(list(folder.rglob("*")))
    settle(made)
    asked = line_of(made[0]).ask(lambda store: int(store.num_keys()))
    assert asked.wait(DEADLINE_S)
    return asked.result()


def settle(made: list[Channel]) -> None:
    """Wait until all ranks have done what they were told."""
    for channel in made:
        assert isinstance(channel, FileChannel) or line_of(channel).ask(lambda store: store.add("settled", 0)).wait(
            DEADLINE_S
        )


def line_of(channel: Channel) -> StoreLine:
    assert isinstance(channel, StoreChannel)
    return channel._line


@pytest.mark.parametrize("kind", ["own store", "file"])
def test_others_learn_that_rank_0_has_closed(pair: list[Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (file_channel, store_channel):
        monkeypatch.setattr(module, "CLOSE_S_MAX", 0.1)
    pair[1].send(1, 0, b"hello")
    pair[0].close()  # It waits for rank 1 for a while; then it goes without it.
    with pytest.raises(PeerError) as caught:
        listen_for_ever(pair[1])
    assert caught.value.rank == 0
    with pytest.raises(PeerError):
        send_for_ever(pair[1])
    with pytest.raises(PeerError):
        pair[1].get(1, "part", DEADLINE_S)


@pytest.mark.parametrize("kind", ["own store", "file"])
def test_rank_0_keeps_the_channel_until_all_have_closed(four: list[Channel]) -> None:
    four[0].send(1, None, b"outcome")
    closing = threading.Thread(target=four[0].close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    for channel in four[1:]:
        assert gather(channel, 1, 1) == [(0, b"outcome")]
        channel.close()
    closing.join()


def test_a_closed_channel_refuses(pair: list[Channel]) -> None:
    for channel in reversed(pair):
        channel.close()
        channel.close()
        for use in (lambda c: c.send(1, 0, b""), lambda c: c.receive(1, 1.0), lambda c: c.get(1, "part", 1.0)):
            with pytest.raises(IOFailedError, match=f"channel of rank {channel.rank} is gone"):
                use(channel)


def test_closing_ends_a_receive_of_another_thread(pair: list[Channel]) -> None:
    begun = threading.Event()

    def receive() -> None:
        begun.set()
        with pytest.raises((IOFailedError, PeerError)):
            listen_for_ever(pair[1])

    def close() -> None:
        begun.wait(DEADLINE_S)
        pair[1].close()

    at_once(iter((receive, close)))


def listen_for_ever(channel: Channel) -> None:
    for _ in range(1000):
        channel.receive(1, 0.05)


def send_for_ever(channel: Channel) -> None:
    for _ in range(1000):
        channel.send(1, 0, b"")
        channel.receive(1, 0.01)


def test_a_store_that_does_not_answer_keeps_nobody() -> None:
    store = StuckStore()
    channel = StoreChannel(StoreLine(lambda: store), rank=1, ranks_count=2)
    channel.send(1, 0, b"message")
    channel.put(1, "part", b"data")
    assert channel.receive(1, 0.02) == channel.receive(1, 0.0) == []
    with pytest.raises(DeadlineError):
        channel.get(1, "part", 0.02)
    channel.forget(1)
    store.free.set()
    with pytest.raises(PeerError) as caught:
        listen_for_ever(channel)
    assert caught.value.cause == "Connection reset by peer"
    assert isinstance(caught.value.__cause__.__cause__, RuntimeError)  # type: ignore[union-attr]
    channel.close()


def test_a_store_that_is_never_reached_is_an_error_of_the_first_use() -> None:
    def connect() -> None:
        raise RuntimeError("no route to host")

    channel = StoreChannel(StoreLine(connect), rank=1, ranks_count=2)
    with pytest.raises(PeerError, match="no route to host"):
        listen_for_ever(channel)
    channel.close()


def test_a_message_of_which_a_listing_misses_the_one_before_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with channels("file", 2, tmp_path) as (first, second):
        for number in range(3):
            second.send(1, 0, b"%d" % number)
        names = Directory.names
        monkeypatch.setattr(Directory, "names", lambda folder: [n for n in names(folder) if not n.endswith("01")])
        assert gather(first, 1, 1) == [(1, b"0")]
        assert first.receive(1, 0.01) == []
        monkeypatch.undo()
        assert gather(first, 1, 2) == [(1, b"1"), (1, b"2")]


def test_a_forked_child_says_nothing(pair: list[Channel]) -> None:
    child = os.fork()
    if child == 0:
        refused = []
        for call in (lambda: pair[1].send(1, 0, b"child"), lambda: pair[1].put(1, "name", b"child")):
            try:
                call()
            except UsageError:
                refused.append(call)
        os._exit(len(refused))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    pair[1].send(1, 0, b"parent")
    assert pair[0].receive(1, DEADLINE_S) == [(1, b"parent")]


def test_what_is_put_is_found_by_all_at_once_and_before_that_nothing(pair: list[Channel]) -> None:
    first, second = pair
    assert second.find(10**11, "word", DEADLINE_S) is None
    second.put(10**11, "word", b"stop")
    assert second.find(10**11, "word", DEADLINE_S) == b"stop"
    assert first.find(10**11, "word", DEADLINE_S) == b"stop"
    for channel in pair:
        channel.forget(7)
    assert first.find(10**11, "word", DEADLINE_S) == b"stop"
