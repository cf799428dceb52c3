"""`python -m demo`: see the package's docstring for the story."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from demo.child import ChildFailedError
from demo.crash import SAVES_BEFORE_KILL
from demo.story import CHECKPOINTS_NAME, RunShape, StoryFailedError, tell_story

app = typer.Typer(add_completion=False)

STEPS, EVERY_STEPS = 1200, 150
COLD_ROWS = 100_000
CACHE_ROWS = 16_384  # A batch has some 4,000 items.
LOG_WIDTH = 110
PICTURE_NAME = "timeline.png"


@app.command()
def main(
    scale: Annotated[float, typer.Option(min=0.0, help="how many cold rows the tables hold; 20 is about 2 GiB")] = 1.0,
    out: Annotated[Path, typer.Option(help="where the picture goes, and, while it runs, the checkpoints")] = Path(
        ".demo"
    ),
    steps: Annotated[int, typer.Option(min=10, help="training steps of a run")] = STEPS,
    every: Annotated[int, typer.Option(min=1, help="steps between two saves")] = EVERY_STEPS,
    threads: Annotated[int, typer.Option(min=1, help="threads that torch trains with")] = 1,
    gpu: Annotated[bool, typer.Option("--gpu", help="train on a GPU, with a cache of each table there")] = False,
    keep: Annotated[bool, typer.Option(help="keep the checkpoints")] = False,
) -> None:
    """Train, kill in the middle of a save, resume, compare bit for bit; beside it the same run with torch.save."""
    if steps <= every * (SAVES_BEFORE_KILL + 1):
        raise typer.BadParameter(f"steps is {steps}; the kill needs {SAVES_BEFORE_KILL + 1} saves before the last step")
    if gpu and not torch.cuda.is_available():
        typer.echo(f"--gpu needs a GPU: torch {torch.__version__} finds none that it can use", err=True)
        raise typer.Exit(1)
    begun = time.perf_counter()
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH)
    runs = Path(tempfile.mkdtemp(prefix="runs-", dir=out))
    shape = RunShape(
        steps=steps,
        every_steps=every,
        cold_rows_count=round(scale * COLD_ROWS),
        threads=threads,
        device="cuda" if gpu else "cpu",
        cache_rows=CACHE_ROWS if gpu else 0,
    )
    try:
        tell_story(shape, runs=runs, picture=out / PICTURE_NAME, console=console)
    except (StoryFailedError, ChildFailedError) as error:
        console.print(f"[bold red]failed:[/] {escape(str(error))}\nthe checkpoints are kept in {runs}")
        raise typer.Exit(1) from error
    except BaseException:
        shutil.rmtree(runs)
        raise
    if keep:
        console.print(f"the checkpoints are kept in {runs}; look at them with: asyncckpt ls {runs / CHECKPOINTS_NAME}")
    else:
        shutil.rmtree(runs)
    console.print(f"{time.perf_counter() - begun:.0f} s in all")


if __name__ == "__main__":
    app()
