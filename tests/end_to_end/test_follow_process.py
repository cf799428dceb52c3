"""A second process sees every committed step once, in order, across its own death."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.end_to_end.chains import TrainingRun
from tests.end_to_end.follower_process import digest_of

REPOSITORY = Path(__file__).resolve().parents[2]


class FollowerProcess:
    """The process of follower_process.py."""

    def __init__(self, path: Path, cursor: Path) -> None:
        command = [sys.executable, "-m", "tests.end_to_end.follower_process", str(path), str(cursor)]
        self._process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)

    def next(self) -> dict[str, Any]:
        """What it says of the next step that it has loaded."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server has ended"
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        """SIGKILL; it was waiting for a step."""
        self._process.kill()
        rest, _ = self._process.communicate(timeout=60)
        assert rest == ""


def test_a_second_process_sees_every_step_once_across_a_restart(tmp_path: Path) -> None:
    path, cursor = tmp_path / "run", tmp_path / "cursor.json"
    server = FollowerProcess(path, cursor)  # Before there is a directory.
    seen, digests = [], {}
    with TrainingRun(path, keep=20) as run:

        def save(step: int, kind: str = "auto") -> None:
            run.save(step, kind)
            digests[step] = digest_of(run.state)

        for step in (1, 2, 3):
            save(step)
            seen.append(server.next())
        server.kill()
        save(4)
        save(5)
        server = FollowerProcess(path, cursor)
        save(6)
        seen += [server.next() for _ in range(3)]
        save(7, "full")
        save(8)
        seen += [server.next() for _ in range(2)]
        server.kill()
    assert [line["step"] for line in seen] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {line["step"]: line["digest"] for line in seen} == digests
    assert [line["kind"] for line in seen] == ["full", *["delta"] * 5, "full", "delta"]
    # A new process has empty tables: its first load is a whole one, though the step before was seen.
    changed = [line["step"] for line in seen if line["rows"]["user"] < 100]
    assert changed == [2, 3, 5, 6, 8]
