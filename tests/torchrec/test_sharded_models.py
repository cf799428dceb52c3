"""TorchRec and FBGEMM themselves, on gloo: what is loaded goes on bit for bit like a run that was not interrupted.

Run by `make test-torchrec`, in a virtual environment that has them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.torchrec.scenarios import PLAIN, PLAIN_TRACKED, RESHARDED, SHARDED, TRACKED, UNTRACKED

pytestmark = pytest.mark.skipif(find_spec("torchrec") is None, reason="no torchrec here: make test-torchrec")

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_S_MAX = 240.0

Found: TypeAlias = dict[int, list[dict[str, list[str]]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What every rank of every world found. All scenarios share processes, whose imports take longest."""
    of_two = tmp_path_factory.mktemp("world2")
    return {2: run_ranks(2, of_two, of_two), 1: run_ranks(1, tmp_path_factory.mktemp("world1"), of_two)}


def run_ranks(world: int, folder: Path, of_two: Path) -> list[dict[str, list[str]]]:
    processes = []
    for rank in range(world):
        command = [sys.executable, "-m", "tests.torchrec.rank", str(rank), str(world), str(folder), str(of_two)]
        with (folder / f"output{rank}").open("wb") as output:
            processes.append(subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT))
    try:
        for process in processes:
            process.wait(RUN_S_MAX)
    except subprocess.TimeoutExpired:
        pass  # The ranks' outputs say more.
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [results(folder, rank) for rank in range(world)]


def results(folder: Path, rank: int) -> dict[str, list[str]]:
    path = folder / f"found{rank}.json"
    if path.exists():
        found: dict[str, list[str]] = json.loads(path.read_text())
        return found
    return {"": [f"rank {rank} ended early: {(folder / f'output{rank}').read_text()[-4000:]}"]}


def check(found: Found, world: int, scenario: str) -> None:
    for rank, problems in enumerate(found[world]):
        said = problems.get(scenario, [f"not run, because of {list(problems.values())[-1]}"])
        assert said == [], f"rank {rank} of {world}: {said[:8]}"


@pytest.mark.parametrize("scenario", [*SHARDED, *TRACKED, *UNTRACKED, *PLAIN, *PLAIN_TRACKED, *RESHARDED])
def test_one_rank(found: Found, scenario: str) -> None:
    check(found, 1, scenario)


@pytest.mark.parametrize("scenario", [*SHARDED, *TRACKED, *UNTRACKED])
def test_two_ranks(found: Found, scenario: str) -> None:
    check(found, 2, scenario)
