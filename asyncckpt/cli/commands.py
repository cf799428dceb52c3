"""The commands.

Each command calls the library, prints for people (screen.py) or as JSON (as_json.py), and exits with the code of the
worst finding (findings.py). An error of the library becomes one line and a code, never a traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from asyncckpt.checkpoints import describe, list_steps
from asyncckpt.checkpoints import verify as verify_step
from asyncckpt.cli import as_json, screen
from asyncckpt.cli.findings import EXIT_CODES, ExitCode, Finding, code_of, worst_code
from asyncckpt.compaction import compact as compact_step
from asyncckpt.engine.load.verify import VerifyReport
from asyncckpt.errors import CheckpointError, NotFoundError
from asyncckpt.follower import follow as follow_steps

Answer = TypeVar("Answer")


app = typer.Typer(
    help="Look at asyncckpt checkpoint directories, prove them sound, compact and follow them. Only `compact` writes.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="a checkpoint directory: it holds manifests/ and data/")]
Step = Annotated[int | None, typer.Argument(metavar="STEP", min=0, help="which checkpoint; default: the newest")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]


@app.command(epilog=EXIT_CODES)
def ls(path: Directory, json: AsJson = False) -> None:
    """List the checkpoints of a directory, the newest last. Reads manifests only."""
    steps = _asked(lambda: list_steps(path), json=json)
    findings = [finding for step in steps if (finding := _find(describe, path, step)) is not None]
    if json:
        as_json.print_list(path, findings)
    else:
        screen.print_list(_console(), path, findings)
    raise typer.Exit(worst_code(findings))


@app.command(epilog=EXIT_CODES)
def show(
    path: Directory,
    step: Step = None,
    json: AsJson = False,
    blocks: Annotated[int, typer.Option(min=0, help="show at most this many blocks; with --json all of them")] = 40,
) -> None:
    """Show what one checkpoint holds: tables, tensors, metadata, files. Reads its manifest only."""
    info = _asked(lambda: describe(path, step), json=json)
    if json:
        as_json.print_info(path, info)
    else:
        screen.print_info(_console(), path, info, blocks_count_max=blocks)


@app.command(epilog=EXIT_CODES)
def verify(
    path: Directory,
    step: Step = None,
    everything: Annotated[bool, typer.Option("--all", help="verify every checkpoint of the directory")] = False,
    json: AsJson = False,
) -> None:
    """Read every byte of a checkpoint and check it: manifest, file sizes, headers and the digest of every block."""
    if everything and step is not None:
        raise typer.BadParameter("give a STEP or --all, not both")
    steps = _asked(lambda: _steps_to_verify(path, step, everything=everything), json=json)
    findings = _verified(path, steps)
    if json:
        as_json.print_verified(path, findings)
    else:
        screen.print_verified(_console(), path, findings)
    raise typer.Exit(worst_code(findings))


@app.command(epilog=EXIT_CODES)
def compact(path: Directory, step: Step = None, json: AsJson = False) -> None:
    """Fold the chain of a delta into a full checkpoint of the same step. Not while training writes there."""
    with Console(stderr=True).status("compacting"):
        result = _asked(lambda: compact_step(path, step), json=json)
    if json:
        as_json.print_compacted(result)
    else:
        screen.print_compacted(_console(), result)


@app.command(epilog=EXIT_CODES)
def follow(
    path: Directory,
    after: Annotated[int | None, typer.Option(min=0, help="begin after this step; default: with the oldest")] = None,
    cursor: Annotated[Path | None, typer.Option(help="a small file that remembers the last step printed")] = None,
    poll: Annotated[float, typer.Option(min=0.01, help="seconds between two checks")] = 1.0,
    until: Annotated[int | None, typer.Option(min=0, help="end after this step; default: never")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object a line")] = False,
) -> None:
    """Print each step as it is committed, until Ctrl-C. The directory need not exist yet."""
    print_update = as_json.print_update if json else partial(screen.print_update, _console())

    async def print_updates() -> None:
        async with follow_steps(path, after=after, cursor=cursor, poll_seconds=poll, until=until) as updates:
            async for update in updates:
                print_update(update)
                update.done()

    try:
        _asked(lambda: asyncio.run(print_updates()), json=json)
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.OK) from None


def _steps_to_verify(path: Path, step: int | None, *, everything: bool) -> list[int]:
    if step is not None:
        return [step]
    steps = list_steps(path)
    if not steps:
        raise NotFoundError(f"there is no checkpoint in {str(path)!r}")
    return steps if everything else steps[-1:]


def _verified(path: Path, steps: Sequence[int]) -> list[Finding[VerifyReport]]:
    findings = []
    waiting = Console(stderr=True)
    for step in steps:
        with waiting.status(f"verifying step {step}"):
            # Skip a step that retention removes meanwhile, unless it is the only one.
            finding = _find(verify_step, path, step, keep_missing=len(steps) == 1)
        if finding is not None:
            findings.append(finding)
    return findings


def _find(
    ask: Callable[[Path, int], Answer], path: Path, step: int, *, keep_missing: bool = False
) -> Finding[Answer] | None:
    """Return the facts of a step, or its error; None if it was removed since it was listed."""
    try:
        return Finding(step=step, fact=ask(path, step))
    except NotFoundError as error:
        return Finding(step=step, error=error) if keep_missing else None
    except CheckpointError as error:
        return Finding(step=step, error=error)


def _asked(ask: Callable[[], Answer], *, json: bool) -> Answer:
    """Return an answer of the library; its error ends the program."""
    try:
        return ask()
    except CheckpointError as error:
        if json:
            as_json.print_error(error)
        screen.print_error(Console(stderr=True), error)
        raise typer.Exit(code_of(error)) from error


def _console() -> Console:
    """Return standard output, very wide if it is not a terminal, so that pipes get whole lines."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=screen.PIPE_WIDTH)
