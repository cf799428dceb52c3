"""A follower on the loop of this process: what it yields, what its loads do, and what stands in its way."""

from __future__ import annotations

import _thread
import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
import asyncckpt.engine.follow.table_update
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.format.manifest import Chain
from asyncckpt.signals import uninterrupted
from tests.end_to_end.chains import ALWAYS_DELTAS, TrainingRun
from tests.end_to_end.state import State
from tests.worlds.directories import document_of, manifest_path
from tests.worlds.gates import Gate

POLL_S = 0.005


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TrainingRun]:
    with TrainingRun(tmp_path / "run") as training:
        yield training


def follow(run: TrainingRun, **options: Any) -> asyncckpt.follower.Follower:
    return asyncckpt.follow(run.path, poll_seconds=POLL_S, **options)


def next_of(follower: asyncckpt.follower.Follower) -> asyncio.Future[asyncckpt.follower.Update]:
    """The next update, asked for now."""
    return asyncio.ensure_future(anext(follower))


def small(report: asyncckpt.LoadReport) -> bool:
    """Whether only what changed was loaded: a table of the run has more than 200 rows."""
    return max(report.rows.values()) < 100


async def serve(run: TrainingRun, steps: list[int], served: State, follower: asyncckpt.follower.Follower) -> list[bool]:
    """Load the steps, one after the other, and compare; returns which loads were small."""
    found = []
    for step in steps:
        update = await anext(follower)
        assert update.step == step
        report = await update.load(served.tables, served.dense)
        assert served.image() == run.images[step]
        assert report.step == step
        found.append(small(report))
    return found


async def test_each_update_brings_the_server_to_its_step(run: TrainingRun) -> None:
    served = State.empty()
    kinds = {1: "full", 2: "delta", 3: "delta", 4: "full", 5: "delta"}
    async with follow(run, until=5) as follower:
        for step, kind in kinds.items():
            run.save(step, kind)
            update = await anext(follower)
            assert (update.step, update.kind) == (step, kind)
            assert update.previous == (step - 1 if kind == "delta" else None)
            assert update.metadata == {"step": step}
            report = await update.load(served.tables, served.dense)
            assert served.image() == run.images[step]
            assert small(report) == (kind == "delta")
            assert report.values["epoch"] == 0
        with pytest.raises(StopAsyncIteration):
            await anext(follower)
    assert follower.last_step == 5


async def test_it_waits_for_the_directory_and_for_steps(tmp_path: Path) -> None:
    waiting = next_of(asyncckpt.follow(tmp_path / "run", poll_seconds=POLL_S))
    await asyncio.sleep(0)
    with TrainingRun(tmp_path / "run") as run:
        await asyncio.to_thread(run.save, 7)
        assert (await asyncio.wait_for(waiting, 60)).step == 7


async def test_rows_and_removals_keep_a_foreign_store_up_to_date(run: TrainingRun) -> None:
    """As a server with a store of its own would: remove, then put, batch by batch."""
    stores: dict[str, dict[int, Any]] = {"user": {}, "item": {}}
    async with follow(run, until=6) as follower:
        for step, kind in enumerate(["full", "delta", "delta", "full", "delta", "delta"], 1):
            run.save(step, kind)
            update = await anext(follower)
            for name, store in stores.items():
                if update.tables[name].whole:
                    store.clear()
                removed, rows = await update.removed(name), await update.rows(name)
                assert len(removed) == update.tables[name].removed_count == (0 if kind == "full" else 9)
                assert len(rows["id"]) == update.tables[name].rows_count
                for id in removed.tolist():
                    store.pop(id, None)
                for index, id in enumerate(rows["id"].tolist()):
                    store[id] = [rows[column][index] for column in ("embedding", "sum", "momentum", "last_seen")]
                image = run.images[step][f"table {name}"]
                assert store.keys() == image.keys()
                for id, columns in store.items():
                    raw = b"".join(bytes(part.contiguous().reshape(-1).view(torch.uint8).tolist()) for part in columns)
                    assert raw == image[id]
        with pytest.raises(asyncckpt.UsageError, match="table 'nobody' is not in step 6"):
            await update.rows("nobody")


async def test_a_cursor_goes_on_behind_the_last_finished_step(run: TrainingRun, tmp_path: Path) -> None:
    cursor = tmp_path / "cursor.json"
    for step in (1, 2, 3, 4):
        run.save(step)
    async with follow(run, cursor=cursor) as follower:
        assert [(await anext(follower)).step for _ in range(3)] == [1, 2, 3]
    assert json.loads(cursor.read_text())["step"] == 2  # Nobody has finished step 3.
    async with follow(run, cursor=cursor) as follower:
        update = await anext(follower)
        assert (update.step, update.kind, update.previous) == (3, "delta", 2)
        update.done()
        update.done()
        assert uninterrupted._depth == 0, "handlers are set back"
        assert json.loads(cursor.read_text())["step"] == 3
        with pytest.raises(asyncckpt.UsageError, match="step 3 is finished"):
            await update.rows("user")
    async with follow(run, cursor=cursor, after=1) as follower:
        assert (await anext(follower)).step == 4
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cursor.json", "run"]


async def test_a_server_begins_behind_a_step_that_it_has_loaded_otherwise(run: TrainingRun) -> None:
    for step in (1, 2, 3):
        run.save(step)
    served = State.empty()
    async with follow(run, after=2) as follower:
        update = await anext(follower)
        assert (update.step, update.kind, update.previous) == (3, "delta", 2)
        # This follower has not filled these tables itself, so it loads all of them.
        assert not small(await update.load(served.tables, served.dense))
        assert served.image() == run.images[3]


async def test_tables_that_do_not_hold_the_step_before_are_loaded_whole(run: TrainingRun) -> None:
    served = State.empty()
    run.save(1)
    async with follow(run) as follower:
        assert await serve(run, [1], served, follower) == [False]
        run.save(2)
        await anext(follower)  # Not loaded.
        run.save(3)
        assert await serve(run, [3], served, follower) == [False]
        run.save(4)
        assert await serve(run, [4], served, follower) == [True]
        run.save(5)
        other = State.empty()
        assert await serve(run, [5], other, follower) == [False]


async def test_a_compacted_step_is_a_full_update(run: TrainingRun) -> None:
    served = State.empty()
    run.save(1)
    async with follow(run) as follower:
        await serve(run, [1], served, follower)
        run.save(2)
        run.save(3)
        run.saver.compact(2).result(60)
        update = await anext(follower)
        assert (update.step, update.kind, update.previous) == (2, "full", None)
        await update.load(served.tables, served.dense)
        assert served.image() == run.images[2]
        assert await serve(run, [3], served, follower) == [True]
        run.saver.compact(3).result(60)  # After it was seen: what builds upon it, builds upon what was seen.
        run.save(4)
        assert await serve(run, [4], served, follower) == [True]


async def test_retention_does_not_take_away_what_is_being_used(run: TrainingRun) -> None:
    served = State.empty()
    run.save(1)
    async with follow(run) as follower:
        await serve(run, [1], served, follower)
        run.save(2)
        update = await anext(follower)
        shutil.rmtree(run.path / "data")
        shutil.rmtree(run.path / "manifests")
        report = await update.load(served.tables, served.dense)
        assert small(report)
        assert served.image() == run.images[2]
        await update.load(served.tables, served.dense)  # Again: whole this time.
        assert served.image() == run.images[2]


async def test_steps_that_are_gone_are_passed_over(tmp_path: Path) -> None:
    served = State.empty()
    with TrainingRun(tmp_path, keep=1) as run:
        run.save(1, "full")
        async with follow(run) as follower:
            await serve(run, [1], served, follower)
            for step in (2, 3, 4):
                run.save(step, "full")
            run.save(5)
            run.saver.wait_idle(60)  # Also for retention.
            assert await serve(run, [4, 5], served, follower) == [False, True]


async def test_a_step_that_goes_while_it_is_opened_is_passed_over(
    run: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_chain = asyncckpt.engine.follow.table_update.read_chain
    read: list[int] = []

    def read_and_lose(root: CheckpointRoot, step: int) -> Chain:
        chain = read_chain(root, step)
        read.append(step)
        if len(read) == 1:
            manifest_path(run.path, 1).unlink()
            shutil.rmtree(run.path / "data" / f"{1:012d}-{chain.newest.head.attempt}")
        return chain

    monkeypatch.setattr(asyncckpt.engine.follow.table_update, "read_chain", read_and_lose)
    run.save(1)
    run.save(2, "full")
    async with follow(run) as follower:
        assert (await anext(follower)).step == 2
    assert read == [1, 2]


async def test_a_chain_that_is_compacted_while_it_is_opened_is_read_again(
    run: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_chain = asyncckpt.engine.follow.table_update.read_chain
    kinds: list[str] = []

    def read_and_compact(root: CheckpointRoot, step: int) -> Chain:
        chain = read_chain(root, step)
        if step == 2 and "delta" not in kinds:
            with ThreadPoolExecutor(1) as training:  # The follower's own threads may not wait for it.
                training.submit(lambda: run.saver.compact(2).result(60)).result(60)
            shutil.rmtree(run.path / "data" / f"{1:012d}-{chain.manifests[1].head.attempt}")
            manifest_path(run.path, 1).unlink()
            manifest_path(run.path, 2).unlink()
        kinds.append(chain.newest.head.kind)
        return chain

    monkeypatch.setattr(asyncckpt.engine.follow.table_update, "read_chain", read_and_compact)
    run.save(1)
    served = State.empty()
    async with follow(run) as follower:
        await serve(run, [1], served, follower)
        run.save(2)
        await serve(run, [2], served, follower)
    assert kinds == ["full", "delta", "full"]


async def test_a_step_that_nobody_knows_is_nothing_to_build_upon(tmp_path: Path) -> None:
    """The number of a step alone does not tell which checkpoint a server holds."""
    path = tmp_path / "later"
    async with asyncckpt.follow(path, after=1, poll_seconds=POLL_S) as follower:
        waiting = next_of(follower)
        while not follower._begun:
            await asyncio.sleep(POLL_S)
        with TrainingRun(path) as later:
            await asyncio.to_thread(later.save, 1)
            await asyncio.to_thread(later.save, 2)
            update = await asyncio.wait_for(waiting, 60)
            assert (update.step, update.kind, update.previous) == (2, "full", None)


async def test_another_checkpoint_of_the_same_step_is_not_the_one_before(run: TrainingRun, tmp_path: Path) -> None:
    """Training went back and saved the same steps again: rows of the first try must not stay."""
    served, cursor = State.empty(), tmp_path / "cursor.json"
    run.save(1)
    run.save(2)
    async with follow(run, cursor=cursor) as follower:
        await serve(run, [1, 2], served, follower)
        run.saver.close()
        manifest_path(run.path, 2).unlink()
        tables, tensors = run.state.tables, run.state.dense
        run.saver = asyncckpt.Saver(path=run.path, hashtables=tables, tensors=tensors, deltas=ALWAYS_DELTAS)
        run.save(2, "full")
        assert run.save(3).kind == "delta"
        update = await anext(follower)
        assert (update.step, update.kind, update.previous) == (3, "full", None)
        assert not small(await update.load(served.tables, served.dense))
        assert served.image() == run.images[3]


async def test_a_damaged_step_is_told_and_looked_at_again(run: TrainingRun) -> None:
    run.save(1)
    run.save(2)
    good = manifest_path(run.path, 2).read_bytes()
    async with follow(run) as follower:
        assert (await anext(follower)).step == 1
        manifest_path(run.path, 2).write_bytes(good[:-9])
        for _ in range(2):
            with pytest.raises(asyncckpt.CorruptError, match="does not end as a manifest"):
                await anext(follower)
        manifest_path(run.path, 2).write_bytes(good)
        assert (await anext(follower)).step == 2


async def test_damaged_rows_are_an_error_and_the_next_load_is_whole(run: TrainingRun) -> None:
    served = State.empty()
    run.save(1)
    async with follow(run) as follower:
        await serve(run, [1], served, follower)
        run.save(2)
        facts = document_of(run.path, 2)
        block = next(block for block in facts["blocks"] if block["name"] == "item@embedding")
        shard = run.path / facts["files"][block["file"]]["path"]
        good = shard.read_bytes()
        raw = bytearray(good)
        raw[block["offset"]] ^= 1
        update = await anext(follower)
        shard.write_bytes(raw)
        with pytest.raises(asyncckpt.CorruptError, match="item@embedding"):
            await update.load(served.tables, served.dense)
        shard.write_bytes(good)
        assert not small(await update.load(served.tables, served.dense))
        assert served.image() == run.images[2]


async def test_what_does_not_fit_touches_nothing(run: TrainingRun) -> None:
    served = State.empty()
    run.save(1)
    async with follow(run) as follower:
        await serve(run, [1], served, follower)
        run.save(2)
        update = await anext(follower)
        with pytest.raises(asyncckpt.IncompatibleError, match=r"only in this state \(1\): 'strange'"):
            await update.load(served.tables, {**served.dense, "strange": torch.zeros(1)})
        assert served.image() == run.images[1]
        await update.load(served.tables, {**served.dense, "strange": torch.zeros(1)}, strict=False)
        assert served.image() == run.images[2]


async def test_a_load_waits_for_the_save_in_flight_and_can_be_cancelled(run: TrainingRun, tmp_path: Path) -> None:
    served, gate = State.empty(), Gate()
    run.save(1)
    with asyncckpt.Saver(path=tmp_path / "other", tensors={"x": torch.zeros(1)}, filter_func=gate) as other:
        async with follow(run) as follower:
            update = await anext(follower)
            future = other.save_async(1)
            assert gate.reached.wait(60)
            load = asyncio.ensure_future(update.load(served.tables, served.dense))
            done, _ = await asyncio.wait([load], timeout=4 * POLL_S)
            assert not done
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load
            assert served.image() != run.images[1]
            load = asyncio.ensure_future(update.load(served.tables, served.dense))
            gate.open()
            future.result(60)
            await asyncio.wait_for(load, 60)
            assert served.image() == run.images[1]


async def test_a_load_that_is_cancelled_twice_has_ended_when_the_caller_goes_on(
    run: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, may_end = threading.Event(), threading.Event()
    ended: list[bool] = []

    def held(*_: Any, **__: Any) -> None:
        reached.set()
        ended.append(may_end.wait(60))

    monkeypatch.setattr(asyncckpt.engine.follow.table_update.OpenUpdate, "load", held)
    run.save(1)
    async with follow(run) as follower:
        update = await anext(follower)
        load = asyncio.ensure_future(update.load(State.empty().tables))
        while not reached.is_set():
            await asyncio.sleep(POLL_S)
        for _ in range(3):
            load.cancel()
            await asyncio.wait([load], timeout=POLL_S)
        asyncio.get_running_loop().call_later(POLL_S, may_end.set)
        with pytest.raises(asyncio.CancelledError):
            await load
        assert ended == [True]


def test_the_end_of_an_update_waits_for_its_use_up_to_a_deadline(
    run: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Ctrl-C ends the wait."""
    run.save(0)
    gate, follower = Gate(), follow(run)

    async def first() -> asyncckpt.follower.Update:
        return await anext(follower)

    update = asyncio.run(first())

    def read(_: str) -> torch.Tensor:
        gate()
        return torch.empty(0)

    thread = threading.Thread(target=update._read, args=(read, "t"))
    thread.start()
    assert gate.reached.wait(60)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(asyncckpt.follower, "SAVE_DEADLINE_S", 0.01)
            with pytest.raises(asyncckpt.DeadlineError, match=r"Update: step 0, full> was still read after 0\.01 s"):
                update.done()
        threading.Timer(0.05, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            update.done()
    finally:
        gate.open()
        thread.join()
    update.done()
    asyncio.run(follower.aclose())


async def test_a_cancelled_wait_goes_on_later(run: TrainingRun) -> None:
    async with follow(run) as follower:
        waiting = next_of(follower)
        await asyncio.sleep(0)
        with pytest.raises(asyncckpt.UsageError, match="one task at a time"):
            await anext(follower)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        run.save(1)
        assert (await anext(follower)).step == 1


async def test_a_follower_writes_nothing(run: TrainingRun, tmp_path: Path) -> None:
    def listing() -> list[tuple[str, int, int]]:
        return sorted((str(f), f.stat().st_mtime_ns, f.stat().st_ino) for f in run.path.rglob("*"))

    run.save(1)
    run.save(2)
    before = listing()
    served = State.empty()
    async with follow(run, cursor=tmp_path / "cursor.json") as follower:
        await serve(run, [1, 2], served, follower)
    assert listing() == before


@pytest.mark.parametrize(
    "options",
    [{"after": -1}, {"after": True}, {"until": 0.5}, {"poll_seconds": 0}, {"poll_seconds": "1"}, {"cursor": "run/c"}],
)
def test_wrong_arguments_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(asyncckpt.UsageError):
        asyncckpt.follow("run", **options)


async def test_multi_level_tables_are_followed(tmp_path: Path) -> None:
    def table() -> asyncckpt.MultiLevelTable:
        return asyncckpt.MultiLevelTable("big", 4, cache_rows=16, admit_after=2, metadata={"count": torch.int64})

    def image(found: asyncckpt.MultiLevelTable) -> dict[int, list[float]]:
        ids = found.ids()
        return dict(zip(ids.tolist(), found.read(ids)["embedding"].tolist(), strict=True))

    trained, served = table(), table()
    with asyncckpt.Saver(path=tmp_path, hashtables={"big": trained}, deltas=asyncckpt.DeltaPolicy()) as saver:
        async with asyncckpt.follow(tmp_path, poll_seconds=POLL_S) as follower:
            for step in range(1, 5):
                for _ in range(2):
                    rows = trained.lookup(torch.arange(10 * step, 10 * step + 12))
                trained.update(rows, lambda values: values.embedding.add_(1.0))
                trained.remove(torch.arange(10 * step - 3, 10 * step))
                saver.save_async(step, kind="full" if step == 1 else "delta").result(60)
                update = await anext(follower)
                report = await update.load({"big": served})
                assert image(served) == image(trained)
                assert len(served.companions()["candidates"]) == len(trained.companions()["candidates"])
                assert step == 1 or report.rows["big"] < len(trained)
