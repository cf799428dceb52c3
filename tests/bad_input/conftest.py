"""What every bad-input test has at hand. `crafted` and `sentinels` are modules of this folder."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import sentinels
from crafted import Crafted

from asyncckpt.engine.process.save_lock import save_lock


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentinels.save_small(tmp_path_factory.mktemp("template") / "root").root


@pytest.fixture
def small(saved_once: Path, tmp_path: Path) -> Crafted:
    """A small sound checkpoint."""
    return Crafted(root=Path(shutil.copytree(saved_once, tmp_path / "root")), step=sentinels.STEP)


@pytest.fixture(autouse=True)
def nothing_in_flight() -> Iterator[None]:
    """Whatever went wrong in a test, the next save and load of the process may begin."""
    yield
    assert save_lock.in_flight() == []
