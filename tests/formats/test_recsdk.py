"""What RecSDK wrote comes in bit for bit, and goes out as its files: checked by NumPy alone."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import asyncckpt
from asyncckpt.embcache import PathRules, Saver
from asyncckpt.errors import ConflictError, CorruptError, UnsupportedError, UsageError
from asyncckpt.formats import recsdk
from tests.embcache.models import CachedNet, image
from tests.embcache.recsdk_writer import RecsdkRows, write_merged, write_ranks
from tests.program import invoke
from tests.worlds.directories import flip_byte, stored_rows

ANYWHERE = PathRules(permission_max=0o777, sensitive_words=(), owner_checked=False)


def rows_of(seed: int = 0, **more: Any) -> RecsdkRows:
    return RecsdkRows.random(seed, momenta=2, counts=True, seen=True, **more)


def check_table(found: dict[str, torch.Tensor], rows: RecsdkRows) -> None:
    order = np.argsort(rows.ids)
    assert rows.counts is not None
    assert rows.seen is not None
    wanted: dict[str, NDArray[Any]] = {
        "id": rows.ids,
        "embedding": rows.embedding,
        "m": rows.momenta[0],
        "v": rows.momenta[1],
        "count": np.maximum(rows.counts, 0),
        "last_seen": np.array([rows.seen.get(id, 0) for id in rows.ids.tolist()], dtype=np.int64),
    }
    assert found.keys() == wanted.keys()
    for column, values in wanted.items():
        assert np.array_equal(found[column].numpy(), values[order]), column


def read_part(folder: Path) -> RecsdkRows:
    """Read the folders of one rank by RecSDK's rules."""
    assert {path.name for path in folder.iterdir()} >= {"key", "embedding"}

    def array(name: str, dtype: str) -> NDArray[Any]:
        assert {path.name for path in (folder / name).iterdir()} == {"slice.attribute", "slice.data"}
        itemsize, *shape = np.fromfile(folder / name / "slice.attribute", "<i8").tolist()
        assert itemsize == np.dtype(dtype).itemsize
        values = np.fromfile(folder / name / "slice.data", dtype)
        assert (folder / name / "slice.data").stat().st_size == itemsize * int(np.prod(shape))
        return values.reshape(shape)

    seen = folder / "evict_timestamp"
    names = sorted(path.name for path in folder.iterdir() if path.name.startswith("momentum"))
    assert names == [f"momentum{number + 1}" for number in range(len(names))]
    return RecsdkRows(
        ids=array("key", "<i8"),
        embedding=array("embedding", "<f4"),
        momenta=tuple(array(name, "<f4") for name in names),
        counts=array("admit_count", "<i8") if (folder / "admit_count").exists() else None,
        seen=dict(
            zip(
                np.fromfile(seen / "slice_evict_key.data", "<i8").tolist(),
                np.fromfile(seen / "slice_evict_ts.data", "<i8").tolist(),
                strict=True,
            )
        )
        if seen.exists()
        else None,
    )


COLUMNS = {"momentum1": "m", "momentum2": "v"}


@pytest.mark.parametrize("form", ["merged", "ranks", "timestamps"])
def test_there_and_back_is_bit_for_bit(tmp_path: Path, form: str) -> None:
    user, item, none = rows_of(), rows_of(1, dim=6), rows_of(2).take(np.zeros(205, dtype=bool)[: len(rows_of(2).ids)])
    tables = {"user": user, "item.big": item, "none": none}
    if form == "merged":
        write_merged(tmp_path / "old", tables)
    else:
        timestamp = "20260102030405" if form == "timestamps" else ""
        write_ranks(tmp_path / "old", {name: rows.split(3) for name, rows in tables.items()}, timestamp=timestamp)
    done = recsdk.import_checkpoint(tmp_path / "old", tmp_path / "run", step=7, columns=COLUMNS)
    assert (done.step, done.rows_count) == (7, len(user.ids) + len(item.ids))
    for name, rows in tables.items():
        if len(rows.ids):
            check_table(stored_rows(tmp_path / "run", name), rows)
    for shards in (None, 1, 4):
        out = tmp_path / f"out-{shards}"
        report = recsdk.export_checkpoint(tmp_path / "run", out, shards=shards)
        assert (report.step, report.left_out) == (7, ())
        assert report.rows == {name: len(rows.ids) for name, rows in tables.items()}
        assert {path.name for path in out.iterdir()} == {*tables, *(["meta.ini"] if shards is None else [])}
        if shards is None:
            assert (out / "meta.ini").read_text() == "incremental=False\n"
        for name, rows in tables.items():
            places = [out / name] if shards is None else [out / name / f"rank{rank}" for rank in range(shards)]
            parts = [read_part(place) for place in places]
            for rank, part in enumerate(parts):
                assert all(id % 2**64 % len(parts) == rank for id in part.ids.tolist())
            check_same(parts, rows)
        recsdk.import_checkpoint(out, tmp_path / f"again-{shards}", columns=COLUMNS)
        check_table(stored_rows(tmp_path / f"again-{shards}", "user"), user)


def check_same(parts: list[RecsdkRows], rows: RecsdkRows) -> None:
    ids = np.concatenate([part.ids for part in parts])
    order, wanted = np.argsort(ids), np.argsort(rows.ids)
    assert np.array_equal(ids[order], rows.ids[wanted])
    assert np.array_equal(np.concatenate([part.embedding for part in parts])[order], rows.embedding[wanted])
    for number, momentum in enumerate(rows.momenta):
        assert np.array_equal(np.concatenate([part.momenta[number] for part in parts])[order], momentum[wanted])
    seen = {id: at for part in parts for id, at in (part.seen or {}).items()}
    assert seen == {id: at for id in rows.ids.tolist() if (at := (rows.seen or {}).get(id, 0))}


def test_tables_of_a_model_go_there_and_load_from_there(tmp_path: Path) -> None:
    net = CachedNet().trained(range(8))
    with Saver(rank=0, path_rules=ANYWHERE) as saver:
        saver.save(net, tmp_path / "run")
        for shards in (None, 2):
            recsdk.export_checkpoint(tmp_path / "run", tmp_path / f"out-{shards}", shards=shards)
            other = CachedNet()
            report = saver.load(other, tmp_path / f"out-{shards}")
            assert report.layout == ("recsdk merged" if shards is None else "recsdk ranks")
            assert image(other) == image(net)


def test_deltas_are_folded_and_what_has_no_place_is_listed(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 2, metadata={"odd": torch.float32})
    table.insert(torch.arange(50), torch.randn(50, 2))
    state = {"w": torch.ones(2), "epoch": 3}
    with asyncckpt.Saver(path=tmp_path / "run", hashtables={"user": table}, tensors=state) as saver:
        saver.save(1, kind="full")
        table.insert(torch.arange(40, 60), torch.ones(20, 2))
        table.remove(torch.arange(10))
        saver.save(2, kind="delta")
    report = recsdk.export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert (report.left_out, report.left_out_tensors, report.left_out_columns) == (("epoch",), ("w",), ("user@odd",))
    part = read_part(tmp_path / "out" / "user")
    assert sorted(part.ids.tolist()) == list(range(10, 60))
    order = np.argsort(part.ids)
    assert np.array_equal(part.embedding[order], table.read(torch.arange(10, 60))["embedding"].numpy())


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_merged(tmp_path / "old", {"user": rows_of()})
    write_merged(tmp_path / "some", {"user": rows_of()}, incremental=True)
    write_merged(tmp_path / "named", {"a@b": rows_of()})
    refused: list[tuple[type[Exception], str, str, dict[str, Any]]] = [
        (UnsupportedError, "only rows that were used", "some", {}),
        (UnsupportedError, "cannot be imported", "named", {}),
        (UsageError, "a mapping", "old", {"columns": ["m"]}),
        (UsageError, "no table has", "old", {"columns": {"momentum3": "m"}}),
        (UsageError, "no fitting names", "old", {"columns": {"momentum1": "m", "momentum2": "m"}}),
        (UsageError, "no fitting names", "old", {"columns": {"momentum1": "id"}}),
        (UsageError, "parallel", "old", {"parallel": 0}),
    ]
    for kind, words, source, more in refused:
        with pytest.raises(kind, match=words):
            recsdk.import_checkpoint(tmp_path / source, tmp_path / "run", **more)
        assert not (tmp_path / "run").exists()
    half = asyncckpt.HashTable("user", 2, dtype=torch.bfloat16)
    asyncckpt.save(tmp_path / "half", {}, hashtables={"user": half})
    long = asyncckpt.HashTable("user", 2, optimizer_slots={"a": torch.float32})
    for name in ("x" * 101, "a/b", "20260101000000"):
        asyncckpt.save(tmp_path / f"names-{len(name)}", {}, hashtables={name: long})
        with pytest.raises(UnsupportedError, match="cannot be written"):
            recsdk.export_checkpoint(tmp_path / f"names-{len(name)}", tmp_path / "out")
    asyncckpt.save(tmp_path / "long", {}, hashtables={"user": long})
    with pytest.raises(UnsupportedError, match="'embedding' of table 'user' has rows"):
        recsdk.export_checkpoint(tmp_path / "half", tmp_path / "out")
    for columns in ({"momentum2": "a"}, {"momentum1": "b"}):
        with pytest.raises(UsageError, match="columns"):
            recsdk.export_checkpoint(tmp_path / "long", tmp_path / "out", columns=columns)
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_taken_and_damage_leave_nothing(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 2)
    table.insert(torch.arange(5000), torch.randn(5000, 2))
    asyncckpt.save(tmp_path / "run", {}, hashtables={"user": table})
    (tmp_path / "out").mkdir()
    with pytest.raises(ConflictError, match="already exists"):
        recsdk.export_checkpoint(tmp_path / "run", tmp_path / "out")
    [shard] = (tmp_path / "run" / "data").glob("*/*.safetensors")
    flip_byte(shard)
    with pytest.raises(CorruptError, match="does not match its digest"):
        recsdk.export_checkpoint(tmp_path / "run", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_columns_of_other_types_are_refused(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 2, optimizer_slots={"a": torch.float32})
    asyncckpt.save(tmp_path / "run", {}, hashtables={"user": table})
    for columns in (5, {"momentum1": ["a"]}, {"momentum1": "a", 2: "a"}, {2: "a"}):
        with pytest.raises(UsageError, match="columns must be a mapping"):
            recsdk.export_checkpoint(tmp_path / "run", tmp_path / "out", columns=columns)  # type: ignore[arg-type]


def test_an_import_does_not_go_into_its_own_source(tmp_path: Path) -> None:
    write_merged(tmp_path / "old", {"user": rows_of()})
    (tmp_path / "same").symlink_to("old")
    before = sorted(tmp_path.rglob("*"))
    for target in ("old", "same", "old/run", "same/user/key"):
        with pytest.raises(UsageError, match="into its own source"):
            recsdk.import_checkpoint(tmp_path / "old", tmp_path / target)
        done = invoke("import", "recsdk", tmp_path / "old", tmp_path / target, "--dry-run")
        assert (done.exit_code, "into its own source" in done.stderr) == (2, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_without_embeddings_is_refused_by_a_dry_run_too(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path / "run", {"w": torch.ones(2)})
    for shards in (None, 2):
        with pytest.raises(UnsupportedError, match="no table with embeddings"):
            recsdk.export_checkpoint(tmp_path / "run", tmp_path / "out", shards=shards)
    for more in (["--dry-run"], []):
        done = invoke("export", "recsdk", tmp_path / "run", tmp_path / "out", *more)
        assert (done.exit_code, "no table with embeddings" in done.stderr) == (4, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_limits_hold_for_a_dry_run_too(tmp_path: Path) -> None:
    write_merged(tmp_path / "old", {"user": rows_of()})
    recsdk.import_checkpoint(tmp_path / "old", tmp_path / "run")
    for more in (["--dry-run"], []):
        for command in (
            ("import", "recsdk", tmp_path / "old", tmp_path / "new", "--parallel", "500"),
            ("export", "recsdk", tmp_path / "run", tmp_path / "new", "--shards", "65537"),
        ):
            done = invoke(*command, *more)
            assert (done.exit_code, "must be" in done.stderr) == (2, True), command
    assert not (tmp_path / "new").exists()


def test_more_files_than_a_process_may_have_open_are_written_and_read(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 2, optimizer_slots={"a": torch.float32})
    table.insert(torch.arange(100), torch.ones(100, 2))
    asyncckpt.save(tmp_path / "run", {}, hashtables={"user": table})
    files_max, hard_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    fewer = len(os.listdir("/proc/self/fd")) + 60
    resource.setrlimit(resource.RLIMIT_NOFILE, (fewer, hard_max))
    try:
        assert recsdk.export_checkpoint(tmp_path / "run", tmp_path / "out", shards=32).rows == {"user": 100}
        assert recsdk.import_checkpoint(tmp_path / "out", tmp_path / "back").rows_count == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, hard_max))


def test_the_commands_do_the_same(tmp_path: Path) -> None:
    write_ranks(tmp_path / "old", {"user": rows_of().split(2)})
    for more in (["--dry-run"], []):
        done = invoke(
            "import", "recsdk", tmp_path / "old", tmp_path / "run", "--column", "momentum1=m", "--json", *more
        )
        assert json.loads(done.output)["tables"] == {"user": len(rows_of().ids)}
    for more in (["--dry-run"], []):
        done = invoke("export", "recsdk", tmp_path / "run", tmp_path / "out", "--shards", "3", "--json", *more)
        facts = json.loads(done.output)
        assert (facts["tables"], facts["shards"]) == ({"user": len(rows_of().ids)}, 3)
    assert len(list((tmp_path / "out" / "user").iterdir())) == 3
