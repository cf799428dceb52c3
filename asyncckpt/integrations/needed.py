"""The library that an integration is for, or an error that names the package to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from asyncckpt.errors import UnsupportedError


def needed(module: str, package: str) -> Any:
    """Import a module of another library. UnsupportedError where the package is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # It is there, and lacks something itself.
        what = f"this integration needs the package {package!r}, which is not installed"
        raise UnsupportedError(what, hint=f"pip install {package}") from error
