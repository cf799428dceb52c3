"""Loading: filters (drop, rename, subset, merge), resharding, strictness, verification, fallback."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.engine.load import run_load, verify
from tests.end_to_end.state import State, filled_table, new_table
from tests.worlds.bits import bits
from tests.worlds.objects import Stateful
from tests.worlds.rows import table_image
from tests.worlds.saves import save_one

Info = dict[str, dict[str, list[str]]]


@pytest.fixture
def saved(tmp_path: Path) -> State:
    state = State.filled(1)
    save_one(tmp_path, staged=True, hashtables=state.tables, tensors=state.dense)
    return state


def test_filter_gets_recis_load_information(tmp_path: Path, saved: State) -> None:
    seen: list[Info] = []
    w = torch.zeros(64, 33)

    def look(info: Info) -> Info:
        seen.append(info)
        return info

    asyncckpt.Loader(tmp_path, {"user": new_table()}, {"w": w}, 4, look).load()
    assert seen == [{"user": {"user": ["id", "embedding", "sum", "momentum", "last_seen"]}, "w": {"w": []}}]


def test_drop_a_destination_keeps_its_rows(tmp_path: Path, saved: State) -> None:
    user, item = filled_table("user", rows=10, seed=99), new_table("item")
    before = table_image(user)

    def only_item(info: Info) -> Info:
        return {"item": info["item"]}

    report = asyncckpt.Loader(tmp_path, {"user": user, "item": item}, filter_func=only_item).load()
    assert table_image(user) == before
    assert table_image(item) == table_image(saved.tables["item"])
    assert report.loaded == {"item": {"item": ["id", "embedding", "sum", "momentum", "last_seen"]}}
    assert "user" in report.unexpected


def test_rename(tmp_path: Path, saved: State) -> None:
    member, weights = new_table("member"), torch.zeros(64, 33)

    def rename(info: Info) -> Info:
        columns = ["id", "embedding", "sum", "momentum", "last_seen"]
        return {"member": {"user": columns}, "weights": {"w": []}}

    asyncckpt.Loader(tmp_path, {"member": member}, {"weights": weights}, filter_func=rename, strict=False).load()
    assert table_image(member) == table_image(saved.tables["user"])
    assert weights.equal(saved.dense["w"])


def test_subset_of_columns_keeps_first_values(tmp_path: Path, saved: State) -> None:
    table = new_table()

    def weights_only(info: Info) -> Info:
        return {"user": {"user": ["id", "embedding"]}}

    asyncckpt.Loader(tmp_path, {"user": table}, filter_func=weights_only).load()
    source = saved.tables["user"]
    rows = table.lookup(source.ids(), insert=False)
    assert table.embedding[rows].equal(source.embedding[source.used_rows()])
    assert not table.slot("sum")[rows].any()
    assert not table.slot("last_seen")[rows].any()


def test_merge_of_several_sources(tmp_path: Path, saved: State) -> None:
    table = new_table()
    columns = ["id", "embedding", "sum", "momentum", "last_seen"]
    asyncckpt.Loader(
        tmp_path, {"user": table}, filter_func=lambda info: {"user": {"user": columns, "item": columns}}
    ).load()
    expected = table_image(saved.tables["user"]) | table_image(saved.tables["item"])
    assert table_image(table) == expected


def test_merge_into_a_table_keeps_its_other_rows(tmp_path: Path, saved: State) -> None:
    table = filled_table("user", rows=20, seed=77)
    before = table_image(table)
    asyncckpt.Loader(tmp_path, {"user": table}, merge=True).load()
    assert table_image(table) == before | table_image(saved.tables["user"])
    asyncckpt.Loader(tmp_path, {"user": table}).load()
    assert table_image(table) == table_image(saved.tables["user"])


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_one_checkpoint_into_many_tables_and_back(tmp_path: Path, count: int) -> None:
    source = filled_table("user", rows=800, seed=5)
    save_one(tmp_path / "one", staged=True, hashtables={"user": source})
    parts = [new_table(shard=(index, count)) for index in range(count)]
    for part in parts:
        asyncckpt.Loader(tmp_path / "one", {"user": part}).load()
    images = [table_image(part) for part in parts]
    assert sum(len(image) for image in images) == len(source)
    for index, image in enumerate(images):
        assert all((id % 2**64) % count == index for id in image)
    alone = asyncckpt.RankOptions(alone=True)
    for index, part in enumerate(parts):
        save_one(tmp_path / f"part{index}", staged=True, hashtables={"user": part}, ranks=alone)
    back = new_table()
    for index in range(count):
        asyncckpt.Loader(tmp_path / f"part{index}", {"user": back}, merge=True, strict=False).load()
    assert table_image(back) == table_image(source)


def test_resharding_reads_split_blocks_by_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.plan.image.BLOCK_BYTES_MAX", 3000)
    monkeypatch.setattr("asyncckpt.snapshot.windows.WINDOW_BYTES", 1000)
    source = filled_table("user", rows=800, seed=6)
    save_one(tmp_path, staged=True, hashtables={"user": source})
    images: dict[int, bytes] = {}
    for index in range(3):
        part = new_table(shard=(index, 3))
        asyncckpt.Loader(tmp_path, {"user": part}).load()
        images |= table_image(part)
    assert images == table_image(source)


def test_older_steps_and_load_async(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0)}
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        for step in (1, 2):
            saver.save_async(step).result(60)
            state["w"] += 1
    target = {"w": torch.zeros(3)}
    assert asyncckpt.Loader(tmp_path, tensors=target, step=1).load_async().result(60).step == 1
    assert target["w"].tolist() == [0, 1, 2]
    assert asyncckpt.Loader(tmp_path, tensors=target).load().step == 2
    assert target["w"].tolist() == [1, 2, 3]


async def test_await_load_async(tmp_path: Path, saved: State) -> None:
    target = State.empty()
    report = await asyncckpt.Loader(tmp_path, target.tables, target.dense).load_async()
    assert report.rows == {name: len(table) for name, table in saved.tables.items()}
    assert target.image() == saved.image()


def _damage(path: Path, step: int, block: str) -> None:
    """Flip one bit in the middle of a block."""
    info = asyncckpt.describe(path, step)
    found = next(b for b in info.blocks if b.name == block)
    file = next(path / f for f in info.files if f.endswith(found.file))
    with open(file, "r+b") as handle:
        handle.seek(found.offset + found.bytes // 2)
        byte = handle.read(1)[0]
        handle.seek(-1, 1)
        handle.write(bytes([byte ^ 1]))


def test_damage_is_found_on_the_way_and_tables_are_left_empty(tmp_path: Path, saved: State) -> None:
    _damage(tmp_path, 1, "user@momentum")
    target = State.empty()
    target.tables["user"].lookup(torch.arange(5))
    with pytest.raises(asyncckpt.CorruptError, match="'user@momentum' in"):
        asyncckpt.Loader(tmp_path, target.tables).load()
    assert len(target.tables["user"]) == 0
    assert len(target.tables["item"]) == 0
    with pytest.raises(asyncckpt.CorruptError, match="user@momentum"):
        asyncckpt.verify(tmp_path)


def test_damaged_ids_are_found_before_a_table_is_touched(tmp_path: Path, saved: State) -> None:
    _damage(tmp_path, 1, "user@id")
    table = filled_table("user", rows=10, seed=3)
    before = table_image(table)
    with pytest.raises(asyncckpt.CorruptError, match="user@id"):
        asyncckpt.Loader(tmp_path, {"user": table}).load()
    assert table_image(table) == before


def test_verify_before_touches_nothing(tmp_path: Path, saved: State) -> None:
    _damage(tmp_path, 1, "w")
    target = State.empty()
    before = target.image()
    with pytest.raises(asyncckpt.CorruptError, match="'w' in"):
        asyncckpt.Loader(tmp_path, target.tables, target.dense, verify="before").load()
    assert target.image() == before


def test_fallback_loads_the_newest_sound_step_and_says_so(tmp_path: Path) -> None:
    state = {"w": torch.arange(3.0)}
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        for step in (1, 2, 3):
            saver.save(step)
            state["w"] += 1
    _damage(tmp_path, 3, "w")
    (tmp_path / "manifests" / "000000000002.json").write_text("{}")
    target = {"w": torch.zeros(3)}
    with pytest.raises(asyncckpt.CorruptError):
        asyncckpt.Loader(tmp_path, tensors=target).load()
    report = asyncckpt.Loader(tmp_path, tensors=target, fallback=True).load()
    assert (report.step, report.fallback_from) == (1, (3, 2))
    assert target["w"].tolist() == [0, 1, 2]


def test_all_misfits_are_listed_before_anything_changes(tmp_path: Path, saved: State) -> None:
    table = asyncckpt.HashTable("user", 9, optimizer_slots={"sum": ()})
    table.lookup(torch.arange(4))
    w, extra = torch.zeros(3), torch.zeros(1)
    with pytest.raises(asyncckpt.IncompatibleError) as caught:
        asyncckpt.Loader(tmp_path, {"user": table}, {"w": w, "half": torch.zeros(17), "extra": extra}).load()
    message = str(caught.value)
    assert "column 'embedding' of table 'user' has rows (9,)" in message
    assert "'w' has shape (3,)" in message
    assert "'half' has dtype torch.float32" in message
    assert "only in this state (1): 'extra'" in message
    assert len(table) == 4
    assert not w.any()


def test_not_strict_reports_missing_entries(tmp_path: Path, saved: State) -> None:
    extra, w = torch.full((2,), 5.0), torch.zeros(64, 33)
    report = asyncckpt.Loader(tmp_path, {"shop": new_table("shop")}, {"w": w, "extra": extra}, strict=False).load()
    assert report.missing == ("shop", "extra")
    assert extra.tolist() == [5, 5]
    assert w.equal(saved.dense["w"])


def test_module_with_other_entries(tmp_path: Path, saved: State) -> None:
    """Unexpected entries inside a module that is loaded are an error, elsewhere they are only reported."""
    smaller = torch.nn.Sequential(torch.nn.Linear(6, 5))
    with pytest.raises(asyncckpt.IncompatibleError, match=r"only in the checkpoint .*'model\.1\.weight'"):
        asyncckpt.Loader(tmp_path, tensors={"model": smaller}).load()
    report = asyncckpt.Loader(tmp_path, tensors={"model": smaller}, strict=False).load()
    assert "model.1.weight" in report.unexpected
    assert bits(smaller.state_dict()["0.weight"]) == bits(saved.dense["model"].state_dict()["0.weight"])


def test_entries_under_another_name_are_shown_with_both_names(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 2)
    tensors = {"model": torch.nn.Linear(1, 1), "w": torch.ones(2), "progress": {"epoch": 1}}
    save_one(tmp_path, hashtables={"user": table}, tensors=tensors)
    other = {"mode": torch.nn.Linear(1, 1), "w": torch.zeros(2), "run": {"epoch": 0}}
    wider = torch.nn.Sequential(torch.nn.Linear(1, 1))
    for target, own, lacks in (
        (other, "'mode'", "'model', 'progress', 'user'"),
        ({"mode": other["mode"]}, "'mode'", "'model', 'w', 'progress', 'user'"),
        ({"model": wider}, "'model.0.weight'", "'w', 'progress', 'user'"),
    ):
        match = rf"only in this state .*{own}.*; the checkpoint has {lacks}, which this state lacks"
        with pytest.raises(asyncckpt.IncompatibleError, match=match):
            asyncckpt.Loader(tmp_path, tensors=target).load()
    asyncckpt.Loader(tmp_path, tensors={"w": other["w"]}).load()  # A part is loaded by its name.


def test_what_a_filter_leaves_out_of_a_module_is_named_as_such(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"model": torch.nn.Linear(1, 1)}, durability="none")
    target = {"model": torch.nn.Linear(1, 1)}
    answer = {"model.weight": {"model.weight": list[str]()}}
    with pytest.raises(asyncckpt.IncompatibleError, match=r"left out by the filter .*'model.bias' .*strict=False"):
        asyncckpt.Loader(tmp_path, tensors=target, filter_func=lambda info: answer).load()


def test_one_source_for_two_objects(tmp_path: Path) -> None:
    """The object whose own tensor the filter left out keeps what it has; the other one's is read once."""

    def filled(value: float) -> Stateful:
        return Stateful({"tensor": torch.full((1000,), value, dtype=torch.float32)})

    save_one(tmp_path, tensors={"a": filled(1.0), "b": filled(2.0)})

    def both_from_a(info: Any) -> Any:
        return {name: {"a.tensor": []} for name in info}

    targets = {"a": filled(3.0), "b": filled(4.0)}
    report = asyncckpt.Loader(tmp_path, tensors=targets, filter_func=both_from_a).load()
    assert targets["a"].state["tensor"].eq(1).all()
    assert targets["b"].state["tensor"].eq(4).all()
    assert report.bytes_read == 4000


def test_tables_are_taken_in_one_order_whatever_that_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a load and a cut of another thread wait for each other."""
    taken: list[str] = []
    begin = asyncckpt.HashTable.begin_load

    def note(table: Any, **options: Any) -> Any:
        taken.append(table.name)
        return begin(table, **options)

    monkeypatch.setattr(asyncckpt.HashTable, "begin_load", note)
    tables = {name: new_table(name) for name in ("user", "item")}
    for number, names in enumerate((("user", "item"), ("item", "user"))):
        ordered, path = {name: tables[name] for name in names}, tmp_path / str(number)
        save_one(path, hashtables=ordered)
        asyncckpt.Loader(path, ordered).load()
    assert len(taken) == 4
    assert taken[:2] == taken[2:]


def test_a_step_that_goes_while_it_is_verified_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_blocks = verify.verify_blocks
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(4)}, keep=1) as saver:
        saver.save(1)

        def then_save(*arguments: Any, **options: Any) -> None:
            verify_blocks(*arguments, **options)
            saver.save(2)
            saver.wait_idle()

        monkeypatch.setattr(verify, "verify_blocks", then_save)
        assert asyncckpt.verify(tmp_path, 1).step == 1
    assert asyncckpt.list_steps(tmp_path) == [2]


@pytest.mark.parametrize("when", ["while it reads", "at its end"])
def test_a_load_that_says_it_is_cancelled_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    w, cancelled = torch.ones(4), []
    save_one(tmp_path, tensors={"w": w})
    name = "restore" if when == "while it reads" else "give_state_dicts"
    real, may_go_on = getattr(run_load, name), threading.Event()

    def first_cancel(*arguments: Any, **options: Any) -> Any:
        assert may_go_on.wait(60)
        found = real(*arguments, **options)
        cancelled.append(future.cancel())
        return found

    monkeypatch.setattr(run_load, name, first_cancel)
    future = asyncckpt.Loader(tmp_path, tensors={"w": w}).load_async()
    may_go_on.set()
    if when == "while it reads":
        with pytest.raises(asyncckpt.SaveCancelledError):
            future.result(60)
    else:
        assert future.result(60).step == 1
    assert cancelled == [when == "while it reads"]


def test_a_report_prints_numbers_not_names(tmp_path: Path) -> None:
    state = {f"weight{number}": torch.zeros(2) for number in range(300)}
    asyncckpt.save(tmp_path, {**state, "epoch": 3}, 7)
    targets = {**state, "epoch": 0, "more": torch.zeros(1)}
    report = asyncckpt.Loader(tmp_path, tensors=targets, strict=False).load()
    numbers = "loaded=300, values=1, missing=1, bytes_read=2400"
    assert re.fullmatch(rf"LoadReport\(step=7, path='.*', {numbers}, seconds=\d+\.\d+\)", str(report))
    assert len(report.loaded) == 300
