"""Marks of fixed tables: those that their owner keeps, and those of a TBE's lookups."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.adapters import FixedTable, tables_of, track_lookups
from asyncckpt.adapters.lookup_hooks import TbeMarks
from asyncckpt.adapters.row_mask import RowMask
from asyncckpt.errors import UsageError
from asyncckpt.model.table import CutVersion, OverlaidCut, Table, TracksRows
from asyncckpt.testing import Contents
from tests.adapters.fake_tbe import FakeTbe, OptimType, Spec
from tests.adapters.test_suites import FixedSuite

# Features 0 and 2 share table 1, and table 2 has none but feature 3.
SPECS = [Spec(6, 4), Spec(9, 2), Spec(5, 3)]
FEATURES = [1, 0, 1, 2]


class TestTrackedEmbedding(FixedSuite):
    """Whoever writes tells."""

    def make_table(self) -> FixedTable:
        torch.manual_seed(0)
        module = nn.Embedding(11, 4)
        table = FixedTable("rows", lambda: {"embedding": module.weight}, first_id=100)
        table.module = module  # type: ignore[attr-defined]
        table.track()
        return table

    def train(self, table: Any, step: int, seed: int) -> None:
        random = np.random.default_rng([seed, step])
        rows = np.unique(random.integers(0, 11, 4))
        table.touch(rows + 100)
        with torch.no_grad():
            table.module.weight[rows] = torch.from_numpy(random.standard_normal((len(rows), 4))).float()

    def contents(self, table: Any) -> Contents:
        return {"id": table.ids().clone(), "embedding": table.module.weight.detach().clone()}


class TestTrackedTbe(FixedSuite):
    """A table on the host, of a TBE whose lookups are tracked."""

    cached = False

    def make_table(self) -> FixedTable:
        specs = [Spec(6, 5, cached=self.cached), Spec(12, 3, cached=self.cached)]
        tbe = FakeTbe(specs, feature_table_map=[1, 0, 1], cache_sets=3)
        track_lookups(tbe)
        table = tables_of(tbe)["table_1"]
        table.tbe = tbe  # type: ignore[attr-defined]
        assert isinstance(table, FixedTable)
        return table

    def train(self, table: Any, step: int, seed: int) -> None:
        random = np.random.default_rng([seed, step])
        indices = torch.from_numpy(random.integers(0, 12, 6))
        table.tbe.iter.fill_(step)
        table.tbe(indices, torch.tensor([0, 2, 4, 6])).backward()

    def contents(self, table: Any) -> Contents:
        momentum = table.tbe.split_optimizer_states()[1][0].clone()
        return {"id": table.ids().clone(), "embedding": table.tbe.rows_of(1), "momentum1": momentum}


class TestTrackedCachedTbe(TestTrackedTbe):
    """Behind a cache: its cut is an OverlaidCut too."""

    cached = True


# -- what is marked ----------------------------------------------------------------------------------------------------


def batch(*features: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and offsets of one sample, by feature."""
    offsets = np.cumsum([0, *(len(feature) for feature in features)])
    return torch.tensor([index for feature in features for index in feature]), torch.from_numpy(offsets)


def version_of(table: Table) -> CutVersion:
    cut = table.begin_cut()
    cut.end(True)
    assert isinstance(cut, TracksRows)
    return cut.version


def versions(tables: dict[str, Table]) -> list[CutVersion]:
    return [version_of(table) for table in tables.values()]


def touched(tables: dict[str, Table], since: list[CutVersion]) -> list[list[int] | None]:
    """The rows touched of every table. Ends an epoch of each."""
    found: list[list[int] | None] = []
    for table, version in zip(tables.values(), since, strict=True):
        cut = table.begin_cut()
        assert isinstance(cut, TracksRows)
        rows, ids = cut.touched_since(version), cut.removed_since(version)
        cut.end(True)
        assert ids is None or not ids.size
        found.append(None if rows is None else rows.tolist())
    return found


def tracked(**options: Any) -> tuple[FakeTbe, dict[str, Table]]:
    tbe = FakeTbe(SPECS, feature_table_map=FEATURES, **options)
    tables = tables_of(tbe)
    assert track_lookups(tbe).tables_count == 3
    return tbe, tables


def test_the_rows_of_a_batch_are_touched() -> None:
    tbe, tables = tracked()
    before = versions(tables)
    tbe(*batch([8, 3], [5], [3], [])).backward()
    assert touched(tables, before) == [[5], [3, 8], []]


def test_an_index_out_of_range_is_row_0() -> None:
    tbe, tables = tracked()
    before = versions(tables)
    tbe(*batch([9, 3], [-1], [], [4])).backward()
    assert touched(tables, before) == [[0], [0, 3], [4]]


def test_a_save_between_forward_and_backward() -> None:
    """As where batches are pipelined: the rows are written behind the cut."""
    tbe, tables = tracked()
    before = versions(tables)
    output = tbe(*batch([1], [2], [], [3]))
    between = versions(tables)
    assert touched(tables, between) == [[], [], []]
    output.backward()
    assert touched(tables, between) == touched(tables, before) == [[2], [1], [3]]


def test_without_gradients_nothing_is_touched() -> None:
    tbe, tables = tracked()
    before = versions(tables)
    with torch.no_grad():
        tbe(*batch([1], [2], [], [3]))
    with torch.inference_mode():
        tbe(*batch([1], [2], [], [3]))
    assert touched(tables, before) == [[], [], []]


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_batch_against_a_loop(seed: int) -> None:
    """Batches of many samples, of one size or of different sizes by feature and rank, some of them empty."""
    random = np.random.default_rng(seed)
    tbe, _ = tracked()
    sizes = None
    samples_count = len(FEATURES) * int(random.integers(0, 4))
    if seed % 2:
        sizes = random.integers(0, 4, size=(len(FEATURES), 2)).tolist()
        samples_count = sum(map(sum, sizes))
    offsets = np.cumsum([0, *random.integers(0, 4, size=samples_count)])
    indices = torch.from_numpy(random.integers(-2, 11, size=int(offsets[-1])))
    dtype = torch.int32 if seed % 3 else torch.int64
    marks = TbeMarks(tbe, [0, 1, 2])
    rows = marks.rows_of(indices.to(dtype), torch.from_numpy(offsets).to(dtype), sizes)
    begins = np.cumsum([0, *(spec.rows for spec in SPECS)])
    by_table = tbe.looked_up(indices, torch.from_numpy(offsets), sizes)
    assert sorted(rows.tolist()) == sorted(begins[t] + row for t, found in by_table.items() for row in found)


def test_keywords_are_understood() -> None:
    tbe, tables = tracked()
    before = versions(tables)
    indices = torch.tensor([1, 2, 4])
    sizes = [[0], [1], [1], [1]]
    tbe(offsets=torch.tensor([0, 1, 2, 3]), indices=indices, batch_size_per_feature_per_rank=sizes).backward()
    assert touched(tables, before) == [[1], [2], [4]]
    before = versions(tables)
    tbe(indices, torch.tensor([0, 0, 2, 3]), None, None, [[1], [1], [0], [1]]).backward()
    assert touched(tables, before) == [[1, 2], [], [4]]


def test_tables_of_two_calls_have_the_same_marks() -> None:
    """As when a Saver is given the module itself."""
    tbe, tables = tracked()
    before = versions(tables_of(nn.ModuleDict({"tbe": tbe})))
    tbe(*batch([], [2], [], [])).backward()
    assert touched(tables, before) == [[2], [], []]


def test_touch_marks_what_hooks_do_not_see() -> None:
    _, tables = tracked()
    before = versions(tables)
    table = tables["table_1"]
    assert isinstance(table, FixedTable)
    table.touch(torch.tensor([[7], [2]]))
    assert touched(tables, before) == [[], [2, 7], []]
    with pytest.raises(UsageError, match="id 9 does not belong to table 'table_1'"):
        table.touch(np.array([0, 9]))


def test_an_untracked_table_has_no_marks_and_touch_does_nothing() -> None:
    table = FixedTable("rows", lambda: {"embedding": torch.zeros(4, 2)})
    table.touch(torch.tensor([1]))
    cut = table.begin_cut()
    assert not isinstance(cut, TracksRows)
    cut.end(True)


def test_own_marks_know_what_was_told_while_lookups_were_tracked() -> None:
    tbe = FakeTbe(SPECS, feature_table_map=FEATURES)
    table = tables_of(tbe)["table_0"]
    assert isinstance(table, FixedTable)
    table.track()
    own = version_of(table)
    tracking = track_lookups(tbe)
    table.touch(torch.tensor([3]))
    assert touched({"": table}, [own]) == [None], "these marks are others"
    tracking.remove()
    assert touched({"": table}, [own]) == [[3]]


# -- beginning and end -------------------------------------------------------------------------------------------------


def test_remove_ends_it() -> None:
    tbe = FakeTbe(SPECS, feature_table_map=FEATURES)
    tables = tables_of(tbe)
    first = track_lookups(tbe)
    second = track_lookups(tbe)
    second.remove()
    before = versions(tables)
    first.remove()
    first.remove()
    assert not tbe._forward_hooks
    assert not tbe._load_state_dict_post_hooks
    cut = tables["table_0"].begin_cut()
    cut.end(True)
    assert not isinstance(cut, TracksRows)
    third = track_lookups(tbe)
    assert touched(tables, before) == [None, None, None], "what happened without hooks is not known"
    third.remove()


def test_loads_are_a_change_of_all_rows() -> None:
    tbe, tables = tracked()
    before = versions(tables)
    tbe.load_state_dict(tbe.state_dict())
    assert touched(tables, before) == [None, None, None]
    before = versions(tables)
    load = tables["table_1"].begin_load(clear=False, rows_count=0)
    load.end(True)
    assert touched(tables, before) == [[], None, []]


def test_a_loaded_state_of_a_fused_optimizer_is_in_the_next_delta(tmp_path: Any) -> None:
    """It is copied into the memory of the states, past all hooks: as TorchRec's KeyedOptimizer does it."""
    tbe, tables = tracked()
    policy = asyncckpt.DeltaPolicy(bytes_share_max=1e9)
    with asyncckpt.Saver(path=tmp_path, hashtables=tables, deltas=policy, durability="none") as saver:
        tbe(*batch([8, 3], [5], [3], [1])).backward()
        kinds = [saver.save(1).kind]
        rows_counts = []
        for step in (2, 3, 4):
            tbe(*batch([2], [4], [6], [])).backward()
            if step == 3:
                for state in tbe.split_optimizer_states():
                    state[0].detach().copy_(torch.arange(len(state[0])))
            result = saver.save_async(step).result(60)
            kinds.append(result.kind)
            rows_counts.append(result.rows_count)
    assert kinds == ["full", "delta", "delta", "delta"]
    assert rows_counts == [3, 20, 3], "all rows are in the delta behind the load, and in no other"
    fresh = FakeTbe(SPECS, feature_table_map=FEATURES, seed=9)
    asyncckpt.Loader(tmp_path, fresh).load()
    for found, expected in zip(fresh.split_optimizer_states(), tbe.split_optimizer_states(), strict=True):
        assert found[0].tolist() == expected[0].tolist()


def test_a_write_that_torch_counts_is_a_change_of_all_rows() -> None:
    tbe, tables = tracked()
    before = versions(tables)
    tbe(*batch([1], [], [], [])).backward()
    assert touched(tables, before) == [[], [1], []]
    before = versions(tables)
    with torch.no_grad():
        tbe.weights_host.mul_(0.5)
    assert touched(tables, before) == [None, None, None]
    before = versions(tables)
    tbe(*batch([1], [], [], [])).backward()
    assert touched(tables, before) == [[], [1], []]


@pytest.mark.parametrize("optimizer", ["none", "ensemble_row_wise_adagrad", "ema_in_place_row_wise_adagrad", "new"])
def test_an_optimizer_that_may_write_other_rows_is_not_tracked(optimizer: str) -> None:
    tbe = FakeTbe(SPECS, feature_table_map=FEATURES, optimizer=OptimType.EXACT_SGD)
    tbe.optimizer = enum.Enum("OptimType", {"OTHER": optimizer}).OTHER  # type: ignore[attr-defined,assignment]
    with pytest.raises(UsageError, match="a module holds no table whose lookups can be tracked"):
        track_lookups(tbe)
    with pytest.raises(UsageError, match="found an Embedding"):
        track_lookups(nn.Embedding(3, 2))


def test_a_cache_that_rounds_is_not_tracked() -> None:
    """A row is rounded at random when it leaves the cache; nobody looked it up then."""
    specs = [Spec(5, 3), Spec(12, 2, cached=True)]
    tbe = FakeTbe(specs, dtype=torch.float16)
    assert track_lookups(tbe).tables_count == 1
    kinds = []
    for table in tables_of(tbe).values():
        cut = table.begin_cut()
        kinds.append((isinstance(cut, OverlaidCut), isinstance(cut, TracksRows)))
        cut.end(True)
    assert kinds == [(False, True), (True, False)]


def test_a_move_between_cache_and_rows_is_no_write() -> None:
    specs = [Spec(12, 2, cached=True)]
    tbe = FakeTbe(specs, cache_sets=1)
    track_lookups(tbe)
    tables = tables_of(tbe)
    tbe(*batch([1, 2])).backward()
    before = versions(tables)
    tbe.prefetch(0, [3, 4, 5])
    assert touched(tables, before) == [[]]


def test_saves_and_loads_of_a_tracked_module(tmp_path: Any) -> None:
    """Every save of a run with small steps loads as it was."""
    tbe, _ = tracked()
    images = {}
    with asyncckpt.Saver(path=tmp_path, hashtables=tbe, durability="none") as saver:
        for step in range(1, 8):
            tbe(*batch([step], [step % 6], [0], [step % 5])).backward()
            images[step] = [tbe.rows_of(t).tolist() for t in range(3)]
            saver.save_async(step, on_busy="wait").result(60)
    for step, image in images.items():
        fresh = FakeTbe(SPECS, feature_table_map=FEATURES, seed=9)
        asyncckpt.Loader(tmp_path, fresh, step=step).load()
        assert [fresh.rows_of(t).tolist() for t in range(3)] == image


def test_a_backward_marks_again_only_what_was_settled_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[list[int]] = []
    mark = RowMask.mark

    def noting(mask: RowMask, rows: torch.Tensor) -> None:
        marked.append(rows.tolist())
        mark(mask, rows)

    monkeypatch.setattr(RowMask, "mark", noting)
    tbe, tables = tracked()
    tbe(*batch([1], [], [], [])).backward()
    assert marked == [[7]]  # Row 1 of table 1, behind the six of table 0.
    output = tbe(*batch([2], [], [], []))
    versions(tables)
    output.backward()
    assert marked == [[7], [8], [8]]
