"""What holds the background, and what is saved beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.steps import gate as gates
from tests.steps.gate import StepGate
from tests.steps.world import Stepped


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepGate]:
    made = gates.install(monkeypatch)
    yield made
    made.open()


@pytest.fixture
def world(tmp_path: Path, gate: StepGate) -> Iterator[Stepped]:
    made = Stepped(tmp_path)
    gate.log.clear()
    yield made
    gate.open()
    made.saver.close()


@pytest.fixture
def mesh() -> Iterator[Any]:
    """One rank, for DTensors. Not of Gloo: torch waits for its threads in a child that another thread forks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
