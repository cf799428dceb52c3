"""Checkpoints that RecSDK wrote, in both layouts: loaded by any number of ranks, or refused before anything changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.embcache import EmbCacheEmbeddingBagCollection, Saver, SparseLoadReport
from asyncckpt.embcache import recsdk_load as recsdk_load_module
from asyncckpt.formats import recsdk
from tests.embcache.models import config, owners
from tests.embcache.recsdk_writer import RecsdkRows, write_array, write_merged, write_part, write_ranks
from tests.worlds.rows import table_image

UsageError, CorruptError = asyncckpt.UsageError, asyncckpt.CorruptError
IncompatibleError, NotFoundError = asyncckpt.IncompatibleError, asyncckpt.NotFoundError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "sparse"
    place.mkdir(0o750)
    return place


def bags(*, shard: tuple[int, int] = (0, 1), **options: Any) -> EmbCacheEmbeddingBagCollection:
    chosen = {"optimizer_slots": {"m": torch.float32}, **options}
    return EmbCacheEmbeddingBagCollection([config(**chosen)], shard=shard)


def load(module: EmbCacheEmbeddingBagCollection, path: Path, **options: Any) -> SparseLoadReport:
    rank, world_size = module.tables()["user"].shard
    with Saver(rank=rank, world_size=world_size) as saver:
        return saver.load(module, path, **options)


def check(module: EmbCacheEmbeddingBagCollection, *rows: RecsdkRows, slots: Mapping[str, int] | None = None) -> None:
    """The table holds exactly the rows of its shard; slots maps slot -> which momentum it came from."""
    table = module.tables()["user"]
    index, count = table.shard
    all_ids = np.concatenate([part.ids for part in rows])
    own = all_ids.view(np.uint64) % np.uint64(count) == np.uint64(index)
    assert sorted(table.ids().tolist()) == sorted(all_ids[own].tolist())
    found = table.read(torch.from_numpy(all_ids[own]))
    assert np.array_equal(found["embedding"].numpy(), np.concatenate([part.embedding for part in rows])[own])
    for slot, number in ({"m": 0} if slots is None else slots).items():
        momentum = np.concatenate([part.momenta[number] for part in rows])[own]
        assert np.array_equal(found[slot].numpy(), momentum)


def refused(path: Path, kind: type[Exception], text: str, **options: Any) -> None:
    """A load is refused and nothing has changed."""
    module = bags()
    module.tables()["user"].lookup(torch.tensor([3, -4]))
    before = table_image(module.tables()["user"])
    with pytest.raises(kind, match=text):
        load(module, path, **options)
    assert table_image(module.tables()["user"]) == before


# -- both layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_by", [1, 2, 5])
@pytest.mark.parametrize("timestamp", ["", "20250102030405"])
def test_folders_of_ranks(path: Path, saved_by: int, timestamp: str) -> None:
    rows = RecsdkRows.random(1)
    write_ranks(path, {"user": rows.split(saved_by)}, timestamp=timestamp)
    module = bags()
    module.tables()["user"].lookup(torch.tensor([123456]))  # A full load empties the table first.
    report = load(module, path)
    check(module, rows)
    assert (report.layout, report.step, report.world_size) == ("recsdk ranks", None, saved_by)
    assert report.path == path / timestamp
    assert report.rows == {"user": len(rows.ids)}
    assert report.bytes_read == 2 * rows.embedding.nbytes


def test_newest_timestamp_is_taken(path: Path) -> None:
    old, new = RecsdkRows.random(1), RecsdkRows.random(2)
    write_ranks(path, {"user": [new]}, timestamp="20250102030406")
    write_ranks(path, {"user": [old]}, timestamp="20241231235959")
    module = bags()
    load(module, path)
    check(module, new)


def test_merged_ranks(path: Path) -> None:
    rows = RecsdkRows.random(3)
    write_merged(path, {"user": rows})
    module = bags()
    module.tables()["user"].lookup(torch.tensor([123456]))
    report = load(module, path)
    check(module, rows)
    assert (report.layout, report.world_size) == ("recsdk merged", None)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("merged", [False, True])
def test_any_number_of_ranks_by_unsigned_ids(path: Path, world_size: int, merged: bool) -> None:
    rows = RecsdkRows.random(4)
    assert (rows.ids < 0).any()
    if merged:
        write_merged(path, {"user": rows})
    else:
        write_ranks(path, {"user": rows.split(4)})
    taken = 0
    for rank in range(world_size):
        module = bags(shard=(rank, world_size))
        load(module, path)
        check(module, rows)
        image = table_image(module.tables()["user"])
        assert owners(image, world_size) == {rank}
        taken += len(image)
    assert taken == len(rows.ids)


def test_rows_come_over_in_windows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recsdk_load_module, "WINDOW_BYTES", 100)
    rows = RecsdkRows.random(5, counts=True)
    write_ranks(path, {"user": rows.split(2)})
    for rank in range(3):
        module = bags(shard=(rank, 3))
        load(module, path)
        check(module, rows)


def test_several_tables_and_no_rows(path: Path) -> None:
    user, none = RecsdkRows.random(6), RecsdkRows.random(7, dim=3).take(np.zeros(205, dtype=bool))
    write_ranks(path, {"user": user.split(2), "ad": [none, none]})
    slots = {"m": torch.float32}
    module = EmbCacheEmbeddingBagCollection(
        [config(optimizer_slots=slots), config("ad", ["ads"], dim=3, optimizer_slots=slots)]
    )
    assert load(module, path).rows == {"user": len(user.ids), "ad": 0}
    check(module, user)
    assert len(module.tables()["ad"]) == 0


def test_training_goes_on_and_saves_in_our_layout(path: Path, tmp_path: Path) -> None:
    rows = RecsdkRows.random(8)
    write_merged(path, {"user": rows})
    module = bags()
    own = tmp_path / "own"
    with Saver(rank=0) as saver:
        saver.load(module, path)
        ids = torch.from_numpy(rows.ids[:3])
        module({"clicks": (ids, torch.tensor([0, 3])), "likes": (ids, torch.tensor([0, 3]))})
        saver.save(module, own)
        again = bags()
        assert saver.load(again, own).layout == "asyncckpt"
    assert table_image(again.tables()["user"]) == table_image(module.tables()["user"])


# -- momenta, counts, timestamps ---------------------------------------------------------------------------------------


def test_momenta_go_to_the_slots_in_their_order(path: Path) -> None:
    rows = RecsdkRows.random(9, momenta=2)
    write_ranks(path, {"user": rows.split(2)})
    module = bags(optimizer_slots={"exp_avg": torch.float32, "exp_avg_sq": torch.float32})
    load(module, path)
    check(module, rows, slots={"exp_avg": 0, "exp_avg_sq": 1})


def test_momenta_are_the_callers_to_choose(path: Path) -> None:
    rows = RecsdkRows.random(10, momenta=2)
    write_merged(path, {"user": rows})
    slots = {"a": asyncckpt.Slot(torch.float32, (4,), 0.5), "b": torch.float32}
    module = bags(optimizer_slots=slots)
    report = load(module, path, momentum_slots={"momentum1": "b", "momentum2": None})
    check(module, rows, slots={"b": 0})
    assert report.ignored == ("user/momentum2",)
    found = module.tables()["user"].read(torch.from_numpy(rows.ids))["a"]
    assert torch.equal(found, torch.full_like(found, 0.5))


@pytest.mark.parametrize("momenta", [0, 2])
def test_other_number_of_momenta_is_refused(path: Path, momenta: int) -> None:
    write_merged(path, {"user": RecsdkRows.random(11, momenta=momenta)})
    refused(path, IncompatibleError, "momentum_slots=")


@pytest.mark.parametrize(
    "momentum_slots", [{}, {"momentum2": "m"}, {"momentum1": "sum"}, {"momentum1": "embedding"}, {"m": "m"}, "m"]
)
def test_wrong_choice_of_momenta_is_refused(path: Path, momentum_slots: Any) -> None:
    write_merged(path, {"user": RecsdkRows.random(12)})
    refused(path, UsageError, "momentum_slots", momentum_slots=momentum_slots)


@pytest.mark.parametrize("merged", [False, True])
def test_counts_and_timestamps_go_to_their_columns(path: Path, merged: bool) -> None:
    rows = RecsdkRows.random(13, counts=True, seen=True)
    assert rows.counts is not None
    assert rows.seen is not None
    if merged:
        write_merged(path, {"user": rows})
    else:
        write_ranks(path, {"user": rows.split(2)})
    metadata = {"last_seen": asyncckpt.Slot(torch.int64, (), -9), "count": torch.int64}
    module = bags(metadata=metadata)
    report = load(module, path)
    found = module.tables()["user"].read(torch.from_numpy(rows.ids))
    assert np.array_equal(found["count"].numpy(), np.maximum(rows.counts, 0))
    assert found["last_seen"].tolist() == [rows.seen.get(id, -9) for id in rows.ids.tolist()]
    assert report.ignored == ()


def test_counts_and_timestamps_without_a_column_are_reported(path: Path) -> None:
    write_ranks(path, {"user": RecsdkRows.random(14, counts=True, seen=True).split(2)})
    module = bags(metadata={"count": torch.float32}, admit_after=2)
    assert load(module, path).ignored == ("user/admit_count", "user/evict_timestamp")
    assert len(module.tables()["user"].companions()["candidates"]) == 0  # type: ignore[arg-type]


# -- incremental -------------------------------------------------------------------------------------------------------


def test_incremental_goes_on_top(path: Path, tmp_path: Path) -> None:
    full, part = RecsdkRows.random(15), RecsdkRows.random(16, count=20)
    write_merged(path, {"user": full})
    write_merged(tmp_path / "part", {"user": part}, incremental=True)
    (tmp_path / "part").chmod(0o750)
    module = bags()
    load(module, path)
    load(module, tmp_path / "part", incremental=True)
    rest = full.take(~np.isin(full.ids, part.ids))
    assert len(rest.ids) < len(full.ids)
    check(module, rest, part)


def test_incremental_must_be_said(path: Path, tmp_path: Path) -> None:
    write_merged(path, {"user": RecsdkRows.random(17)}, incremental=True)
    refused(path, UsageError, "load the full one first")
    (tmp_path / "ranks").mkdir(0o750)
    write_ranks(tmp_path / "ranks", {"user": [RecsdkRows.random(17)]})
    refused(tmp_path / "ranks", UsageError, "holds all rows", incremental=True)


@pytest.mark.parametrize(
    ("text", "incremental"),
    [("incremental=True", True), ("[meta]\nincremental = false\n", False), ("INCREMENTAL: True\r\n", True)],
)
def test_forms_of_the_meta_file(path: Path, text: str, incremental: bool) -> None:
    rows = RecsdkRows.random(18)
    write_merged(path, {"user": rows})
    (path / "meta.ini").write_text(text)
    module = bags()
    load(module, path, incremental=incremental)
    check(module, rows)


@pytest.mark.parametrize(
    "raw", [b"", b"incremental=maybe", b"incremental=True\nincremental=False", b"\xff", b"x" * 9999]
)
def test_wrong_meta_file_is_refused(path: Path, raw: bytes) -> None:
    write_merged(path, {"user": RecsdkRows.random(19)})
    (path / "meta.ini").write_bytes(raw)
    refused(path, CorruptError, r"meta\.ini")


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_renamed_missing_and_unknown_tables_are_refused(path: Path) -> None:
    write_merged(path, {"person": RecsdkRows.random(20)})
    refused(path, IncompatibleError, r"missing \['user'\], unknown \['person'\]")
    write_part(path / "user", RecsdkRows.random(21))
    refused(path, IncompatibleError, r"missing \[\], unknown \['person'\]")


@pytest.mark.parametrize(
    "options",
    [{"dim": 5}, {"dtype": torch.float64}, {"optimizer_slots": {"m": ()}}, {"optimizer_slots": {"m": torch.float16}}],
)
def test_other_dim_or_dtype_is_refused(path: Path, options: dict[str, Any]) -> None:
    write_merged(path, {"user": RecsdkRows.random(22)})
    module = bags(**options)
    module.tables()["user"].lookup(torch.tensor([3]))
    with pytest.raises(IncompatibleError, match="does not fit column"):
        load(module, path)
    assert module.tables()["user"].ids().tolist() == [3]


def test_steps_and_recsdk_do_not_go_together(path: Path) -> None:
    write_merged(path, {"user": RecsdkRows.random(23)})
    refused(path, UsageError, "have no steps", step=3)


def test_options_for_recsdk_are_refused_for_our_own(path: Path) -> None:
    with Saver(rank=0) as saver:
        saver.save(bags(), path)
    refused(path, UsageError, "are for files of RecSDK", incremental=True)
    refused(path, UsageError, "are for files of RecSDK", momentum_slots={})


def test_folder_of_something_else_is_no_checkpoint(path: Path) -> None:
    (path / "photos" / "2024").mkdir(parents=True)
    (path / "notes.txt").write_text("")
    refused(path, NotFoundError, "there is no checkpoint")


# -- damage ------------------------------------------------------------------------------------------------------------


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def make_longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0" * 8)


def remove(file: Path) -> None:
    file.unlink()


def be_a_link(file: Path) -> None:
    moved = file.with_name("moved")
    file.rename(moved)
    file.symlink_to(moved)


FILES = [
    "key/slice.attribute", "key/slice.data", "embedding/slice.attribute", "embedding/slice.data",
    "momentum1/slice.attribute", "momentum1/slice.data", "admit_count/slice.attribute", "admit_count/slice.data",
    "evict_timestamp/slice_evict_key.data", "evict_timestamp/slice_evict_ts.data",
]  # fmt: skip


@pytest.mark.parametrize("damage", [cut_short, make_longer, remove, be_a_link])
# Names of tests are in paths, where "key" is a sensitive word.
@pytest.mark.parametrize("name", FILES, ids=[name.replace("key", "ids") for name in FILES])
def test_damaged_file_is_named(path: Path, name: str, damage: Callable[[Path], None]) -> None:
    write_ranks(path, {"user": RecsdkRows.random(24, counts=True, seen=True).split(2)})
    damage(path / "user" / "rank1" / name)
    other = {"slice_evict_key.data": "slice_evict_ts.data"}.get(Path(name).name, "")
    refused(path, CorruptError, f"rank1/{Path(name).parent}/({Path(name).name}|{other})")


@pytest.mark.parametrize("name", ["key", "embedding"])
@pytest.mark.parametrize("merged", [False, True])
def test_missing_folder_is_named(path: Path, name: str, merged: bool) -> None:
    if merged:
        write_merged(path, {"user": RecsdkRows.random(25)})
    else:
        write_ranks(path, {"user": RecsdkRows.random(25).split(2)})
    folder = path / "user" / ("" if merged else "rank1") / name
    shutil.rmtree(folder)
    refused(path, CorruptError, str(folder))


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("key", (4, 205)), ("key", (8, 204)), ("key", (8, -1)), ("key", (8, 2**62)), ("key", (8, 205, 1)),
        ("embedding", (8, 205, 4)), ("embedding", (4, 205, 0)), ("embedding", (4, 205, -4)),
        ("embedding", (4, 410, 2)), ("embedding", (4, 204, 4)), ("embedding", (4, 205)),
        ("momentum1", (4, 410, 2)), ("admit_count", (8, 204)), ("admit_count", (8, 0)),
    ],
)  # fmt: skip
def test_attribute_that_does_not_go_with_its_data(path: Path, name: str, attributes: tuple[int, ...]) -> None:
    rows = RecsdkRows.random(26, counts=True)
    assert len(rows.ids) == 205
    write_merged(path, {"user": rows})
    file = path / "user" / name / "slice.attribute"
    file.write_bytes(np.array(attributes, dtype="<i8").tobytes())
    refused(path, CorruptError, f"user/{name}/slice")


@pytest.mark.parametrize("name", ["embedding", "momentum1", "admit_count"])
def test_counts_that_do_not_match_the_keys(path: Path, name: str) -> None:
    rows = RecsdkRows.random(27, counts=True)
    write_merged(path, {"user": rows})
    shutil.rmtree(path / "user" / name)
    if name == "admit_count":
        write_array(path / "user" / name, np.zeros(204, dtype="<i8"), 8, 204)
    else:
        write_array(path / "user" / name, np.zeros((204, 4), dtype="<f4"), 4, 204, 4)
    refused(path, CorruptError, f"user/{name}/slice.data' does not go with its keys, found 204, expected 205")


def test_duplicate_ids_in_a_file_are_refused(path: Path) -> None:
    rows = RecsdkRows.random(28)
    rows.ids[3] = rows.ids[100]
    write_merged(path, {"user": rows})
    refused(path, CorruptError, f"user/key/slice.data' holds the same key twice, found {rows.ids[3]}")


def test_duplicate_ids_of_two_ranks_are_refused(path: Path) -> None:
    one, two = RecsdkRows.random(29).split(2)
    two.ids[0] = one.ids[0]
    write_ranks(path, {"user": [one, two]})
    refused(path, CorruptError, "rank0 to .*rank1' holds the same key twice")


def test_duplicate_ids_with_timestamps_are_refused(path: Path) -> None:
    write_merged(path, {"user": RecsdkRows.random(30, seen=True)})
    file = path / "user" / "evict_timestamp" / "slice_evict_key.data"
    raw = file.read_bytes()
    file.write_bytes(raw[8:16] + raw[8:])
    refused(path, CorruptError, "slice_evict_key.data' holds the same key twice")


def test_missing_rank_is_found(path: Path) -> None:
    parts = RecsdkRows.random(31).split(3)
    write_ranks(path, {"user": parts})
    shutil.rmtree(path / "user" / "rank1")
    refused(path, CorruptError, r"not complete, found \['rank0', 'rank2'\], expected rank0 to")


def test_tables_of_different_numbers_of_ranks_are_refused(path: Path) -> None:
    write_ranks(path, {"user": RecsdkRows.random(32).split(2), "ad": RecsdkRows.random(33).split(3)})
    refused(path, CorruptError, r"ranks of table 'user'")


def test_momenta_with_a_gap_are_refused(path: Path) -> None:
    write_merged(path, {"user": RecsdkRows.random(34, momenta=3)})
    shutil.rmtree(path / "user" / "momentum2")
    refused(path, CorruptError, r"momenta in .*user' are not complete, found \[1, 3\]")


def test_ranks_with_different_momenta_are_refused(path: Path) -> None:
    one, two = RecsdkRows.random(35, momenta=1).split(2)
    write_ranks(path, {"user": [one, RecsdkRows(ids=two.ids, embedding=two.embedding)]})
    refused(path, CorruptError, "rank1' has not as many momenta")


def test_merge_that_did_not_end_is_refused(path: Path) -> None:
    write_merged(path, {"user": RecsdkRows.random(36)})
    (path / "user" / "rank1").mkdir()
    refused(path, CorruptError, "their merge did not end")


def test_merged_table_without_meta_file_is_refused(path: Path) -> None:
    write_merged(path, {"user": RecsdkRows.random(37)})
    (path / "meta.ini").unlink()
    refused(path, CorruptError, r"meta\.ini' of the merged table 'user' is missing")


def test_unknown_part_is_refused(path: Path) -> None:
    write_merged(path, {"user": RecsdkRows.random(38)})
    (path / "user" / "frequency").mkdir()
    refused(path, asyncckpt.UnsupportedError, r"found \['frequency'\]")


@pytest.mark.parametrize("name", ["user", "user/rank0", "user/rank0/key"])
def test_symbolic_links_are_not_followed(path: Path, tmp_path: Path, name: str) -> None:
    write_ranks(path, {"user": [RecsdkRows.random(39)]})
    (path / name).rename(tmp_path / "moved")
    (path / name).symlink_to(tmp_path / "moved")
    refused(path, asyncckpt.CheckpointError, "no checkpoint|not a folder of its own")


@pytest.mark.parametrize("name", ["ad", "user/momentum1", "user/evict_timestamp", "user/frequency"])
@pytest.mark.parametrize("is_link", [True, False])
def test_no_folder_under_a_name_is_not_left_out_unseen(path: Path, tmp_path: Path, name: str, is_link: bool) -> None:
    write_merged(path, {"user": RecsdkRows.random(39, seen=True), "ad": RecsdkRows.random(41)})
    check_nothing_is_left_out(path, tmp_path, name, is_link=is_link or "momentum1" not in name)


@pytest.mark.parametrize("name", ["user/rank1", "20260102030405"])
@pytest.mark.parametrize("is_link", [True, False])
def test_no_newest_folder_is_left_out_unseen(path: Path, tmp_path: Path, name: str, is_link: bool) -> None:
    if "user" in name:
        write_ranks(path, {"user": RecsdkRows.random(39).split(2)})
    else:
        write_ranks(path, {"user": [RecsdkRows.random(39)]}, timestamp="20250102030405")
        write_ranks(path, {"user": [RecsdkRows.random(40)]}, timestamp=name)
    check_nothing_is_left_out(path, tmp_path, name, is_link=is_link)


def check_nothing_is_left_out(path: Path, tmp_path: Path, name: str, *, is_link: bool) -> None:
    if (path / name).exists():
        (path / name).rename(tmp_path / "moved")
    if is_link:
        (path / name).symlink_to(tmp_path / "moved")  # Of 'frequency' it leads nowhere.
    else:
        (path / name).write_bytes(b"")
    refused(path, CorruptError, f"{name}' is not a folder of its own")
    with pytest.raises(CorruptError, match="not a folder of its own"):
        recsdk.import_checkpoint(path, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_links_beside_what_is_read_are_no_matter(path: Path, tmp_path: Path) -> None:
    rows = RecsdkRows.random(39)
    write_ranks(path, {"user": [rows]}, timestamp="20260102030405")
    (path / "latest").symlink_to("20260102030405")
    (path / "20260102030405" / "notes.txt").symlink_to(tmp_path / "moved")
    (tmp_path / "moved").write_text("")
    module = bags()
    load(module, path)
    check(module, rows)


def test_failure_while_reading_leaves_the_tables_empty(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ranks(path, {"user": RecsdkRows.random(40).split(2)})
    module = bags()
    module.tables()["user"].lookup(torch.tensor([3, -4]))
    cut_off = path / "user" / "rank1" / "embedding" / "slice.data"
    run = recsdk_load_module.RecsdkLoad.run

    def run_after_the_file_shrank(self: Any) -> SparseLoadReport:
        cut_short(cut_off)
        return run(self)

    monkeypatch.setattr(recsdk_load_module.RecsdkLoad, "run", run_after_the_file_shrank)
    with pytest.raises(CorruptError, match="ended while it was read; all multi-level tables of the module are empty"):
        load(module, path)
    assert len(module.tables()["user"]) == 0
