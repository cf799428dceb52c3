"""`python -m asyncckpt.cli`, where the command is not on the path."""

from asyncckpt.cli import app

app(prog_name="asyncckpt")
