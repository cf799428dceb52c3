"""Text for people: columns that are never cut off, however narrow the terminal is, so that pipes get whole lines.

Names come from files of unknown origin, so control characters in them are shown as escapes.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_GAP = "  "
TERMINAL_CHARACTERS_MAX = 400  # Of one value on a terminal; pipes and --json get all of it.


def print_columns(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> None:
    """Print rows of cells below their heads, "-" for an empty one; the columns in `right` are flush right."""
    cells = [list(heads), *([safe(cell) or "-" for cell in row] for row in rows)]
    flush_right = set(right)
    columns = []
    for head, *column in zip(*cells, strict=True):
        widths = [*map(_width, (head, *column))]
        widest = max(widths)
        pairs = [(cell, " " * (widest - width)) for cell, width in zip((head, *column), widths, strict=True)]
        columns.append([pad + cell if head in flush_right else cell + pad for cell, pad in pairs])
    print("\n".join(_GAP.join(row).rstrip() for row in zip(*columns, strict=True)))


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print names and their facts, one below the other."""
    known = list(facts)
    width = max(len(name) for name, _ in known)
    for name, fact in known:
        print(f"{name.ljust(width)}{_GAP}{safe(fact)}")


def size(bytes: int) -> str:
    """Return bytes with a unit, three to four digits."""
    value = float(bytes)
    for unit in _UNITS:
        if value < 1000 or unit == _UNITS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    raise AssertionError("the last unit ends the loop")


def count_of(count: int, noun: str, nouns: str = "") -> str:
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def safe(raw: str) -> str:
    """Return foreign text with control characters as escapes."""
    if raw.isascii() and raw.isprintable():
        return raw
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in raw)


def shown_value(value: object) -> str:
    """Return a plain value; on a terminal, a long one by its beginning."""
    text = repr(value)
    if len(text) > TERMINAL_CHARACTERS_MAX and sys.stdout.isatty():
        return f"{text[:TERMINAL_CHARACTERS_MAX]} ... {len(text) - TERMINAL_CHARACTERS_MAX:,} more characters (--json)"
    return text


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
