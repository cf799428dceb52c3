"""The bench of trainers runs, and gives a figure for every kind of saving. No timing is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.integrations.jobs import REPOSITORY, SECONDS_MAX


def test_the_bench_of_trainers_gives_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "trainers", "--smoke", "--out", tmp_path / "out", "--dir", tmp_path]
    subprocess.run(list(map(str, command)), cwd=REPOSITORY, check=True, timeout=SECONDS_MAX)
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert runs.keys() == {"transformers", "lightning"}
    for kinds in runs.values():
        assert {kind: len(found) for kind, found in kinds.items()} == {"none": 1, "own": 1, "ours": 1}
        assert all(found[0]["steps_s"] > 0 for found in kinds.values())
