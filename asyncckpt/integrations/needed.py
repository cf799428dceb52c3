"""The library that an integration is for, or an error that names the package to install."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import version
from typing import Any

from asyncckpt.errors import UnsupportedError


def needed(module: str, package: str, at_least: str | None = None) -> Any:
    """Import a module of another library. UnsupportedError where the package is not installed, or is too old."""
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # It is there, and lacks something itself.
        what = f"this integration needs the package {package!r}, which is not installed"
        raise UnsupportedError(what, hint=f"pip install {package}") from error
    if at_least is not None and _numbers(version(package)) < _numbers(at_least):
        what = f"this integration needs {package} {at_least} or newer"
        raise UnsupportedError(what, found=version(package), hint=f"pip install '{package}>={at_least}'")
    return found


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:2]]
