"""What one training run did, gathered from its events, and what its saves cost.

Training time lost by a save is its stall plus what the steps took longer than usual until it was durable. "Usual" is
the median of the steps nearest to the save, before and after, during which no save was in flight: machines drift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from demo.events import Event, Resumed, RunEnded, SaveBegun, SaveEnded, SaveSkipped, StepsDone

IDLE_STEPS_NEAR = 40


@dataclass(frozen=True)
class Step:
    """One training step: when it began and how long it took, in seconds."""

    number: int
    begin: float
    seconds: float

    @property
    def end(self) -> float:
        return self.begin + self.seconds


@dataclass(frozen=True)
class Save:
    """One durable save."""

    step: int
    at: float
    stall: float
    seconds: float
    bytes: int
    final: bool

    @property
    def durable_at(self) -> float:
        return self.at + self.seconds


@dataclass
class History:
    """A run so far. A save that was begun and never ended stays in `begun`."""

    steps: list[Step] = field(default_factory=list)
    begun: dict[int, SaveBegun] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    skipped_count: int = 0
    loss: float = float("nan")
    resumed: Resumed | None = None
    digests: Mapping[str, str] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        """Note one event."""
        match event:
            case StepsDone():
                times = zip(event.begins, event.seconds, strict=True)
                self.steps += [Step(event.first + i, begin, seconds) for i, (begin, seconds) in enumerate(times)]
                self.loss = event.loss
            case SaveBegun():
                self.begun[event.step] = event
            case SaveEnded():
                begun = self.begun.pop(event.step)
                self.saves.append(Save(event.step, begun.at, begun.stall, event.seconds, event.bytes, event.final))
            case SaveSkipped():
                self.skipped_count += 1
            case Resumed():
                self.resumed = event
            case RunEnded():
                self.digests = event.digests

    def periodic_saves(self) -> list[Save]:
        """Return the saves during training: all but the final one, which no step follows."""
        return [save for save in self.saves if not save.final]

    def lost_seconds(self, save: Save) -> float:
        """Return the training time that a save cost."""
        resumed_at = save.at + save.stall
        during = [step.seconds for step in self.steps if resumed_at <= step.begin < save.durable_at]
        return save.stall + sum(during) - len(during) * self._usual_seconds(save)

    def _usual_seconds(self, save: Save) -> float:
        idle = [step for step in self.steps if not any(_overlap(step, other) for other in self.saves)]
        before = [step.seconds for step in idle if step.end <= save.at][-IDLE_STEPS_NEAR:]
        after = [step.seconds for step in idle if step.begin >= save.durable_at][:IDLE_STEPS_NEAR]
        return median([*before, *after] or [step.seconds for step in self.steps])


def _overlap(step: Step, save: Save) -> bool:
    return step.begin < save.durable_at and save.at < step.end
