"""The records that rounds produce, and their medians.

Machines drift: a figure means something only beside the floor of the same round. So every ratio is taken within a
round, and the median is taken over the ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

NAN = math.nan


@dataclass(frozen=True)
class SaveFigures:
    """One save. `lost_seconds`: stall plus what the steps took longer than `step_idle_seconds` until it was durable."""

    stall_seconds: float
    lost_seconds: float
    durable_seconds: float
    background_cpu_seconds: float
    steps_count: int
    step_idle_seconds: float  # median
    step_idle_mean_seconds: float
    step_busy_seconds: float  # mean, from the return of the call until durable
    step_worst_seconds: float


@dataclass(frozen=True)
class RoundFigures:
    """One process: one peer, one round."""

    peer: str
    round_index: int
    trainer_threads: str
    state_bytes: int
    files_bytes: int
    prepare_seconds: float
    saves: tuple[SaveFigures, ...]
    extra_memory_bytes: int
    load_cold_seconds: float
    load_warm_seconds: float
    cold_cached_share: float
    image: str  # "ok", "torn: ..." or "" when this round did not look

    def later(self, value: Callable[[SaveFigures], float]) -> float:
        """Median over all saves but the first; of the first when there is no other."""
        return median_of(value(save) for save in self.saves[1:] or self.saves)

    def first(self, value: Callable[[SaveFigures], float]) -> float:
        return value(self.saves[0]) if self.saves else NAN

    @property
    def gib_per_second(self) -> float:
        return self.state_bytes / 2**30 / self.later(lambda save: save.durable_seconds)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> RoundFigures:
        return RoundFigures(**{**fields, "saves": tuple(SaveFigures(**save) for save in fields["saves"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Value = Callable[[RoundFigures], float]


def median_of(values: Iterable[float]) -> float:
    """Median of the values that are numbers; NaN if there is none."""
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else NAN


def peer_median(rounds: Iterable[RoundFigures], peer: str, value: Value) -> float:
    return median_of(value(one) for one in rounds if one.peer == peer)


def ratio_median(rounds: list[RoundFigures], peer: str, other: str, value: Value) -> float:
    """Median over rounds of value(peer) / value(other) in the same round."""
    others = {one.round_index: value(one) for one in rounds if one.peer == other}
    return median_of(
        value(one) / others[one.round_index]
        for one in rounds
        if one.peer == peer and others.get(one.round_index, 0.0) > 0
    )


# The figures by the name that tables, plots and targets use.
VALUES: dict[str, Value] = {
    "stall": lambda one: one.later(lambda save: save.stall_seconds),
    "lost": lambda one: one.later(lambda save: save.lost_seconds),
    "durable": lambda one: one.later(lambda save: save.durable_seconds),
    "first stall": lambda one: one.first(lambda save: save.stall_seconds),
    "first lost": lambda one: one.first(lambda save: save.lost_seconds),
    "first durable": lambda one: one.first(lambda save: save.durable_seconds),
    "background cpu": lambda one: one.later(lambda save: save.background_cpu_seconds),
    "cpu per gib": lambda one: one.later(lambda save: save.background_cpu_seconds) / (one.state_bytes / 2**30),
    "step slowdown": lambda one: one.later(
        lambda save: save.step_busy_seconds / save.step_idle_seconds if save.steps_count else NAN
    ),
    # Rates on both sides: what part of its idle speed the training thread keeps while the save is written.
    "speed kept": lambda one: one.later(
        lambda save: save.step_idle_mean_seconds / save.step_busy_seconds if save.steps_count else NAN
    ),
    "worst step": lambda one: one.later(lambda save: save.step_worst_seconds),
    "gib per second": lambda one: one.gib_per_second,
    "extra memory": lambda one: float(one.extra_memory_bytes),
    "load cold": lambda one: one.load_cold_seconds,
    "load warm": lambda one: one.load_warm_seconds,
    "prepare": lambda one: one.prepare_seconds,
}
