"""What a training process tells the demo: one JSON line per event on its standard output.

All times are seconds on the clock of the training process, which begins with its first step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Resumed:
    """The state comes from a checkpoint; training goes on behind `step`."""

    step: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class StepsDone:
    """Steps `first`, `first + 1`, ... have been done: when each began and how long it took, saves not included."""

    first: int
    begins: tuple[float, ...]
    seconds: tuple[float, ...]
    loss: float


@dataclass(frozen=True)
class SaveBegun:
    """The loop went on after a stall; in the background, unless the save is a blocking one, files are being written."""

    step: int
    at: float
    stall: float


@dataclass(frozen=True)
class SaveSkipped:
    """A save fell due while another one was in flight."""

    step: int


@dataclass(frozen=True)
class SaveEnded:
    """A save is durable, `seconds` after its call. The final one, after the last step, is always a blocking one."""

    step: int
    seconds: float
    bytes: int
    final: bool


@dataclass(frozen=True)
class RunEnded:
    """The last step is done and saved; the digests of all that was trained."""

    digests: Mapping[str, str]


Event: TypeAlias = Resumed | StepsDone | SaveBegun | SaveSkipped | SaveEnded | RunEnded

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Resumed, StepsDone, SaveBegun, SaveSkipped, SaveEnded, RunEnded)
}


def encode_event(event: Event) -> str:
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def decode_event(line: str) -> Event:
    """Read one line. Raises ValueError."""
    try:
        fields: dict[str, Any] = json.loads(line)
        kind: Callable[..., Event] = _KINDS[fields.pop("event")]
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"line of a training process is no event: {line!r}") from error
