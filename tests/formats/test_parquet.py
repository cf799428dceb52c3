"""Tables go out as Parquet files, and come in from them: checked by pyarrow alone."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.errors import ConflictError, CorruptError, UnsupportedError, UsageError
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.formats import parquet
from asyncckpt.formats.parquet.columns import WIDENED, ParquetColumn
from asyncckpt.model.table import Role
from asyncckpt.plan import image
from tests.formats.states import same
from tests.program import invoke
from tests.worlds.directories import stored_rows

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
IN_TURN = asyncckpt.RankOptions(in_turn=True)
pytestmark = pytest.mark.any_core


def table(name: str = "user", *, rows: int = 500, dim: int = 4, first: int = -100) -> asyncckpt.HashTable:
    slots = {"exp_avg": torch.float32, "half": torch.float16, "narrow": torch.bfloat16}
    metadata = {"count": torch.int64, "flag": torch.bool, "small": torch.uint8}
    made = asyncckpt.HashTable(name, dim, optimizer_slots=slots, metadata=metadata)
    ids = torch.arange(first, first + rows) * 7
    generator = torch.Generator().manual_seed(rows)
    columns = {
        "exp_avg": torch.randn(rows, dim, generator=generator),
        "half": torch.randn(rows, dim, generator=generator).half(),
        "narrow": torch.randn(rows, dim, generator=generator).bfloat16(),
        "count": torch.arange(rows) - 3,
        "flag": torch.arange(rows) % 3 == 0,
        "small": (torch.arange(rows) % 256).to(torch.uint8),
    }
    made.insert(ids, torch.randn(rows, dim, generator=generator), **columns)
    return made


def roles(path: Path) -> dict[str, str]:
    """What each column is for, as `show` says."""
    shown = json.loads(invoke("show", path, "--json").stdout)
    return {block["name"]: block["role"] for block in shown["blocks"]}


def columns_of(path: Path) -> dict[str, Any]:
    """What pyarrow reads, as NumPy arrays in the order of the ids."""
    found = pq.read_table(path)
    order = np.argsort(found["id"].to_numpy())
    arrays = {}
    for name in found.column_names:
        column = found[name].combine_chunks()
        is_list = pa.types.is_fixed_size_list(column.type)
        rows = (column.flatten() if is_list else column).to_numpy(zero_copy_only=False)
        arrays[name] = (rows.reshape(len(found), -1) if is_list else rows)[order]
    return arrays


def test_a_table_goes_out_as_columns(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {"w": torch.ones(2), "epoch": 3}, 5, hashtables={"user": table()})
    with pytest.warns(RuntimeWarning, match=r"tensors \['w'\] are left out"):
        report = parquet.export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert (report.step, report.rows, report.left_out, report.left_out_tensors) == (
        5,
        {"user": 500},
        ("epoch",),
        ("w",),
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["user.parquet"]
    schema = pq.read_schema(tmp_path / "out" / "user.parquet")
    kinds = {field.name: (str(field.type), field.nullable) for field in schema}
    assert kinds["id"] == ("int64", False)
    assert kinds["embedding"] == ("fixed_size_list<element: float not null>[4]", False)
    assert kinds["narrow"] == kinds["embedding"]
    assert kinds["flag"] == ("bool", False)
    expected = stored_rows(tmp_path / "run")
    found = columns_of(tmp_path / "out" / "user.parquet")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        wide = values.float() if values.dtype is torch.bfloat16 else values
        assert np.array_equal(found[name], wide.numpy()), name


def test_it_comes_back_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, groups of rows and batches have sizes that do not go into each other."""
    tables = {"user": table(), "item": table("item", rows=33, dim=1), "none": table("none", rows=0)}
    asyncckpt.save(tmp_path / "run", {}, hashtables=tables)
    monkeypatch.setattr(sys.modules["asyncckpt.formats.parquet.export_checkpoint"], "GROUP_BYTES", 7_000)
    parquet.export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert pq.read_metadata(tmp_path / "out" / "user.parquet").num_row_groups > 3
    monkeypatch.setattr(image, "BLOCK_BYTES_MAX", 1_111)
    monkeypatch.setattr("asyncckpt.formats.parquet.files.BATCH_BYTES", 600)
    result = parquet.import_checkpoint(tmp_path / "out", tmp_path / "back", step=9)
    assert (result.step, result.rows_count) == (9, 533)
    for name in tables:
        assert same(stored_rows(tmp_path / "back", name), stored_rows(tmp_path / "run", name)), name
    assert roles(tmp_path / "back") == roles(tmp_path / "run")
    target = table(rows=1)
    asyncckpt.Loader(tmp_path / "back", hashtables={"user": target}).load()
    assert len(target) == 500


def test_deltas_are_folded_and_ranks_merged(tmp_path: Path) -> None:
    tables = [asyncckpt.HashTable("user", 2, shard=(rank, 2)) for rank in range(2)]
    for rank, own in enumerate(tables):
        ids = torch.arange(0, 400, 2) + rank
        own.insert(ids, torch.randn(200, 2))
    with (
        asyncckpt.Saver(0, 2, path=tmp_path / "run", hashtables={"user": tables[0]}, ranks=IN_TURN) as first,
        asyncckpt.Saver(1, 2, path=tmp_path / "run", hashtables={"user": tables[1]}, ranks=IN_TURN) as second,
    ):
        first.save(1)
        second.save(1)
    parquet.export_checkpoint(tmp_path / "run", tmp_path / "ranks")
    assert sorted(pq.read_table(tmp_path / "ranks" / "user.parquet")["id"].to_pylist()) == list(range(400))
    alone = asyncckpt.RankOptions(alone=True)
    with asyncckpt.Saver(path=tmp_path / "chain", hashtables={"user": tables[0]}, ranks=alone) as saver:
        saver.save(1)
        tables[0].insert(torch.tensor([0, 1000]), torch.ones(2, 2))
        tables[0].remove(torch.tensor([2]))
        saver.save(2, kind="delta")
    parquet.export_checkpoint(tmp_path / "chain", tmp_path / "folded")
    with pytest.warns(RuntimeWarning, match="only a part of table 'user': shard 0 of 2"):
        found, expected = columns_of(tmp_path / "folded" / "user.parquet"), stored_rows(tmp_path / "chain")
    assert {name: values.tolist() for name, values in found.items()} == {n: v.tolist() for n, v in expected.items()}


def spark(folder: Path, *, parts: int = 3, rows: int = 10) -> None:
    """A folder of parts with lists of no fixed size, nullable, under other names, as Spark writes it."""
    folder.mkdir(parents=True)
    for part in range(parts):
        ids = np.arange(part * rows, (part + 1) * rows)
        vectors = pa.array([[float(id), 1.0, 2.0] for id in ids], type=pa.list_(pa.float32()))
        made = pa.table({"user_id": ids, "vector": vectors, "clicks": pa.array(ids, type=pa.int32())})
        pq.write_table(made, folder / f"part-{part:05d}-abc.snappy.parquet", row_group_size=4)
    (folder / "_SUCCESS").touch()
    (folder / ".part-0.crc").write_bytes(b"x")


@pytest.mark.parametrize("below", ["user", "user.parquet"])
def test_parts_of_other_programs_come_in(below: str, tmp_path: Path) -> None:
    spark(tmp_path / "in" / below)
    pq.write_table(pa.table({"user_id": [7], "vector": pa.array([[1.0, 2.0]])}), tmp_path / "in" / "item.parquet")
    names = ("--column", "user_id=id", "--column", "vector=embedding")
    done = invoke("import", "parquet", tmp_path / "in", tmp_path / "run", *names)
    assert done.stdout.startswith("imported step 0: 2 tables of 31 rows, 0 tensors, 4 shards, "), done.output
    found = stored_rows(tmp_path / "run")
    assert found["id"].tolist() == list(range(30))
    assert (found["embedding"].dtype, found["embedding"][29].tolist()) == (torch.float32, [29.0, 1.0, 2.0])
    assert found["clicks"].dtype is torch.int32
    assert stored_rows(tmp_path / "run", "item")["embedding"].dtype is torch.float64
    assert roles(tmp_path / "run") == {
        **{"user@id": "id", "user@embedding": "weight", "user@clicks": "metadata"},
        **{"item@id": "id", "item@embedding": "weight"},
    }


def test_one_file_and_one_folder_are_tables_of_their_names(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {}, hashtables={"user": table()})
    parquet.export_checkpoint(tmp_path / "run", tmp_path / "out")
    parquet.import_checkpoint(tmp_path / "out" / "user.parquet", tmp_path / "one")
    spark(tmp_path / "many.parquet")
    parquet.import_checkpoint(tmp_path / "many.parquet", tmp_path / "two", columns={"user_id": "id"})
    assert same(stored_rows(tmp_path / "one"), stored_rows(tmp_path / "run"))
    assert len(stored_rows(tmp_path / "two", "many")["id"]) == 30


@pytest.mark.parametrize("dtype", WIDENED)
def test_every_pattern_of_narrow_numbers_comes_back(dtype: str) -> None:
    """NaN is many patterns, of which torch makes one."""
    narrow = dtype_by_name(dtype, owner="").dtype
    count = 256**narrow.itemsize
    raw = np.arange(count).astype(np.uint8 if narrow.itemsize == 1 else np.uint16).view(np.uint8)
    column = ParquetColumn("values", Role.WEIGHT, dtype, ())
    found = column.to_bytes(column.to_arrow(raw), "file")
    widened = torch.from_numpy(raw.copy()).view(narrow).float().numpy().view(np.uint32)
    again = torch.from_numpy(found.copy()).view(narrow).float().numpy().view(np.uint32)
    assert np.array_equal(again, widened)
    assert dtype != "bfloat16" or np.array_equal(found, raw)
    wrong = pa.array(np.float32([1.0, 1.0 + 2**-20]))
    with pytest.raises(CorruptError, match=f"not {dtype}"):
        column.to_bytes(wrong, "file")


def test_a_folder_that_would_be_one_table_is_refused(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {}, hashtables={"a": table("a"), "b": table("b")})
    for more in ([], ["--dry-run"]):
        done = invoke("export", "parquet", tmp_path / "run", tmp_path / "out.parquet", *more)
        assert done.exit_code == 2
        assert "one table" in done.stderr
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_parts_without_rows_and_other_orders_of_columns_come_in(empty: int, tmp_path: Path) -> None:
    """How long the lists of an empty part are, nobody knows."""
    folder = tmp_path / "in" / "user"
    folder.mkdir(parents=True)
    for number in range(3):
        ids = pa.array([] if number == empty else [3 * number, 3 * number + 1], type=pa.int64())
        rows = pa.array([[float(number)] * 4] * len(ids), type=pa.list_(pa.float32()))
        columns = {"id": ids, "embedding": rows}
        columns = columns if number else dict(reversed(columns.items()))
        pq.write_table(pa.table(columns), folder / f"part{number}.parquet")
    done = invoke("import", "parquet", tmp_path / "in", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert len(stored_rows(tmp_path / "run")["id"]) == 4


def test_dry_runs_say_the_same_and_make_nothing(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {"w": torch.ones(2)}, 3, hashtables={"user": table()})
    for more in (["--dry-run"], []):
        done = invoke("export", "parquet", tmp_path / "run", tmp_path / "out", *more)
        assert "step 3: 1 table of 500 rows, 0 tensors, 1 shard, " in done.stdout
        assert done.stdout.endswith("left out: 1 tensor: w\n")
        assert (tmp_path / "out").exists() == (not more)
    for more in (["--dry-run"], []):
        done = invoke("import", "parquet", tmp_path / "out", tmp_path / "back", "--step", "4", *more)
        assert "step 4: 1 table of 500 rows, 0 tensors, 1 shard, " in done.stdout
        assert (tmp_path / "back").exists() == (not more)


def test_what_has_no_place_is_refused_by_name(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "dense", {"w": torch.ones(2)})
    with pytest.raises(UnsupportedError, match="dense tensors have no place"):
        parquet.export_checkpoint(tmp_path / "dense", tmp_path / "out")
    asyncckpt.save(tmp_path / "run", {}, hashtables={"a/b": table("a/b")})
    with pytest.raises(UnsupportedError, match="cannot be the name of a file"):
        parquet.export_checkpoint(tmp_path / "run", tmp_path / "out")
    with pytest.raises(ConflictError):
        parquet.export_checkpoint(tmp_path / "run", tmp_path / "dense")
    spark(tmp_path / "user")
    with pytest.raises(UsageError, match="columns that no table has"):
        parquet.import_checkpoint(tmp_path / "user", tmp_path / "new", columns={"user_id": "id", "other": "x"})
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "new").exists()


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncckpt.save(tmp_path / "run", {}, hashtables={"user": table()})
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    for arguments in (
        ("export", "parquet", tmp_path / "run", tmp_path / "out"),
        ("import", "parquet", tmp_path, "new"),
    ):
        done = invoke(*arguments)
        assert "pip install 'asyncckpt[parquet]'" in done.stderr
        assert done.exit_code == 4
