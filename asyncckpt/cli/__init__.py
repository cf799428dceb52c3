"""The command line: `asyncckpt COMMAND DIR ...`; docs/command-line.md has every command."""

from asyncckpt.cli.commands import main, run

__all__ = ["main", "run"]
