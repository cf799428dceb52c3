"""AsyncStager and dcp.save with tensors on simulated devices: copies are listed, launched together, and waited for."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
from asyncckpt.dcp import AsyncStager, StorageReader, StorageWriter
from asyncckpt.engine.save.staged_tensors import _give_back, lent_arena
from asyncckpt.native import core
from asyncckpt.plan import image
from asyncckpt.plan.leaf_facts import addresses_of
from asyncckpt.staging.pool import ArenaState, pool
from tests.dcp.model import blank, differences, image_of
from tests.simulated_device import SimulatedRuntime

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
HAS_ASYNC_STAGING = hasattr(dcp.state_dict_saver, "AsyncSaveResponse")
needs_async_staging = pytest.mark.skipif(not HAS_ASYNC_STAGING, reason="DCP has no asynchronous staging")
LIMITS = [{}, {"host_memory_limit": 0}, {"device": asyncckpt.DeviceOptions(pinned_memory_limit=0)}]
SEEDS = range(3)
WAIT_S = 60


@pytest.fixture(params=SEEDS)
def runtime(request: pytest.FixtureRequest) -> Iterator[SimulatedRuntime]:
    kernels: Any = ("plain", "torch")[request.param % 2]
    runtime = SimulatedRuntime(2, seed=request.param, kernels=kernels)
    with runtime.installed():
        yield runtime


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed)).float()


class Live:
    """A state on two devices and the host, with views that are not plain memory; `train` changes all of it."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        self._values = {
            "large": numbers(0, 70_000),
            "matrix": numbers(1, 17, 9),
            "scalar": torch.tensor(3.0),
            "empty": torch.empty(0, 3),
            "other": numbers(2, 501),
            "complex": torch.complex(numbers(3, 30), numbers(4, 30)),
            **{f"small.{index}": numbers(index, 1 + 13 * index) for index in range(20)},
        }
        self.live = {
            name: runtime.new_tensor(value.shape, value.dtype, device=index % 2, values=value)
            for index, (name, value) in enumerate(self._values.items())
        }
        self.on_host = torch.arange(10.0)
        self.steps = 0

    def train(self) -> None:
        for tensor in [*self.live.values(), self.on_host]:
            tensor.add_(1)
        self.steps += 1

    @property
    def state(self) -> dict[str, Any]:
        return nested(self.live, self.on_host)

    def expected(self) -> dict[str, Any]:
        """What the state is now, on the host."""
        moved = {name: value + self.steps for name, value in self._values.items()}
        return nested(moved, self.on_host.clone())


def nested(live: dict[str, torch.Tensor], on_host: torch.Tensor) -> dict[str, Any]:
    views = {"turned": live["matrix"].t(), "conjugated": live["complex"].conj(), "tied": live["large"]}
    return {"live": dict(live), "views": views, "list": [on_host, {"epoch": 3}]}


def assert_loads(path: Path, expected: dict[str, Any], *, step: int | None = None) -> None:
    found = blank(expected)
    dcp.load(found, storage_reader=StorageReader(path, step=step))
    assert differences(image_of(found), image_of(expected)) == []


def arenas_are_free() -> bool:
    gc.collect()
    return all(arena.state is ArenaState.FREE for arena in pool._arenas)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a_staged_state_is_complete(runtime: SimulatedRuntime, limits: dict[str, int]) -> None:
    live = Live(runtime)
    live.train()
    expected = image_of(live.expected())
    staged = AsyncStager(**limits).stage(live.state)
    live.train()
    assert isinstance(staged, dict)
    assert differences(image_of(staged), expected) == []
    assert staged["live"]["large"] is staged["views"]["tied"]
    del staged
    assert arenas_are_free()


class CountedCopies:
    """How many bytes the core has copied for the host since `take` was called last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bytes = 0
        copy = core.copy

        def counted(segments: np.ndarray[Any, Any], **options: int) -> None:
            self._bytes += int(segments[:, 2].sum())
            copy(segments, **options)

        monkeypatch.setattr(core, "copy", counted)

    def take(self) -> int:
        found, self._bytes = self._bytes, 0
        return found


def save_async(state: dict[str, Any], path: Path) -> None:
    saved = dcp.async_save(state, storage_writer=StorageWriter(path, parallel=3))
    getattr(saved, "upload_completion", saved).result(WAIT_S)


@pytest.mark.parametrize("large", [False, True], ids=["small", "split"])
def test_host_bytes_are_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    """From the second save on, when it is known where the plan wants the tensors; split ones are put in place later."""
    monkeypatch.setattr(image, "FILE_TARGET_BYTES", 20_000)
    if large:
        monkeypatch.setattr(image, "BLOCK_BYTES_MAX", 10_000)
    state: dict[str, Any] = {f"w.{n}": numbers(n, 50 + n, 7) for n in range(40)}
    state |= {"c": torch.complex(numbers(3, 31), numbers(4, 31)), "flag": torch.tensor(True), "none": torch.empty(0, 2)}
    state |= {"long": torch.arange(2001), "half": numbers(5, 33).half(), "big": numbers(6, 900, 9)}
    state |= {"nested": {"turned": numbers(7, 20, 30).t(), "epoch": 3}}
    by_address = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    counted, expected = CountedCopies(monkeypatch), []
    for step in range(4):
        expected.append(image_of(state))
        save_async(state, tmp_path)
        copied = counted.take()
        split = state["big"].nbytes + state["long"].nbytes if large else 0
        # A strided tensor is copied by torch, and lies in memory of its own then.
        assert by_address <= copied <= by_address + split if step else copied >= by_address
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dtype is not torch.bool:
                value.add_(1)
        if step == 2:  # Other sizes: their places are learned anew, and those of the former state are kept.
            other = {"a": numbers(1, 9), **{f"w.{n}": numbers(n, 3) for n in range(9)}}
            for _ in range(2):
                save_async(other, tmp_path / "other")
                copied = counted.take()
            assert copied == sum(value.nbytes for value in other.values())
    for step, want in enumerate(expected):
        found = blank(state)
        dcp.load(found, storage_reader=StorageReader(tmp_path, step=step))
        assert differences(image_of(found), want) == []
    assert asyncckpt.verify(tmp_path).strays == ()
    assert arenas_are_free()


def test_tensors_that_change_places_are_never_overwritten(tmp_path: Path) -> None:
    """Staged where another order of the same sizes wanted them, tied, narrowed, or fewer than before."""
    big = {name: numbers(n, 500) for n, name in enumerate("abcd")}
    tied = numbers(9, 500)
    states: list[dict[str, Any]] = [
        big,
        {name: big[name] for name in "dcba"},
        {"a": big["b"], "b": big["a"], "c": big["d"], "d": big["c"]},
        {"a": tied, "b": tied, "c": big["c"], "d": big["d"]},
        {"a": big["a"][100:400], "b": big["b"], "c": big["c"]},
        {"x": big["d"], "b": big["b"], "a": big["c"], "y": big["a"]},
    ]
    for step, state in enumerate([*states, *reversed(states), *states, *states[::2]]):
        save_async(state, tmp_path)
        assert_loads(tmp_path, state, step=step)
    assert arenas_are_free()


@needs_async_staging
@pytest.mark.parametrize("scratch", [0, 100_000, 1 << 20])
def test_async_staging_leaves_the_waiting_to_the_future(runtime: SimulatedRuntime, scratch: int) -> None:
    live, stager = (
        Live(runtime),
        AsyncStager(use_async_staging=True, device=asyncckpt.DeviceOptions(scratch_bytes=scratch)),
    )
    for _ in range(2):
        live.train()
        expected = image_of(live.expected())
        staging = stager.stage(live.state)
        live.train()
        assert isinstance(staging, Future)
        stager.synchronize_staging()
        assert staging.done()
        assert differences(image_of(staging.result(WAIT_S)), expected) == []
        del staging
        assert arenas_are_free(), "the stager keeps what it has staged"


def test_a_wait_for_a_staging_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.dcp.stager.DEVICE_DEADLINE_S", 0.01)
    stager = AsyncStager()
    stager._newest = Future()
    with pytest.raises(asyncckpt.DeadlineError, match=r"the staging did not end within 0\.01 s"):
        stager.synchronize_staging()


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_saves_of_devices(runtime: SimulatedRuntime, tmp_path: Path, limits: dict[str, int]) -> None:
    """Blocking, from the live state; then in the background, from a staged one."""
    live, expected = Live(runtime), []
    live.train()
    expected.append(live.expected())
    dcp.save(live.state, storage_writer=StorageWriter(tmp_path, **limits))
    live.train()
    expected.append(live.expected())
    saved = dcp.async_save(live.state, storage_writer=StorageWriter(tmp_path, **limits))
    live.train()
    getattr(saved, "upload_completion", saved).result(WAIT_S)
    if HAS_ASYNC_STAGING:
        expected.append(live.expected())
        stager = AsyncStager(use_async_staging=True, **limits)
        saved = dcp.async_save(live.state, storage_writer=StorageWriter(tmp_path, **limits), async_stager=stager)
        live.train()
        saved.staging_completion.result(WAIT_S)
        saved.upload_completion.result(WAIT_S)
    for step, state in enumerate(expected):
        assert_loads(tmp_path, state, step=step)


@pytest.mark.parametrize("verify", [True, False])
def test_loads_to_devices(runtime: SimulatedRuntime, tmp_path: Path, verify: bool) -> None:
    """As they were saved, converted, turned, in part, and to several targets from one chunk."""
    state = {"a": numbers(1, 40, 30), "b": numbers(2, 50_000), "c": numbers(3, 40, 30), "d": torch.tensor(2.0)}
    dcp.save(state, storage_writer=StorageWriter(tmp_path))
    targets = {
        "a": runtime.new_tensor((30, 40), torch.float32, device=0, values=torch.zeros(30, 40)).t(),
        "b": runtime.new_tensor((50_000,), torch.float32, device=1, values=torch.zeros(50_000)),
        "c": runtime.new_tensor((40, 30), torch.float64, device=1, values=torch.zeros(40, 30, dtype=torch.float64)),
        "d": runtime.new_tensor((), torch.float16, device=0, values=torch.tensor(0.0).half()),
    }
    dcp.load(targets, storage_reader=StorageReader(tmp_path, verify=verify))
    for name, target in targets.items():
        assert torch.equal(runtime.read(target), state[name].to(target.dtype)), name


def test_without_following_the_trainer_this_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off: no stream waits for another one. Some order of things then gives other values."""
    monkeypatch.setattr(SimulatedRuntime, "hold_back", lambda self, stream, event: None)
    wrong = 0
    for seed in SEEDS:
        runtime = SimulatedRuntime(2, seed=seed)
        with runtime.installed():
            live = Live(runtime)
            live.train()
            expected = image_of(live.expected())
            staged = AsyncStager().stage(live.state)
            wrong += bool(differences(image_of(staged), expected))
            del staged
    assert wrong


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=needs_async_staging)])
@pytest.mark.parametrize("at", range(0, 60, 10))
def test_a_lost_device_is_an_error_and_its_arena_is_never_used_again(at: int, is_async: bool) -> None:
    runtime = SimulatedRuntime(2, seed=at)
    with runtime.installed():
        live, stager = Live(runtime), AsyncStager(use_async_staging=is_async)
        state, lost_before = live.state, len(pool._lost)
        runtime.fail_at(at)
        try:
            staged: Any = stager.stage(state)
            if is_async:
                staged = staged.result(WAIT_S)
        except asyncckpt.DeviceError:
            has_failed = True
        else:
            has_failed = False
        runtime.recover()
        assert not has_failed or len(pool._lost) == lost_before + 1
        staged = None
        assert AsyncStager().stage({"host": torch.arange(3.0)})["host"].tolist() == [0, 1, 2]
        assert arenas_are_free()


def test_a_capture_is_refused_and_nothing_is_held() -> None:
    runtime = SimulatedRuntime(1, seed=1)
    with runtime.installed():
        tensor = runtime.new_tensor((4,), torch.float32, values=torch.ones(4))
        with runtime.capturing(), pytest.raises(asyncckpt.UsageError):
            AsyncStager().stage({"x": tensor})
        assert arenas_are_free()
        assert AsyncStager().stage({"x": tensor})["x"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("wrong", [{"host_memory_limit": -1}, {"device": 1 << 20}, {"device": None}], ids=str)
def test_wrong_options_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(asyncckpt.UsageError, match=next(iter(wrong))):
        AsyncStager(**wrong)


def test_async_staging_needs_a_dcp_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dcp.state_dict_saver, "AsyncSaveResponse", raising=False)
    with pytest.raises(asyncckpt.UnsupportedError):
        AsyncStager(use_async_staging=True)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_knows_nothing_of_what_its_parent_has_staged() -> None:
    """The arena is not mapped there: tensors of the child may get its addresses, and would be copied into it."""
    staged = AsyncStager().stage({"a": torch.arange(70_000.0)})
    assert isinstance(staged, dict)
    begins = addresses_of([staged["a"]])
    lent = lent_arena(begins)
    assert lent is not None
    child = os.fork()
    if child == 0:
        status = 1
        try:  # What the parent has lent is not given back here, to a pool that does not know it.
            _give_back(lent)
            status = 0 if lent_arena(begins) is None and lent.arena.state is ArenaState.DRAINING else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lent_arena(begins) is lent
