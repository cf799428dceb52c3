"""What the ranks of a save say to each other, and its form on the wire: strict JSON, one object a message.

    begin      rank -> coordinator   I have captured step N and am ready to write
    skipped    rank -> coordinator   I skip this call
    failed     rank -> coordinator   I cannot go on, and shall never be prepared in this call
    attempt    coordinator -> all    everybody has begun: write into this attempt
    prepared   rank -> coordinator   my files of this attempt are written and durable
    outcome    coordinator -> all    how the call has ended
    alive      both ways             nothing new, but I am there

A message from elsewhere is judged before it is believed: what is no message of this protocol is a CorruptError, one of
another version of it an IncompatibleError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from asyncckpt.errors import CorruptError, IncompatibleError
from asyncckpt.format.limits import RANKS_MAX, STEP_MAX
from asyncckpt.format.names import Attempt, attempt_of_directory
from asyncckpt.format.strict_json import Fields, Json, dumps, loads, shown

PROTOCOL_VERSION = 1
CAUSE_CHARACTERS_MAX = 2000

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

    attempt: None when none was made, or this rank does not know of one. rank: whose failure or skip it was; None of an
    aborted call when no one rank is at fault but they contradict each other. notes: of a committed call, those of its
    publication; empty where a rank did not hear of the commit and found the manifest itself.
    """

    state: State
    attempt: Attempt | None = None
    rank: int | None = None
    cause: str = ""
    notes: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Alive:
    """Nothing new."""


Message: TypeAlias = Begin | Skipped | Failed | AttemptMessage | Prepared | Outcome | Alive


def cause_of(error: BaseException) -> str:
    """An error as text for other ranks: one that every rank can encode, of bounded length."""
    text = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= CAUSE_CHARACTERS_MAX else text[: CAUSE_CHARACTERS_MAX - 1] + "…"


def encode(message: Message) -> bytes:
    """The bytes of a message; the caller guarantees that notes hold JSON only."""
    kind, members = _members(message)
    return dumps({"asyncckpt": PROTOCOL_VERSION, "message": kind, **members})


def decode(raw: bytes, *, sender: int) -> Message:
    """A message from its bytes; CorruptError or IncompatibleError, naming the sender, for anything else."""
    owner = f"message from rank {sender}"
    value = loads(raw, owner=owner)
    fields = Fields(value, owner=owner, where="the message")
    version = fields.integer("asyncckpt")
    if version != PROTOCOL_VERSION:
        raise IncompatibleError(
            f"{owner} is of another version of the protocol between ranks",
            found=version,
            expected=PROTOCOL_VERSION,
            hint="all ranks of a job need the same version of asyncckpt",
        )
    kind = fields.text("message")
    if kind not in _DECODERS:
        raise CorruptError(f"{owner} is of no known kind", found=shown(kind), expected=sorted(_DECODERS))
    names, decoder = _DECODERS[kind]
    if value.keys() != names:
        raise CorruptError(
            f"{owner}: members of {kind!r} are wrong", found=shown(sorted(value)), expected=sorted(names)
        )
    return decoder(fields)


def _members(message: Message) -> tuple[str, dict[str, Json]]:
    match message:
        case Begin(step, kind, facts, notes):
            return "begin", {"step": step, "kind": kind, "facts": dict(facts), "notes": dict(notes)}
        case Skipped(cause):
            return "skipped", {"cause": cause}
        case Failed(cause):
            return "failed", {"cause": cause}
        case AttemptMessage(attempt, kind, notes):
            return "attempt", {"attempt": attempt.directory, "kind": kind, "notes": dict(notes)}
        case Prepared(attempt, notes):
            return "prepared", {"attempt": attempt.directory, "notes": dict(notes)}
        case Outcome(state, attempt, rank, cause, notes):
            directory = None if attempt is None else attempt.directory
            members = {"state": state, "attempt": directory, "rank": rank, "cause": cause, "notes": dict(notes)}
            return "outcome", members
        case Alive():
            return "alive", {}


def _begin(fields: Fields) -> Begin:
    return Begin(
        step=fields.integer("step", at_most=STEP_MAX),
        kind=_kind(fields),
        facts=_facts(fields),
        notes=_object(fields, "notes"),
    )


def _attempt_message(fields: Fields) -> AttemptMessage:
    return AttemptMessage(attempt=_attempt(fields), kind=_kind(fields), notes=_object(fields, "notes"))


def _outcome(fields: Fields) -> Outcome:
    state = fields.text("state")
    if state not in ("committed", "aborted", "skipped", "in_doubt"):
        raise CorruptError(f"{fields.owner}: no outcome has this state", found=shown(state))
    attempt = None if fields.optional_text("attempt") is None else _attempt(fields)
    if attempt is None and state in ("committed", "in_doubt"):
        raise CorruptError(f"{fields.owner}: an outcome {state!r} names no attempt")
    return Outcome(
        state=state,  # type: ignore[arg-type]  # Just checked.
        attempt=attempt,
        rank=fields.optional_integer("rank", at_most=RANKS_MAX - 1),
        cause=fields.text("cause"),
        notes=_object(fields, "notes"),
    )


def _kind(fields: Fields) -> Kind:
    kind = fields.text("kind")
    if kind == "full":
        return "full"
    if kind == "delta":
        return "delta"
    raise CorruptError(f"{fields.owner}: no save has this kind", found=shown(kind), expected=["delta", "full"])


def _attempt(fields: Fields) -> Attempt:
    attempt = attempt_of_directory(fields.text("attempt"))
    if attempt is None:
        raise CorruptError(f"{fields.owner}: the attempt has no valid name", found=shown(fields.text("attempt")))
    return attempt


def _facts(fields: Fields) -> dict[str, str]:
    facts = _object(fields, "facts")
    if not all(type(fact) is str for fact in facts.values()):
        raise CorruptError(f"{fields.owner}: facts are not all strings", found=shown(facts))
    return facts


def _object(fields: Fields, key: str) -> dict[str, Json]:
    value = fields.value(key)
    if type(value) is not dict:
        raise CorruptError(f"{fields.owner}: {key} is not an object", found=shown(value))
    return value


_ENVELOPE = frozenset({"asyncckpt", "message"})
# Of every kind of message: its members, and what makes it from them.
_DECODERS: dict[str, tuple[frozenset[str], Callable[[Fields], Message]]] = {
    "begin": (_ENVELOPE | {"step", "kind", "facts", "notes"}, _begin),
    "skipped": (_ENVELOPE | {"cause"}, lambda fields: Skipped(fields.text("cause"))),
    "failed": (_ENVELOPE | {"cause"}, lambda fields: Failed(fields.text("cause"))),
    "attempt": (_ENVELOPE | {"attempt", "kind", "notes"}, _attempt_message),
    "prepared": (
        _ENVELOPE | {"attempt", "notes"},
        lambda fields: Prepared(_attempt(fields), _object(fields, "notes")),
    ),
    "outcome": (_ENVELOPE | {"state", "attempt", "rank", "cause", "notes"}, _outcome),
    "alive": (_ENVELOPE, lambda fields: Alive()),
}
