"""`python -m asyncckpt`, where the command is not on the path."""

from asyncckpt.cli import main

main()
