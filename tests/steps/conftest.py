"""What holds the background, and what is saved beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.steps import gate as gates
from tests.steps.gate import Gate
from tests.steps.world import World


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = gates.install(monkeypatch)
    yield made
    made.open()


@pytest.fixture
def world(tmp_path: Path, gate: Gate) -> Iterator[World]:
    made = World(tmp_path)
    gate.log.clear()
    yield made
    gate.open()
    made.saver.close()
