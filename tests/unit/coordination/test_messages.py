"""Messages come back as they were; whatever else comes is a CheckpointError."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import pytest

from asyncckpt.coordination.messages import (
    CAUSE_CHARACTERS_MAX,
    Alive,
    AttemptMessage,
    Begin,
    Failed,
    Limits,
    Message,
    Outcome,
    Prepared,
    Skipped,
    cause_of,
    decode,
    encode,
)
from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, UsageError
from asyncckpt.format.limits import STEP_MAX
from asyncckpt.format.names import Attempt

pytestmark = pytest.mark.any_core

ATTEMPT = Attempt(step=120, id="0123456789abcdef" * 2)
MESSAGES: list[Message] = [
    Begin(step=0),
    Begin(step=STEP_MAX, kind="delta", facts={"parent": "", "übrig": "\n"}, notes={"a": [1, 2.5, None, {"b": True}]}),
    Skipped("busy"),
    Failed("OSError: [Errno 28] no room"),
    AttemptMessage(ATTEMPT, "delta", {"owners": {"w": 3}}),
    AttemptMessage(ATTEMPT),
    Prepared(ATTEMPT, {"bytes": 2**62}),
    Outcome("committed", attempt=ATTEMPT, notes={"digest": "ab"}),
    Outcome("aborted", rank=3, cause="rank 3 sent nothing"),
    Outcome("aborted", attempt=ATTEMPT, cause="steps differ"),
    Outcome("skipped", rank=0, cause="busy"),
    Outcome("in_doubt", attempt=ATTEMPT, rank=0, cause="not synced"),
    Alive(),
]


def changed(message: Message, **members: Any) -> bytes:
    return json.dumps({**json.loads(encode(message)), **members}).encode()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back(message: Message) -> None:
    assert decode(encode(message), sender=1) == message


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"1",
        b"{}",
        b'{"asyncckpt":1}',
        b'{"asyncckpt":1,"message":"alive","message":"alive"}',
        b'{"asyncckpt":true,"message":"alive"}',
        b'{"asyncckpt":"1","message":"alive"}',
        b'{"asyncckpt":1,"message":null}',
        b'{"asyncckpt":1,"message":["alive"]}',
        b'{"asyncckpt":1,"message":"begone"}',
        b'{"asyncckpt":1,"message":"alive","more":1}',
        b"[" * 100_000,
        b"\x80\x05K\x01.",
        changed(Begin(step=1), step=-1),
        changed(Begin(step=1), step=STEP_MAX + 1),
        changed(Begin(step=1), step=1.0),
        changed(Begin(step=1), step=True),
        changed(Begin(step=1), step="1"),
        changed(Begin(step=1), kind="half"),
        changed(Begin(step=1), kind=None),
        changed(Begin(step=1), facts=[]),
        changed(Begin(step=1), facts={"version": 1}),
        changed(Begin(step=1), notes=None),
        changed(Skipped("busy"), cause=7),
        changed(AttemptMessage(ATTEMPT), attempt="../x"),
        changed(AttemptMessage(ATTEMPT), attempt=None),
        changed(AttemptMessage(ATTEMPT), attempt=ATTEMPT.directory.upper()),
        changed(Prepared(ATTEMPT), notes=[1]),
        changed(Outcome("committed", attempt=ATTEMPT), state="perhaps"),
        changed(Outcome("committed", attempt=ATTEMPT), attempt=None),
        changed(Outcome("in_doubt", attempt=ATTEMPT), attempt=None),
        changed(Outcome("aborted", rank=1), rank=-1),
        changed(Outcome("aborted", rank=1), rank=10**9),
        changed(Outcome("aborted", rank=1), rank="1"),
    ],
)
def test_what_is_no_message_is_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptError, match="message from rank 7"):
        decode(raw, sender=7)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_member_is_needed(message: Message) -> None:
    whole = json.loads(encode(message))
    for name in whole:
        with pytest.raises(CorruptError):
            decode(json.dumps({key: value for key, value in whole.items() if key != name}).encode(), sender=1)


def test_another_version_is_incompatible() -> None:
    with pytest.raises(IncompatibleError, match="another version of the protocol between ranks"):
        decode(changed(Alive(), asyncckpt=2), sender=1)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_messages_raise_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    for message in MESSAGES:
        for _ in range(40):
            raw = bytearray(encode(message))
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(len(raw))
                raw[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
            with contextlib.suppress(CheckpointError):  # Or it still is a message.
                decode(bytes(raw), sender=1)


def test_every_error_can_be_told() -> None:
    told = Failed(cause_of(OSError("cannot open 'ckpt/\udcff'")))
    assert decode(encode(told), sender=1) == told
    assert cause_of(ValueError("x" * 10_000)).startswith("ValueError: xxx")
    assert len(cause_of(ValueError("x" * 10_000))) == CAUSE_CHARACTERS_MAX


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "1", None])
def test_limits_are_seconds(seconds: Any) -> None:
    with pytest.raises(UsageError, match="silence_s of Limits"):
        Limits(silence_s=seconds)
