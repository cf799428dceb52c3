"""The targets that the project set itself, each beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from bench.figures import VALUES, RoundFigures, Value, median_of, peer_median, ratio_median
from bench.peers import FLOOR, OURS
from bench.report import number, peers_in, print_table

EXTRA_MEMORY_SLACK_BYTES = 64 << 20


@dataclass(frozen=True)
class Target:
    """`measured` has to be at most `bound` (or at least, with `floor`)."""

    what: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if math.isnan(self.measured):
            return "not measured"
        met = self.measured >= self.bound if self.at_least else self.measured <= self.bound
        return "met" if met else "missed"

    def row(self) -> list[str]:
        return [self.what, number(self.measured), f"{'>=' if self.at_least else '<='} {self.bound:g}", self.verdict]


def print_targets(console: Console, targets: Sequence[Target]) -> None:
    print_table(console, "targets", ["target", "measured", "bound", ""], [target.row() for target in targets])


def state_targets(rounds: list[RoundFigures], trainer_threads: str) -> list[Target]:
    """The targets of the 2 GiB state; with the trainer on all cores those of that case."""

    def floor_ratio(name: str) -> float:
        return ratio_median(rounds, OURS, FLOOR, VALUES[name])

    def best_ratio(value: Value) -> float:
        """Ours against the best other peer of each figure, in medians of the ratios of the same rounds."""
        others = [peer for peer in peers_in(rounds) if peer not in (FLOOR, OURS)]
        ratios = [ratio_median(rounds, OURS, peer, value) for peer in others]
        return max((ratio for ratio in ratios if not math.isnan(ratio)), default=math.nan)

    case = "trainer on all cores" if trainer_threads == "all" else f"trainer on {trainer_threads} core"
    lost_floor, lost_best = (1.5, 0.1) if trainer_threads == "all" else (1.3, 0.5)
    memory = median_of(
        (one.extra_memory_bytes - EXTRA_MEMORY_SLACK_BYTES) / one.state_bytes for one in rounds if one.peer == OURS
    )
    return [
        Target(f"{case}: stall / copy floor", floor_ratio("stall"), 1.15),
        Target(f"{case}: stall / best peer's", best_ratio(VALUES["stall"]), 0.6),
        Target(f"{case}: time lost / floor's", floor_ratio("lost"), lost_floor),
        Target(f"{case}: time lost / best peer's", best_ratio(VALUES["lost"]), lost_best),
        Target(f"{case}: durable / O_DIRECT floor", floor_ratio("durable"), 1.15),
        Target(f"{case}: times faster durable than the best peer", 1 / best_ratio(VALUES["durable"]), 4, at_least=True),
        Target(f"{case}: background CPU s/GiB", peer_median(rounds, OURS, VALUES["cpu per gib"]), 0.15),
        Target(f"{case}: (extra memory - 64 MiB) / state", memory, 1.0),
    ]
