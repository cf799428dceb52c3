"""Folders that cannot be written to, not even by root, and disks that are soon full; where the system has no such, the
test is skipped.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534


def run_tool(*command: object) -> None:
    """Run a program of the system, or skip the test saying why it does not work here."""
    try:
        run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"{command[0]} does not work here: {error}")
    if run.returncode:
        pytest.skip(f"{command[0]} does not work here: {run.stderr.strip()}")


@functools.cache
def as_nobody() -> tuple[str, ...]:
    """The start of a command that runs as a user for whom modes hold."""
    command = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    run_tool(*command, sys.executable, "-c", "")
    return command


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
def small_disk(path: Path, *, mib: int, inodes: int = 0) -> Iterator[None]:
    """The folder as a disk of its own, of so many MiB and inodes (0: any number)."""
    run_tool("mount", "-t", "tmpfs", "-o", f"size={mib}m,nr_inodes={inodes}", "none", path)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)
