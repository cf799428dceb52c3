"""The program: its commands, how they are called, and how it ends.

Each command calls the library, prints for people or as JSON, and returns the code of the worst finding (findings.py).
What needs torch is imported by the command that needs it: the others start at once.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import NoReturn

from asyncckpt.cli import change, compare, completion, convert, doctor, follow, look, observe
from asyncckpt.cli.answers import Commands
from asyncckpt.cli.findings import EXIT_CODES, ExitCode
from asyncckpt.errors import nearest
from asyncckpt.version import __version__


def main() -> NoReturn:
    """Run the program. A reader that has had enough, as in `| head`, ends it quietly."""
    gc.set_threshold(100_000)  # Thousands of manifests are no cycles, and looking for some takes a fifth of the time.
    warnings.filterwarnings("ignore", "asyncckpt runs its portable twin")  # doctor says it.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        try:
            code = run(sys.argv[1:])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else ExitCode.FAILED
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except OSError as error:  # Standard output cannot be written: a full disk, a closed descriptor.
        print(f"asyncckpt: the answer cannot be printed: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.FAILED
    sys.exit(code)


def _replace_closed_streams() -> None:
    """Where Python was given no stream, as under cron, errors go nowhere, and an answer fails to be written."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. SystemExit for wrong usage, and where the library raises an error."""
    parser = parser_of_all()[0]
    if not arguments:
        parser.print_help()
        return ExitCode.USAGE
    wanted = parser.parse_args(arguments)
    command: Callable[[Namespace], int] = wanted.command
    return command(wanted)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit; for an unknown word, with the known one that looks like it."""
        found = re.search(r"invalid choice: '([^']*)'", message)
        hint = nearest(found[1], re.findall(r"[\w-]+", message[found.end() :])) if found else None
        super().error(f"{message}; {hint}" if hint else message)


def parser_of_all() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """Return the parser of the program, and those of its commands by name."""
    parser = _Parser(
        prog="asyncckpt",
        description="Inspect, verify, compare, convert and clean up asyncckpt checkpoint directories.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"asyncckpt {__version__}")
    commands = Commands(parser.add_subparsers(metavar="COMMAND", required=True))
    for module in (look, compare, change, convert, follow, observe, doctor):
        module.add_commands(commands)
    completion.add_command(commands, lambda: parser_of_all()[1])
    return parser, commands.by_name
