"""Kill a training process in the middle of a save, and prove that it was in the middle.

1. Let the process train until it has made a few checkpoints.
2. It says that it began another save. Wait for the folder of that save to appear, with bytes of data in it.
3. SIGKILL, at once. The kernel ends all its threads; no handler runs.
4. A save that has its manifest has committed. If this one has, the kill came too late, and only a new try can tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import asyncckpt
from demo.child import Child, ChildFailedError
from demo.events import Event, SaveBegun
from demo.history import History
from demo.spec import RunSpec

SAVES_BEFORE_KILL = 2
WAIT_SECONDS_MAX = 10.0
POLL_SECONDS = 0.0005


def train_until_killed(spec: RunSpec, *, stderr_path: Path, watch: Callable[[Event], None]) -> tuple[History, int]:
    """Run spec and kill it during a save; return what it did, and the step of that save.

    Whether the kill hit is for `was_torn` to say. Raises ChildFailedError when the process ends before.
    """
    history = History()
    with Child(spec, stderr_path=stderr_path) as child:
        for event in child.events():
            history.take(event)
            watch(event)
            if isinstance(event, SaveBegun) and len(history.saves) >= SAVES_BEFORE_KILL:
                wait_for_data(Path(spec.directory), event.step)
                child.kill()
                return history, event.step
    begun_count = len(history.saves) + len(history.begun)
    raise ChildFailedError(
        f"the run ended before it could be killed: {begun_count} saves begun, {history.skipped_count} skipped because "
        f"another one was in flight; more steps between two saves are needed"
    )


def wait_for_data(directory: Path, step: int) -> None:
    """Return when a save has begun to write, or has committed; after WAIT_SECONDS_MAX in any case."""
    until = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < until and not _has_data(directory, step) and not is_committed(directory, step):
        time.sleep(POLL_SECONDS)


def was_torn(directory: Path, step: int) -> bool:
    """Say whether a save left data without a manifest: it had begun to write and had not committed."""
    return _has_data(directory, step) and not is_committed(directory, step)


def is_committed(directory: Path, step: int) -> bool:
    return step in asyncckpt.list_steps(directory)


def _has_data(directory: Path, step: int) -> bool:
    """Look for data/<step>-<attempt>/ with a file in it that has bytes on disk."""
    return any(path.stat().st_blocks > 0 for path in directory.glob(f"data/{step:012d}-*/*"))
