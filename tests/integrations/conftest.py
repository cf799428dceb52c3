"""The S3 server of tests/cloud, for trainers that upload; and what keeps small runs short."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.cloud.conftest import owner, server, url
from tests.integrations import remaining

__all__ = ["owner", "server", "url"]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Of jobs in processes of their own.


@pytest.fixture(scope="module", autouse=True)
def _one_thread_and_little_to_collect() -> Iterator[None]:
    """Threads wait for each other longer than so small a model computes; Accelerate collects garbage in every run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for kind, facts in sorted(remaining.MET.items()):
        told = f"{kind}: not as the whole run: {', '.join(sorted(facts))}"
        terminalreporter.write_line(f"{told}. {remaining.REMAINING[kind]}")
