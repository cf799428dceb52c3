"""Row filters and encodings, from a Saver to a Loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import asyncckpt
from asyncckpt import filters
from tests.worlds.bits import bits
from tests.worlds.rows import table_image

DIM = 16
KINDS = ["async", "blocking"]


def new_table(name: str = "user") -> asyncckpt.HashTable:
    return asyncckpt.HashTable(
        name,
        DIM,
        optimizer_slots={"sum": torch.float32},
        metadata={"count": torch.int64},
        initializer=asyncckpt.nn.Uniform(0.1, seed=3),
    )


def filled(name: str = "user", *, rows: int = 700, seed: int = 0) -> asyncckpt.HashTable:
    """Random ids with holes; of the slot `sum` only every third row is not zero."""
    generator = torch.Generator().manual_seed(seed)
    table = new_table(name)
    ids = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    found = table.lookup(ids)
    table.slot("sum")[found[::3]] = torch.rand(len(found[::3]), DIM, generator=generator)
    table.slot("count")[found] = torch.randint(0, 7, (rows,), generator=generator)
    table.remove(ids[::5])
    return table


def save(path: Path, kind: str, step: int = 1, **options: Any) -> asyncckpt.SaveResult:
    with asyncckpt.Saver(path=path, **options) as saver:
        return saver.save(step) if kind == "blocking" else saver.save_async(step).result(60)


def loaded(path: Path, name: str = "user", *, step: int | None = None) -> asyncckpt.HashTable:
    table = new_table(name)
    asyncckpt.Loader(path, {name: table}, step=step).load()
    return table


def kept_image(table: asyncckpt.HashTable, keep: Callable[[int], bool]) -> dict[int, bytes]:
    """The image of the rows whose count is to be kept."""
    counts = dict(zip(table.ids().tolist(), table.slot("count")[table.used_rows()].tolist(), strict=True))
    return {id: row for id, row in table_image(table).items() if keep(counts[id])}


@pytest.mark.parametrize("kind", KINDS)
def test_only_kept_rows_are_there_after_a_load(tmp_path: Path, kind: str) -> None:
    table, other = filled(), filled("item", seed=1)
    before = table_image(table)
    rule = filters.keep_rows("user", lambda columns: columns["count"] >= 3)
    save(tmp_path, kind, hashtables={"user": table, "item": other}, filters=[rule])
    assert table_image(table) == before
    wanted = kept_image(table, lambda count: count >= 3)
    assert 0 < len(wanted) < len(before)
    assert table_image(loaded(tmp_path)) == wanted
    assert table_image(loaded(tmp_path, "item")) == table_image(other)
    asyncckpt.verify(tmp_path)
    manifest = json.loads((tmp_path / "manifests" / "000000000001.json").read_text())
    (record,) = next(item["filters"] for item in manifest["tables"] if item["name"] == "user")
    assert record == {"kind": "keep_rows", "name": record["name"], "kept": len(wanted), "of": len(before)}


LOSSLESS = [filters.skip_zero_rows("user@sum"), filters.cast("user@count", torch.int32), filters.compress()]


@pytest.mark.parametrize("kind", KINDS)
def test_lossless_encodings_are_undone_by_a_load(tmp_path: Path, kind: str) -> None:
    table = filled()
    dense: dict[str, Any] = {"w": torch.zeros(90, 40), "step": torch.tensor(5), "half": torch.ones(999).bfloat16()}
    dense["w"][::9] = torch.rand(10, 40)
    plain = save(tmp_path / "plain", kind, hashtables={"user": table}, tensors=dense)
    packed = save(tmp_path / "packed", kind, hashtables={"user": table}, tensors=dense, filters=LOSSLESS)
    assert packed.bytes_written < 0.8 * plain.bytes_written
    targets = {name: torch.full_like(values, 3) for name, values in dense.items()}
    fresh = new_table()
    asyncckpt.Loader(tmp_path / "packed", {"user": fresh}, targets).load()
    assert table_image(fresh) == table_image(table)
    assert bits(targets) == bits(dense)
    asyncckpt.verify(tmp_path / "packed")


@pytest.mark.parametrize("kind", KINDS)
def test_smaller_numbers_come_back_in_their_own_dtype(tmp_path: Path, kind: str) -> None:
    table = filled()
    weight = torch.randn(30, 50)
    rules = [
        filters.quantize("user@embedding", bits=4),
        filters.cast("user@sum", torch.bfloat16),
        filters.quantize("head.*"),
    ]
    save(tmp_path, kind, hashtables={"user": table}, tensors={"head": {"weight": weight}}, filters=rules)
    target = torch.zeros_like(weight)
    fresh = new_table()
    asyncckpt.Loader(tmp_path, {"user": fresh}, {"head": {"weight": target}}).load()
    mine, theirs = table.used_rows(), fresh.lookup(table.ids(), insert=False)
    assert len(fresh) == len(table)
    assert torch.equal(fresh.slot("count")[theirs], table.slot("count")[mine])
    assert torch.equal(fresh.slot("sum")[theirs], table.slot("sum")[mine].bfloat16().float())
    values = table.embedding[mine]
    ranges = values.amax(1) - values.amin(1)
    error = (fresh.embedding[theirs] - values).abs().amax(1)
    assert bool((error <= (ranges + values.amin(1).abs() / 1024) / 29).all())
    assert bool((error > 0).any())
    bound = (weight.amax(1) - weight.amin(1)) / 509
    assert bool(((target - weight).abs().amax(1) <= bound + 1e-6).all())


def test_shard_files_open_as_safetensors(tmp_path: Path) -> None:
    table = filled()
    rules = [filters.cast("user@embedding", torch.float16), filters.quantize("user@sum"), filters.compress(name="w")]
    save(tmp_path, "async", hashtables={"user": table}, tensors={"w": torch.zeros(5000)}, filters=rules)
    (path,) = tmp_path.glob("data/*/*.safetensors")
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("user@embedding").dtype is torch.float16
        assert file.get_tensor("user@sum").shape == (len(table), DIM + 8)
        assert file.get_tensor("w").dtype is torch.uint8


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_drop_rows_that_are_not_kept_any_more(tmp_path: Path, kind: str) -> None:
    table = filled()
    rules = [filters.keep_rows("user", lambda columns: columns["count"] >= 3), *LOSSLESS]
    images = {}
    with asyncckpt.Saver(
        path=tmp_path, hashtables={"user": table}, deltas=asyncckpt.DeltaPolicy(), filters=rules
    ) as saver:
        for step in range(5):
            if kind == "blocking":
                result = saver.save(step, kind="full" if step == 0 else "delta")
            else:
                result = saver.save_async(step, kind="full" if step == 0 else "delta").result(60)
            assert result.kind == ("full" if step == 0 else "delta")
            images[step] = kept_image(table, lambda count: count >= 3)
            chosen = table.ids()[step :: 7 + step].clone()
            found = table.lookup(chosen)
            if step % 2:
                table.slot("count")[found] = (table.slot("count")[found] * 3 + step) % 7
            else:
                with table.rows(chosen) as rows:
                    rows["count"] = (rows["count"] * 3 + step) % 7
                    rows.embedding += 1.0
            table.remove(chosen[::9])
    assert len({len(image) for image in images.values()}) > 1
    for step, image in images.items():
        assert table_image(loaded(tmp_path, step=step)) == image
    asyncckpt.verify(tmp_path, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_filters_commit_nothing(tmp_path: Path, kind: str) -> None:
    table = filled()
    table.embedding[table.used_rows()[40]] = float("nan")
    id = int(table.ids()[40])
    wrong: list[tuple[filters.RowFilter, str]] = [
        (filters.keep_rows("user", lambda columns: columns["count"]), "torch.int64"),
        (filters.quantize("user@embedding"), f"the row of id {id}"),
        (filters.cast("nowhere", torch.float16), "not saved"),
    ]
    for rule, message in wrong:
        with pytest.raises(asyncckpt.errors.FilterError, match=message):
            save(tmp_path, kind, hashtables={"user": table}, filters=[rule])
    assert asyncckpt.list_steps(tmp_path) == []
    save(tmp_path, kind, hashtables={"user": table})
    assert list((tmp_path / "data").iterdir()) == list((tmp_path / "data").glob("000000000001-*"))
    assert len(list((tmp_path / "data").iterdir())) == 1


def test_filters_that_can_be_for_no_save_are_refused_by_the_saver(tmp_path: Path) -> None:
    for rule in (filters.cast("user@nothing", torch.float16), filters.keep_rows("item", lambda columns: None)):
        with pytest.raises(asyncckpt.UsageError, match=r"has no column|no table"):
            asyncckpt.Saver(path=tmp_path, hashtables={"user": new_table()}, filters=[rule])


def test_multi_level_tables_and_their_companions_are_filtered_by_name(tmp_path: Path) -> None:
    def fresh() -> asyncckpt.MultiLevelTable:
        return asyncckpt.MultiLevelTable("big", DIM, cache_rows=20, metadata={"count": torch.int64}, admit_after=2)

    table = fresh()
    for begin in (0, 0, 50, 50, 100):
        rows = table.lookup(torch.arange(begin, begin + 20))
        used = rows[rows >= 0]
        table.embedding[used] += 1.0
        table.slot("count")[used] += begin
    rules = [
        filters.keep_rows("big", lambda columns: columns["count"] >= 50),
        filters.keep_rows("big.candidates", lambda columns: columns["id"] >= 110),
        filters.compress(),
    ]
    save(tmp_path, "async", hashtables={"big": table}, filters=rules)
    other = fresh()
    report = asyncckpt.Loader(tmp_path, {"big": other}).load()
    assert sorted(other.ids().tolist()) == list(range(50, 70))
    assert report.rows == {"big": 20, "big.candidates": 10}


def test_a_filter_function_goes_before_the_row_filters(tmp_path: Path) -> None:
    table = filled()

    def no_slots(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        return [block for block in blocks if block.role is not asyncckpt.table.Role.OPTIMIZER]

    rules = [filters.keep_rows("user", lambda columns: columns["count"] >= 3), filters.cast("*", torch.float16)]
    save(tmp_path, "async", hashtables={"user": table}, filter_func=no_slots, filters=rules)
    fresh = asyncckpt.HashTable("user", DIM, metadata={"count": torch.int64})
    asyncckpt.Loader(tmp_path, {"user": fresh}).load()
    assert set(fresh.ids().tolist()) == kept_image(table, lambda count: count >= 3).keys()


def test_rows_that_no_load_could_do_without_are_not_filtered(tmp_path: Path) -> None:
    """The rows of a module of torch cannot be removed, so a load takes all of them."""
    tables = asyncckpt.adapters.tables_of(torch.nn.ModuleDict({"fixed": torch.nn.Embedding(10, 4)}))
    rule = filters.keep_rows("fi*", lambda columns: columns["id"] > 3)
    with pytest.raises(asyncckpt.UsageError, match="out rows of table 'fixed', and then no load takes the others"):
        asyncckpt.Saver(path=tmp_path, hashtables=tables, filters=[rule])
    with asyncckpt.Saver(path=tmp_path, hashtables=tables, filters=[filters.keep_rows("other*", len)]) as saver:
        saver.save(1)
