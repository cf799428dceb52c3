"""Every way to save: the image is that of the call, whatever happens to the state afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import asyncckpt
from tests.end_to_end.state import Scribbler, State, load_image
from tests.worlds.gates import Gate


async def test_await_save_async_while_the_state_is_scribbled(tmp_path: Path) -> None:
    state = State.filled(1)
    with asyncckpt.Saver(path=tmp_path, hashtables=state.tables, tensors=state.dense) as saver:
        expected = state.image()
        future = saver.save_async(10)
        with Scribbler(state):
            result = await future
        assert (result.step, result.skipped, result.fallback, result.kind) == (10, False, None, "full")
        assert result.bytes_written > result.bytes_logical > 0
    assert load_image(tmp_path) == expected


def test_result_from_a_thread_while_the_state_is_scribbled(tmp_path: Path) -> None:
    state = State.filled(2)
    gate = Gate()
    with asyncckpt.Saver(path=tmp_path, hashtables=state.tables, tensors=state.dense, filter_func=gate) as saver:
        expected = state.image()
        future = saver.save_async(3)
        with Scribbler(state):
            assert gate.reached.wait(60)
            assert not future.done()
            gate.open()
            assert future.result(60).step == 3
    assert load_image(tmp_path, 3) == expected


def test_fire_and_forget_is_drained_by_close(tmp_path: Path) -> None:
    state = State.filled(3)
    saver = asyncckpt.Saver(path=tmp_path, hashtables=state.tables, tensors=state.dense)
    expected = state.image()
    saver.save_async(1)
    state.scribble()
    saver.close()
    assert load_image(tmp_path) == expected


def test_blocking_save(tmp_path: Path) -> None:
    state = State.filled(4)
    with asyncckpt.Saver(path=tmp_path, hashtables=state.tables, tensors=state.dense) as saver:
        expected = state.image()
        result = saver.save(7)
        state.scribble()
        assert result.step == 7
        assert result.fallback is None
    assert load_image(tmp_path) == expected


def test_blocking_save_streams_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are cut at every place: a chunk is far smaller than a block, and no multiple of a row."""
    monkeypatch.setattr("asyncckpt.staging.chunks.CHUNK_BYTES", 4096)
    monkeypatch.setattr("asyncckpt.plan.image.FILE_TARGET_BYTES", 20_000)
    state = State.filled(5)
    with asyncckpt.Saver(path=tmp_path, hashtables=state.tables, tensors=state.dense) as saver:
        expected = state.image()
        saver.save(1)
        saver.save_async(2).result(60)
    assert len(asyncckpt.describe(tmp_path, 1).files) > 1
    assert load_image(tmp_path, 1) == expected
    assert load_image(tmp_path, 2) == expected
    # Rows of tables may be in another order.
    digests = [
        {b.name: b.digest for b in asyncckpt.describe(tmp_path, step).blocks if b.role == "dense"} for step in (1, 2)
    ]
    assert digests[0] == digests[1]


def test_large_blocks_are_split_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.plan.image.BLOCK_BYTES_MAX", 1000)
    state = State.filled(6, rows=2000)
    with asyncckpt.Saver(path=tmp_path, hashtables=state.tables, tensors=state.dense) as saver:
        expected = state.image()
        saver.save_async(1).result(60)
        saver.save(2)
    for step in (1, 2):
        names = [block.name for block in asyncckpt.describe(tmp_path, step).blocks]
        assert names.count("user@embedding") > 5
        assert names.count("w") > 5
    assert load_image(tmp_path, 1) == expected
    assert load_image(tmp_path, 2) == expected
    asyncckpt.verify(tmp_path, 1)


def test_step_none_is_one_more_than_the_newest(tmp_path: Path) -> None:
    state = State.filled(7)
    with asyncckpt.Saver(path=tmp_path, tensors=state.dense) as saver:
        assert saver.save().step == 0
        assert saver.save(41).step == 41
        assert saver.save_async().result(60).step == 42
    assert asyncckpt.list_steps(tmp_path) == [0, 41, 42]


def test_state_may_be_freed_after_save_async(tmp_path: Path) -> None:
    state = {"w": State.filled(8).dense["w"]}
    gate = Gate()
    with asyncckpt.Saver(path=tmp_path, tensors=state, filter_func=gate) as saver:
        expected = state["w"].clone()
        future = saver.save_async(1)
        state["w"].untyped_storage().resize_(0)
        del state["w"]
        gate.open()
        future.result(60)
    target = {"w": expected * 0}
    asyncckpt.Loader(tmp_path, tensors=target).load()
    assert target["w"].equal(expected)


def test_state_is_read_anew_at_every_save(tmp_path: Path) -> None:
    """Objects in the mapping may be replaced between saves: nothing but the shape is remembered."""
    state = {"w": State.filled(1).dense["w"], "epoch": 1}
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        saver.save_async(1).result(60)
        state["w"], state["epoch"] = state["w"] + 1, 2
        saver.save_async(2).result(60)
        plans = saver.statistics().plans_made_count
    assert plans == 1
    target = {"w": state["w"] * 0, "epoch": 0}
    assert asyncckpt.Loader(tmp_path, tensors=target).load().values == {"epoch": 2}
    assert target["w"].equal(state["w"])


def test_several_loops_may_await_one_future(tmp_path: Path) -> None:
    state = State.filled(9)

    async def wait(future: asyncckpt.SaveFuture) -> int:
        return (await future).step

    with asyncckpt.Saver(path=tmp_path, tensors=state.dense) as saver:
        future = saver.save_async(5)
        assert asyncio.run(wait(future)) == 5
        assert asyncio.run(wait(future)) == 5
        assert future.result(0).step == 5


def test_prepare_makes_plan_and_arena(tmp_path: Path) -> None:
    state = State.filled(1)
    with asyncckpt.Saver(path=tmp_path, hashtables=state.tables, tensors=state.dense) as saver:
        saver.prepare().result(60)
        before = saver.statistics()
        assert before.plans_made_count == 1
        assert before.arena_bytes > 0
        for step in range(4):
            saver.save_async(step).result(60)
        after = saver.statistics()
    assert after.plans_made_count == 1
    assert (after.arena_touches_count, after.arenas_count) == (before.arena_touches_count, before.arenas_count)
    assert after.saves_count == 4
