"""Folders that cannot be written to, not even by root, and disks that are soon full; where the system has no such, the
test is skipped.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def run_tool(*command: object) -> None:
    """Run a program of the system, or skip the test saying why it does not work here."""
    try:
        run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"{command[0]} does not work here: {error}")
    if run.returncode:
        pytest.skip(f"{command[0]} does not work here: {run.stderr.strip()}")


@contextmanager
def read_only_mount(path: Path) -> Iterator[None]:
    """The folder as a read-only file system."""
    run_tool("mount", "--bind", path, path)
    try:
        run_tool("mount", "-o", "remount,ro,bind", path)
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@contextmanager
def small_disk(path: Path, *, mib: int) -> Iterator[None]:
    """The folder as a disk of its own, of so many MiB."""
    run_tool("mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", path)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)
