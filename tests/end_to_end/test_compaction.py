"""Compaction: a chain folded into a full checkpoint loads the same, whatever happens beside it or to it."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

import asyncckpt
import asyncckpt.engine.compact.run_compaction
import asyncckpt.shard.stored_rows
from asyncckpt import filters
from asyncckpt.checkpoints import KnownSummaries
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.transaction import Transaction
from asyncckpt.engine.compact.run_compaction import run_compaction
from asyncckpt.engine.process.background import REWRITERS_MAX, rewriters
from asyncckpt.engine.process.held_directory import held_directory
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.native import Progress
from asyncckpt.options import SaveOptions
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.owner_lock import _lock_file
from tests.end_to_end.chains import TrainingRun
from tests.end_to_end.state import load_image
from tests.worlds.directories import document_of, flip_byte, manifest_path
from tests.worlds.gates import Gate
from tests.worlds.rows import rows_of

STEPS = [1, 2, 3, 4]


@dataclass(frozen=True)
class Chain:
    """A directory of one's own, and what its steps hold."""

    path: Path
    images: dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Step 1 is full, the others are deltas; the Saver is closed."""
    with TrainingRun(tmp_path_factory.mktemp("saved") / "run") as run:
        for step in STEPS:
            run.save(step)
    return run


@pytest.fixture
def chain(saved: TrainingRun, tmp_path: Path) -> Chain:
    shutil.copytree(saved.path, tmp_path / "run")
    return Chain(path=tmp_path / "run", images=saved.images)


def files_of(path: Path) -> dict[str, bytes]:
    """Everything below a directory but its LOCK."""
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file() and f.name != "LOCK"}


def shards_of(path: Path, step: int) -> list[Path]:
    return sorted((path / "data").glob(f"{step:012d}-*/*.safetensors"))


def keep_only(path: Path, step: int) -> None:
    """Leave nothing but the compacted checkpoint of a step."""
    kept = {Path(file["path"]).parent.name for file in document_of(path, step, "full.json")["files"]}
    for folder in (path / "data").iterdir():
        if folder.name not in kept:
            shutil.rmtree(folder)
    for file in (path / "manifests").iterdir():
        if file != manifest_path(path, step, "full.json"):
            file.unlink()


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_compacted_step_loads_the_same_without_its_parents(chain: Chain, step: int) -> None:
    before = asyncckpt.describe(chain.path, step)
    result = asyncckpt.compact(chain.path, step)
    assert (result.step, result.kind, result.skipped) == (step, "full", False)
    assert load_image(chain.path, step) == chain.images[step]
    keep_only(chain.path, step)
    assert load_image(chain.path) == chain.images[step]
    after = asyncckpt.describe(chain.path)
    assert (after.step, after.kind, after.parents, after.compacted) == (step, "full", (), True)
    assert (after.metadata, after.created) == (before.metadata, before.created)
    assert after.tables == {
        name: len(image) for name, image in list(chain.images[step].items())[:2] for name in [name[6:]]
    }
    asyncckpt.verify(chain.path, step)
    files = sum(file.stat().st_size for file in shards_of(chain.path, step))
    assert result.bytes_written == files + manifest_path(chain.path, step, "full.json").stat().st_size


def test_values_come_back(chain: Chain) -> None:
    before = asyncckpt.Loader(chain.path).load().values
    asyncckpt.compact(chain.path)
    assert asyncckpt.Loader(chain.path).load().values == before != {}


def test_nothing_that_was_there_is_changed(chain: Chain) -> None:
    before = files_of(chain.path)
    asyncckpt.compact(chain.path, 3)
    after = files_of(chain.path)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 2
    for step in STEPS:
        assert load_image(chain.path, step) == chain.images[step]


def test_shard_files_open_without_asyncckpt(chain: Chain) -> None:
    asyncckpt.compact(chain.path, 4)
    keep_only(chain.path, 4)
    (shard,) = shards_of(chain.path, 4)
    with safetensors.safe_open(shard, framework="pt") as opened:
        names = list(opened.keys())
        ids = torch.cat([opened.get_tensor(name) for name in names if name.startswith("user@id")])
    assert sorted(ids.tolist()) == sorted(chain.images[4]["table user"])


def test_full_and_compacted_steps_are_left_as_they_are(chain: Chain) -> None:
    assert asyncckpt.compact(chain.path, 1).skipped
    assert not asyncckpt.compact(chain.path).skipped
    before = files_of(chain.path)
    assert asyncckpt.compact(chain.path).skipped
    assert files_of(chain.path) == before


def test_later_deltas_build_upon_the_compacted_step(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, keep=None) as run:
        for step in STEPS[:3]:
            run.save(step)
        assert not run.saver.compact().result(60).skipped
        assert run.save(4).kind == "delta"
        assert run.save(5).kind == "delta"
    assert asyncckpt.verify(tmp_path, 5).steps == (5, 4, 3)
    for step in (3, 4, 5):
        assert load_image(tmp_path, step) == run.images[step]
    # What only the chain before needed may go.
    shutil.rmtree(shards_of(tmp_path, 1)[0].parent)
    for step in (1, 2, 3):
        manifest_path(tmp_path, step).unlink()
    for step in (3, 4, 5):
        assert load_image(tmp_path, step) == run.images[step]


def test_a_delta_builds_upon_the_compacted_step_alone(chain: Chain) -> None:
    """Its manifest lists what was there when it was saved; what is looked at ends where a load does."""
    known = KnownSummaries(chain.path)
    assert known.now()[4].parents == (3, 2, 1)
    asyncckpt.compact(chain.path, 3)
    asyncckpt.checkpoints.remove(chain.path, [1, 2])
    assert asyncckpt.list_steps(chain.path) == [3, 4]
    parents = [found.parents for found in (asyncckpt.describe(chain.path, 4), known.now()[4])]
    assert parents == [(3,), (3,)]
    assert asyncckpt.verify(chain.path, 4).steps == (4, 3)


def test_retention_lets_what_was_folded_go(tmp_path: Path) -> None:
    with TrainingRun(tmp_path, keep=2) as run:
        for step in STEPS:
            run.save(step)
        run.saver.wait_idle(60)  # Also for retention.
        assert asyncckpt.list_steps(tmp_path) == STEPS  # The newest ones need them all.
        run.saver.compact(3).result(60)
        run.save(5)
    assert asyncckpt.list_steps(tmp_path) == [3, 4, 5]
    assert not manifest_path(tmp_path, 3).exists()
    assert len(list((tmp_path / "data").iterdir())) == 3
    for step in (3, 4, 5):
        assert load_image(tmp_path, step) == run.images[step]


def do_when_written(monkeypatch: pytest.MonkeyPatch, act: Callable[..., object]) -> None:
    """Do something when a compaction has written, with what it was called."""
    write = asyncckpt.engine.compact.run_compaction._write

    def write_and_act(*arguments: Any, **options: Any) -> Any:
        written = write(*arguments, **options)
        act(*arguments)
        return written

    monkeypatch.setattr(asyncckpt.engine.compact.run_compaction, "_write", write_and_act)


def test_a_save_beside_a_compaction_does_not_sweep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    do_when_written(monkeypatch, lambda *_: gate())
    with TrainingRun(tmp_path, keep=100) as run:
        for step in STEPS:
            run.save(step)
        compaction = run.saver.compact()
        assert gate.reached.wait(60)
        run.save(5)
        run.save(6, kind="full")
        with pytest.raises(asyncckpt.ConflictError, match="being compacted already"):
            run.saver.compact(4).result(60)
        gate.open()
        assert not compaction.result(60).skipped
        run.save(7)
    for step in range(1, 8):
        assert load_image(tmp_path, step) == run.images[step]
    assert asyncckpt.describe(tmp_path, 4).compacted


def test_a_step_that_retention_takes_meanwhile_does_not_come_back(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = shards_of(chain.path, 4)
    do_when_written(monkeypatch, lambda *_: manifest_path(chain.path, 4).unlink())
    with pytest.raises(asyncckpt.NotFoundError, match="step 4 is not in"):
        asyncckpt.compact(chain.path, 4)
    assert asyncckpt.list_steps(chain.path) == [1, 2, 3]
    assert shards_of(chain.path, 4) == shards


def test_a_folder_that_is_taken_away_is_not_published(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_of(chain.path)

    def lose(*arguments: Any) -> None:
        shutil.rmtree(next(path for path in arguments if isinstance(path, Transaction)).place.path)

    do_when_written(monkeypatch, lose)
    with pytest.raises(asyncckpt.ConflictError, match="was removed while step 4 was compacted"):
        asyncckpt.compact(chain.path, 4)
    assert files_of(chain.path) == before


def test_no_damaged_byte_gets_into_a_full_checkpoint(chain: Chain) -> None:
    """A bit of every block whose rows count, at its begin or at its end."""
    listed = set(files_of(chain.path))
    flips = 0
    for step in (1, 3, 4):
        facts = document_of(chain.path, step)
        for block in facts["blocks"]:
            if block["role"] == "pad" or not block["bytes"] or (block["role"] == "dense" and block["name"] != "w"):
                continue
            if block["role"] == "dense" and step < 4:
                continue
            flips += 1
            shard = chain.path / facts["files"][block["file"]]["path"]
            at = block["offset"] + (block["bytes"] - 1 if flips % 2 else 0)
            flip_byte(shard, at)
            with pytest.raises(asyncckpt.CorruptError, match="does not match its digest"):
                asyncckpt.compact(chain.path, 4)
            flip_byte(shard, at)
    assert flips > 30
    assert set(files_of(chain.path)) == listed
    assert load_image(chain.path) == chain.images[4]


def test_a_broken_chain_is_not_folded(chain: Chain) -> None:
    manifest_path(chain.path, 2).unlink()
    with pytest.raises(asyncckpt.CorruptError, match="parent step 2 is missing"):
        asyncckpt.compact(chain.path, 4)
    with pytest.raises(asyncckpt.NotFoundError):
        asyncckpt.compact(chain.path, 9)


def test_a_directory_that_is_being_written_is_left_alone(chain: Chain, tmp_path: Path) -> None:
    with Directory.open(chain.path) as root:
        lock = _lock_file(root, LOCK_NAME)  # As another process would: by an open file of its own.
    try:
        with pytest.raises(asyncckpt.ConflictError) as caught:
            asyncckpt.compact(chain.path)
        assert "is locked by process" in str(caught.value)
        assert "Saver.compact()" in str(caught.value)
    finally:
        os.close(lock)
    assert not asyncckpt.compact(chain.path).skipped
    with pytest.raises(asyncckpt.NotFoundError):
        asyncckpt.compact(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(asyncckpt.UsageError, match="step must be"):
        asyncckpt.compact(chain.path, -1)


def test_a_cancelled_compaction_leaves_nothing(chain: Chain) -> None:
    before = files_of(chain.path)
    progress = Progress()
    progress.cancel()
    with CheckpointRoot.for_reading(chain.path) as root, held_directory(root, "fsync") as commits:
        with pytest.raises(asyncckpt.SaveCancelledError):
            run_compaction(commits, 4, options=SaveOptions(), progress=progress)
        with pytest.raises(asyncckpt.SaveCancelledError):
            run_compaction(commits, 4, options=SaveOptions(), progress=Progress(), may_commit=lambda: False)
    assert files_of(chain.path) == before


def test_compact_may_be_called_where_a_loop_runs(chain: Chain) -> None:
    async def main() -> None:
        asyncckpt.compact(chain.path)

    asyncio.run(main())
    assert asyncckpt.describe(chain.path).compacted


@pytest.mark.parametrize("parts", [1, 3])
def test_large_blocks_go_through_windows_and_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """Columns in several parts, chunks that end within rows, and windows that are smaller than both."""
    with TrainingRun(tmp_path, rows=1000) as run:
        for step in STEPS:
            run.save(step)
    monkeypatch.setattr(asyncckpt.shard.stored_rows, "WINDOW_BYTES", 1000 * parts)
    monkeypatch.setattr("asyncckpt.staging.chunks.CHUNK_BYTES", 4096 * parts)
    asyncckpt.compact(tmp_path)
    keep_only(tmp_path, 4)
    assert load_image(tmp_path) == run.images[4]


ENCODINGS: dict[str, Callable[[], list[Any]]] = {
    "cast": lambda: [filters.cast("*@embedding", torch.bfloat16), filters.cast("w", torch.float16)],
    "quantize": lambda: [filters.quantize("*@embedding"), filters.quantize("*@momentum", bits=4)],
    "quantize and zstd": lambda: [filters.quantize("*@embedding", bits=4), filters.compress()],
    "cast and zstd": lambda: [filters.cast("*@momentum", torch.bfloat16), filters.compress()],
    "zstd": lambda: [filters.compress()],
    "zero rows": lambda: [filters.skip_zero_rows("*@sum"), filters.skip_zero_rows("*@momentum"), filters.compress()],
    "rows": lambda: [filters.keep_rows("*", lambda columns: columns["id"] % 3 != 0)],
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_was_encoded_loads_to_the_same_bits(tmp_path: Path, name: str) -> None:
    with TrainingRun(tmp_path, filters=ENCODINGS[name]()) as run:
        for table in run.state.tables.values():
            table.slot("sum")[table.used_rows()[::2]] = 0.0
            table.slot("momentum")[table.used_rows()[::2]] = 0.0
        for step in STEPS:
            run.save(step)
    before = load_image(tmp_path)
    size = sum(file.stat().st_size for step in STEPS for file in shards_of(tmp_path, step))
    asyncckpt.compact(tmp_path)
    keep_only(tmp_path, 4)
    assert load_image(tmp_path) == before
    asyncckpt.verify(tmp_path)
    if name in ("cast", "quantize", "rows"):
        # Rows are taken out of what is stored, which stays as small as it was.
        assert sum(file.stat().st_size for file in shards_of(tmp_path, 4)) < size


def test_tables_that_come_go_and_are_empty(tmp_path: Path) -> None:
    """Whole tables in deltas, a table without rows, one that lost all of them, one that is not in the newest step."""

    def table(name: str, rows: int) -> asyncckpt.HashTable:
        made = asyncckpt.HashTable(name, 2, metadata={"count": torch.int64})
        made.insert(torch.arange(rows), torch.rand(rows, 2))
        return made

    tables = {name: table(name, rows) for name, rows in {"a": 50, "lost": 20, "empty": 0, "cleared": 30}.items()}
    with asyncckpt.Saver(path=tmp_path, hashtables=tables) as saver:
        saver.save(1)
        tables["a"].insert(torch.arange(10), torch.zeros(10, 2))
        tables["lost"].remove(torch.arange(20))
        tables["cleared"].clear()
        tables["cleared"].insert(torch.arange(3), torch.ones(3, 2))
        assert saver.save_async(2, kind="delta").result(60).kind == "delta"
        tables["a"].remove(torch.arange(5))
        assert saver.save_async(3, kind="delta").result(60).kind == "delta"
    wanted = {name: _rows(tmp_path, name) for name in tables}
    asyncckpt.compact(tmp_path)
    keep_only(tmp_path, 3)
    assert {name: _rows(tmp_path, name) for name in tables} == wanted
    assert {name: len(rows) for name, rows in wanted.items()} == {"a": 45, "lost": 0, "empty": 0, "cleared": 3}


def _rows(path: Path, name: str) -> dict[int, tuple[float, ...]]:
    target = asyncckpt.HashTable(name, 2, metadata={"count": torch.int64})
    asyncckpt.Loader(path, hashtables={name: target}).load()
    return rows_of(target, "embedding")


def test_multi_level_tables_with_their_companions(tmp_path: Path) -> None:
    def table() -> asyncckpt.MultiLevelTable:
        return asyncckpt.MultiLevelTable("big", 4, cache_rows=16, admit_after=2, metadata={"count": torch.int64})

    trained = table()
    with asyncckpt.Saver(path=tmp_path, hashtables={"big": trained}) as saver:
        for step in range(1, 5):
            for _ in range(2):
                rows = trained.lookup(torch.arange(10 * step, 10 * step + 12))
            trained.update(rows, lambda values: values.embedding.add_(1.0))
            trained.remove(torch.arange(10 * step - 3, 10 * step))
            saver.save_async(step, kind="full" if step == 1 else "delta").result(60)
        assert not saver.compact().result(60).skipped
    keep_only(tmp_path, 4)
    loaded = table()
    report = asyncckpt.Loader(tmp_path, hashtables={"big": loaded}).load()
    assert report.rows == {"big": len(trained), "big.candidates": len(trained.companions()["candidates"])}
    ids = torch.sort(trained.ids()).values
    assert torch.equal(torch.sort(loaded.ids()).values, ids)
    assert torch.equal(loaded.read(ids)["embedding"], trained.read(ids)["embedding"])


def test_a_callback_that_waits_for_another_compaction_is_refused(tmp_path: Path) -> None:
    """It would need the thread that it is on; as many of them as there are threads would wait for ever."""
    table = asyncckpt.HashTable("t", 2)
    found: Future[BaseException | None] = Future()
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        saver.save(1)
        saver.save(2, kind="delta")
        saver.save(3, kind="delta")
        blocked = [rewriters.submit(found.exception, 60) for _ in range(REWRITERS_MAX - 1)]

        def wait_for_another(_: Any) -> None:
            try:
                saver.compact(3).result(20)
            except BaseException as error:
                found.set_result(error)
            else:
                found.set_result(None)

        may_begin = threading.Event()
        blocked.append(rewriters.submit(may_begin.wait, 60))
        saver.compact(2).add_done_callback(wait_for_another)
        may_begin.set()
        assert isinstance(found.result(60), asyncckpt.UsageError)
        for one in blocked:
            one.result(60)
