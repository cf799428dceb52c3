"""What the background logs. A logging handler that raises must not change how a save ends."""

from __future__ import annotations

import contextlib
import logging

_log = logging.getLogger("asyncckpt")


def log_warning(message: str, *values: object) -> None:
    with contextlib.suppress(Exception):
        _log.warning(message, *values)


def log_exception(message: str, *values: object) -> None:
    """Log a warning with the exception that is being handled."""
    with contextlib.suppress(Exception):
        _log.exception(message, *values)
