"""What RecIS wrote is loaded bit for bit, into tables of any sharding and into tensors, or looked into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.formats import recis
from asyncckpt.plan.load_offer import LoadInfo
from tests.recis.handmade import Handmade, dense_values, user_rows

SLOTS = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}


def make_table(shard: asyncckpt.table.Shard = (0, 1), **more: object) -> asyncckpt.HashTable:
    arguments = {"optimizer_slots": SLOTS, "metadata": {"last_seen": torch.int64}, **more}
    return asyncckpt.HashTable("user", 4, shard=shard, **arguments)


def check_rows(tables: list[asyncckpt.HashTable], rows: dict[str, torch.Tensor]) -> None:
    """Together the tables hold these rows, each its own ids, bit for bit."""
    ids = torch.cat([table.ids() for table in tables])
    assert torch.equal(ids.sort().values, rows["id"].sort().values)
    for table in tables:
        mine = table.owns(rows["id"])
        found = table.read(rows["id"][mine])
        for column, slot in (
            ("embedding", "embedding"),
            ("exp_avg", "sparse_adam_exp_avg"),
            ("exp_avg_sq", "sparse_adam_exp_avg_sq"),
        ):
            assert torch.equal(found[column], rows[slot][mine])
        assert torch.equal(found["last_seen"], rows["step_filter"][mine, 0])


SHARDINGS = [[(0, 1)], [(0, 3), (1, 3), (2, 3)], [(0, 20_000, 65_536), (20_000, 65_536, 65_536)]]


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("into", SHARDINGS)
def test_tables_of_any_sharding_get_their_rows(tmp_path: Path, shards: int, into: list[tuple[int, ...]]) -> None:
    rows, dense = user_rows(), dense_values()
    folder = Handmade.of({"user": rows}, dense, shards=shards, parallel=3).write(tmp_path / "ckpt_120")
    tables = [make_table(shard) for shard in into]
    tables[0].insert(torch.tensor([first_owned(tables[0])]), torch.ones(1, 4))
    for table in tables:
        tensors = {name: torch.full_like(value, 1) for name, value in dense.items()}
        report = recis.Loader(folder, {"user": table}, tensors).load()
        assert (report.step, report.rows) == (120, {"user": len(table)})
        assert report.loaded["user"] == {"user": ["id", "embedding", "exp_avg", "exp_avg_sq", "last_seen"]}
        assert (report.missing, report.unexpected) == ((), ())
        assert all(torch.equal(tensors[name], value) for name, value in dense.items())
    check_rows(tables, rows)


def first_owned(table: asyncckpt.HashTable) -> int:
    return int(torch.arange(100_000)[table.owns(torch.arange(100_000))][0])


def test_rows_are_added_where_that_is_asked_for(tmp_path: Path) -> None:
    rows = user_rows(100)
    folder = Handmade.of({"user": rows}, {}).write(tmp_path / "a")
    table = make_table()
    table.insert(torch.tensor([5]), torch.full((1, 4), 2.0))
    recis.Loader(folder, {"user": table}, merge=True).load()
    assert len(table) == len(rows["id"]) + 1
    assert table.read(torch.tensor([5]))["embedding"].tolist() == [[2.0] * 4]
    assert recis.Loader(folder, {"user": table}).load().step == 0
    check_rows([table], rows)


def test_slots_keep_their_names_where_the_table_has_them(tmp_path: Path) -> None:
    rows = user_rows(50)
    folder = Handmade.of({"user": rows}, {}).write(tmp_path / "a")
    names = [slot for slot in rows if slot not in ("id", "embedding", "step_filter")]
    own = {"step_filter": (torch.int64, (1,))}
    table = asyncckpt.HashTable("user", 4, optimizer_slots=dict.fromkeys(names, torch.float32), metadata=own)
    recis.Loader(folder, {"user": table}).load()
    found = table.read(rows["id"])
    assert all(torch.equal(found[slot], values) for slot, values in rows.items() if slot != "id")


def test_columns_says_what_a_slot_becomes(tmp_path: Path) -> None:
    rows = user_rows(50)
    folder = Handmade.of({"user": rows}, {}).write(tmp_path / "a")
    table = asyncckpt.HashTable("user", 4, optimizer_slots={"sum": torch.float32})
    columns = {"sparse_adam_exp_avg_sq": "sum"}
    report = recis.Loader(folder, {"user": table}, columns=columns).load()
    assert report.loaded["user"]["user"] == ["id", "embedding", "sum"]
    assert torch.equal(table.read(rows["id"])["sum"], rows["sparse_adam_exp_avg_sq"])


def test_a_filter_renames_and_drops(tmp_path: Path) -> None:
    rows, dense = user_rows(50), dense_values()
    folder = Handmade.of({"old": rows}, dense).write(tmp_path / "a")
    table, weight = make_table(), torch.zeros(5, 3)
    seen, sources = [], []

    def choose(info: LoadInfo) -> dict[str, dict[str, list[str]]]:
        seen.append(dict(info))
        sources.append(set(info.sources))
        return {**info, "user": {"old": ["id", "embedding"]}, "w": {"dense.weight": []}}

    targets = {"w": weight, "not there": torch.zeros(2)}
    report = recis.Loader(folder, {"user": table}, targets, filter_func=choose, strict=False).load()
    columns = ["id", "embedding", "exp_avg", "exp_avg_sq", "last_seen"]
    assert seen == [{"user": {"user": columns}, "w": {"w": []}, "not there": {"not there": []}}]
    assert sources == [{"old", *dense}]
    assert report.missing == ("not there",)
    assert torch.equal(weight, dense["dense.weight"])
    assert torch.equal(table.read(rows["id"])["embedding"], rows["embedding"])
    assert set(report.unexpected) == dense.keys() - {"dense.weight"}


def test_a_load_of_nothing_warns(tmp_path: Path) -> None:
    folder = Handmade.of({"old": user_rows(50)}, {}).write(tmp_path / "a")
    loader = recis.Loader(folder, {"user": make_table()}, strict=False)
    with pytest.warns(RuntimeWarning, match="nothing was loaded.*lacks 'user'; it has 'old'"):
        assert loader.load().is_empty


def test_nested_targets_are_found_by_their_names(tmp_path: Path) -> None:
    dense = dense_values()
    folder = Handmade.of({}, dense).write(tmp_path / "a")
    model = torch.nn.ModuleDict({"dense": torch.nn.Linear(5, 3)})
    model["dense"].weight = torch.nn.Parameter(torch.zeros(5, 3))
    model["dense"].bias = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    recis.Loader(folder, tensors=model.state_dict()).load()
    assert torch.equal(model["dense"].weight, dense["dense.weight"])
    nested = {"dense": {"weight": torch.zeros(5, 3), "bias": torch.zeros(3, dtype=torch.bfloat16)}}
    recis.Loader(folder, tensors=nested).load()
    assert torch.equal(nested["dense"]["bias"], dense["dense.bias"])


def test_large_arrays_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.plan.image.BLOCK_BYTES_MAX", 999)
    rows, dense = user_rows(500), {"wide": torch.randn(100, 30)}
    folder = Handmade.of({"user": rows}, dense, shards=2).write(tmp_path / "a")
    table, wide = make_table(), torch.zeros(100, 30)
    recis.Loader(folder, {"user": table}, {"wide": wide}).load()
    check_rows([table], rows)
    assert torch.equal(wide, dense["wide"])


def test_a_reader_shows_names_forms_and_values(tmp_path: Path) -> None:
    rows, dense = user_rows(200), dense_values()
    folder = Handmade.of({"user": rows}, dense, shards=3).write(tmp_path / "a")
    with recis.CheckpointReader(folder) as reader:
        assert sorted(reader.tensor_names()) == sorted([*(f"user@{slot}" for slot in rows), *dense])
        order = reader.read_tensor("user@id").argsort()
        for slot, values in rows.items():
            assert reader.tensor_shape(f"user@{slot}") == tuple(values.shape)
            assert reader.tensor_dtype(f"user@{slot}") is values.dtype
            assert torch.equal(reader.read_tensor(f"user@{slot}")[order], values[rows["id"].argsort()])
        for name, value in dense.items():
            assert torch.equal(reader.read_tensor(name), value)
        with pytest.raises(asyncckpt.CheckpointError, match="no tensor 'user'"):
            reader.read_tensor("user")


def test_an_import_is_a_checkpoint_of_ours(tmp_path: Path) -> None:
    rows, dense = user_rows(), dense_values()
    folder = Handmade.of({"user": rows, "none": empty_rows(rows)}, dense, shards=8).write(tmp_path / "ckpt_77")
    result = recis.import_checkpoint(folder, tmp_path / "run")
    assert (result.step, result.rows_count) == (77, len(rows["id"]))
    info = asyncckpt.describe(tmp_path / "run")
    assert info.ranks_count == 8
    assert {name: item for name, item in info.tables.items()} == {"user": len(rows["id"]), "none": 0}
    for into in SHARDINGS:
        tables = [make_table(shard) for shard in into]
        for table in tables:
            tensors = {name: torch.full_like(value, 1) for name, value in dense.items()}
            asyncckpt.Loader(tmp_path / "run", {"user": table}, tensors, shard_index=0, shard_num=1).load()
            assert all(torch.equal(tensors[name], value) for name, value in dense.items())
        check_rows(tables, rows)
    assert recis.import_checkpoint(folder, tmp_path / "run", step=78).step == 78
    with pytest.raises(asyncckpt.ConflictError):
        recis.import_checkpoint(folder, tmp_path / "run")
    assert asyncckpt.list_steps(tmp_path / "run") == [77, 78]


def empty_rows(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {slot: values[:0] for slot, values in rows.items()}
