"""What the library logs, on the logger `asyncckpt`: docs/observability.md has each line, and what to do.

A logging handler that raises must not change how a save ends. Nothing is logged in a signal handler.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncckpt.model.result import LoadReport, SaveResult

OFTEN_S = 600.0

_log = logging.getLogger("asyncckpt")
_told: dict[tuple[str, str], tuple[float, int]] = {}  # When a line was logged last, and how many were not since then.


def is_logged() -> bool:
    """Return whether somebody wants to know of what goes well."""
    return _log.isEnabledFor(logging.INFO)


def log_info(message: str, *values: object, **fields: object) -> None:
    """Log what has gone well. fields: for handlers that write JSON, each with asyncckpt_ before its name."""
    with contextlib.suppress(Exception):
        _log.info(message, *values, extra={f"asyncckpt_{name}": value for name, value in fields.items()})


def log_restored(report: LoadReport) -> None:
    """Log what a loop goes on from."""
    missing = f", missing: {', '.join(report.missing[:8])}" if report.missing else ""
    log_info(
        "step %d of %s is restored: %.1f MiB in %.2f s%s",
        report.step, report.path, report.bytes_read / 2**20, report.seconds, missing,
        event="restored", path=str(report.path), step=report.step, bytes=report.bytes_read, seconds=report.seconds,
        missing=list(report.missing),
    )  # fmt: skip


def log_ended(result: SaveResult, why: str, *, rank: int) -> None:
    """Log that a loop ends here, and whether its last step is saved: other ranks may have skipped it."""
    if rank == 0:
        what = "not saved, another rank has skipped it" if result.skipped else "saved"
        message, step, path = "step %d of %s is %s, and the process ends: %s", result.step, result.path
        log_info(message, step, path, what, why, event="ended", path=str(path), step=step, skipped=result.skipped)


def log_warning(message: str, *values: object) -> None:
    with contextlib.suppress(Exception):
        _log.warning(message, *values)


def log_at_times(kind: str, path: object, message: str, *values: object) -> None:
    """Log a warning of a directory that may come with every save: one of a kind in ten minutes, then with a count."""
    now, key = time.monotonic(), (kind, str(path))
    last, left_out = _told.get(key, (-OFTEN_S, 0))
    if now - last < OFTEN_S:
        _told[key] = last, left_out + 1
        return
    _told[key] = now, 0
    log_warning(f"{message}%s", *values, f"; {left_out} more since the last such line" if left_out else "")


def log_exception(message: str, *values: object) -> None:
    """Log a warning with the exception that is being handled."""
    with contextlib.suppress(Exception):
        _log.exception(message, *values)
