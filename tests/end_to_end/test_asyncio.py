"""Saves and loads as people write them on an event loop: of asyncio, and of uvloop where that is installed."""

from __future__ import annotations

import asyncio
import inspect
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.engine.process.save_lock import save_lock
from tests.worlds.gates import Gate
from tests.worlds.objects import Stateful
from tests.worlds.threads import awaited

DEADLINE_S = 60.0
SHORT_S = 0.01


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    if kind == "asyncio":
        return asyncio.new_event_loop()
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed: it is one of the dev extras")
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


@pytest.fixture(params=["asyncio", "asyncio in debug mode", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Run a coroutine to its end; nothing is left unawaited or unretrieved."""
    kind, _, debug = request.param.partition(" ")
    loop = new_loop(kind)
    loop.set_debug(bool(debug))
    complaints: list[Any] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            yield lambda main: loop.run_until_complete(asyncio.wait_for(main, DEADLINE_S))
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()
    assert complaints == []


def make(path: Path, **options: Any) -> asyncckpt.Saver:
    return asyncckpt.Saver(path=path, tensors={"w": torch.ones(9)}, **options)


async def with_wait(future: Any) -> Any:
    """asyncio.wait takes tasks: it takes no coroutine."""
    done, _ = await asyncio.wait({asyncio.create_task(future)}, timeout=DEADLINE_S)
    return done.pop().result()


async def with_as_completed(future: Any) -> Any:
    [first] = asyncio.as_completed([future])
    return await first


async def with_task_group(future: Any) -> Any:
    group: Any = getattr(asyncio, "TaskGroup", None)
    if group is None:  # Python 3.10.
        return await future
    async with group() as tasks:
        task = tasks.create_task(future)
    return task.result()


WAYS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "await": awaited,
    "create_task": lambda future: asyncio.create_task(future),
    "create_task with a name": lambda future: asyncio.create_task(future, name="save"),
    "ensure_future": lambda future: asyncio.ensure_future(future),
    "wait_for": lambda future: asyncio.wait_for(future, DEADLINE_S),
    "shield": lambda future: asyncio.shield(future),
    "gather": lambda future: gathered(future),
    "wait": with_wait,
    "as_completed": with_as_completed,
    "TaskGroup": with_task_group,
    "another thread's loop": lambda future: asyncio.to_thread(lambda: asyncio.run(awaited(future))),
    "asyncio.run of it": lambda future: asyncio.to_thread(asyncio.run, future),
    "run_coroutine_threadsafe": lambda future: asyncio.to_thread(
        asyncio.run_coroutine_threadsafe(future, asyncio.get_running_loop()).result, DEADLINE_S
    ),
}


async def gathered(future: Any) -> Any:
    [result] = await asyncio.gather(future)
    return result


@pytest.mark.parametrize("way", WAYS)
def test_a_save_is_awaited(tmp_path: Path, run: Any, way: str) -> None:
    weight = torch.ones(9)

    async def main() -> None:
        async with asyncckpt.Saver(path=tmp_path, tensors={"w": weight}) as saver:
            waiting = WAYS[way](saver.save_async(1))
            weight.zero_()  # The state is captured in the call, whenever the task begins.
            assert (await waiting).step == 1

    run(main())
    target = {"w": torch.zeros(9)}
    asyncckpt.Loader(tmp_path, tensors=target).load()
    assert target["w"].equal(torch.ones(9))


async def error_of(waiting: Awaitable[Any]) -> Any:
    try:
        await waiting
    except BaseException as error:
        return getattr(error, "exceptions", [error])[0]  # Of a TaskGroup.


@pytest.mark.parametrize("way", WAYS)
def test_an_error_is_raised_where_it_is_awaited(tmp_path: Path, run: Any, way: str) -> None:
    def failing(_: Any) -> Any:
        raise RuntimeError("disk on fire")

    async def main() -> None:
        async with make(tmp_path, filter_func=failing) as saver:
            waiting = WAYS[way](saver.save_async(1))
            error = await error_of(waiting)
            assert isinstance(error, asyncckpt.errors.FilterError)
            assert "disk on fire" in str(error)

    run(main())


@pytest.mark.parametrize("way", WAYS)
def test_a_load_is_awaited(tmp_path: Path, run: Any, way: str) -> None:
    with make(tmp_path) as saver:
        saver.save(1)

    async def main() -> None:
        target = {"w": torch.zeros(9)}
        report = await WAYS[way](asyncckpt.Loader(tmp_path, tensors=target).load_async())
        assert report.step == 1
        assert target["w"].equal(torch.ones(9))

    run(main())


def test_one_future_is_awaited_many_times_at_once(tmp_path: Path, run: Any, gate: Gate) -> None:
    async def main() -> None:
        async with make(tmp_path, filter_func=gate) as saver:
            future = saver.save_async(1)
            tasks = [asyncio.create_task(future) for _ in range(3)]
            tasks += [asyncio.ensure_future(future), asyncio.ensure_future(awaited(future))]
            await asyncio.sleep(0)
            tasks.pop(1).cancel()
            await asyncio.sleep(0)
            gate.open()
            results = await asyncio.gather(*tasks, future, future)
            assert [result.step for result in results] == [1] * 6
            assert not future._driven

    run(main())


def test_a_task_that_is_cancelled_leaves_the_save_alone(tmp_path: Path, run: Any, gate: Gate) -> None:
    async def main() -> None:
        async with make(tmp_path, filter_func=gate) as saver:
            future = saver.save_async(1)
            running, unbegun = asyncio.create_task(future), asyncio.create_task(future)
            unbegun.cancel()
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait({running, unbegun})
            assert running.cancelled()
            assert unbegun.cancelled()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(future, SHORT_S)
            future.close()
            assert not future.done()
            gate.open()
            assert (await future).step == 1

    run(main())


def test_a_future_nobody_awaits_complains_of_nothing(tmp_path: Path, run: Any) -> None:
    async def main() -> None:
        async with make(tmp_path) as saver:
            saver.save_async(1)

    run(main())
    assert asyncckpt.list_steps(tmp_path) == [1]


def test_it_is_a_coroutine_for_asyncio_alone(tmp_path: Path) -> None:
    with make(tmp_path) as saver:
        future = saver.save_async(1)
        assert asyncio.iscoroutine(future)
        assert inspect.isawaitable(future)
        with pytest.raises(RuntimeError, match="no running event loop"):
            future.send(None)
        assert future.result(DEADLINE_S).step == 1


# -- busy --------------------------------------------------------------------------------------------------------------


async def turns_while(work: Awaitable[Any], let_go: Callable[[], object]) -> tuple[Any, int]:
    """Await work that cannot end before the loop has turned some times; then it may."""
    task = asyncio.ensure_future(work)
    for _ in range(5):
        await asyncio.sleep(0)
        assert not task.done()
    let_go()
    return await task


def test_a_save_that_would_wait_raises_on_a_loop(tmp_path: Path, run: Any, gate: Gate) -> None:
    async def main() -> None:
        async with make(tmp_path, filter_func=gate, on_busy="wait") as saver:
            first = saver.save_async(1)
            with pytest.raises(asyncckpt.SaveInProgressError, match=r"step 1 .*stop its event loop.*when_free"):
                saver.save_async(2)
            loader = asyncckpt.Loader(tmp_path, tensors={"w": torch.ones(9)}, on_busy="wait")
            with pytest.raises(asyncckpt.SaveInProgressError, match=r"step 1 .*stop its event loop.*when_free"):
                loader.load_async()
            await turns_while(saver.when_free(), gate.open)
            assert first.done()
            second = saver.save_async(2)
            await asyncio.gather(second, loader.when_free())
            assert (await loader.load_async()).step == 2

    run(main())


def test_a_third_queued_save_raises_on_a_loop(tmp_path: Path, run: Any, gate: Gate) -> None:
    """Two arenas: it would wait until one is free."""

    async def main() -> None:
        async with make(tmp_path, filter_func=gate, on_busy="queue") as saver:
            futures = [saver.save_async(step) for step in (1, 2)]
            with pytest.raises(asyncckpt.SaveInProgressError, match=r"staging arena is not free.*stop its event loop"):
                saver.save_async(3)
            gate.open()
            await asyncio.gather(*futures)
            await saver.save_async(3)

    run(main())
    assert asyncckpt.list_steps(tmp_path) == [1, 2, 3]


def test_a_save_that_is_queued_behind_a_load_raises_on_a_loop(tmp_path: Path, run: Any) -> None:
    async def main() -> None:
        gate = Gate()
        held = Stateful({"w": torch.zeros(9)}, loading=gate)
        async with asyncckpt.Saver(path=tmp_path, tensors={"held": held}, on_busy="queue") as saver:
            await saver.save_async(1)
            loading = asyncckpt.Loader(tmp_path, tensors={"held": held}).load_async()
            with pytest.raises(asyncckpt.SaveInProgressError, match=r"load of .*stop its event loop.*when_free"):
                saver.save_async(2)
            await turns_while(saver.when_free(), gate.open)
            await saver.save_async(2)
            assert (await loading).step == 1

    run(main())


def test_blocking_calls_may_wait_on_a_loop(tmp_path: Path, run: Any, gate: Gate) -> None:
    async def main() -> None:
        async with make(tmp_path, filter_func=gate, on_busy="wait") as saver:
            saver.save_async(1)
            opening = threading.Timer(0.05, gate.open)
            opening.start()
            assert saver.save(2).step == 2
            opening.join(DEADLINE_S)

    run(main())


def test_when_free_has_a_deadline(tmp_path: Path, run: Any, gate: Gate) -> None:
    async def main() -> None:
        async with make(tmp_path, filter_func=gate) as saver:
            saver.save_async(1)
            with pytest.raises(asyncckpt.DeadlineError, match=r"step 1 .* did not end within 0 s"):
                await saver.when_free(0)
            with pytest.raises(asyncckpt.UsageError, match="timeout"):
                await saver.when_free(-1)
            gate.open()

    run(main())


# -- the end -----------------------------------------------------------------------------------------------------------


def test_async_with_does_not_stop_the_loop(tmp_path: Path, run: Any, gate: Gate) -> None:
    async def main() -> None:
        async def block() -> None:
            async with make(tmp_path, filter_func=gate) as saver:
                saver.save_async(1)

        await turns_while(block(), gate.open)
        make(tmp_path).close()  # The directory was given back.

    run(main())
    assert asyncckpt.list_steps(tmp_path) == [1]


def test_async_with_of_a_periodic_saver_does_not_stop_the_loop(tmp_path: Path, run: Any, gate: Gate) -> None:
    async def main() -> None:
        async def block() -> None:
            async with asyncckpt.PeriodicSaver(saver, every_steps=1) as periodic:
                assert periodic.step(1) is not None
                assert periodic.step(2) is None
            assert periodic.statistics().last_result is not None

        async with make(tmp_path, filter_func=gate) as saver:
            await turns_while(block(), gate.open)

    run(main())


def test_a_cancelled_async_with_closes_all_the_same(tmp_path: Path, run: Any, gate: Gate) -> None:
    async def main() -> None:
        saver = make(tmp_path, filter_func=gate)

        async def block() -> None:
            async with saver:
                saver.save_async(1)
                await asyncio.sleep(DEADLINE_S)

        task = asyncio.create_task(block())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()  # It waits for the save.
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        make(tmp_path).close()

    run(main())
    assert asyncckpt.list_steps(tmp_path) == [1]


def test_following_beside_saves(tmp_path: Path, run: Any) -> None:
    async def main() -> None:
        async def served() -> list[int]:
            target = {"w": torch.zeros(9)}
            steps = []
            async for update in asyncckpt.follow(tmp_path, poll_seconds=SHORT_S, until=3):
                await update.load(tensors=target)
                assert target["w"].eq(update.step).all()
                steps.append(update.step)
            return steps

        weight = torch.zeros(9)
        async with asyncckpt.Saver(path=tmp_path, tensors={"w": weight}) as saver:
            following = asyncio.create_task(served())
            for step in (1, 2, 3):
                weight.fill_(step)
                while True:
                    await saver.when_free()
                    try:
                        await saver.save_async(step)
                    except asyncckpt.SaveInProgressError:  # The follower's load was faster.
                        continue
                    break
            assert await following == [1, 2, 3]

    run(main())


def test_a_follower_is_closed_while_it_loads(tmp_path: Path, run: Any) -> None:
    """The loop goes on while what reads the files of the update ends."""

    with asyncckpt.Saver(path=tmp_path, tensors={"held": Stateful({"w": torch.zeros(9)})}) as saver:
        saver.save(1)

    async def main() -> None:
        gate = Gate()
        held = Stateful({"w": torch.zeros(9)}, loading=gate)
        follower = asyncckpt.follow(tmp_path)
        update = await follower.__anext__()
        loading = asyncio.create_task(update.load(tensors={"held": held}))
        assert await asyncio.to_thread(gate.reached.wait, DEADLINE_S)
        await turns_while(follower.aclose(), gate.open)
        assert (await loading).step == 1

    run(main())
    assert save_lock.in_flight() == []


def test_a_preparation_that_would_wait_for_a_load_raises_on_a_loop(tmp_path: Path, run: Any) -> None:
    async def main() -> None:
        gate = Gate()
        held = Stateful({"w": torch.zeros(9)}, loading=gate)
        async with asyncckpt.Saver(path=tmp_path, tensors={"held": held}) as saver:
            await saver.save_async(1)
            loading = asyncckpt.Loader(tmp_path, tensors={"held": held}).load_async()
            with pytest.raises(asyncckpt.SaveInProgressError, match=r"load of .*stop its event loop.*when_free"):
                saver.prepare()
            gate.open()
            await loading
            await saver.prepare()


def test_a_save_that_is_queued_behind_a_blocking_one_raises_on_a_loop(tmp_path: Path, run: Any, gate: Gate) -> None:
    """That one holds its tables until it is written; so does one that turns out not to fit into memory."""

    async def main() -> None:
        async with make(tmp_path, filter_func=gate, on_busy="queue") as saver:
            blocking = asyncio.create_task(asyncio.to_thread(saver.save, 1))
            while not gate.reached.is_set():
                await asyncio.sleep(0)
            with pytest.raises(asyncckpt.SaveInProgressError, match=r"step 1 .*stop its event loop.*when_free"):
                saver.save_async(2)
            await turns_while(saver.when_free(), gate.open)
            assert (await blocking).step == 1
        async with make(tmp_path, host_memory_limit=1) as saver:
            with pytest.raises(asyncckpt.UsageError, match=r"1 bytes.*stop its event loop.*to_thread"):
                saver.save_async(3)
            assert (await asyncio.to_thread(saver.save, 3)).step == 3

    run(main())
