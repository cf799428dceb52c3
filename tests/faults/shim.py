"""Compile shim.c, and control it in a process that has it loaded.

A process gets the shim with LD_PRELOAD. It does nothing until `Shim.arm` names a folder and what shall happen there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
COMPILE_SECONDS_MAX = 60


class Action(IntEnum):
    """What happens at the operation that is hit."""

    PASS = 0
    KILL_BEFORE = 1
    KILL_AFTER = 2
    FAIL = 3  # The operation is not done and fails.
    LIE = 4  # The operation is done and reported as failed.
    SHORT = 5  # A read or write moves only a part.
    ZERO = 6  # A read or write moves nothing and reports 0.
    DELAY = 7  # The operation is done, later by as many milliseconds as `error` says.


class OpKind(IntEnum):
    """Kinds of operations; OPEN is without O_CREAT, CREATE with it."""

    OPEN = 0
    CREATE = 1
    READ = 2
    WRITE = 3
    TRUNCATE = 4
    ALLOCATE = 5
    SYNC = 6
    RENAME = 7
    LINK = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    CLOSE = 12
    MARK = 13  # No operation, but a line that Shim.mark has put into the log.


ALL_KINDS = frozenset(OpKind) - {OpKind.MARK}
CHANGING_KINDS = ALL_KINDS - {OpKind.OPEN, OpKind.READ, OpKind.CLOSE}
SPACE_TAKING_KINDS = CHANGING_KINDS - {OpKind.UNLINK, OpKind.RMDIR, OpKind.TRUNCATE}

# What goes on failing while the fault lasts: a full disk can still be read, a dead one cannot.
STICKY_KINDS = {
    errno.EIO: ALL_KINDS,
    errno.EACCES: ALL_KINDS,
    errno.EROFS: CHANGING_KINDS,
    errno.ENOSPC: SPACE_TAKING_KINDS,
    errno.EDQUOT: SPACE_TAKING_KINDS,
}


@dataclass(frozen=True)
class DiskFault:
    """What shall happen at operation `at` (-1: at none), and at all later ones of `sticky` kinds."""

    action: Action
    at: int
    error: int = 0
    sticky: frozenset[OpKind] = frozenset()

    @property
    def name(self) -> str:
        """Without the place."""
        reason = f" {errno.errorcode[self.error]}" if self.error else ""
        return f"{'sticky ' if self.sticky else ''}{self.action.name}{reason}"


NOTHING = DiskFault(Action.PASS, at=-1)


class NoCompiler(Exception):
    """There is no C compiler on this machine."""


def compile_shim(folder: Path) -> Path:
    """Return the compiled shim; NoCompiler says why there is none."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompiler("no cc, gcc or clang was found")
    library = folder / "shim.so"
    done = subprocess.run(
        [*compiler.split(), "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(library), str(SOURCE)],
        capture_output=True,
        text=True,
        timeout=COMPILE_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{compiler} cannot compile {SOURCE.name}: {done.stderr}"
    return library


class Shim:
    """The shim of this process; AttributeError when it is not loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._arm = self._library.shim_arm
        self._arm.restype = None
        self._arm.argtypes = [
            ctypes.c_char_p,
            ctypes.c_long,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_int,
        ]
        self._library.shim_mark.restype = None
        self._library.shim_mark.argtypes = [ctypes.c_long]
        for name in ("shim_operations_count", "shim_hits_count"):
            getattr(self._library, name).restype = ctypes.c_long

    def arm(self, watch: Path, fault: DiskFault = NOTHING, *, log: int = -1) -> None:
        """Watch a folder from now on, counting from 0; operations are appended to the file `log` (a descriptor)."""
        sticky = sum(1 << kind for kind in fault.sticky)
        self._arm(os.fsencode(watch), fault.at, fault.action, fault.error, sticky, log)

    def mark(self, number: int) -> None:
        """Put a line of kind MARK into the log."""
        self._library.shim_mark(number)

    def disarm(self) -> None:
        self._library.shim_disarm()

    @property
    def operations_count(self) -> int:
        return int(self._library.shim_operations_count())

    @property
    def hits_count(self) -> int:
        return int(self._library.shim_hits_count())
