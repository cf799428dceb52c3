"""The command line in this process: what it prints, and how it ends."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import dataclass
from typing import Any

from asyncckpt.cli import run


@dataclass(frozen=True)
class Result:
    """`output` is all of it, in the order in which it was printed."""

    exit_code: int
    stdout: str
    stderr: str
    output: str


class _Both(io.StringIO):
    def __init__(self, output: io.StringIO) -> None:
        super().__init__()
        self._output = output

    def write(self, text: str) -> int:
        self._output.write(text)
        return super().write(text)


def invoke(*arguments: object) -> Result:
    """Run one command with these words."""
    output = io.StringIO()
    stdout, stderr = _Both(output), _Both(output)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            code: object = run([str(word) for word in arguments])
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return Result(code, stdout.getvalue(), stderr.getvalue(), output.getvalue())


def answer_of(result: Result) -> Any:
    """Return what it printed as JSON."""
    return json.loads(result.stdout)


def check_refused(result: Result, code: int, words: str) -> None:
    """One line, with these words, and nothing else."""
    assert result.exit_code == code, result.output
    assert re.search(words, result.stderr), result.stderr
    assert (result.stdout, result.stderr.count("\n"), "\\n" in result.stderr) == ("", 1, False)
