"""The picture: step times along the run with the saves marked, and below it the same run with torch.save."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from demo.history import History

STEP_COLOUR, STALL_COLOUR, SAVE_COLOUR = "#30638e", "#d1495b", "#edae49"


def draw_timeline(runs: Mapping[str, History], path: Path) -> None:
    """Write a PNG with one panel for each run (title -> history)."""
    figure = Figure(figsize=(12, 3.2 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (title, history) in zip(panels, runs.items(), strict=True):
        _draw_run(axes, history)
        axes.set_title(f"{title}: {_summary(history)}", loc="left", fontsize=10)
        axes.set_ylabel("ms")
        axes.grid(alpha=0.25)
    # Steps of milliseconds and stalls of seconds need a logarithm.
    panels[0].set_yscale("log")
    panels[0].legend(loc="upper right", fontsize=8, framealpha=0.9)
    panels[-1].set_xlabel("seconds since the first step")
    figure.savefig(path, dpi=130)


def _draw_run(axes: Any, history: History) -> None:
    saves = history.periodic_saves()
    axes.plot(
        [step.begin for step in history.steps],
        [step.seconds * 1e3 for step in history.steps],
        ".",
        markersize=2.5,
        color=STEP_COLOUR,
        label="time of a step",
    )
    for index, save in enumerate(saves):
        label = "save in flight" if index == 0 else None
        axes.axvspan(save.at, save.durable_at, color=SAVE_COLOUR, alpha=0.35, linewidth=0, label=label)
    axes.vlines(
        [save.at for save in saves],
        [min(step.seconds for step in history.steps) * 1e3] * len(saves),
        [save.stall * 1e3 for save in saves],
        color=STALL_COLOUR,
    )
    axes.plot(
        [save.at for save in saves],
        [save.stall * 1e3 for save in saves],
        "v",
        color=STALL_COLOUR,
        label="stall: the loop waits in the save call",
    )


def _summary(history: History) -> str:
    saves = history.periodic_saves()
    lost = sum(history.lost_seconds(save) for save in saves)
    end = max(step.end for step in history.steps)
    return f"{len(history.steps)} steps in {end:.1f} s, of which {len(saves)} saves cost {lost:.2f} s"
