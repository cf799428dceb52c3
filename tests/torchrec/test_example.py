"""The example with TorchRec's tables runs and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_examples import check_resumes


@pytest.mark.parametrize("job", ["jobs/torchrec_bags.py", "peers/torchrec_bags_dcp.py"])
def test_the_job_resumes(tmp_path: Path, job: str) -> None:
    check_resumes(job, tmp_path)
