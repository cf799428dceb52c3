"""The command that waits for steps."""

from __future__ import annotations

import contextlib
from argparse import ArgumentTypeError, Namespace

from asyncckpt.cli import as_json, screen
from asyncckpt.cli.answers import Commands, add_json, asked, file, natural
from asyncckpt.cli.findings import ExitCode


def add_commands(commands: Commands) -> None:
    made = commands.add(
        "follow", follow, "print each step as it is committed, until Ctrl-C", "The directory need not exist yet."
    )
    made.add_argument("--after", metavar="STEP", type=natural, help="start after this step; default: with the oldest")
    made.add_argument("--cursor", metavar="FILE", type=file, help="a small file that remembers the last step printed")
    made.add_argument("--poll", metavar="SECONDS", type=_seconds, default=1.0, help="seconds between two checks (1)")
    made.add_argument("--until", metavar="STEP", type=natural, help="end after this or a later step; default: never")
    add_json(made, "print one JSON object a line")


def follow(wanted: Namespace) -> ExitCode:
    import asyncio

    from asyncckpt.follower import follow as follow_steps

    async def print_updates() -> None:
        async with follow_steps(
            wanted.path, after=wanted.after, cursor=wanted.cursor, poll_seconds=wanted.poll, until=wanted.until
        ) as updates:
            async for update in updates:
                (as_json if wanted.json else screen).print_update(update)
                update.done()

    with contextlib.suppress(KeyboardInterrupt):  # The way to end it.
        asked(lambda: asyncio.run(print_updates()), json=wanted.json)
    return ExitCode.OK


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0.01")
    return seconds
