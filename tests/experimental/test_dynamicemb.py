"""dynamicemb's tables, behind a fake of the library that behaves as it documents itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.adapters.dynamicemb import DynamicEmbTable, dynamicemb_tables
from asyncckpt.adapters.export_only import Rows
from asyncckpt.modules.walk import tables_of
from asyncckpt.testing import Contents, TableSuite
from tests.experimental.fake_dynamicemb import (
    EMPTY,
    BatchedDynamicEmbeddingTablesV2,
    Clock,
    Optimizer,
    install,
    new_module,
)
from tests.testing.one_test import FAILURES, run_one


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def train(module: BatchedDynamicEmbeddingTablesV2, table_id: int, step: int, seed: int, *, forget: bool = True) -> None:
    """One step: the clock goes on, some rows are forgotten, others get new values."""
    random = np.random.default_rng([seed, step, table_id])
    Clock.now = 1000 + 10 * step
    known = sorted(rows_of(module, table_id))
    for key in known[step % 5 :: 9] if forget else ():
        module.forget(table_id, key)
    width = module.levels()[0].table_value_dims_cpu[table_id]
    for key in random.integers(-25, 25, size=14).tolist():
        Clock.now += 1 if Clock.now % 10 < 9 else 0
        value = torch.from_numpy(random.standard_normal(width)).to(module.levels()[0].emb_dtype)
        module.touch(table_id, key * (2**50 + 1), value)
    Clock.now = 1000 + 10 * step + 9
    module._scores[module.table_names[table_id]] += 1


def rows_of(module: BatchedDynamicEmbeddingTablesV2, table_id: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """key -> (value row, score words), the newest level winning."""
    keys = {int(key) for level in module.levels() for key in level.key_index_map.keys[table_id].tolist()} - {EMPTY}
    return {key: found for key in keys if (found := module.find(table_id, key)) is not None}


def contents_of(module: BatchedDynamicEmbeddingTablesV2, table_id: int, columns: list[str]) -> Contents:
    rows = rows_of(module, table_id)
    state = module.levels()[-1]
    dim = state.table_emb_dims_cpu[table_id]
    width = state.table_value_dims_cpu[table_id]
    saved = state.optimizer.get_ckpt_state_dim(dim)
    values = torch.stack([row[0] for row in rows.values()]) if rows else torch.empty((0, width), dtype=state.emb_dtype)
    words = torch.stack([row[1] for row in rows.values()]) if rows else torch.empty((0, 2), dtype=torch.int64)
    found = {"id": torch.tensor(list(rows), dtype=torch.int64), "embedding": values[:, :dim]}
    if "optimizer_state" in columns:
        found["optimizer_state"] = values[:, dim : dim + saved]
    for index, name in enumerate(columns[columns.index("embedding") + 1 + ("optimizer_state" in columns) :]):
        found[name] = Clock.now - words[:, index] if name == "age" else words[:, index]
    return found


class DynamicEmbSuite(TableSuite):
    """The table t1 of a module whose table t0 is trained too."""

    cut_kind = "copies"
    failed_load = "unchanged"
    adapter = DynamicEmbTable
    options: dict[str, Any] = {}  # noqa: RUF012
    forgets = True

    def make_table(self) -> DynamicEmbTable:
        return dynamicemb_tables(new_module(**self.options), "")["t1"]

    def train(self, table: Any, step: int, seed: int) -> None:
        for table_id in (0, 1):
            train(table._module, table_id, step, seed, forget=self.forgets)

    def contents(self, table: Any) -> Contents:
        return contents_of(table._module, 1, [column.name for column in table.schema().columns])

    def internals(self, table: Any) -> Contents:
        """Every level of the module, slot by slot, of all of its tables; and that nothing was flushed."""
        found: dict[str, Any] = {"flushes": torch.tensor(table._module.flushes_count)}
        for number, level in enumerate(table._module.levels()):
            for table_id in (0, 1):
                keys = level.key_index_map
                found[f"{number} {table_id} keys"] = keys.keys[table_id]
                found[f"{number} {table_id} scores"] = keys.scores[table_id]
                used = keys.keys[table_id] != EMPTY
                if level.no_eviction_next_index is None:
                    found[f"{number} {table_id} values"] = level.tables[table_id][used]
        return found


class TestTimestamps(DynamicEmbSuite):
    """Row-wise Adagrad: one element of four is saved."""


@pytest.mark.slow  # TestNeverEvicting has this layout.
class TestCached(DynamicEmbSuite):
    options = {"layout": "cached", "policy": "frequency", "optimizer": Optimizer(7)}  # noqa: RUF012


class TestHybrid(DynamicEmbSuite):
    options = {"layout": "hybrid", "policy": "step"}  # noqa: RUF012


class TestNeverEvicting(DynamicEmbSuite):
    """The rows of its storage are its scores, those of the cache are not; no score is saved."""

    options = {"policy": "index", "layout": "cached"}  # noqa: RUF012
    forgets = False


@pytest.mark.slow
class TestScoreWords(DynamicEmbSuite):
    options = {"policy": "lru_lfu", "layout": "cached"}  # noqa: RUF012


class TestWithoutStates(DynamicEmbSuite):
    """SGD, in a dtype that float32 copies would not bring back."""

    options = {"optimizer": Optimizer(0), "dtype": torch.float64, "policy": "customized"}  # noqa: RUF012


# -- adapters that a careless reader of the library would write --------------------------------------------------------


class ReadsTheStorageAlone(DynamicEmbTable):
    def _export(self) -> Rows:
        return self._export_level(self._tiers[-1], Clock.now)


class FlushesFirst(DynamicEmbTable):
    def _export(self) -> Rows:
        self._module.flush()
        return super()._export()


class OldestLevelWins(DynamicEmbTable):
    def _export(self) -> Rows:
        self._tiers.reverse()
        try:
            return super()._export()
        finally:
            self._tiers.reverse()


class TakesSlotsForRows(DynamicEmbTable):
    def _export(self) -> Rows:
        state = self._tiers[-1]
        kept, state.no_eviction_next_index = state.no_eviction_next_index, None
        try:
            return super()._export()
        finally:
            state.no_eviction_next_index = kept


class KeepsTheCacheAtALoad(DynamicEmbTable):
    def _drop_cache(self) -> None:
        pass


class SavesTimestamps(DynamicEmbTable):
    """And not ages."""

    def _clock(self) -> int:
        return 10_000


class DropsStates(DynamicEmbTable):
    def _write_batch(self, rows: Rows, now: int) -> None:
        super()._write_batch({name: column for name, column in rows.items() if name != "optimizer_state"}, now)


@pytest.mark.parametrize(
    ("adapter", "options", "test"),
    [
        (ReadsTheStorageAlone, {"layout": "cached"}, "test_cut_holds_the_contents"),
        (ReadsTheStorageAlone, {"layout": "hybrid"}, "test_save_async_holds_the_table_of_the_call"),
        (FlushesFirst, {"layout": "cached"}, "test_a_cut_changes_nothing"),
        (OldestLevelWins, {"layout": "hybrid"}, "test_cut_holds_the_contents"),
        (TakesSlotsForRows, {"policy": "index"}, "test_cut_holds_the_contents"),
        (KeepsTheCacheAtALoad, {"layout": "cached"}, "test_load_empties_first"),
        (SavesTimestamps, {}, "test_cut_holds_the_contents"),
        (DropsStates, {}, "test_blocking_save"),
    ],
)
def test_wrong_adapter_fails(
    adapter: type[DynamicEmbTable], options: dict[str, Any], test: str, tmp_path: Path
) -> None:
    class Suite(DynamicEmbSuite):
        def make_table(self) -> DynamicEmbTable:
            return self.adapter("t1", new_module(**options), 1)

    suite = Suite()
    suite.forgets = options.get("policy") != "index"
    suite.adapter = adapter
    with pytest.raises(FAILURES):
        run_one(suite, test, tmp_path / "wrong")
    suite.adapter = DynamicEmbTable
    run_one(suite, test, tmp_path / "right")


# -- what only these tables do -----------------------------------------------------------------------------------------


def trained(**options: Any) -> BatchedDynamicEmbeddingTablesV2:
    module = new_module(**options)
    for step in range(3):
        for table_id in (0, 1):
            train(module, table_id, step, 1)
    return module


def save(path: Path, tables: Any) -> None:
    with asyncckpt.Saver(path=path, hashtables=tables, durability="none") as saver:
        saver.save(1)


def plain(contents: Contents) -> dict[int, tuple[Any, ...]]:
    ids = contents["id"].tolist()
    return {id: tuple(str(column[row].tolist()) for column in contents.values()) for row, id in enumerate(ids)}


def test_a_module_walk_finds_the_tables_by_the_library_s_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), new_module())
    assert [*tables_of(model)] == ["1.t0", "1.t1"]
    schema = tables_of(model)["1.t0"].schema()
    assert [(c.name, c.dtype, c.row_shape, c.role.value) for c in schema.columns] == [
        ("id", torch.int64, (), "id"),
        ("embedding", torch.float32, (4,), "weight"),
        ("optimizer_state", torch.float32, (1,), "optimizer"),
        ("age", torch.int64, (), "metadata"),
    ]


@pytest.mark.parametrize("layout", ["single", "cached", "hybrid"])
def test_a_save_neither_flushes_nor_erases(tmp_path: Path, layout: str) -> None:
    module = trained(layout=layout)
    keys = [level.key_index_map.keys[1].clone() for level in module.levels()]
    save(tmp_path, dynamicemb_tables(module, ""))
    assert module.flushes_count == 0
    assert all(level.key_index_map.keys[1].equal(before) for level, before in zip(module.levels(), keys, strict=True))


def test_levels_hold_stale_copies() -> None:
    """Otherwise a reader of the storage alone would pass."""
    for layout in ("cached", "hybrid"):
        module = trained(layout=layout)
        newest, oldest = module.levels()[0].key_index_map, module.levels()[-1].key_index_map
        both = ({*newest.keys[1].tolist()} & {*oldest.keys[1].tolist()}) - {EMPTY}
        assert any(not module.levels()[-1].take(1, key)[0].equal(module.find(1, key)[0]) for key in both)


@pytest.mark.parametrize("layout", ["cached", "hybrid", "single"])
def test_loading_one_table_keeps_the_rows_of_the_others(tmp_path: Path, layout: str) -> None:
    """Also those that only the cache has: the library can reset it as a whole only."""
    columns = ["id", "embedding", "optimizer_state", "age"]
    source, target = trained(layout=layout), trained(layout=layout)
    for key in range(3):
        target.touch(0, key, torch.full((8,), float(key)))
    save(tmp_path, dynamicemb_tables(source, ""))
    before = plain(contents_of(target, 0, columns))
    asyncckpt.Loader(tmp_path, {"t1": dynamicemb_tables(target, "")["t1"]}).load()
    assert plain(contents_of(target, 0, columns)) == before
    assert plain(contents_of(target, 1, columns)) == plain(contents_of(source, 1, columns))


def test_no_flush_where_no_other_table_is_cached(tmp_path: Path) -> None:
    module = trained(layout="cached", dims=(4, 3))
    tables = dynamicemb_tables(module, "")
    save(tmp_path, tables)
    module.reset_cache_states()
    train(module, 1, 5, 1)
    asyncckpt.Loader(tmp_path, {"t1": tables["t1"]}).load()
    assert module.flushes_count == 0


def test_a_table_that_is_too_small_is_found_out(tmp_path: Path) -> None:
    save(tmp_path, dynamicemb_tables(trained(), ""))
    small = dynamicemb_tables(new_module(max_capacity=10), "")
    with pytest.raises(asyncckpt.IncompatibleError, match="table 't1' is too small for the checkpoint"):
        asyncckpt.Loader(tmp_path, {"t1": small["t1"]}).load()
    assert small["t1"].begin_cut().rows_count == 0


def test_ages_survive_a_restart_of_the_clock(tmp_path: Path) -> None:
    source, target = trained(), new_module()
    save(tmp_path, dynamicemb_tables(source, ""))
    ages = {key: Clock.now - int(score) for key, (_, score) in rows_of(source, 1).items()}
    assert len({*ages.values()}) > 3
    for now in (50_000, 5):
        Clock.now = now
        asyncckpt.Loader(tmp_path, dynamicemb_tables(target, "")).load()
        scores = {key: int(score) for key, (_, score) in rows_of(target, 1).items()}
        assert scores == {key: max(0, now - age) for key, age in ages.items()}


def test_steps_go_on_behind_the_newest_row(tmp_path: Path) -> None:
    source, target = trained(policy="step"), new_module(policy="step")
    save(tmp_path, dynamicemb_tables(source, ""))
    asyncckpt.Loader(tmp_path, dynamicemb_tables(target, "")).load()
    assert target._scores == source._scores == {"t0": 4, "t1": 4}


def test_missing_states_start_from_the_initial_value(tmp_path: Path) -> None:
    save(tmp_path, dynamicemb_tables(trained(optimizer=Optimizer(0)), ""))
    target = new_module()
    asyncckpt.Loader(tmp_path, dynamicemb_tables(target, ""), strict=False).load()
    assert all(value[3:].tolist() == [0.25] * 4 for value, _ in rows_of(target, 1).values())


def test_ranks_hold_ids_by_the_signed_remainder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.adapters.dynamicemb.own_rank", lambda *_: (2, 3))
    module = new_module()
    module._shard_world_size = 3
    table = dynamicemb_tables(module, "")["t0"]
    ids = np.array([-4, -1, 2, 3, 2**63 - 1], dtype=np.int64)
    assert table.shard == (2, 3)
    assert table.owned(ids).tolist() == (torch.from_numpy(ids) % 3 == 2).tolist() == [True, True, True, False, False]
    module._dynamicemb_options[1].dist_type = "continuous"
    with pytest.raises(asyncckpt.UnsupportedError, match="distributes its ids over ranks"):
        dynamicemb_tables(module, "")


def test_unknown_storages_and_scores_are_refused() -> None:
    module = new_module()
    module._storage.tables[-1].score_policy.name = "novel"
    with pytest.raises(asyncckpt.UnsupportedError, match="scores of dynamicemb table 't0' cannot be saved"):
        dynamicemb_tables(module, "")
    cached = new_module(layout="cached")
    cached.cache._state.score_policy.name = "frequency"
    with pytest.raises(asyncckpt.UnsupportedError, match="in all levels"):
        dynamicemb_tables(cached, "")
    with pytest.raises(asyncckpt.UnsupportedError, match="several score words"):
        dynamicemb_tables(new_module(layout="hybrid", policy="lru_lfu"), "")


def test_an_unknown_storage_is_refused() -> None:
    module = new_module()
    known = module.tables

    class WrittenByPeers:
        tables = known.tables

    module._storage = WrittenByPeers()
    with pytest.raises(asyncckpt.UnsupportedError, match="storage of dynamicemb table 't0' is unknown"):
        dynamicemb_tables(module, "")
