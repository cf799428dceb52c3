"""`python -m bench parallel`: what `parallel` does to blocking saves and cold loads, by size.

Each round of a size saves the same tensors once with each number, and loads them again from a cold cache, the order
turned round in every other round; medians are reported, and how many files there were. `parallel=1` is the base.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import asyncckpt
from bench.clocks import drop_page_cache
from bench.report import machine, make_console, print_table, write_json
from bench.rounds import scratch_folder

NUMBERS = (1, 2, 4, 8, 16)
TENSORS_COUNT = 32


@dataclass(frozen=True)
class ParallelFigures:
    """A save and a load. files_count: of the checkpoint."""

    mib: int
    parallel: int
    files_count: int
    save_seconds: float
    load_seconds: float


def run_parallel(
    *, sizes: Sequence[int], rounds: int, directory: Path | None, out: Path
) -> dict[tuple[int, int], list[ParallelFigures]]:
    """Measure, print and write; return the runs by MiB and number."""
    runs: dict[tuple[int, int], list[ParallelFigures]] = {}
    with scratch_folder(directory) as folder:
        for mib in sizes:
            state = {f"t{index}": torch.randn(mib * (1 << 18) // TENSORS_COUNT) for index in range(TENSORS_COUNT)}
            for number in range(rounds):
                for parallel in NUMBERS[:: -1 if number % 2 else 1]:
                    place = folder / f"{mib}-{number}-{parallel}"
                    runs.setdefault((mib, parallel), []).append(_run(state, place, mib=mib, parallel=parallel))
    lines = []
    for (mib, parallel), own in sorted(runs.items()):
        row = [f"{mib:,}", str(parallel), str(own[0].files_count)]
        for what in ("save_seconds", "load_seconds"):
            taken, base = (
                statistics.median(getattr(run, what) for run in found) for found in (own, runs[mib, NUMBERS[0]])
            )
            row += [f"{taken:.3f}", f"{base / taken:.2f}"]
        lines.append(row)
    console = make_console()
    columns = ["MiB", "parallel", "files", "save s", "times parallel=1", "load s", "times parallel=1"]
    print_table(console, f"medians of {rounds} rounds", columns, lines)
    content = {"machine": machine(), "runs": [asdict(run) for own in runs.values() for run in own]}
    write_json(out.with_suffix(".json"), content)
    out.with_suffix(".txt").write_text(console.export_text(), encoding="utf-8")
    return runs


def _run(state: dict[str, torch.Tensor], place: Path, *, mib: int, parallel: int) -> ParallelFigures:
    with asyncckpt.Saver(path=place, tensors=state, parallel=parallel, keep=1) as saver:
        saver.save(0)  # The first one makes folders and memory.
        begun = time.perf_counter()
        saver.save(1)
        save_seconds = time.perf_counter() - begun
    drop_page_cache(place)
    begun = time.perf_counter()
    asyncckpt.Loader(place, tensors=state, parallel=parallel).load()
    load_seconds = time.perf_counter() - begun
    files_count = len(list((place / "data").glob("*/*.safetensors")))
    for path in place.rglob("*.safetensors"):
        path.unlink()
    return ParallelFigures(mib, parallel, files_count, save_seconds, load_seconds)
