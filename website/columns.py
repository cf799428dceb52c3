"""Extension of griffe: parameters that a docstring lists in two columns become a list of definitions.

Docstrings of this package read so, because that is how they are read most, in an editor:

    every     steps between saves; or every_seconds
              between them, with one rank
    keep      which checkpoints stay

or, with one or two of them, `every: steps between saves`. Markdown would make one paragraph of that.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

NAME = r"(?:\*{0,2}[A-Za-z_][\w.]*(?:\(\))?|\"[^\"]+\")"
NAMES = rf"{NAME}(?:,? (?:or )?{NAME})*"
COLUMNS = re.compile(rf"^({NAMES}) {{2,}}(\S.*)$")
COLON = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (\S.*)$")


class Columns(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_definitions(obj.docstring.value)


def with_definitions(text: str) -> str:
    """Return the text of a docstring with its columns as a list of definitions in Markdown."""
    lines: list[str] = []
    indent = 0  # Of the definition that is being read; 0: none is.
    for line in text.splitlines():
        match = COLUMNS.match(line) or COLON.match(line)
        if match is not None:
            names = ", ".join(f"`{name}`" for name in re.split(r", ", match.group(1)))
            lines += ["", names, f":   {match.group(2)}"]
            indent = 1 if COLON.match(line) else match.start(2)
        elif indent and line.strip() and (indent == 1 or line.startswith(" " * min(indent, 4))):
            lines.append(f"    {line.strip()}")
        else:
            if indent and line.strip():
                lines.append("")
            indent = 0
            lines.append(line)
    return "\n".join(lines)
