"""The example with TorchRec's tables runs and resumes."""

from __future__ import annotations

from pathlib import Path

from tests.docs.test_examples import check_resumes


def test_the_job_resumes(tmp_path: Path) -> None:
    check_resumes("jobs/torchrec_bags.py", tmp_path)
