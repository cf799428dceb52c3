"""What the state machines ask for: messages to send, and effects to run.

A machine never does anything itself. Its driver (driver.py, the simulator of the tests) does what the actions say, in
their order, and reports how the effects ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from asyncckpt.coordination.messages import AttemptMessage, Begin, Message, Prepared
from asyncckpt.format.names import Attempt


class Contradiction(Exception):
    """What ranks hold, or say, contradicts each other; raised by the effect of MakeFolder, with what it is as text."""


@dataclass(frozen=True)
class Send:
    """Send to one rank, or (None, only by the coordinator) to all participants, also the one beside it."""

    to: int | None
    message: Message


@dataclass(frozen=True)
class MakeFolder:
    """All ranks have begun: compare what they hold, draw an attempt and make its folder.

    Ends in `folder_made` or `folder_failed`.
    """

    begins: Mapping[int, Begin]


@dataclass(frozen=True)
class Write:
    """Write and sync the files of this rank. Ends in `wrote` or `write_failed`."""

    attempt: AttemptMessage


@dataclass(frozen=True)
class Publish:
    """Every rank is prepared: assemble the manifest and publish it. Ends in `published`."""

    attempt: Attempt
    prepared: Mapping[int, Prepared]


@dataclass(frozen=True)
class Look:
    """Look whether the manifest of this attempt is there, and make that durable. Ends in `looked`."""

    attempt: Attempt


@dataclass(frozen=True)
class AbandonAttempt:
    """Remove what an aborted attempt left. Nobody waits to hear of it."""

    attempt: Attempt


Action: TypeAlias = Send | MakeFolder | Write | Publish | Look | AbandonAttempt
