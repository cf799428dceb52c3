"""Upstream's own tests in a checkout, in processes that a sitecustomize module of ours prepares."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


@contextmanager
def prepared_environment(code: str, *paths: Path) -> Iterator[dict[str, str]]:
    """Yield an environment in which every Python runs `code` first, also those that tests spawn.

    paths: where it looks for modules before this repository. The module is gone at the end of the block.
    """
    with tempfile.TemporaryDirectory() as site:
        (Path(site) / "sitecustomize.py").write_text(f"import sys\n{code}")
        found = [site, *map(str, paths), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        yield {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in found if path)}


def pytest_command(root: Path, tests: list[str], *options: str) -> list[str]:
    """Return the command that runs tests below `root` in one process."""
    always = ["-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", "--show-capture=no", "--rootdir", str(root)]
    return [sys.executable, "-m", "pytest", *always, *options, *tests]
