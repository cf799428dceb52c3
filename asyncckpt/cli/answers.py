"""What all commands share: their arguments, and how an error of the library ends them: one line and a code."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from asyncckpt.cli import as_json, screen
from asyncckpt.cli.findings import EXIT_CODES, code_of
from asyncckpt.errors import CheckpointError
from asyncckpt.model.store_url import StoreUrl

Answer = TypeVar("Answer")


def given(text: str) -> str:
    """Refuse an empty argument, as of a shell's variable that is not set: as a path it is the current folder."""
    if not text:
        raise ArgumentTypeError("it is empty")
    return text


def place(text: str) -> Path | str:
    """Take an argument as a path, or as the URL that it is: a path would lose one of its slashes."""
    return text if StoreUrl.is_url(text) else file(text)


def file(text: str) -> Path:
    return Path(given(text))


class Commands:
    """The commands of the program, with their parsers."""

    def __init__(self, parsers: Any) -> None:
        self._parsers = parsers
        self.by_name: dict[str, ArgumentParser] = {}

    def add(
        self, name: str, command: Callable[[Namespace], int], what: str, more: str, *, directory: bool = True
    ) -> ArgumentParser:
        """Add a command; its first argument is a checkpoint directory, unless it has none."""
        parser: ArgumentParser = self._parsers.add_parser(
            name, help=what, description=f"{what[0].upper()}{what[1:]}. {more}", epilog=EXIT_CODES, allow_abbrev=False
        )
        parser.set_defaults(command=command)
        if directory:
            parser.add_argument(
                "path", metavar="DIR", type=place, help="a checkpoint directory, or the URL of one in an object store"
            )
        self.by_name[name] = parser
        return parser


def add_step(parser: ArgumentParser) -> None:
    parser.add_argument("step", metavar="STEP", type=natural, nargs="?", help="which checkpoint; default: the newest")


def add_json(parser: ArgumentParser, what: str = "print JSON instead of text") -> None:
    parser.add_argument("--json", action="store_true", help=what)


def add_most(parser: ArgumentParser, what: str) -> None:
    parser.add_argument("--most", type=natural, default=40, metavar="N", help=f"show at most N {what}")


def add_dry_run(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only print what would be done")


def natural(text: str) -> int:
    """Return a number that is not negative, as an argument."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def asked(ask: Callable[[], Answer], *, json: bool) -> Answer:
    """Return an answer of the library; its error ends the program."""
    try:
        return ask()
    except CheckpointError as error:
        if json:
            as_json.print_error(error)
        screen.print_error(error)
        sys.exit(code_of(error))


@contextmanager
def said(what: str) -> Iterator[None]:
    """Show on a terminal what is running; remove the line when it is done."""
    if not sys.stderr.isatty():
        yield
        return
    print(f"{what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
