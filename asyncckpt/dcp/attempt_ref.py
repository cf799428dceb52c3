"""What the coordinator tells every rank of an attempt, through the plans that DCP scatters.

A planner that caches its plans hands a rank the plan of an earlier save when nothing has changed, and with it what was
told then. So what counts is what came with the plan that has arrived in this thread last, whichever the planner gives:
DCP unpickles it in the thread that calls `write_data` afterwards, and unpickling makes an AttemptRef anew.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from asyncckpt.format.names import Attempt


@dataclass(frozen=True)
class AttemptRef:
    """Of which attempt a rank writes its files, as rank `rank` of `ranks_count`. Of plain values alone."""

    step: int
    id: str
    rank: int
    ranks_count: int

    @property
    def attempt(self) -> Attempt:
        return Attempt(step=self.step, id=self.id)

    def __reduce__(self) -> tuple[object, ...]:
        return tell, (self.step, self.id, self.rank, self.ranks_count)


_arrived = threading.local()


def tell(step: int, id: str, rank: int, ranks_count: int) -> AttemptRef:
    """Make one, and remember it as the newest of this thread."""
    told = AttemptRef(step=step, id=id, rank=rank, ranks_count=ranks_count)
    _arrived.newest = told
    return told


def newest_received() -> AttemptRef | None:
    """What arrived in this thread last; it is forgotten with that."""
    told: AttemptRef | None = getattr(_arrived, "newest", None)
    _arrived.newest = None
    return told
