"""Checks of plain arguments: UsageError with their name, what was given and what is expected."""

from __future__ import annotations

import threading
from typing import Any

from asyncckpt.errors import UsageError
from asyncckpt.format.names import STEP_MAX


def check_int(name: str, value: Any, *, at_least: int, at_most: int | None = None) -> None:
    """An int, no bool, within bounds."""
    if type(value) is not int or value < at_least or (at_most is not None and value > at_most):
        bounds = f"an int of at least {at_least}" + (f", at most {at_most}" if at_most is not None else "")
        raise UsageError(f"{name} is wrong", found=value, expected=bounds)


def check_step(step: Any, *, name: str = "step", or_none: bool = True) -> None:
    """The number of a step; or_none: or None, for the newest or the next one."""
    if (step is not None or not or_none) and (type(step) is not int or not 0 <= step <= STEP_MAX):
        raise UsageError(f"{name} is wrong", found=step, expected=f"an int in [0, {STEP_MAX}]")


def check_seconds(name: str, value: Any, *, above_zero: bool = False) -> None:
    """Seconds that a wait can take."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= threading.TIMEOUT_MAX:
        raise UsageError(f"{name} is wrong", found=value, expected=f"seconds in [0, {threading.TIMEOUT_MAX:.0f}]")
    if above_zero and not value:
        raise UsageError(f"{name} is wrong", found=value, expected="more than 0 seconds")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """One of some words."""
    if value not in choices:
        raise UsageError(f"{name} is wrong", found=value, expected=choices)
