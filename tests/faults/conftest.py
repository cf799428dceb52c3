"""The compiled shim, the lanes of fork servers, and folders to work in; shared by the tests of this folder.

The helper modules beside this file are also run by the fork servers as plain scripts, so they import each other by
their bare names; this puts their folder on the path for the tests too.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fork_lanes import ForkLanes
from shim import NoCompiler, compile_shim
from templates import Templates

MEMORY_FILE_SYSTEM = Path("/dev/shm")
LANES_COUNT_MAX = 4


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fault shim, compiled for this run."""
    try:
        return compile_shim(tmp_path_factory.mktemp("shim"))
    except NoCompiler as error:
        pytest.skip(f"fault tests need a C compiler: {error}")


@pytest.fixture(scope="session")
def lanes(shim_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkLanes]:
    """One fork server per core of this worker, so that the children of different requests run side by side."""
    cores_count = len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    count = min(LANES_COUNT_MAX, max(1, cores_count))
    with ForkLanes(shim_library, count=count, folder=tmp_path_factory.mktemp("lanes")) as lanes:
        yield lanes


@pytest.fixture(scope="session")
def fast_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of saves need no disk to show their order of operations."""
    if not os.access(MEMORY_FILE_SYSTEM, os.W_OK):
        yield tmp_path_factory.mktemp("runs")
        return
    folder = Path(tempfile.mkdtemp(prefix="asyncckpt-faults-", dir=MEMORY_FILE_SYSTEM))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def templates(lanes: ForkLanes, fast_folder: Path) -> Templates:
    """The directories that scenarios begin with."""
    return Templates(lanes, Path(tempfile.mkdtemp(prefix="templates-", dir=fast_folder)))


@pytest.fixture
def run_folders(fast_folder: Path, request: pytest.FixtureRequest) -> Iterator[Iterator[Path]]:
    """Fresh folders, one per run; gone after the test."""
    mine = Path(tempfile.mkdtemp(dir=fast_folder))
    yield (_made(mine / str(number)) for number in itertools.count())
    shutil.rmtree(mine, ignore_errors=True)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
