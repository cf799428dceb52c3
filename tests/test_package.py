"""`tests` is this folder, also where site-packages has a package of that name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_package_of_the_same_name_behind_it_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path)))}
    found = subprocess.run(
        [sys.executable, "-c", "import tests; print(tests.__path__[0])"],
        env=environment,
        cwd=tmp_path.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.stdout.strip() == str(ROOT / "tests"), found.stderr
