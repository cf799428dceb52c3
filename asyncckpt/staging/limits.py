"""How much memory staging may take by default: a share of the smaller of what psutil says is available and what the
cgroups of this process still allow (version 1 and 2). Arenas that the process holds count as free.

A cgroup counts the page cache of its files as used, and gives it up when it comes to its limit: what has not been used
for long at once. So that counts as free here too, or no snapshot would fit in a container that has read its data.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil

DEFAULT_SHARE = 0.7


@dataclass(frozen=True)
class _Names:
    """The files of a cgroup, and the line of memory.stat that says what can be reclaimed in it and all below it."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def spare_bytes(held_bytes: int = 0) -> int:
    """Return the bytes that this process may take now, with those that it holds for this already.

    A cgroup kills at its limit, and a step of training needs memory again that it has given back: as much as the
    process has had at its peak.
    """
    available = psutil.virtual_memory().available + held_bytes
    cgroup = cgroup_free_bytes()
    return available if cgroup is None else min(available, max(0, cgroup + held_bytes - _given_back_bytes()))


def default_limit_bytes(held_bytes: int) -> int:
    """Return the bytes that all arenas together may take now."""
    return int(spare_bytes(held_bytes) * DEFAULT_SHARE)


def _given_back_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return how much less memory this process has now than at its peak; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (line.split(":", 1) for line in status.read_text().splitlines() if line.startswith(("Vm", "RssAnon")))
        kib = {name: int(size.split()[0]) for name, size in lines}
        # What was mapped of files counts there, too: a step needs no more than as much again as the process has.
        return min(kib["VmHWM"] - kib["VmRSS"], kib["RssAnon"]) << 10
    return 0


def cgroup_free_bytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return what is left below the tightest memory limit of our cgroups; None without any."""
    frees = []
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                frees += _walk_up(root, path, _V2)
            elif "memory" in controllers.split(","):
                frees += _walk_up(root / "memory", path, _V1)
    return min(frees, default=None)


def _walk_up(root: Path, path: str, names: _Names) -> list[int]:
    """Return the free bytes below the limit of a cgroup and of each of its parents, if visible in a container."""
    frees = []
    folder = root / path.lstrip("/")
    while folder == root or root in folder.parents:
        with contextlib.suppress(OSError, ValueError):
            # "max" is no number and so no limit.
            limit, usage = int((folder / names.limit).read_text()), int((folder / names.usage).read_text())
            frees.append(max(0, limit - usage + min(usage, _reclaimable(folder, names))))
        folder = folder.parent
    return frees


def _reclaimable(folder: Path, names: _Names) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == names.reclaimable:
                return int(count)
    return 0
