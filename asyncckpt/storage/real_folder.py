"""The folder to which a path leads, over links. For files of other libraries: nothing of a checkpoint is a link."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from asyncckpt.storage.directory import Directory


@contextlib.contextmanager
def real_folder(path: Path) -> Iterator[tuple[Directory, str]]:
    """Give the folder, opened, and the name in it."""
    real = Path(os.path.realpath(path))
    with Directory.open(real.parent) as folder:
        yield folder, real.name
