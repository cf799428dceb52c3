"""The command line: `asyncckpt ls | show | verify DIR`. Reads checkpoints, and never writes or deletes."""

from asyncckpt.cli.commands import app

__all__ = ["app"]
