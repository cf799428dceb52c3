"""`python -m asyncckpt` is the command `asyncckpt`."""

from asyncckpt.cli import app

app()
