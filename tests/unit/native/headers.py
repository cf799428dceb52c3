"""What a C header declares, and whether a declaration for ctypes is the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

INCLUDE = Path(__file__).parents[3] / "csrc" / "include"


def text_of(header: Path) -> str:
    return re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)


def functions_of(header: Path) -> list[tuple[str, str, list[str]]]:
    """Return (name, result, arguments) of each function."""
    text = text_of(header)
    found = re.findall(r"AC_API\s+([\w\s]+?[\s*]+)(ac_\w+)\(([^)]*)\)", text)
    assert len(found) == text.count("AC_API ") - text.count("define AC_API ")
    return [
        (name, result.strip(), [] if arguments.strip() == "void" else arguments.split(","))
        for result, name, arguments in found
    ]


def check_arguments(
    declared: tuple[Any, Sequence[Any]], result: str, arguments: list[str], allowed: Callable[[str], list[Any]]
) -> None:
    declared_result, declared_arguments = declared
    assert declared_result in allowed(result)
    assert len(declared_arguments) == len(arguments)
    for kind, argument in zip(declared_arguments, arguments, strict=True):
        c_type = re.sub(r"\w+$", "", argument.strip())
        assert kind in allowed(c_type), f"{argument.strip()!r} is declared as {kind}"
