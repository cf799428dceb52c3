"""The table at the end: what the saves of each run cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from demo.history import History, Save

NOTHING = "-"
CAPTION = "At its end a save of asyncckpt is durable; one of torch.save is in the page cache, and nobody syncs it."


@dataclass(frozen=True)
class ReportedRun:
    """A column of the table. A run that was killed has two histories, before and after."""

    title: str
    histories: Sequence[History]
    recovered: str = NOTHING


def figures_table(runs: Sequence[ReportedRun]) -> Table:
    """Build the table: a column for each run, a row for each figure."""
    table = Table(
        title="Medians over the saves during training", caption=CAPTION, title_justify="left", caption_justify="left"
    )
    table.add_column("")
    for run in runs:
        table.add_column(run.title, justify="right")
    for name, cell in ROWS.items():
        table.add_row(name, *(cell(run) for run in runs))
    return table


def _median_of(value: Callable[[History, Save], float], form: str) -> Callable[[ReportedRun], str]:
    """Make a cell: the median over all periodic saves of a run."""

    def cell(run: ReportedRun) -> str:
        values = [value(history, save) for history in run.histories for save in history.periodic_saves()]
        return format(median(values), form) if values else NOTHING

    return cell


def _worst_stall(run: ReportedRun) -> str:
    stalls = [save.stall for history in run.histories for save in history.periodic_saves()]
    return f"{max(stalls) * 1e3:.1f}" if stalls else NOTHING


def _counts(run: ReportedRun) -> str:
    counts = " + ".join(str(len(history.periodic_saves())) for history in run.histories)
    skipped_count = sum(history.skipped_count for history in run.histories)
    return f"{counts} ({skipped_count} skipped)" if skipped_count else counts


def _step_ms(run: ReportedRun) -> str:
    seconds = [step.seconds for history in run.histories for step in history.steps]
    return f"{median(seconds) * 1e3:.1f}" if seconds else NOTHING


ROWS: dict[str, Callable[[ReportedRun], str]] = {
    "saves": _counts,
    "step ms": _step_ms,
    "stall ms": _median_of(lambda _, save: save.stall * 1e3, ".1f"),
    "worst stall ms": _worst_stall,
    "training time lost ms": _median_of(lambda history, save: history.lost_seconds(save) * 1e3, ".1f"),
    "call to end of save ms": _median_of(lambda _, save: save.seconds * 1e3, ".0f"),
    "MiB a save": _median_of(lambda _, save: save.bytes / 2**20, ".1f"),
    "GiB/s": _median_of(lambda _, save: save.bytes / 2**30 / save.seconds, ".2f"),
    "recovered step": lambda run: run.recovered,
}
