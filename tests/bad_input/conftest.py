"""What every bad-input test has at hand. `crafted` and `sentinels` are modules of this folder."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import sentinels
from crafted import Crafted
from round_trip import Save

import asyncckpt
from tests.worlds.gates import Gate
from tests.worlds.gates import nothing_in_flight as nothing_in_flight


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentinels.save_small(tmp_path_factory.mktemp("template") / "root").root


@pytest.fixture
def small(saved_once: Path, tmp_path: Path) -> Crafted:
    """A small sound checkpoint."""
    return Crafted(root=Path(shutil.copytree(saved_once, tmp_path / "root")), step=sentinels.STEP)


@pytest.fixture(params=["staged", "blocking"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Save:
    """Save a state as step 0, in the background or blocking."""

    def run(state: Any, **options: Any) -> asyncckpt.SaveResult:
        with asyncckpt.Saver(path=tmp_path, tensors=state, durability="none", **options) as saver:
            return saver.save_async(0).result() if request.param == "staged" else saver.save(0)

    return run


@pytest.fixture
def saver(tmp_path: Path, gate: Gate) -> Iterator[asyncckpt.Saver]:
    """A Saver whose saves wait at the gate."""
    made = asyncckpt.Saver(path=tmp_path, tensors={"x": torch.arange(5.0)}, filter_func=gate)
    yield made
    gate.open()
    made.close()
