"""Tensors that change what they are while a save waits or gives up the lock, and change back: see moving_tensors.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from asyncckpt.plan.leaf_facts import LeafFacts, Places, read_places
from tests.end_to_end.moving_tensors import CASES, mistakes

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has its places elsewhere")
SEED = int(os.environ.get("ASYNCCKPT_FAULT_SEED", "1"))


@pytest.mark.random
@pytest.mark.parametrize(("kind", "in_background"), CASES)
def test_each_save_holds_the_state_or_is_refused_by_name(tmp_path: Path, kind: str, in_background: bool) -> None:
    print("seed", SEED)
    assert mistakes(tmp_path / "d", kind, in_background=in_background, count=5, seed=SEED) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "in_background"), CASES)
def test_each_save_is_right_or_refused_at_every_place(tmp_path: Path, kind: str, in_background: bool) -> None:
    assert mistakes(tmp_path / "d", kind, in_background=in_background, count=1_000_000, seed=SEED) == []


def test_a_plan_that_is_trusted_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trusted(self: LeafFacts, tensors: Sequence[torch.Tensor]) -> Places:
        return read_places(tensors)

    monkeypatch.setattr(LeafFacts, "places", trusted)
    found = mistakes(tmp_path / "d", "staged", in_background=False, count=16, seed=1)
    assert found != []
