"""Checks of plain arguments: UsageError with their name, what was given and what is expected."""

from __future__ import annotations

import sys
import threading
from typing import Any

from asyncckpt.errors import must_be

INT_MAX = 2**63 - 1


def as_int(value: Any) -> Any:
    """Return a NumPy integer as an int, anything else as it is."""
    numpy = sys.modules.get("numpy")  # Not imported here: where nobody has, there are none of its integers.
    return int(value) if numpy is not None and isinstance(value, numpy.integer) else value


def check_int(name: str, value: Any, *, at_least: int, at_most: int = INT_MAX, optional: bool = False) -> None:
    """Check for an int, not a bool, within bounds; with `optional`, None too."""
    if optional and value is None:
        return
    if type(value) is not int or not at_least <= value <= at_most:
        bounds = f"an int of at least {at_least}" + (f", at most {at_most}" if at_most < INT_MAX else "")
        bounds += ", or None" if optional else ""
        raise must_be(name, bounds, value)


def check_seconds(name: str, value: Any, *, above_zero: bool = False, unit: str = "seconds") -> None:
    """Check for seconds, or hours, that a wait can take."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if above_zero and is_number and value <= 0:
        raise must_be(name, f"more than 0 {unit}", value)
    if not is_number or not 0 <= value <= threading.TIMEOUT_MAX:
        raise must_be(name, f"a number of {unit} in [0, {threading.TIMEOUT_MAX:.0f}]", value)


def check_choice(name: str, value: Any, choices: tuple[object, ...]) -> None:
    """Check for one of some words, or a bool where that is one of them."""
    if not isinstance(value, (str, bool)) or value not in choices:
        raise must_be(name, choices, value)


def check_type(name: str, value: Any, kind: type) -> None:
    """Check for an object of a class."""
    if not isinstance(value, kind):
        raise must_be(name, "True or False" if kind is bool else kind, type(value))


def is_text(name: str) -> bool:
    """Return whether a str is one that files and manifests can have: what another library wrote may hold halves of
    characters."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
