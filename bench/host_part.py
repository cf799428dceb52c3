"""`python -m bench host-part`: how long `save_async` keeps the calling thread, for tensors on a device, without one.

The device is the simulated one of the tests: queueing a copy costs other time there than on a real one, a few calls in
all; what is done for every tensor (taking the state apart, looking for its addresses) is the same.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from bench.figures import median_of
from bench.report import machine, make_console, number, print_table, write_json
from bench.rounds import scratch_folder
from tests.simulated_device import SimulatedRuntime

COUNTS = (1, 100, 10_000)
ELEMENTS = 1000
WAIT_S = 300


def run_host_part(
    *, rounds: int = 5, directory: Path | None = None, out: Path, smoke: bool = False
) -> list[dict[str, Any]]:
    """Run it, print the table, write `out`.json and .txt; return the figures."""
    console = make_console()
    counts, rounds = ((1, 50), 1) if smoke else (COUNTS, rounds)
    figures = []
    with scratch_folder(directory) as folder:
        for index in range(rounds):
            for count in counts:
                for scratch in (0, 1 << 30):
                    seconds = call_seconds(count, scratch, folder / f"{index}-{count}-{scratch}")
                    figures.append({"tensors": count, "scratch_bytes": scratch, "seconds": seconds})
    rows = [
        [f"{count:,}", "yes" if scratch else "no", number(_median(figures, count, scratch) * 1e3, 2)]
        for count in counts
        for scratch in (0, 1 << 30)
    ]
    title = f"tensors of {4 * ELEMENTS} bytes on a simulated device, medians of {rounds} rounds"
    print_table(console, title, ["tensors", "scratch memory", "save_async ms"], rows)
    write_json(Path(f"{out}.json"), {"machine": machine(), "calls": figures})
    console.save_text(f"{out}.txt")
    return figures


def call_seconds(count: int, scratch_bytes: int, path: Path) -> float:
    """The median of some calls, but for the first ones, which make what later ones use."""
    runtime = SimulatedRuntime(1, device_bytes=max(32 << 20, 6 * count * ELEMENTS * 4))
    with runtime.installed():
        tensors = {f"t{number}": runtime.new_tensor((ELEMENTS,), torch.float32) for number in range(count)}
        with asyncckpt.Saver(
            path=path,
            tensors=tensors,
            durability="none",
            device=asyncckpt.DeviceOptions(scratch_bytes=scratch_bytes),
            filter_func=_drop,
        ) as saver:
            saver.save_async().result(WAIT_S)
            seconds = []
            for _ in range(5):
                gc.collect()
                begun = time.perf_counter()
                future = saver.save_async()
                seconds.append(time.perf_counter() - begun)
                future.result(WAIT_S)
    return median_of(seconds)


def _drop(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
    """Nothing need be written."""
    return []


def _median(figures: list[dict[str, Any]], count: int, scratch: int) -> float:
    return median_of(one["seconds"] for one in figures if (one["tensors"], one["scratch_bytes"]) == (count, scratch))
