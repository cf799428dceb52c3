"""Tables of a TBE: on the host, with every optimizer, and behind a device cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.adapters import FixedTable, dense_state_of, prefetch_stream, tables_of
from asyncckpt.adapters.fbgemm import KEY_VALUE_TBE
from asyncckpt.adapters.fbgemm_cache import CachedTable
from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.model.table import OverlaidCut, Role
from tests.adapters.fake_tbe import CurrentStream, FakeTbe, FakeTbeStream, OptimType, Spec
from tests.adapters.test_dense_state import saved
from tests.worlds.bits import bits

HOST = [Spec(6, 4), Spec(9, 2)]
# Features 0 and 2 share table 1, table 0 has no cache, and table 2 comes first in the cache.
CACHED = [Spec(5, 3), Spec(12, 2, cached=True), Spec(8, 5, cached=True)]
FEATURES = [2, 1, 0, 1]


def cached_tbe(**options: Any) -> FakeTbe:
    return FakeTbe(CACHED, feature_table_map=FEATURES, **options)


def trained(tbe: FakeTbe, steps: range = range(6)) -> FakeTbe:
    for step in steps:
        rows = {t: [(step * 5 + t) % spec.rows, (step * 3 + 1) % spec.rows] for t, spec in enumerate(tbe.specs)}
        tbe.train_step(step, rows)
    return tbe


def image(tbe: FakeTbe) -> Any:
    """The newest values of all tables, the optimizer states, and the counter."""
    states = [] if tbe.optimizer is OptimType.NONE else tbe.split_optimizer_states()
    return bits({"rows": [tbe.rows_of(t) for t in range(len(tbe.specs))], "states": states, "iter": tbe.iter})


def live(tbe: FakeTbe) -> Any:
    """Every tensor the TBE has, the cache and its map included."""
    return bits({name: tensor for name, tensor in [*tbe.named_parameters(), *tbe.named_buffers()]})


def load(model: nn.Module, path: Path, **options: Any) -> None:
    asyncckpt.Loader(path, model, {"model": dense_state_of(model)}, **options).load()


@pytest.mark.parametrize("optimizer", OptimType, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("specs", [HOST, CACHED], ids=["host", "cached"])
def test_round_trip_goes_on_like_an_uninterrupted_run(tmp_path: Path, specs: list[Spec], optimizer: OptimType) -> None:
    features = FEATURES if specs is CACHED else None
    tbe = trained(FakeTbe(specs, optimizer=optimizer, feature_table_map=features))
    expected = image(tbe)
    saved(nn.ModuleDict({"tbe": tbe}), tmp_path)
    trained(tbe, range(6, 10))
    fresh = FakeTbe(specs, optimizer=optimizer, feature_table_map=features, seed=5)
    load(nn.ModuleDict({"tbe": fresh}), tmp_path)
    assert image(fresh) == expected
    trained(fresh, range(6, 10))
    assert image(fresh) == image(tbe)
    assert tbe.flushes_count == fresh.flushes_count == 0


def test_columns_are_the_live_memory() -> None:
    tbe = FakeTbe(HOST, optimizer=OptimType.ADAM)
    tables = tables_of(nn.ModuleDict({"a": nn.ModuleDict({"tbe": tbe})}))
    assert list(tables) == ["a.tbe.table_0", "a.tbe.table_1"]
    columns = tables["a.tbe.table_1"].schema().columns
    assert [(column.name, column.row_shape, column.role) for column in columns] == [
        ("id", (), Role.ID),
        ("embedding", (2,), Role.WEIGHT),
        ("momentum1", (2,), Role.OPTIMIZER),
        ("momentum2", (2,), Role.OPTIMIZER),
    ]
    cut = tables["a.tbe.table_1"].begin_cut()
    assert cut.column("embedding").data_ptr() == tbe.split_embedding_weights()[1].data_ptr()
    assert cut.column("momentum2").data_ptr() == tbe.split_optimizer_states()[1][1].data_ptr()
    cut.end(ok=True)


def test_names_are_those_of_the_tbe() -> None:
    assert list(tables_of(FakeTbe(HOST, table_names=["user", "item"]))) == ["user", "item"]
    assert list(tables_of(FakeTbe(HOST, table_names=[]))) == ["table_0", "table_1"]
    with pytest.raises(UsageError, match="a TBE holds two tables with the name 't'"):
        tables_of(FakeTbe(HOST, table_names=["t", "t"]))


@pytest.mark.parametrize(
    ("optimizer", "flags", "names"),
    [
        (
            OptimType.EXACT_ROWWISE_ADAGRAD,
            ["_used_rowwise_adagrad_with_counter"],
            ["momentum1", "prev_iter", "row_counter"],
        ),
        (
            OptimType.EXACT_ROWWISE_ADAGRAD,
            ["_used_rowwise_adagrad_with_global_weight_decay"],
            ["momentum1", "prev_iter"],
        ),
        (OptimType.ADAM, ["use_rowwise_bias_correction"], ["momentum1", "momentum2", "row_counter"]),
        (OptimType.EXACT_ROWWISE_ADAGRAD, ["use_rowwise_bias_correction"], ["momentum1"]),
    ],
)
def test_states_by_row_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch, optimizer: OptimType, flags: list[str], names: list[str]
) -> None:
    tbe = FakeTbe(HOST, optimizer=optimizer)
    for flag in flags:
        setattr(tbe, flag, True)
    states = [[torch.zeros(spec.rows) for _ in names] for spec in HOST]
    monkeypatch.setattr(tbe, "split_optimizer_states", lambda: states)
    found = [column.name for column in tables_of(tbe)["table_0"].schema().columns]
    assert found == ["id", "embedding", *names]


def test_counters_are_dense_state() -> None:
    tbe = trained(FakeTbe(HOST))
    assert dense_state_of(nn.ModuleDict({"tbe": tbe})).state_dict() == {"module": {"tbe.iter": tbe.iter}}


def test_a_tbe_that_has_moved_is_refused() -> None:
    tbe = FakeTbe(HOST)
    table = tables_of(tbe)["table_0"]
    tbe.weights_host.data = tbe.weights_host.data.clone()
    with pytest.raises(UsageError, match="a TBE has moved since its tables were made"):
        table.begin_cut()
    table = tables_of(tbe)["table_0"]
    table.begin_cut().end(ok=True)


def test_a_key_value_tbe_is_refused() -> None:
    kind = type("SSDTableBatchedEmbeddingBags", (nn.Module,), {"__module__": KEY_VALUE_TBE.rpartition(".")[0]})
    with pytest.raises(UnsupportedError, match="module 'tbe' keeps its rows in a key-value store"):
        tables_of(nn.ModuleDict({"tbe": kind()}))


# -- behind a cache ----------------------------------------------------------------------------------------------------


def test_only_tables_behind_the_cache_are_overlaid() -> None:
    tables = list(tables_of(trained(cached_tbe())).values())
    assert [type(table) for table in tables] == [FixedTable, CachedTable, CachedTable]
    for table in tables:
        cut = table.begin_cut()
        assert isinstance(cut, OverlaidCut) == isinstance(table, CachedTable)
        cut.end(ok=True)


def test_cache_map_names_rows_of_the_table() -> None:
    tbe = trained(cached_tbe(cache_sets=8))
    assert all(tbe.cached(t) for t in (1, 2))
    for t, table in zip((1, 2), list(tables_of(tbe).values())[1:], strict=True):
        cut = table.begin_cut()
        assert isinstance(cut, OverlaidCut)
        assert cut.cache_map.dtype is torch.int64
        assert sorted(cut.cache_map.tolist()) == sorted(tbe.cached(t))
        values = cut.cached_column("embedding")
        assert values is not None
        assert values.is_contiguous()
        for row, value in zip(cut.cache_map.tolist(), values, strict=True):
            assert torch.equal(value, tbe.lxu_cache_weights[tbe.cached(t)[row], : tbe.specs[t].dim])
        assert cut.cached_column("id") is None
        assert cut.cached_column("momentum1") is None
        cut.fence()
        with pytest.raises(UsageError, match="was asked for after its fence"):
            cut.cached_column("embedding")


@pytest.mark.parametrize("staged", [True, False])
def test_a_save_leaves_table_cache_and_random_numbers_alone(tmp_path: Path, staged: bool) -> None:
    tbe = trained(cached_tbe())
    before, random = live(tbe), torch.get_rng_state()
    with asyncckpt.Saver(path=tmp_path, hashtables=tbe) as saver:
        if staged:
            saver.save_async(1).result(60)
        else:
            saver.save(1)
    assert live(tbe) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert (tbe.flushes_count, tbe.resets_count) == (0, 0)
    fresh = cached_tbe(seed=5)
    asyncckpt.Loader(tmp_path, fresh).load()
    assert bits(fresh.rows_of(1)) == bits(tbe.rows_of(1))


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> CurrentStream:
    """What stands for torch.cuda.current_stream() of a prefetch stream's device."""
    stream = CurrentStream()
    monkeypatch.setattr(prefetch_stream, "_current", lambda other: stream)
    return stream


def test_a_cut_comes_behind_the_prefetch(tmp_path: Path, current: CurrentStream) -> None:
    tbe = trained(cached_tbe())
    expected = image(tbe)
    tbe.prefetch_stream = FakeTbeStream()
    for _ in range(3):
        tbe.prefetch(1, [7, 8])
        tbe.prefetch(2, [6, 5])
    assert tbe.prefetch_stream.queue
    assert image(tbe) != expected  # Slots without their weights: what a cut must not see.
    saved(tbe, tmp_path)
    assert tbe.prefetch_stream in current.waits_for
    fresh = cached_tbe(seed=5)
    load(fresh, tmp_path)
    assert image(fresh) == expected


def test_prefetches_behind_a_cut_wait_for_its_fence(current: CurrentStream) -> None:
    tbe = trained(cached_tbe())
    tbe.prefetch_stream = FakeTbeStream()
    cut = tables_of(tbe)["table_1"].begin_cut()
    assert current not in tbe.prefetch_stream.waits_for
    cut.fence()
    assert tbe.prefetch_stream.waits_for == [current]
    cut.end(True)
    assert tbe.prefetch_stream.waits_for == [current]


def test_a_lost_device_does_not_keep_the_table(current: CurrentStream, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(stream: FakeTbeStream, other: FakeTbeStream) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    tbe = trained(cached_tbe())
    tbe.prefetch_stream = FakeTbeStream()
    table = tables_of(tbe)["table_1"]
    cut = table.begin_cut()
    with monkeypatch.context() as patch:
        patch.setattr(FakeTbeStream, "wait_stream", lost)
        cut.fence()
    table.begin_cut().end(True)


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, True), (torch.float16, False), (torch.bfloat16, False)])
def test_a_cache_of_more_precision_is_rounded_to_the_nearest(tmp_path: Path, dtype: torch.dtype, exact: bool) -> None:
    tbe = trained(cached_tbe(dtype=dtype))
    saved(tbe, tmp_path)
    fresh = cached_tbe(dtype=dtype, seed=5)
    load(fresh, tmp_path)
    assert image(fresh) == image(tbe)
    slot = tbe.cached(1)[next(iter(tbe.cached(1)))]
    row = tbe.lxu_cache_weights[slot, :2]
    assert torch.equal(row.to(dtype).float(), row) == exact


def test_a_quantized_table_behind_a_cache_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"a cached table of a TBE is quantized, found torch.uint8"):
        tables_of(cached_tbe(dtype=torch.uint8))


def test_a_load_empties_the_cache(tmp_path: Path) -> None:
    tbe = trained(cached_tbe())
    saved(tbe, tmp_path)
    target = trained(cached_tbe(seed=5), range(3, 9))
    assert target.cached(1)
    load(target, tmp_path)
    assert not target.cached(1)
    assert image(target) == image(tbe)


def test_a_partial_load_keeps_the_newest_values_of_the_rest(tmp_path: Path) -> None:
    """Other columns, other rows and other tables of the TBE are as new as their cached rows were."""
    saved(trained(cached_tbe()), tmp_path)
    target = trained(cached_tbe(seed=5), range(3, 9))
    rows = [target.rows_of(t) for t in range(3)]
    assert any(target.cached(t) and not torch.equal(target.split_embedding_weights()[t], rows[t]) for t in (1, 2))
    only_state = {"table_1": {"table_1": ["id", "momentum1"]}}
    asyncckpt.Loader(tmp_path, {"table_1": tables_of(target)["table_1"]}, filter_func=lambda info: only_state).load()
    assert bits([target.rows_of(t) for t in range(3)]) == bits(rows)
    assert target.resets_count


def test_a_load_with_prefetched_batches_is_refused(tmp_path: Path) -> None:
    tbe = trained(cached_tbe())
    saved(tbe, tmp_path)
    tbe.prefetch(1, [3])
    before = live(tbe)
    with pytest.raises(UsageError, match="a load into a TBE while prefetched batches wait for their forward, found 1"):
        load(tbe, tmp_path)
    assert live(tbe) == before


def test_the_fake_can_tell_a_wrong_reader(tmp_path: Path) -> None:
    """Of the traps: rows of the feature behind, managed rows alone, and a flush are all seen as different."""
    tbe = trained(cached_tbe())
    cumsum = tbe.cache_hash_size_cumsum.tolist()
    begin = cumsum[FEATURES.index(1)]
    assert cumsum[FEATURES.index(1) + 1] != begin + tbe.specs[1].rows
    assert any(not torch.equal(tbe.split_embedding_weights()[t], tbe.rows_of(t)) for t in (1, 2))
    before = image(tbe)
    tbe.flush()
    tbe.reset_cache_states()
    assert image(tbe) != before
