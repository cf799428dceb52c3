"""Upstream's own tests in a checkout, in processes that a sitecustomize module of ours prepares."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).parents[1]
TEST_SECONDS_MAX = 300
WHY_LENGTH_MAX = 160
FOLDERS = re.compile(r"/[^\s:'\"]*/")  # Of absolute paths: they are this machine's.
_ADDRESS = re.compile(r" (at|id=)\s?'?(0x)?[0-9a-f]{6,}'?")
Outcomes = dict[str, tuple[str, str]]


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


def run_tests(root: Path, tests: Sequence[Path], code: str, *options: str) -> Outcomes:
    """Run tests below `root`/tests in a process that runs `code` first; return what each did, and why."""
    with tempfile.TemporaryDirectory() as place, prepared_environment(code, root, root / "tests") as environment:
        found = Path(place) / "found.xml"
        always = [f"--timeout={TEST_SECONDS_MAX}", f"--junitxml={found}", "-o", "junit_family=xunit1", "-W", "ignore"]
        always += ["-o", "addopts=", f"--basetemp={place}/tests", "--continue-on-collection-errors"]
        command = pytest_command(root, [str(test) for test in tests], *always, *options)
        command = [word for word in command if word not in ("-n", "0")]  # There is no xdist.
        done = subprocess.run(command, cwd=place, env=environment, check=False, capture_output=True, text=True)
        if not found.exists():
            raise RuntimeError(f"the tests did not come to their end:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        cases = list(ElementTree.parse(found).iter("testcase"))
    return {f"{Path(case.get('file', '')).name}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for kind in ("failure", "error", "skipped"):
        said = case.find(kind)
        if said is not None:
            message = _ADDRESS.sub("", FOLDERS.sub("", said.get("message") or ""))
            return kind, " ".join(message.split())[:WHY_LENGTH_MAX]
    return "passed", ""


def table(own: Outcomes, ours: Outcomes) -> str:
    """Return lines of text: a row for each file, and below it what passes with upstream's own and fails with ours."""
    passed = [test for test, (kind, _) in own.items() if kind == "passed"]
    failed = {test: ours.get(test, ("failure", "did not run")) for test in passed}
    failed = {test: outcome for test, outcome in failed.items() if outcome[0] != "passed"}
    lines = ["| file | own | ours | neither counts |", "|---|---|---|---|"]
    for file in [*sorted({test.split("::")[0] for test in own}), ""]:
        kinds = Counter(kind for test, (kind, _) in own.items() if test.startswith(file))
        ours_count = kinds["passed"] - sum(test.startswith(file) for test in failed)
        neither = f"{kinds['failure'] + kinds['error']} fail, {kinds['skipped']} skipped"
        lines.append(f"| {file or 'all'} | {kinds['passed']} | {ours_count} | {neither} |")
    return "\n".join([*lines, "", *(f"{test}: {why}" for test, (_, why) in failed.items())])
