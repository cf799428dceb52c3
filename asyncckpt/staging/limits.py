"""How much host memory a snapshot may take, so that a save never gets the process killed.

The default is a share of what is free: the smaller of what psutil says is available and what the cgroup of this process
still allows (version 1 and 2). Arenas that the process holds already count as free.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

DEFAULT_SHARE = 0.7


def default_limit_bytes(*, held_bytes: int) -> int:
    """Bytes that all arenas together may take now."""
    available = psutil.virtual_memory().available
    cgroup = _cgroup_free_bytes()
    free = available if cgroup is None else min(available, cgroup)
    return int((free + held_bytes) * DEFAULT_SHARE)


def _cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """What is left below the tightest memory limit of our cgroups; None without any."""
    frees = []
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                frees += _walk_up(root, path, limit="memory.max", usage="memory.current")
            elif "memory" in controllers.split(","):
                frees += _walk_up(root / "memory", path, limit="memory.limit_in_bytes", usage="memory.usage_in_bytes")
    return min(frees, default=None)


def _walk_up(root: Path, path: str, *, limit: str, usage: str) -> list[int]:
    """Free bytes below the limit of a cgroup and of each of its parents; in a container it may not be visible."""
    frees = []
    folder = root / path.lstrip("/")
    while folder == root or root in folder.parents:
        with contextlib.suppress(OSError, ValueError):
            # "max" is no number and so no limit.
            frees.append(max(0, int((folder / limit).read_text()) - int((folder / usage).read_text())))
        folder = folder.parent
    return frees
