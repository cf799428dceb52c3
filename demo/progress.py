"""A progress bar for a training process, fed by its events."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from demo.events import Event, Resumed, SaveBegun, SaveEnded, SaveSkipped, StepsDone


def progress_display(console: Console) -> Progress:
    """Make the display; every run adds a line to it."""
    return Progress(
        TextColumn("{task.description:<26}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]:>6}"),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


class RunLine:
    """One line of the display."""

    def __init__(self, progress: Progress, title: str, *, steps: int) -> None:
        self._progress = progress
        self._task: TaskID = progress.add_task(title, total=steps, loss="", note="starting")

    def watch(self, event: Event) -> None:
        """Show what an event tells."""
        match event:
            case StepsDone():
                done = event.first + len(event.seconds) - 1
                self._progress.update(self._task, completed=done, loss=f"{event.loss:.3f}")
            case SaveBegun():
                self.note(f"[yellow]saving step {event.step}")
            case SaveEnded():
                self.note(f"[green]saved step {event.step}")
            case SaveSkipped():
                self.note(f"[yellow]step {event.step} not saved, a save is in flight")
            case Resumed():
                self._progress.update(self._task, completed=event.step)
                self.note(f"[green]resumed from step {event.step}")

    def note(self, text: str) -> None:
        self._progress.update(self._task, note=text)

    def stop(self) -> None:
        self._progress.stop_task(self._task)
