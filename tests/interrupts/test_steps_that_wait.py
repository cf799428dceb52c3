"""Ctrl-C while a step of an optimizer copies for a save, or waits: nothing is held, and the save holds its cut."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.devices import step_copies
from asyncckpt.devices.step_copies import StepCopies
from asyncckpt.nn import HashEmbedding
from asyncckpt.optim import SparseSGD
from asyncckpt.snapshot import table_capture
from tests.interrupts.places import SOME, interrupt_at
from tests.interrupts.world import DEADLINE_S, check_nothing_is_held
from tests.steps.gate import watch_short
from tests.worlds.gates import nothing

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 looks for signals in other places")


PLACES_MAX = 150  # Most are torch's.


@pytest.mark.parametrize("is_left_to_the_step", [True, False])
def test_steps(tmp_path: Path, is_left_to_the_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_copies, "CHUNK_BYTES", 256)
    watch_short(monkeypatch)
    if is_left_to_the_step:
        monkeypatch.setattr(StepCopies, "run", nothing)
        monkeypatch.setattr(step_copies, "PATIENCE_S", 0.1)
    parameter = torch.nn.Parameter(torch.arange(300.0))
    optimizer = torch.optim.SGD([parameter], lr=1.0, foreach=False)
    saver = asyncckpt.Saver(
        path=tmp_path,
        tensors={"parameter": parameter},
        keep=2,
        durability="none",
        device=asyncckpt.DeviceOptions(optimizers=[optimizer]),
    )
    futures: list[asyncckpt.SaveFuture] = []
    values = torch.empty(0)
    parameter.grad = torch.ones(300)

    def prepare() -> Callable[[], object]:
        nonlocal values
        values = parameter.detach().clone()
        futures[:] = [saver.save_async(on_busy="wait")]
        return optimizer.step

    def check() -> None:
        torch.set_grad_enabled(True)  # torch's own step, interrupted before its `try`, leaves it off.
        result = futures[0].result(DEADLINE_S)
        check_nothing_is_held(futures)
        assert torch.equal(asyncckpt.load(tmp_path, step=result.step)["parameter"], values)
        now = parameter.detach()
        assert torch.equal(now, values) or torch.equal(now, values - 1)

    interrupt_at(min(SOME, PLACES_MAX), prepare, check)
    saver.close()


@pytest.mark.parametrize("is_left_to_the_step", [True, False])
def test_steps_of_tables(tmp_path: Path, is_left_to_the_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of two tables does not step without the other."""
    monkeypatch.setattr(step_copies, "CHUNK_BYTES", 256)
    monkeypatch.setattr(table_capture, "LATER_BYTES_MIN", 1)
    if is_left_to_the_step:
        monkeypatch.setattr(StepCopies, "run", nothing)
        monkeypatch.setattr(step_copies, "PATIENCE_S", 0.1)
    ids = torch.arange(100)
    tables = {name: asyncckpt.HashTable(name, 3) for name in ("users", "items")}
    modules = [HashEmbedding(table) for table in tables.values()]
    optimizer = SparseSGD(modules, lr=1.0)
    saver = asyncckpt.Saver(
        path=tmp_path,
        hashtables=tables,
        keep=2,
        durability="none",
        device=asyncckpt.DeviceOptions(optimizers=[optimizer]),
    )
    futures: list[asyncckpt.SaveFuture] = []
    values = torch.empty(0)

    def rows(of: Mapping[str, asyncckpt.HashTable]) -> torch.Tensor:
        return torch.cat([table.read(ids)["embedding"] for table in of.values()])

    def prepare() -> Callable[[], object]:
        nonlocal values
        optimizer.zero_grad()
        for module in modules:
            module(ids).sum().backward()
        values = rows(tables)
        futures[:] = [saver.save_async(on_busy="wait")]
        return optimizer.step

    def check() -> None:
        result = futures[0].result(DEADLINE_S)
        check_nothing_is_held(futures)
        assert not any(table._store.watchers for table in tables.values())
        found = {name: asyncckpt.HashTable(name, 3) for name in tables}
        asyncckpt.Loader(tmp_path, hashtables=found, step=result.step).load()
        assert torch.equal(rows(found), values)
        now = rows(tables)
        assert torch.equal(now, values) or torch.equal(now, values - 1)

    interrupt_at(min(SOME, PLACES_MAX), prepare, check)
    saver.close()
