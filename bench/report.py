"""Tables, plots and files: what people look at afterwards."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.figures import VALUES, RoundFigures, peer_median, ratio_median
from bench.peers import FLOOR, OURS

PEER_COLOURS = {FLOOR: "#888888", OURS: "#d1495b"}
OTHER_COLOUR = "#30638e"


def make_console() -> Console:
    """A console that also remembers, and does not fold the tables when the output is a file."""
    console = Console(record=True)
    return console if console.is_terminal else Console(record=True, width=180)


def machine() -> dict[str, Any]:
    """Say on what the figures were taken."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def number(value: float, digits: int = 3) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def times(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}x"


def print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    console.print(f"\n{title}", style="italic", highlight=False)  # A table's own title folds at the table's width.
    table = Table(header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == OURS else "")
    console.print(table)


def peers_in(rounds: Sequence[RoundFigures]) -> list[str]:
    return list(dict.fromkeys(one.peer for one in rounds))


SAVE_NAMES = ("stall", "lost", "durable")


def print_saves(console: Console, title: str, rounds: list[RoundFigures], images: Mapping[str, str]) -> None:
    """The main tables: later saves; the first save and the rest; ratios against the floor of the same round."""
    later, rest, ratios = [], [], []
    for peer in peers_in(rounds):
        of = {name: peer_median(rounds, peer, value) for name, value in VALUES.items()}
        seconds = [number(of[name]) for name in SAVE_NAMES]
        speed = [number(of["gib per second"], 2), times(of["step slowdown"]), number(of["worst step"] * 1e3, 1)]
        later.append([peer, *seconds, *speed, number(of["background cpu"])])
        first = [number(of[f"first {name}"]) for name in SAVE_NAMES]
        loads = [number(of["load cold"], 2), number(of["load warm"], 2), images.get(peer, "-").partition(":")[0]]
        rest.append([peer, *first, number(of["prepare"]), number(of["extra memory"] / 2**30, 2), *loads])
        against = [times(ratio_median(rounds, peer, FLOOR, VALUES[name])) for name in (*SAVE_NAMES, "load cold")]
        ratios.append([peer, *against, number(of["cpu per gib"])])
    columns = ["peer", "stall s", "time lost s", "durable s", "GiB/s", "step while writing", "worst step ms"]
    print_table(console, title, [*columns, "background CPU s"], later)
    columns = ["peer", "1st stall s", "1st time lost s", "1st durable s", "prepare s", "extra memory GiB"]
    print_table(console, "the first save, memory, loads", [*columns, "cold load s", "warm load s", "image"], rest)
    columns = ["peer", "stall", "time lost", "durable", "cold load", "background CPU s/GiB"]
    print_table(console, "against the raw floor of the same rounds", columns, ratios)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_without_nan(content), indent=1, allow_nan=False) + "\n")


def _without_nan(value: Any) -> Any:
    """JSON has no NaN; what was not measured is null there."""
    if isinstance(value, Mapping):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def draw(path: Path, groups: Mapping[str, list[RoundFigures]], title: str) -> None:
    """One row of bar charts for each group of rounds: stall, time lost, durable. The scale is logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = {"stall": "stall (s)", "lost": "training time lost (s)", "durable": "time to durable (s)"}
    figure, axes = pyplot.subplots(len(groups), 3, figsize=(13, 0.9 + 3.1 * len(groups)), squeeze=False, sharex="col")
    for line, (name, rounds) in zip(axes, groups.items(), strict=True):
        peers = peers_in(rounds)[::-1]
        for axis, value in zip(line, labels, strict=True):
            heights = [max(1e-4, peer_median(rounds, peer, VALUES[value])) for peer in peers]
            bars = axis.barh(peers, heights, color=[PEER_COLOURS.get(peer, OTHER_COLOUR) for peer in peers])
            axis.bar_label(bars, [f" {height:.3g}" for height in heights], fontsize=8)
            axis.set_xscale("log")
            axis.margins(x=0.25)
            axis.set_title(f"{labels[value]}, {name}", fontsize=9)
            axis.tick_params(labelsize=8)
            if axis is not line[0]:
                axis.set_yticklabels([])
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
