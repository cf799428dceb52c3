"""The examples run, and an interrupted run ends like one that was not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.checkpoint_lines import MARK, TITLES, marked_lines, table

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS_MAX = 120


LINES_MAX = 5
STEPS = 50


def run(example: str, *arguments: object, ranks: int = 1) -> str:
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(EXAMPLES / example), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run("resume.py", tmp_path / "whole", "--steps", 60, "--every", 20)
    run("resume.py", tmp_path / "parts", "--steps", 30, "--every", 10)
    rest = run("resume.py", tmp_path / "parts", "--steps", 60, "--every", 20)
    assert "resumed at step" in rest
    assert rest.splitlines()[-1] == whole.splitlines()[-1]


@pytest.mark.slow
def test_export_makes_a_smaller_checkpoint(tmp_path: Path) -> None:
    run("resume.py", tmp_path / "run", "--steps", 20, "--every", 20)
    printed = run("export.py", tmp_path / "run", tmp_path / "serving")
    before, after = (int(word) for word in printed.split() if word.isdigit() and int(word) > 100_000)
    assert after < before / 2


def check_resumes(job: str, folder: Path, *, steps: int = STEPS, ranks: int = 1) -> None:
    """A job that is run in two parts ends with the same loss as one that is run at once."""
    whole = run(job, folder / "whole", steps, ranks=ranks)
    run(job, folder / "parts", steps // 2 + 1, ranks=ranks)
    rest = run(job, folder / "parts", steps, ranks=ranks)
    assert re.search(r"loss \S+$", whole, re.MULTILINE)
    assert rest.splitlines()[-1] == whole.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("job", "ranks"), [("plain_loop", 1), ("ddp", 2), ("fsdp2", 2), ("recommender_deltas", 1)])
def test_jobs_resume(tmp_path: Path, job: str, ranks: int) -> None:
    check_resumes(f"jobs/{job}.py", tmp_path, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("job", "ranks"), [("plain_loop", 1), ("ddp", 2), ("fsdp2", 2)])
def test_the_jobs_of_dcp_resume_too(tmp_path: Path, job: str, ranks: int) -> None:
    check_resumes(f"peers/{job}_dcp.py", tmp_path, ranks=ranks)


@pytest.mark.slow
def test_the_follower_serves_what_the_recommender_saved(tmp_path: Path) -> None:
    run("jobs/recommender_deltas.py", tmp_path, STEPS)
    printed = run("jobs/serving_follower.py", tmp_path, STEPS - 1)
    assert printed.splitlines()[-1].startswith(f"serving step {STEPS - 1}:")


def test_every_job_has_few_lines_of_checkpoint_code() -> None:
    assert {file.stem for file in (EXAMPLES / "jobs").glob("*.py")} == TITLES.keys()
    assert len(table()) == len(TITLES) + 2
    assert "\n".join(table()) in (EXAMPLES.parent / "docs" / "trainers.md").read_text(encoding="utf-8")
    for job in TITLES:
        file = EXAMPLES / "jobs" / f"{job}.py"
        assert 0 < marked_lines(file) <= LINES_MAX
        code = file.read_text(encoding="utf-8").split('"""')[2].splitlines()
        unmarked = [line for line in code if re.search(r"ckpt|resum", line, re.IGNORECASE) and not line.endswith(MARK)]
        assert [line for line in unmarked if "HashTable" not in line] == []  # What it trains, not how it is saved.
