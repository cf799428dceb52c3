"""The examples of the trainers run, resume, and those of Lightning's own saving run too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_examples import check_resumes, run


@pytest.mark.parametrize("job", ["hf_trainer", "lightning_fit"])
def test_jobs_resume(tmp_path: Path, job: str) -> None:
    check_resumes(f"jobs/{job}.py", tmp_path, steps=20)


@pytest.mark.parametrize("job", ["hf_trainer", "lightning_fit"])
def test_the_jobs_of_the_trainers_themselves_run(tmp_path: Path, job: str) -> None:
    assert "loss" in run(f"peers/{job}_own.py", tmp_path, 10)
