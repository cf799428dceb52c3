"""A training process seen from the demo: started fresh (never forked), read line by line, killed when asked."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from demo.events import Event, decode_event
from demo.spec import RunSpec

RUN_SECONDS_MAX = 3600.0
STDERR_LINES_SHOWN = 15
REPOSITORY = Path(__file__).resolve().parents[1]


class ChildFailedError(RuntimeError):
    """A training process ended by itself, and not well."""


class Child:
    """One training process. Leaving the `with` block ends it, whatever happened inside."""

    def __init__(self, spec: RunSpec, *, stderr_path: Path) -> None:
        self._stderr_path = stderr_path
        with stderr_path.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "demo.train", spec.to_json()],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._watchdog = threading.Timer(RUN_SECONDS_MAX, self._process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    def events(self) -> Iterator[Event]:
        """Yield what the process tells until it ends. Raises ChildFailedError when it did not end well."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield decode_event(line)
        if self._process.wait(RUN_SECONDS_MAX) != 0:
            lines = self._stderr_path.read_text(errors="replace").splitlines()[-STDERR_LINES_SHOWN:]
            what = f"training process ended with status {self._process.returncode}"
            raise ChildFailedError("\n".join([what, *lines]))

    def kill(self) -> None:
        """Send SIGKILL and wait until the process is gone: no handler runs, nothing is flushed.

        Do not ask for `events()` afterwards; the last line may be torn.
        """
        self._process.kill()
        self._process.wait(RUN_SECONDS_MAX)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watchdog.cancel()
        if self._process.poll() is None:
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
