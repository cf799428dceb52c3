"""The command line: `asyncckpt ls | show | verify | compact | follow DIR`. Only `compact` writes; none deletes."""

from asyncckpt.cli.commands import app

__all__ = ["app"]
