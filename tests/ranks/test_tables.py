"""Four ranks and what they say of their tables: what is said rightly loads bit by bit, all else is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from tests.ranks import table_ranks
from tests.ranks.forked import run

pytestmark = [pytest.mark.any_core, pytest.mark.timeout(200)]

ALL = [0] * table_ranks.RANKS_COUNT
COMMITTED = {1: 1, 2: 2, 3: 3, 4: 4}
KINDS = pytest.mark.parametrize("kind", table_ranks.MAKERS)


@KINDS
@pytest.mark.parametrize(
    ("scenario", "steps"),
    [
        pytest.param(table_ranks.shards, COMMITTED, id="shards are saved each by its rank"),
        pytest.param(table_ranks.slices, COMMITTED, id="slices are saved each by its rank"),
        pytest.param(table_ranks.replicas, COMMITTED, id="replicas are saved once"),
        # Before, those of one rank were saved, and all ranks reported success.
        pytest.param(table_ranks.each_has_rows_of_its_own, COMMITTED, id="rows of each rank alone are no replicas"),
        pytest.param(table_ranks.replicas_differ, {1: 0, 2: 0, 3: 0, 4: 0}, id="replicas that differ are refused"),
        pytest.param(table_ranks.audited, {1: 0, 2: 0, 3: 0}, id="an audit finds replicas that drift apart"),
    ],
)
def test_what_is_said_rightly_loads(tmp_path: Path, scenario: Any, steps: dict[int, int], kind: str) -> None:
    assert run(partial(scenario, kind), 4, tmp_path) == ALL
    table_ranks.check(tmp_path / "checkpoints", kind, steps)


@pytest.mark.parametrize("kind", ["hash", "levels"])
def test_tables_with_a_rule_of_their_own(tmp_path: Path, kind: str) -> None:
    assert run(partial(table_ranks.a_rule_of_its_own, kind), 4, tmp_path) == ALL
    table_ranks.check(tmp_path / "checkpoints", "hash", COMMITTED)


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_that_says_nothing_is_heard_of_by_all(tmp_path: Path, silent: int) -> None:
    assert run(partial(table_ranks.unsaid_on_one, silent), 4, tmp_path) == ALL
    table_ranks.check(tmp_path / "checkpoints", "hash", COMMITTED)


def test_who_says_nothing_is_refused(tmp_path: Path) -> None:
    assert run(table_ranks.unsaid, 4, tmp_path) == ALL


@KINDS
def test_shards_that_do_not_fit_together_are_refused(tmp_path: Path, kind: str) -> None:
    assert run(partial(table_ranks.wrong_shards, kind), 4, tmp_path) == ALL
    refused = ("twice", "sizes", "slices", "slice beside shards", "kinds")
    assert [asyncckpt.list_steps(tmp_path / name) for name in refused] == [[]] * len(refused)
    table_ranks.check(tmp_path / "checkpoints", kind, {1: 0})


def test_tables_of_modules_need_not_say_anything(tmp_path: Path) -> None:
    assert run(table_ranks.modules, 4, tmp_path) == ALL
    module = torch.nn.ModuleDict({"e": torch.nn.Embedding(50, 3), "wide": torch.nn.Embedding(40, 100)})
    whole = torch.zeros(40, 3)
    tables = {
        **asyncckpt.adapters.tables_of(module),
        "p": asyncckpt.adapters.FixedTable("p", lambda: {"embedding": whole}),
    }
    for step in (1, 2):
        whole.zero_()
        assert asyncckpt.Loader(tmp_path / "checkpoints", tables, step=step).load().step == step
        assert bool((module["wide"].weight == 1).all())
        assert torch.equal(whole, torch.arange(120.0).reshape(40, 3))


def test_tensors_that_are_taken_for_replicas_are_compared(tmp_path: Path) -> None:
    assert run(table_ranks.tensors, 4, tmp_path) == ALL
    found = {"scalar": torch.zeros(()), "own 2": torch.zeros(9), "model": torch.nn.Sequential(torch.nn.Linear(8, 4))}
    report = asyncckpt.Loader(tmp_path / "checkpoints", tensors=found, step=1, strict=False).load()
    assert (report.step, float(found["scalar"]), float(found["own 2"].mean())) == (1, 1.0, 2.0)
