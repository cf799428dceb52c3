"""How long the ranks of a save wait for each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from asyncckpt.errors import UsageError

ALIVE_PER_SILENCE = 4


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
        for field in fields(self):
            seconds = getattr(self, field.name)
            if not (isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds > 0):
                raise UsageError(f"{field.name} of Limits is wrong", found=seconds, expected="seconds, more than 0")

    @property
    def alive_s(self) -> float:
        return self.silence_s / ALIVE_PER_SILENCE
