"""`python -m bench gpu`: saves and loads of tensors on a CUDA device, beside the copies that they are made of.

1. Floors: one big copy to pinned memory, within the device, and back. Every figure has those of its round and size.
2. A training loop that saves: what the call takes of the host, what the save takes of the device; a few large tensors,
   and 10,000 small ones; straight to the host, and by way of scratch memory.
3. Saves whose copies hide behind forward and backward, and the host's part of calls for a state that has not changed.
4. Rows of a table, gathered on the device and to the host.
5. Cold loads into the device.
6. Other ways to save in the same loop, which write to the disk.

Every other round goes in the reverse order, so that no one has the warmer device. Figures are printed and written after
each section: a run that is cut off has what it had measured.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from bench.gpu_copies import measure_floors, measure_gathers, usable_library
from bench.gpu_device import GIB, BenchDevice
from bench.gpu_loads import measure_loads
from bench.gpu_peers import PEERS
from bench.gpu_report import (
    SCRATCH,
    STRAIGHT,
    CaseFloors,
    GpuFigures,
    print_floors,
    print_gathers,
    print_host,
    print_loads,
    print_loops,
    print_peers,
    print_steps,
    targets_of,
)
from bench.gpu_saves import OurSaves, SaveCase, Saves, TrainingLoop, make_state, measure
from bench.gpu_steps import measure_host, measure_steps
from bench.report import machine, make_console, write_json
from bench.rounds import scratch_folder
from bench.targets import print_targets

SMALL_BYTES = 64 << 10
T = TypeVar("T")


def run_gpu(
    *,
    gib: float = 8.0,
    rounds: int = 5,
    directory: Path | None = None,
    out: Path,
    peers: bool = True,
    smoke: bool = False,
    device: str = "cuda",
) -> dict[str, Any]:
    """Run it, print the tables, write `out`.json and .txt; return what is in the former. NoDevice without one."""
    console, bench = make_console(), BenchDevice(device)
    facts = {**bench.facts(), "date": datetime.date.today().isoformat(), **machine()}
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)
    large = 8 << 20 if smoke else int(gib * GIB)
    rounds = 1 if smoke else rounds
    cases = _cases(large, smoke=smoke)
    written = SaveCase("written", 100, min(large, GIB) // 100 // 4 * 4)
    largest = max(case.bytes for case in cases)
    source, pinned = bench.empty(2 * largest).fill_(1), bench.pinned(largest)
    loop = _loop(bench, smoke=smoke)
    library, why_not = usable_library() if bench.is_cuda else (None, "the host stands in for the device")
    if library is None:
        console.print(f"the CUDA library is left out: {why_not}", highlight=False)
    figures = GpuFigures(cases=tuple(cases))

    def end_section(*tables: Callable[[Console, GpuFigures], None]) -> dict[str, Any]:
        for print_one in tables:
            print_one(console, figures)
        return _write(out, console, facts, figures)

    with scratch_folder(directory) as folder:
        _add_loops(figures, bench, loop, source, pinned, folder, rounds=rounds)
        end_section(print_floors, print_loops)
        figures.steps += measure_steps(bench, written, folder, rounds=rounds, smoke=smoke)
        figures.host += measure_host(bench, folder, rounds=min(rounds, 3), smoke=smoke)
        end_section(print_steps, print_host)
        for index in range(rounds):
            figures.gathers += measure_gathers(
                bench, library, source, pinned, table_bytes=large // 2, round_index=index
            )
        end_section(print_gathers)
        loaded = SaveCase("loaded", 100, min(large, 4 * GIB) // 100 // 4 * 4)
        figures.loads += measure_loads(bench, loaded, source, pinned, folder, rounds=min(rounds, 3))
        end_section(print_loads)
        if peers:
            _add_peers(figures, bench, loop, written, folder, rounds=min(rounds, 2), console=console)
            end_section(print_peers)
    return end_section(lambda console, figures: print_targets(console, targets_of(figures)))


def _write(out: Path, console: Console, facts: dict[str, Any], figures: GpuFigures) -> dict[str, Any]:
    """Write what was measured by now; return what is in the .json."""
    targets = targets_of(figures)
    content = {
        "facts": facts,
        **asdict(figures),
        "targets": [{"what": one.what, "measured": one.measured, "verdict": one.verdict} for one in targets],
    }
    write_json(Path(f"{out}.json"), content)
    console.save_text(f"{out}.txt", clear=False)
    return content


def _cases(large: int, *, smoke: bool) -> list[SaveCase]:
    count, part = (50, 64) if smoke else (10_000, 1)
    return [
        SaveCase("1 tensor", 1, large),
        SaveCase("100 tensors", 100, large // 100 // 4 * 4),
        SaveCase("10,000 of 64 KiB", count, SMALL_BYTES // part),
        SaveCase("10,000 of 512 KiB", count, 8 * SMALL_BYTES // part),
    ]


def _loop(bench: BenchDevice, *, smoke: bool) -> TrainingLoop:
    """Some 6 ms a step on an H200; enough steps behind the save that all copies beside training are among them."""
    if smoke:
        return TrainingLoop(bench, size=64, products=1, steps_before=2, steps_after=2)
    return TrainingLoop(bench, size=8192, products=4, steps_before=15, steps_after=50)


def _add_loops(
    figures: GpuFigures,
    bench: BenchDevice,
    loop: TrainingLoop,
    source: torch.Tensor,
    pinned: torch.Tensor,
    folder: Path,
    *,
    rounds: int,
) -> None:
    """All cases and ways in every round; a save of each beforehand makes what later ones use."""
    states = {case.name: make_state(bench, case) for case in figures.cases}
    ways: list[tuple[SaveCase, str, Saves]] = []
    for case in figures.cases:
        for way, scratch in ((STRAIGHT, 0), (SCRATCH, 2 * case.bytes)):
            path = folder / f"{len(ways)}"
            ways.append((case, way, OurSaves(states[case.name], path, scratch_bytes=scratch, is_written=False)))
    for index in range(-1, rounds):
        for case in figures.cases if index >= 0 else ():
            floors = measure_floors(bench, case.bytes, source, pinned)
            figures.floors.append(CaseFloors(case=case.name, round_index=index, floors=floors))
        for case, way, saves in _in_turn(ways, index):
            one = measure(bench, loop, case, states[case.name], way, saves, round_index=index)
            if index >= 0:
                figures.loops.append(one)
    for _, _, saves in ways:
        saves.close()


def _add_peers(
    figures: GpuFigures,
    bench: BenchDevice,
    loop: TrainingLoop,
    case: SaveCase,
    folder: Path,
    *,
    rounds: int,
    console: Console,
) -> None:
    state = make_state(bench, case)
    peers: dict[str, Saves] = {}
    for index, (name, make) in enumerate(PEERS.items()):
        try:
            saves = make(bench, state, folder / f"peer{index}")
            measure(bench, loop, case, state, name, saves, round_index=-1)
            peers[name] = saves
        except Exception as error:  # Of another library: the figures of all others count none the less.
            console.print(f"{name} is left out: {type(error).__name__} {error}", highlight=False)
    for index in range(rounds):
        for name in _in_turn(list(peers), index):
            figures.peers.append(measure(bench, loop, case, state, name, peers[name], round_index=index))
    for saves in peers.values():
        saves.close()


def _in_turn(ways: Sequence[T], index: int) -> Sequence[T]:
    """There and back: each comes as early as late, over two rounds."""
    return ways if index % 2 == 0 else ways[::-1]
