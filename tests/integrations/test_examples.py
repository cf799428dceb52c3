"""The examples of the trainers run, resume, and those of Lightning's own saving run too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_examples import check_resumes, run


@pytest.mark.parametrize("job", ["hf_trainer", "lightning_fit"])
def test_jobs_resume(tmp_path: Path, job: str) -> None:
    check_resumes(f"jobs/{job}.py", tmp_path, steps=20)


def test_the_job_of_lightning_itself_runs(tmp_path: Path) -> None:
    assert "loss" in run("peers/lightning_fit_own.py", tmp_path, 10)
