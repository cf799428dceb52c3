"""What a command found out about one step: a fact, or an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncckpt.errors import CheckpointError

Fact = TypeVar("Fact", covariant=True)


@dataclass(frozen=True)
class Finding(Generic[Fact]):
    """Exactly one of fact and error is set."""

    step: int
    fact: Fact | None = None
    error: CheckpointError | None = None

    @property
    def is_sound(self) -> bool:
        return self.error is None
