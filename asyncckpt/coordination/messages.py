"""What the ranks of a save say to each other, how long they wait for it, and its form: strict JSON, one object each.

    begin      rank -> coordinator   I have captured step N and am ready to write
    skipped    rank -> coordinator   I skip this call
    failed     rank -> coordinator   I cannot go on, and shall never be prepared in this call
    attempt    coordinator -> all    everybody has begun: write into this attempt
    prepared   rank -> coordinator   my files of this attempt are written and durable
    outcome    coordinator -> all    how the call has ended
    alive      both ways             nothing new, but I am there

A message from elsewhere is judged before it is believed: a message of another protocol is a CorruptError, of another
version of this one an IncompatibleError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from asyncckpt.errors import CorruptError, IncompatibleError, must_be, one_line
from asyncckpt.format.limits import RANKS_MAX, STEP_MAX
from asyncckpt.format.names import Attempt, parse
from asyncckpt.format.strict_json import Fields, Json, dumps, loads, shown

PROTOCOL_VERSION = 1
COORDINATOR = 0  # The rank that is it.
CAUSE_CHARACTERS_MAX = 2000
ALIVE_PER_SILENCE = 4

Kind: TypeAlias = Literal["full", "delta"]
State: TypeAlias = Literal["committed", "aborted", "skipped", "in_doubt"]


@dataclass(frozen=True)
class Begin:
    """A rank is ready. `facts` must be the same on all ranks; `notes` are handed to the coordinator's effects."""

    step: int
    kind: Kind = "full"
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Skipped:
    """A rank skips this call, so all do; `cause` is text for people."""

    cause: str = "it was busy"


@dataclass(frozen=True)
class Failed:
    """A rank cannot go on; `cause` is its error as text."""

    cause: str


@dataclass(frozen=True)
class AttemptMessage:
    """Everybody writes into this attempt. `kind` is what all ranks together save."""

    attempt: Attempt
    kind: Kind = "full"
    notes: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """The files of this rank are written and synced in this attempt."""

    attempt: Attempt
    notes: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a call ended, and for its rank what it returns.

    attempt: None when none was made, or this rank does not know of one. rank: whose failure or skip it was; None for an
    aborted call when no one rank is at fault but they contradict each other. notes: those of the publication; empty
    where a rank did not hear of the commit and found the manifest itself.
    """

    state: State
    attempt: Attempt | None = None
    rank: int | None = None
    cause: str = ""
    notes: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Alive:
    """Nothing new."""


@dataclass(frozen=True)
class Limits:
    """Deadlines of one call, in seconds.

    begin_s: from the coordinator's own call until every rank has called; and from a rank's call until the coordinator
        says its first word.
    silence_s: how long a rank in the middle of a save, or the coordinator, may say nothing before it counts as dead.
        Everybody says that he is alive every `alive_s`, a quarter of this.
    save_s: from the coordinator's call until all ranks have written. Other ranks give up begin_s + save_s after their
        own call, for the coordinator may have called that much later.
    """

    begin_s: float = 300.0
    silence_s: float = 30.0
    save_s: float = 3600.0

    def __post_init__(self) -> None:
        for item in fields(self):
            seconds = getattr(self, item.name)
            if not (isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds > 0):
                raise must_be(f"{item.name} of Limits", "more than 0 seconds", seconds)

    @property
    def alive_s(self) -> float:
        return self.silence_s / ALIVE_PER_SILENCE


Message: TypeAlias = Begin | Skipped | Failed | AttemptMessage | Prepared | Outcome | Alive


def cause_of(error: BaseException) -> str:
    """Return an error as text for other ranks."""
    return bounded(f"{type(error).__name__}: {one_line(error)}")


def bounded(text: str) -> str:
    """Return a text that every rank can encode, of bounded length."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= CAUSE_CHARACTERS_MAX else text[: CAUSE_CHARACTERS_MAX - 1] + "…"


def encode(message: Message) -> bytes:
    """Return the bytes of a message; the caller guarantees that notes hold JSON only."""
    members = {name: _plain(getattr(message, name)) for name in _names(type(message))}
    return dumps({"asyncckpt": PROTOCOL_VERSION, "message": _KINDS[type(message)], **members})


def decode(raw: bytes, *, sender: int) -> Message:
    """Return a message from its bytes; CorruptError or IncompatibleError, naming the sender, for anything else."""
    owner = f"message from rank {sender}"
    value = loads(raw, owner=owner)
    found = Fields(value, owner=owner, where="the message")
    version = found.integer("asyncckpt")
    if version != PROTOCOL_VERSION:
        raise IncompatibleError(
            f"{owner} is of another version of the protocol between ranks",
            found=version,
            expected=PROTOCOL_VERSION,
            hint="all ranks of a job need the same version of asyncckpt",
        )
    kind = found.text("message")
    message_type = next((known for known, name in _KINDS.items() if name == kind), None)
    if message_type is None:
        raise CorruptError(f"{owner} is of no known kind", found=shown(kind), expected=sorted(_KINDS.values()))
    names = _names(message_type)
    expected = {"asyncckpt", "message", *names}
    if value.keys() != expected:
        raise must_be(f"{owner}: members of {kind!r}", sorted(expected), shown(sorted(value)), kind=CorruptError)
    if message_type is Outcome and found.optional_text("attempt") is None:
        if found.text("state") in ("committed", "in_doubt"):
            raise CorruptError(f"{owner}: an outcome {found.text('state')!r} names no attempt")
        names.remove("attempt")
    message: Message = message_type(**{name: _READERS[name](found) for name in names})
    return message


def malformed(owner: str, what: str) -> CorruptError:
    """Return the error for a message between ranks that cannot be read."""
    text = f"{owner} sent a malformed message ({what})"
    return CorruptError(text, hint="all ranks need the same version of asyncckpt")


def _names(message_type: type[Message]) -> list[str]:
    return [item.name for item in fields(message_type)]


def _plain(value: Any) -> Json:
    if isinstance(value, Attempt):
        return value.directory
    plain: Json = dict(value) if isinstance(value, Mapping) else value
    return plain


def _one_of(found: Fields, key: str, known: tuple[str, ...]) -> str:
    if found.text(key) not in known:
        raise CorruptError(f"{found.owner}: {key} is unknown", found=shown(found.text(key)), expected=sorted(known))
    return found.text(key)


def _attempt(found: Fields) -> Attempt:
    name = parse(found.text("attempt"))
    if name is None or name.kind != "attempt":
        raise CorruptError(f"{found.owner}: the attempt has no valid name", found=shown(found.text("attempt")))
    return Attempt(name.step, name.attempt)


def _facts(found: Fields) -> dict[str, Json]:
    facts = _object(found, "facts")
    if not all(type(fact) is str for fact in facts.values()):
        raise CorruptError(f"{found.owner}: facts are not all strings", found=shown(facts))
    return facts


def _object(found: Fields, key: str) -> dict[str, Json]:
    value = found.value(key)
    if type(value) is not dict:
        raise CorruptError(f"{found.owner}: {key} is not an object", found=shown(value))
    return value


_KINDS: dict[type[Message], str] = {
    Begin: "begin",
    Skipped: "skipped",
    Failed: "failed",
    AttemptMessage: "attempt",
    Prepared: "prepared",
    Outcome: "outcome",
    Alive: "alive",
}
# By the name of a member, which means the same in every message.
_READERS: dict[str, Callable[[Fields], Any]] = {
    "step": lambda found: found.integer("step", at_most=STEP_MAX),
    "kind": lambda found: _one_of(found, "kind", get_args(Kind)),
    "facts": _facts,
    "notes": lambda found: _object(found, "notes"),
    "cause": lambda found: found.text("cause"),
    "attempt": _attempt,
    "state": lambda found: _one_of(found, "state", get_args(State)),
    "rank": lambda found: found.optional_integer("rank", at_most=RANKS_MAX - 1),
}
