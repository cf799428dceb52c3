"""More removals, compactions and saves at once than there are threads for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SECONDS_MAX = 180  # Of the child, which gives up itself before that.


@pytest.mark.timeout(SECONDS_MAX + 10)
def test_removals_compactions_and_saves_at_once_all_end(tmp_path: Path) -> None:
    """In a process of its own: what hangs there could not be ended here."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.strategies.many_at_once", str(tmp_path)],
        cwd=REPOSITORY,
        timeout=SECONDS_MAX,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "not ended: none", done.stdout
    assert done.returncode == 0, done.stdout
