"""The figures of `bench gpu`, the tables that people look at, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rich.console import Console

from bench.figures import median_of
from bench.gpu_copies import Floors, GatherFigures
from bench.gpu_device import GIB
from bench.gpu_loads import DeviceLoadFigures
from bench.gpu_saves import LoopFigures, SaveCase
from bench.gpu_steps import HostFigures, StepFigures
from bench.report import number, print_table, times
from bench.targets import Target

STRAIGHT, SCRATCH = "straight", "scratch"
LOOP_COLUMNS = ("host blocked ms", "stream waits ms", "device time lost ms")
GATHER_WAYS = ("device", "index_select", "host")


@dataclass(frozen=True)
class CaseFloors:
    """The floors for as many bytes as a case has."""

    case: str
    round_index: int
    floors: Floors


@dataclass
class GpuFigures:
    """All that was measured."""

    cases: tuple[SaveCase, ...]
    floors: list[CaseFloors] = field(default_factory=list)
    loops: list[LoopFigures] = field(default_factory=list)
    peers: list[LoopFigures] = field(default_factory=list)
    steps: list[StepFigures] = field(default_factory=list)
    host: list[HostFigures] = field(default_factory=list)
    gathers: list[GatherFigures] = field(default_factory=list)
    loads: list[DeviceLoadFigures] = field(default_factory=list)

    def loops_of(self, case: str, way: str) -> list[LoopFigures]:
        return [one for one in self.loops if (one.case, one.way) == (case, way)]

    def lost_ratio(self, case: str, way: str) -> float:
        """Time lost against the floor of the same round: to the host, or with scratch memory within the device."""
        return self._ratio(case, way, lambda one: one.lost_seconds)

    def wait_ratio(self, case: str, way: str) -> float:
        """What the stream waits at the save, against the same floor."""
        return self._ratio(case, way, lambda one: one.fence_seconds)

    def _ratio(self, case: str, way: str, value: Callable[[LoopFigures], float]) -> float:
        floors = {one.round_index: one.floors for one in self.floors if one.case == case}
        bounds = {index: one.d2d if way == SCRATCH else one.d2h for index, one in floors.items()}
        return median_of(value(one) / bounds[one.round_index] for one in self.loops_of(case, way))

    def steps_ratio(self, value: Callable[[StepFigures], float]) -> float:
        """Against one copy to the host of as many bytes, by the speed of the largest one."""
        floors = [one.floors for one in self.floors if one.case == self.cases[0].name]
        second_per_byte = median_of(one.d2h / one.bytes for one in floors)
        return median_of(value(one) / (one.bytes * second_per_byte) for one in self.steps)

    def host_call_ms(self, state: str) -> float:
        """What a call takes of the host when the device has nothing else to do."""
        return median_of(one.seconds * 1e3 for one in self.host if one.state == state)

    @property
    def load_ratio(self) -> float:
        """Seconds of a load against the slower of one raw read and one copy up."""
        return median_of(one.seconds / max(one.read_seconds, one.up_seconds) for one in self.loads)

    def gather_speed(self, row_bytes: int, share: float, way: str) -> float:
        """As a part of a plain copy's of as many bytes."""
        wanted = (row_bytes, share, way)
        own = [one for one in self.gathers if (one.row_bytes, one.share, one.way) == wanted]
        return median_of(one.floor_seconds / one.seconds for one in own)


def targets_of(figures: GpuFigures) -> list[Target]:
    """The project's targets, each beside what was measured.

    A copy of small states within the device takes less than two loops differ: there, what the stream waits must do.
    """
    small = "10,000 of 64 KiB"
    cases = [case.name for case in figures.cases if case.name != "10,000 of 512 KiB"]
    on_device, to_host = (figures.gather_speed(512, 0.1, way) for way in ("device", "host"))
    return [
        Target("copies behind the step: time lost / one copy to the host", figures.steps_ratio(lost), 0.05),
        *(
            Target(f"{case}: device time lost / one copy to the host", figures.lost_ratio(case, STRAIGHT), 1.1)
            for case in cases
        ),
        *(
            Target(f"{case}, scratch: stream waits / one copy within", figures.wait_ratio(case, SCRATCH), 1.2)
            for case in cases
        ),
        *(
            Target(f"{case}, scratch: device time lost / one copy within", figures.lost_ratio(case, SCRATCH), 1.2)
            for case in cases
            if case != small
        ),
        Target("10 % of rows of 512 bytes, on the device / one copy", on_device, 0.8, at_least=True),
        Target("10 % of rows of 512 bytes, to the host / one copy", to_host, 0.9, at_least=True),
        Target("cold load / the slower of disk and bus", 1 / figures.load_ratio, 0.9, at_least=True),
    ]


def lost(one: StepFigures) -> float:
    return one.lost_seconds


def print_steps(console: Console, figures: GpuFigures) -> None:
    values: list[Callable[[StepFigures], float]] = [
        lambda one: one.host_seconds,
        lambda one: one.fence_seconds,
        lambda one: one.step_seconds,
        lost,
    ]
    row = [number(median_of(one.bytes / GIB for one in figures.steps), 2)]
    row += [number(median_of(value(one) for one in figures.steps) * 1e3, 2) for value in values]
    row += [
        times(figures.steps_ratio(lambda one: one.fence_seconds + one.step_seconds)),
        times(figures.steps_ratio(lost)),
    ]
    columns = ["GiB", *LOOP_COLUMNS[:2], "next step longer ms", LOOP_COLUMNS[2], "waits / floor", "lost / floor"]
    print_table(console, "copies behind forward (optimizers=); the floor is one copy to the host", columns, [row])


def print_host(console: Console, figures: GpuFigures) -> None:
    rows = []
    for name in dict.fromkeys(one.state for one in figures.host):
        own = [one for one in figures.host if one.state == name]
        processor = median_of(one.processor_seconds for one in own)
        rows.append([name, number(figures.host_call_ms(name), 2), number(processor * 1e3, 2)])
    print_table(console, "save_async of a state that has not changed, ms", ["state", "call", "processor"], rows)


def print_floors(console: Console, figures: GpuFigures) -> None:
    rows = []
    for case in figures.cases:
        own = [one.floors for one in figures.floors if one.case == case.name]
        seconds = [median_of(getattr(one, name) for one in own) for name in ("d2h", "h2d", "d2d")]
        cells = [f"{number(value * 1e3, 2)} ({number(case.bytes / GIB / value, 1)} GiB/s)" for value in seconds]
        rows.append([case.name, number(case.bytes / GIB, 2), *cells])
    columns = ["as large as", "GiB", "to the host", "to the device", "within the device"]
    print_table(console, "floors: one big copy, ms", columns, rows)


def print_loops(console: Console, figures: GpuFigures) -> None:
    rows = []
    for case in figures.cases:
        for way in (STRAIGHT, SCRATCH):
            ratios = [times(figures.wait_ratio(case.name, way)), times(figures.lost_ratio(case.name, way))]
            rows.append([f"{case.name}, {way}", *_milliseconds(figures.loops_of(case.name, way)), *ratios])
    title = "saves in a training loop; the floor is one copy to the host, with scratch memory one within the device"
    print_table(console, title, ["save", *LOOP_COLUMNS, "waits / floor", "lost / floor"], rows)


def print_peers(console: Console, figures: GpuFigures) -> None:
    rows = []
    for name in dict.fromkeys(one.way for one in figures.peers):
        own = [one for one in figures.peers if one.way == name]
        rows.append([name, *_milliseconds(own), number(median_of(one.done_seconds for one in own), 2)])
    gib = median_of(one.bytes / GIB for one in figures.peers)
    title = f"other ways to save, 100 tensors of {number(gib, 2)} GiB together, to the disk"
    print_table(console, title, ["way", *LOOP_COLUMNS, "done s"], rows)


def print_gathers(console: Console, figures: GpuFigures) -> None:
    widths = sorted({one.row_bytes for one in figures.gathers})
    columns = [(way, share) for way in GATHER_WAYS for share in sorted({one.share for one in figures.gathers})]
    rows = [
        [f"{width} bytes", *(number(figures.gather_speed(width, share, way), 2) for way, share in columns)]
        for width in widths
    ]
    names = [f"{way} {share * 100:g} %" for way, share in columns]
    title = "gathers of rows: their speed as a part of that of one copy of as many bytes"
    print_table(console, title, ["rows of", *names], rows)


def print_loads(console: Console, figures: GpuFigures) -> None:
    loads = figures.loads
    row = [
        number(median_of(one.bytes / GIB for one in loads), 2),
        number(median_of(one.seconds for one in loads)),
        number(median_of(one.read_seconds for one in loads)),
        number(median_of(one.up_seconds for one in loads)),
        times(figures.load_ratio),
        number(max((one.cached_share for one in loads), default=0.0), 2),
        "yes" if all(one.exact for one in loads) else "NO",
    ]
    columns = ["GiB", "load s", "raw read s", "one copy up s", "load / slower of both", "cached share", "exact"]
    print_table(console, "cold loads into the device", columns, [row])


def _milliseconds(figures: Iterable[LoopFigures]) -> list[str]:
    own = list(figures)
    values = ([one.host_seconds for one in own], [one.fence_seconds for one in own], [one.lost_seconds for one in own])
    return [number(median_of(value) * 1e3, 2) for value in values]
