"""`python -m bench compaction`: what four compactions in the same process cost a save, until it is durable.

    alone    a save of a large state
    beside   the same while four chains of deltas, each of a directory of its own, are compacted
    held     the same while four compactions stand still: to sync their files takes as long as the save, as on a disk
             that is slow for them alone. This shows what a save waits for, apart from what it shares: disk and cores
    floor    a plain copy and direct writes of the same bytes (peers/raw_floor.py), alone and beside four compactions:
             what sharing costs whoever writes beside them

Each way has a process of its own in every round; rounds are interleaved. Ratios are taken inside a round.

Expected, before measuring: `held` as long as `alone`, for a save needs no thread that a compaction has. `beside` little
longer: a compaction reads nothing while a save is in flight, and ends only the read and the write that it has begun.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from bench.figures import median_of
from bench.peers.protocol import TreeHandle
from bench.peers.raw_floor import RawFloor
from bench.report import machine, make_console, number, print_table, times, write_json
from bench.rounds import run_child, scratch_folder
from bench.state import GIB, tensors_state
from bench.targets import Target, print_targets

WAYS = ("alone", "beside", "held", "floor alone", "floor beside")
COMPACTIONS_COUNT = 4
DELTAS_COUNT = 3
TENSORS_COUNT = 64
DIM = 64
RATIO_MAX = 1.2
WAIT_S = 600.0
UNDER_WAY_S = 0.2  # After which the first compactions are in the middle of it.
HELD_S_MAX = 10.0  # Longer than any save; one that waits for a compaction shows it.


@dataclass(frozen=True)
class CompactionSpec:
    """What one process shall do."""

    directory: str
    figures_path: str
    way: str
    state_bytes: int
    table_rows_count: int


def run_compaction_bench(
    *, gib: float = 1.0, rounds: int = 5, directory: Path | None = None, out: Path, smoke: bool = False
) -> dict[str, Any]:
    """Run it, print the tables, write `out`.json and .txt; return the figures."""
    state_bytes, rounds = (16 << 20, 1) if smoke else (int(gib * GIB), rounds)
    answers: list[dict[str, Any]] = []
    for index in range(rounds):
        for turn in range(len(WAYS)):
            way = WAYS[(turn + index) % len(WAYS)]
            with scratch_folder(directory) as folder:
                spec = CompactionSpec(
                    directory=str(folder),
                    figures_path=str(folder / "figures"),
                    way=way,
                    state_bytes=state_bytes,
                    table_rows_count=state_bytes // COMPACTIONS_COUNT // (8 + 4 * DIM),
                )
                answer, _ = run_child("bench.compaction", asdict(spec))
            answers.append({"round": index, "way": way, **answer})
    content = {"machine": machine(), "state_bytes": state_bytes, "rounds": answers}
    console = make_console()
    rows = [[way, *_row(answers, way)] for way in WAYS]
    title = f"a save of {state_bytes / GIB:.2f} GiB and {COMPACTIONS_COUNT} compactions, medians of {rounds} rounds"
    columns = ["way", "call ms", "durable s", "of that alone", "compactions beside it", "they take s"]
    print_table(console, title, columns, rows)
    floor = _ratio(answers, "floor beside", "floor alone")
    targets = [
        Target("save while compactions stand still / alone", _ratio(answers, "held", "alone"), RATIO_MAX),
        Target("save beside compactions / alone", _ratio(answers, "beside", "alone"), RATIO_MAX),
        Target("... over what the floor's writes take longer", _ratio(answers, "beside", "alone") / floor, RATIO_MAX),
    ]
    print_targets(console, targets)
    write_json(Path(f"{out}.json"), content)
    console.save_text(f"{out}.txt")
    return content


def _row(answers: list[dict[str, Any]], way: str) -> list[str]:
    of = [answer for answer in answers if answer["way"] == way]
    alone = "floor alone" if way.startswith("floor") else "alone"
    return [
        number(median_of(answer["call_seconds"] for answer in of) * 1e3, 1),
        number(median_of(answer["durable_seconds"] for answer in of)),
        times(_ratio(answers, way, alone)),
        number(median_of(answer["beside"] for answer in of), 2),
        number(median_of(answer["compaction_seconds"] for answer in of)),
    ]


def _ratio(answers: list[dict[str, Any]], way: str, base: str) -> float:
    """Median over rounds of the time to durable, of one way / another in the same round."""
    seconds = {(answer["round"], answer["way"]): float(answer["durable_seconds"]) for answer in answers}
    indices = sorted({index for index, _ in seconds})
    return median_of(seconds[index, way] / seconds[index, base] for index in indices)


# -- one process -------------------------------------------------------------------------------------------------------


class Compactions:
    """Four chains, and their compactions when begun. `ends` has when each one has ended."""

    def __init__(self, folder: Path, rows_count: int) -> None:
        self.ends: list[float] = []
        self._savers = []
        ids = torch.arange(rows_count)
        for index in range(COMPACTIONS_COUNT):
            table = asyncckpt.HashTable("rows", DIM, capacity=rows_count)
            saver = asyncckpt.Saver(path=folder / f"chain{index}", hashtables={"rows": table})
            table.lookup(ids)
            saver.save(kind="full")
            for number_of in range(DELTAS_COUNT):
                table.touch(table.lookup(ids[number_of::10]))
                saver.save(kind="delta")
            self._savers.append(saver)

    def begin(self) -> None:
        self._begun = time.perf_counter()
        self._futures = [saver.compact() for saver in self._savers]
        for future in self._futures:
            future.add_done_callback(lambda _: self.ends.append(time.perf_counter()))

    def wait(self) -> None:
        for future in self._futures:
            assert not future.result(WAIT_S).skipped
        for saver in self._savers:
            saver.close()

    @property
    def seconds(self) -> float:
        return median_of(end - self._begun for end in self.ends)

    def beside(self, begin: float, end: float) -> float:
        """How many ran while something else did, on average."""
        return sum(max(0.0, min(one, end) - begin) for one in self.ends) / (end - begin)


@contextmanager
def slow_syncs_below(folder: Path) -> Iterator[Callable[[], None]]:
    """os.fsync below a folder ends with the block, but at most HELD_S_MAX after the first; gives a wait for that."""
    real, ended, begun = os.fsync, threading.Event(), threading.Event()
    timer = threading.Timer(HELD_S_MAX, ended.set)

    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{folder}/"):
            begun.set()
            ended.wait(WAIT_S)
        real(fd)

    os.fsync = fsync  # type: ignore[assignment]

    def wait_for_first() -> None:
        assert begun.wait(WAIT_S), "no compaction has come to sync its files"
        timer.start()

    try:
        yield wait_for_first
    finally:
        timer.cancel()
        ended.set()
        os.fsync = real


def _measure(spec: CompactionSpec) -> dict[str, float]:
    folder = Path(spec.directory)
    state = tensors_state(TENSORS_COUNT, spec.state_bytes // TENSORS_COUNT)
    (folder / "chains").mkdir()
    (folder / "saves").mkdir()
    compactions = None if spec.way.endswith("alone") else Compactions(folder / "chains", spec.table_rows_count)
    saver: Any
    if spec.way.startswith("floor"):
        saver = RawFloor(state, folder / "saves")
        saver.prepare()
    else:
        saver = asyncckpt.Saver(path=folder / "saves", tensors=state.tensors())
    for step in range(2):  # Memory is touched, and plans are made.
        _wait_durable(saver.save_async(step))
    if compactions is None:
        call, begin, end = _save(saver)
        return {"call_seconds": call, "durable_seconds": end - begin, "beside": 0.0, "compaction_seconds": 0.0}
    if spec.way == "held":
        with slow_syncs_below(folder / "chains") as wait_for_syncs:
            compactions.begin()
            wait_for_syncs()
            call, begin, end = _save(saver)
    else:
        compactions.begin()
        time.sleep(UNDER_WAY_S)
        call, begin, end = _save(saver)
    compactions.wait()
    return {
        "call_seconds": call,
        "durable_seconds": end - begin,
        "beside": compactions.beside(begin, end),
        "compaction_seconds": compactions.seconds,
    }


def _wait_durable(future: asyncckpt.SaveFuture | TreeHandle) -> None:
    if isinstance(future, TreeHandle):
        future.wait_durable()
    else:
        future.result(WAIT_S)


def _save(saver: Any) -> tuple[float, float, float]:
    """Seconds of the call; when it began, and when the save was durable."""
    begin = time.perf_counter()
    future = saver.save_async(2)
    called = time.perf_counter()
    _wait_durable(future)
    return called - begin, begin, time.perf_counter()


if __name__ == "__main__":
    given = CompactionSpec(**json.loads(sys.argv[1]))
    Path(given.figures_path).write_text(json.dumps(_measure(given)))
