"""`python -m bench dcp`: torch.distributed.checkpoint with its own FileSystemWriter and with ours, 8,000 tensors.

In one process and on two gloo ranks, large tensors (1 GiB together) and small ones. Each round does every way once, in
one process per rank, in turn; the medians of the rounds are reported. `planning` is the least that any writer costs:
DCP's planning and collectives with a writer that writes nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.dcp_rank import OURS_PLANNED, PLANNING, PLANNING_OURS, THEIRS, WAYS, DcpSpec
from bench.figures import median_of
from bench.report import machine, make_console, number, print_table, times, write_json
from bench.rounds import REPOSITORY, RoundFailed, scratch_folder
from bench.targets import Target, print_targets

LARGE_BYTES = 128 << 10
SMALL_BYTES = 4 << 10
RANKS_SECONDS_MAX = 1800.0
VALUES = ("save_seconds", "call_seconds", "durable_seconds", "lost_seconds")
Figures = list[dict[str, Any]]


def run_dcp(
    *,
    count: int = 8000,
    rounds: int = 5,
    short: bool = False,
    worlds: Sequence[int] = (1, 2),
    directory: Path | None = None,
    out: Path,
    smoke: bool = False,
) -> Figures:
    """Run it, print the tables, write `out`.json and .txt; return the figures of every save.

    short: their writer as it comes, ours with our planner, and the planning of both. worlds: numbers of ranks.
    """
    console = make_console()
    sizes, ways = {"large": LARGE_BYTES, "small": SMALL_BYTES}, list(WAYS)
    if short:
        ways = [THEIRS, OURS_PLANNED, PLANNING, PLANNING_OURS]
    if smoke:
        count, rounds, ways, worlds = 40, 1, [THEIRS, OURS_PLANNED], [2]
    figures: Figures = []
    for world in worlds:
        with scratch_folder(directory) as folder:
            idle_steps_count = 20 if smoke else 2000
            found = run_ranks(DcpSpec(str(folder), world, count, sizes, ways, rounds, idle_steps_count))
        figures += [{"world": world, **one} for one in found]
        for size, tensor_bytes in sizes.items():
            title = f"{count} tensors of {tensor_bytes >> 10} KiB, {world} ranks, medians of {rounds} rounds"
            columns = ["way", "dcp.save s", "async_save call s", "async durable s", "time lost s", "save / theirs"]
            print_table(console, title, columns, [_row(figures, world, size, way) for way in ways])
    print_targets(console, [target for world in worlds for target in _targets(figures, world, "large")])
    write_json(Path(f"{out}.json"), {"machine": machine(), "saves": figures})
    console.save_text(f"{out}.txt")
    return figures


def run_ranks(spec: DcpSpec) -> Figures:
    """Run the ranks, and return what rank 0 has measured."""
    folder = Path(spec.directory)
    processes = []
    for rank in range(spec.world):
        command = [sys.executable, "-m", "bench.dcp_rank", str(rank), json.dumps(asdict(spec))]
        with (folder / f"words-{rank}").open("wb") as words:
            processes.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=words, stderr=words))
    try:
        statuses = [process.wait(RANKS_SECONDS_MAX) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(statuses):
        words = "\n".join((folder / f"words-{rank}").read_text(errors="replace")[-4000:] for rank in range(spec.world))
        raise RoundFailed(f"bench.dcp_rank ended with {statuses}:\n{words}")
    found: Figures = json.loads((folder / "figures.json").read_text())
    return found


def median_for(figures: Figures, world: int, size: str, way: str, value: str) -> float:
    wanted = (world, size, way)
    return median_of(one[value] for one in figures if (one["world"], one["size"], one["way"]) == wanted)


def _row(figures: Figures, world: int, size: str, way: str) -> Sequence[str]:
    of = {value: median_for(figures, world, size, way, value) for value in VALUES}
    theirs = median_for(figures, world, size, THEIRS, "save_seconds")
    return [way, *(number(of[value]) for value in VALUES), times(of["save_seconds"] / theirs)]


def _targets(figures: Figures, world: int, size: str) -> list[Target]:
    def ratio(way: str, other: str, value: str) -> float:
        return median_for(figures, world, size, way, value) / median_for(figures, world, size, other, value)

    where = f"{world} ranks, {size}"
    return [
        Target(f"{where}: save, theirs / ours", ratio(THEIRS, OURS_PLANNED, "save_seconds"), 10, at_least=True),
        Target(
            f"{where}: async durable, theirs / ours", ratio(THEIRS, OURS_PLANNED, "durable_seconds"), 10, at_least=True
        ),
        Target(f"{where}: time lost, ours / theirs", ratio(OURS_PLANNED, THEIRS, "lost_seconds"), 0.2),
    ]
