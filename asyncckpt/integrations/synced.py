"""What another library has written, made durable."""

from __future__ import annotations

import os


def sync_path(path: str | os.PathLike[str]) -> None:
    """Make a file, or the names in a folder, survive loss of power. OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
