"""The order of events: undisturbed run, the same with torch.save, killed run, resumed run, comparison, results."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

import asyncckpt
from demo.child import Child
from demo.crash import train_until_killed, was_torn
from demo.digests import differences, digests
from demo.history import History
from demo.log import Log, read_log, stdlib_folder
from demo.model import Recommender
from demo.neighbours import neighbour_names
from demo.progress import RunLine, progress_display
from demo.report import ReportedRun, figures_table
from demo.spec import RunSpec, SaverName
from demo.timeline import draw_timeline

KILL_TRIES_MAX = 8
DIFFERENCES_SHOWN = 8
NEIGHBOURS_COUNT = 6
QUERIES = ("len", "append", "os", "path", "ValueError", "socket", "thread", "int")
CHECKPOINTS_NAME = "killed"


class StoryFailedError(RuntimeError):
    """Something that the demo is to show is not so."""


@dataclass(frozen=True)
class RunShape:
    """What all runs have in common; see RunSpec."""

    steps: int
    every_steps: int
    cold_rows_count: int
    device: str = "cpu"
    cache_rows: int = 0
    threads: int = 1
    dim: int = 64
    batch_size: int = 1024
    files_max: int | None = None


@dataclass(frozen=True)
class Killed:
    """A run that was killed while the save of `save_step` was in flight, `tries_count` tries needed."""

    history: History
    save_step: int
    tries_count: int


def tell_story(shape: RunShape, *, runs: Path, picture: Path, console: Console) -> None:
    """Do it all and print it. Raises StoryFailedError or ChildFailedError."""
    log = read_log(stdlib_folder(), files_max=shape.files_max)
    log.save(runs / "log.npz")
    _print_log(log, console)
    if shape.cache_rows:
        console.print(f"tables: rows on the host, and of each a cache of {shape.cache_rows:,} on {shape.device}")
    stage = _Stage(shape, runs)
    with progress_display(console) as progress:
        undisturbed = stage.run("undisturbed", "asyncckpt", progress)
        blocking = stage.run("blocking", "torch.save", progress)
        # Nothing of them is needed any more, and with --scale they are gigabytes.
        for name in ("undisturbed", "blocking"):
            shutil.rmtree(runs / name)
        killed = stage.kill(progress)
        committed = asyncckpt.list_steps(runs / CHECKPOINTS_NAME)
        resumed = stage.run(CHECKPOINTS_NAME, "asyncckpt", progress, title="resumed")
    if resumed.resumed is None or resumed.resumed.step != committed[-1]:
        raise StoryFailedError(f"resumed from {resumed.resumed}, expected the newest committed step {committed[-1]}")
    _print_crash(killed, committed, console)
    loaded = stage.load(CHECKPOINTS_NAME)
    check_same("the resumed run", resumed.digests, "the undisturbed run", undisturbed.digests)
    check_same("its last checkpoint", digests(loaded), "the resumed run", resumed.digests)
    compared = f"{len(undisturbed.digests)} columns, tensors and values"
    console.print(
        f"[bold green]bit for bit the same:[/] undisturbed run, resumed run, its last checkpoint ({compared})"
    )
    for query, names in neighbour_names(loaded, log, QUERIES, count=NEIGHBOURS_COUNT).items():
        console.print(f"  near [bold]{query:<12}[/]{escape(', '.join(names))}")
    recovered = f"{resumed.resumed.step}, killed in {killed.save_step}"
    reported = [
        ReportedRun("asyncckpt", [undisturbed]),
        ReportedRun("killed + resumed", [killed.history, resumed], recovered),
        ReportedRun("torch.save", [blocking]),
    ]
    console.print(figures_table(reported))
    draw_timeline({"asyncckpt": undisturbed, "torch.save": blocking}, picture)
    console.print(f"timeline of step times and saves: {picture}", soft_wrap=True)


def check_same(left: str, left_digests: Mapping[str, str], right: str, right_digests: Mapping[str, str]) -> None:
    """Raise StoryFailedError with the names of what is not the same."""
    different = differences(left_digests, right_digests)
    if different or not left_digests:
        shown = ", ".join(different[:DIFFERENCES_SHOWN])
        raise StoryFailedError(f"{left} and {right} differ in {len(different)} of {len(right_digests)} parts: {shown}")


class _Stage:
    """Starts training processes in folders below `runs`."""

    def __init__(self, shape: RunShape, runs: Path) -> None:
        self._shape = shape
        self._runs = runs

    def run(self, name: str, saver: SaverName, progress: Progress, *, title: str | None = None) -> History:
        """Run a training process to its end."""
        spec, history = self._spec(name, saver), History()
        line = RunLine(progress, f"{title or name}, {saver}", steps=spec.steps)
        with Child(spec, stderr_path=self._stderr_path(name)) as child:
            for event in child.events():
                history.take(event)
                line.watch(event)
        line.stop()
        return history

    def kill(self, progress: Progress) -> Killed:
        """Run and kill until a kill hits a save."""
        spec = self._spec(CHECKPOINTS_NAME, "asyncckpt")
        for tries_count in range(1, KILL_TRIES_MAX + 1):
            shutil.rmtree(spec.directory, ignore_errors=True)
            line = RunLine(progress, "to be killed, asyncckpt", steps=spec.steps)
            stderr_path = self._stderr_path(CHECKPOINTS_NAME)
            history, save_step = train_until_killed(spec, stderr_path=stderr_path, watch=line.watch)
            line.stop()
            if was_torn(Path(spec.directory), save_step):
                line.note(f"[red]SIGKILL in the save of step {save_step}")
                return Killed(history, save_step, tries_count)
            line.note(f"[red]SIGKILL came too late for the save of step {save_step}[/], once more")
        raise StoryFailedError(f"none of {KILL_TRIES_MAX} kills hit a save; a larger --scale makes saves take longer")

    def load(self, name: str) -> Recommender:
        """Load the newest checkpoint into a model of our own."""
        spec = self._spec(name, "asyncckpt")
        recommender = Recommender(dim=spec.dim, seed=spec.seed, device=spec.device, cache_rows=spec.cache_rows)
        recommender.load(spec.directory)
        return recommender

    def _spec(self, name: str, saver: SaverName) -> RunSpec:
        shape = self._shape
        return RunSpec(
            saver=saver,
            directory=str(self._runs / name),
            log_path=str(self._runs / "log.npz"),
            steps=shape.steps,
            every_steps=shape.every_steps,
            cold_rows_count=shape.cold_rows_count,
            device=shape.device,
            cache_rows=shape.cache_rows,
            dim=shape.dim,
            batch_size=shape.batch_size,
            threads=shape.threads,
        )

    def _stderr_path(self, name: str) -> Path:
        return self._runs / f"{name}.stderr"


def _print_log(log: Log, console: Console) -> None:
    top = log.counts[:10].sum() / log.tokens.size
    once = (log.counts == 1).mean()
    console.print(
        f"log: {log.tokens.size:,} identifiers in {log.file_ids.size:,} files of the standard library, "
        f"{len(log.names):,} distinct; ten of them make {top:.0%} of the log, {once:.0%} occur once"
    )


def _print_crash(killed: Killed, committed: list[int], console: Console) -> None:
    tries = "" if killed.tries_count == 1 else f" (at try {killed.tries_count}: the kills before came too late)"
    console.print(
        f"SIGKILL hit the save of step {killed.save_step}{tries}: its data had no manifest; "
        f"committed steps were {committed}, resumed from {committed[-1]}"
    )
