"""What is written for RecIS obeys all of its rules, holds every bit, and is there all at once or not at all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.errors import ConflictError, CorruptError, UnsupportedError, UsageError
from asyncckpt.formats import recis
from tests.end_to_end.merged_ranks import as_boxes, save_each
from tests.recis.handmade import Handmade, dense_values, user_rows
from tests.recis.rules import check_rules
from tests.recis.test_loading import check_rows, make_table
from tests.worlds.directories import flip_byte
from tests.worlds.failing_calls import fail_in_turn

BACK = {"embedding": "embedding", "exp_avg": "sparse_adam_exp_avg", "exp_avg_sq": "sparse_adam_exp_avg_sq"}


def filled(rows: dict[str, torch.Tensor], shard: asyncckpt.table.Shard = (0, 1)) -> asyncckpt.HashTable:
    table = make_table(shard)
    mine = table.owns(rows["id"])
    slots = {column: rows[slot][mine] for column, slot in BACK.items() if column != "embedding"}
    table.insert(rows["id"][mine], rows["embedding"][mine], last_seen=rows["step_filter"][mine, 0], **slots)
    return table


def same_rows(found: dict[str, torch.Tensor], rows: dict[str, torch.Tensor]) -> None:
    assert found.keys() == rows.keys()
    at, order = found["id"].argsort(), rows["id"].argsort()
    for slot, values in rows.items():
        assert found[slot].dtype is values.dtype
        assert torch.equal(found[slot][at], values[order])


def same_dense(found: dict[str, torch.Tensor], dense: dict[str, torch.Tensor]) -> None:
    assert found.keys() == dense.keys()
    assert all(found[name].dtype is v.dtype and torch.equal(found[name], v) for name, v in dense.items())


@pytest.mark.parametrize("parallel", [1, 3, 40])
def test_live_tables_and_tensors_obey_the_rules(tmp_path: Path, parallel: int) -> None:
    rows, dense = user_rows(), dense_values()
    table = filled(rows)
    table.remove(rows["id"][::3])
    kept = {slot: values[torch.arange(len(values)) % 3 != 0] for slot, values in rows.items()}
    report = recis.save(
        tmp_path / "ckpt", {"user": table}, {**dense, "epoch": 3}, optimizer="sparse_adam", parallel=parallel
    )
    assert (report.rows, report.left_out) == ({"user": len(kept["id"])}, ("epoch",))
    tables, found = check_rules(tmp_path / "ckpt", shards=1, parallel=parallel)
    same_rows(tables["user"], kept)
    same_dense(found, dense)
    other = make_table()
    recis.Loader(tmp_path / "ckpt", {"user": other}).load()
    check_rows([other], kept)


def test_a_multi_level_table_is_written_with_its_newest_rows(tmp_path: Path) -> None:
    table = asyncckpt.MultiLevelTable("user", 4, cache_rows=16)
    ids = torch.arange(60)
    table.insert(ids, torch.randn(60, 4))
    with table.rows(ids[:10]) as rows:
        rows.embedding.add_(1.0)
    recis.save(tmp_path / "ckpt", {"user": table})
    found = check_rules(tmp_path / "ckpt", shards=1, parallel=8)[0]["user"]
    assert torch.equal(found["embedding"][found["id"].argsort()], table.read(ids)["embedding"])


def test_a_slice_of_recis_keeps_its_buckets(tmp_path: Path) -> None:
    rows = user_rows(200)
    recis.save(tmp_path / "ckpt", {"user": filled(rows, (0, 32_768, 65_536))}, optimizer="sparse_adam")
    with recis.CheckpointReader(tmp_path / "ckpt") as reader:
        assert ((reader.read_tensor("user@id") % 65_536) < 32_768).all()
    assert '"user@id^00000@32768@65536"' in (tmp_path / "ckpt" / "tensorkey.json").read_text()
    with pytest.raises(UsageError, match="not a slice of RecIS"):
        recis.save(tmp_path / "other", {"user": filled(rows, (0, 3))}, optimizer="sparse_adam")


@pytest.mark.parametrize("shards", [None, 1, 3, 8])
def test_a_chain_of_deltas_is_exported_as_one(tmp_path: Path, shards: int | None) -> None:
    rows, dense = user_rows(2000), dense_values()
    table = filled({slot: values[:1500] for slot, values in rows.items()})
    deltas = asyncckpt.DeltaPolicy(bytes_share_max=9.0)
    state = {"layers": {"0": dense}, "epoch": 3}
    with asyncckpt.Saver(path=tmp_path / "run", hashtables={"user": table}, tensors=state, deltas=deltas) as saver:
        saver.save(1, kind="full")
        rest = {slot: values[1000:] for slot, values in rows.items()}
        slots = {column: rest[slot] for column, slot in BACK.items() if column != "embedding"}
        table.insert(rest["id"], rest["embedding"], last_seen=rest["step_filter"][:, 0], **slots)
        table.remove(rows["id"][:100])
        saver.save(2, kind="delta")
    report = recis.export_checkpoint(tmp_path / "run", tmp_path / "ckpt", shards=shards, optimizer="sparse_adam")
    assert (report.step, report.rows, report.left_out) == (2, {"user": 1900}, ("epoch",))
    tables, found = check_rules(tmp_path / "ckpt", shards=shards or 1, parallel=8)
    same_rows(tables["user"], {slot: values[100:] for slot, values in rows.items()})
    same_dense(found, {f"layers.0.{name}": value for name, value in dense.items()})


@pytest.mark.parametrize("shards", [1, 8])
def test_there_and_back_is_bit_for_bit(tmp_path: Path, shards: int) -> None:
    rows, dense = user_rows(), dense_values()
    folder = Handmade.of({"user": rows}, dense, shards=shards).write(tmp_path / "ckpt_5")
    recis.import_checkpoint(folder, tmp_path / "run")
    for out in (None, 2):
        target = tmp_path / f"out-{out}"
        report = recis.export_checkpoint(tmp_path / "run", target, shards=out, optimizer="sparse_adam", parallel=2)
        assert report.shards_count == (out or shards)
        tables, found = check_rules(target, shards=out or shards, parallel=2)
        same_rows(tables["user"], rows)
        same_dense(found, dense)


def test_large_blocks_and_encodings_come_out_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.plan.image.BLOCK_BYTES_MAX", 1000)
    rows = user_rows(400)
    table, wide = filled(rows), torch.zeros(60, 33)
    filters = [asyncckpt.filters.cast("user@embedding", torch.bfloat16), asyncckpt.filters.compress()]
    saver = asyncckpt.Saver(path=tmp_path / "run", hashtables={"user": table}, tensors={"w": wide}, filters=filters)
    with saver:
        saver.save(1)
    assert {"cast", "zstd"} <= encodings_in(tmp_path / "run")
    recis.export_checkpoint(tmp_path / "run", tmp_path / "ckpt", shards=2, optimizer="sparse_adam")
    tables, found = check_rules(tmp_path / "ckpt", shards=2, parallel=8)
    same_rows(tables["user"], {**rows, "embedding": rows["embedding"].bfloat16().float()})
    same_dense(found, {"w": wide})


def encodings_in(path: Path) -> set[str]:
    [manifest] = (path / "manifests").glob("*.json")
    blocks = json.loads(manifest.read_text())["blocks"]
    return {step["kind"] for block in blocks for step in block.get("encoding", [])}


def test_ranks_and_boxes_are_put_together(tmp_path: Path) -> None:
    """Tables by the modulo of their ids, which no slice of RecIS is; a matrix in four boxes, a vector in four parts."""
    whole, vector, rows = torch.randn(5, 6), torch.randn(8), user_rows(300)
    boxes, states, tables = {}, [], []
    for rank, (own, columns) in enumerate(itertools.product(((0, 2), (2, 5)), ((0, 4), (4, 6)))):
        part = vector[2 * rank : 2 * rank + 2]
        boxes[rank, "w"] = ((own[0], columns[0]), (5, 6))
        boxes[rank, "v"] = ((2 * rank,), (8,))
        states.append({"w": whole[slice(*own), slice(*columns)].clone(), "v": part.clone(), "rank": rank})
        tables.append({"user": filled(rows, (rank, 4))})
    root = save_each(tmp_path, states, tables=tables, change=as_boxes(boxes))
    report = recis.export_checkpoint(root, tmp_path / "ckpt", optimizer="sparse_adam")
    assert report.shards_count == 4
    found, dense = check_rules(tmp_path / "ckpt", shards=4, parallel=8)
    same_rows(found["user"], rows)
    same_dense(dense, {"w": whole, "v": vector})


def test_a_dense_tensor_may_have_the_name_of_a_table(tmp_path: Path) -> None:
    """RecIS calls blocks of a table `user@id` and so on; a dense `user` beside them keeps its name."""
    rows, dense = user_rows(50), {"user": torch.randn(3), "other": torch.randn(2)}
    folder = Handmade.of({"user": rows}, dense).write(tmp_path / "ckpt_3")
    table, targets = make_table(), {"user": torch.zeros(3), "other": torch.zeros(2)}
    report = recis.Loader(folder, {"user": table}, targets).load()
    assert report.loaded["user#2"] == {"user#2": []}
    check_rows([table], rows)
    same_dense(targets, dense)
    recis.save(tmp_path / "live", {"user": table}, targets, optimizer="sparse_adam", parallel=2)
    asyncckpt.save(tmp_path / "saved", targets, hashtables={"user": table})
    recis.import_checkpoint(folder, tmp_path / "imported")
    for run in ("saved", "imported"):
        out = recis.export_checkpoint(tmp_path / run, tmp_path / f"{run}-out", optimizer="sparse_adam", parallel=2)
        assert sorted(out.tensors) == ["other", "user"]
    for name in ("live", "saved-out", "imported-out"):
        tables, found = check_rules(tmp_path / name, shards=1, parallel=2)
        same_rows(tables["user"], rows)
        same_dense(found, dense)


LIKE_TABLES: tuple[tuple[str, dict[str, object]], ...] = (
    ("user", {"user": 1.0, "user#2": 2.0}),
    ("user", {"user#2": 2.0, "user": 1.0, "user#3": 3.0}),
    ("a.b", {"a.b": 1.0, "a": {"b": 2.0}}),
    ("a.b", {"a": {"b": 2.0}, "a.b": 1.0}),
)


def tensors_of(numbers: Mapping[str, Any], factor: float = 1.0) -> dict[str, Any]:
    return {
        name: tensors_of(number, factor) if isinstance(number, dict) else torch.full((2,), number * factor)
        for name, number in numbers.items()
    }


@pytest.mark.parametrize("way", ["save", "export"])
@pytest.mark.parametrize(("table", "numbers"), LIKE_TABLES)
def test_tensors_of_one_dotted_name_stay_apart_beside_a_table_of_that_name(
    tmp_path: Path, table: str, numbers: Mapping[str, Any], way: str
) -> None:
    tables = {table: asyncckpt.HashTable(table, 2)}
    tables[table].insert(torch.arange(3), torch.ones(3, 2))
    if way == "save":
        recis.save(tmp_path / "out", tables, tensors_of(numbers))
    else:
        asyncckpt.save(tmp_path / "run", tensors_of(numbers), hashtables=tables)
        recis.export_checkpoint(tmp_path / "run", tmp_path / "out")
    loaded = tensors_of(numbers, factor=0.0)
    recis.Loader(tmp_path / "out", tables, loaded).load()
    assert str(loaded) == str(tensors_of(numbers))


def test_what_recis_cannot_have_is_refused(tmp_path: Path) -> None:
    rows = user_rows(20)
    table = filled(rows)
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (UsageError, "not known", {"hashtables": {"user": table}}),
        (UsageError, "optimizer must be", {"hashtables": {"user": table}, "optimizer": "adam"}),
        (UsageError, "the same slot", {"hashtables": {"user": table}, "columns": {"a": "exp_avg", "id": "exp_avg_sq"}}),
        (UsageError, "two slots", {"hashtables": {"user": table}, "columns": {"a": "exp_avg", "b": "exp_avg"}}),
        (UnsupportedError, "'\\^'", {"tensors": {"a^b": torch.ones(1)}}),
        (UnsupportedError, "/part_", {"tensors": {"a/part_0": torch.ones(1)}}),
        (UnsupportedError, "cannot be written", {"hashtables": {"a^b": table}, "optimizer": "sparse_adam"}),
        (UnsupportedError, "dtype", {"tensors": {"x": torch.ones(1, dtype=torch.complex64)}}),
        (UsageError, "parallel", {"tensors": {"x": torch.ones(1)}, "parallel": 0}),
    ]
    for kind, words, arguments in refused:
        with pytest.raises(kind, match=words):
            recis.save(tmp_path / "ckpt", **arguments)
        assert list(tmp_path.iterdir()) == []
    asyncckpt.save(tmp_path / "run", {"x": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(UnsupportedError, match="'x' has a dtype"):
        recis.export_checkpoint(tmp_path / "run", tmp_path / "ckpt")
    table.insert(torch.tensor([3]), torch.ones(1, 4))  # Not held by a cut that was given up.


def test_a_name_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {"x": torch.ones(1)})
    (tmp_path / "ckpt").mkdir()
    for call in (
        lambda: recis.export_checkpoint(tmp_path / "run", tmp_path / "ckpt"),
        lambda: recis.save(tmp_path / "ckpt", tensors={"x": torch.ones(1)}),
    ):
        with pytest.raises(ConflictError, match="already exists"):
            call()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "run"]
    assert list((tmp_path / "ckpt").iterdir()) == []


def test_damage_in_the_source_leaves_nothing(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {"x": torch.ones(100_000)}, hashtables={"user": make_table()})
    [shard] = (tmp_path / "run" / "data").glob("*/*.safetensors")
    flip_byte(shard)
    with pytest.raises(CorruptError, match="does not match its digest"):
        recis.export_checkpoint(tmp_path / "run", tmp_path / "ckpt", optimizer="sparse_adam")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_is_not_read_back_as_written_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(self: Any, folder: Any) -> None:
        for name in folder.names():
            if name.endswith(".safetensors"):
                path = folder.path / name
                flip_byte(path)

    monkeypatch.setattr("asyncckpt.commit.new_entry.NewEntry._sync", damage)
    with pytest.raises(CorruptError, match="not read back as it was written"):
        recis.save(tmp_path / "ckpt", tensors={"x": torch.ones(100)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["open", "mkdir", "rename", "fsync", "ftruncate"])
def test_a_failing_operation_leaves_nothing(tmp_path: Path, call: str) -> None:
    def save() -> None:
        recis.save(tmp_path / "ckpt", tensors={"x": torch.ones(10)})

    assert fail_in_turn(call, save, tmp_path / "ckpt") > 0
    same_dense(check_rules(tmp_path / "ckpt", shards=1, parallel=8)[1], {"x": torch.ones(10)})
