"""Blocking saves of tensors on devices: a few trips over the bus for all of a chunk, whose memory goes at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.adapters import FixedTable
from asyncckpt.shard import stream
from tests.simulated_device import SimulatedRuntime
from tests.worlds.saves import save_one

CHUNK_BYTES = 16 << 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncckpt.staging.chunks.CHUNK_BYTES", CHUNK_BYTES)


def state_on(runtime: SimulatedRuntime, seed: int) -> dict[str, torch.Tensor]:
    """Small, large, of one row that is larger than a chunk, strided, conjugated, empty, single, on the host."""
    rng = torch.Generator().manual_seed(seed)
    values = {f"small.{number}": torch.randn(number % 7 + 1, generator=rng) for number in range(100)}
    values |= {"large": torch.randn(100, 90, generator=rng), "row": torch.randn(1, 9000, generator=rng).double()}
    values |= {"bool": torch.rand(900, generator=rng) < 0.5, "single": torch.tensor(2.5), "empty": torch.zeros(0, 2)}
    values |= {"turned": torch.randn(40, 70, generator=rng), "complex": torch.randn(60, dtype=torch.complex64)}
    values |= {"one.complex": torch.tensor(1 + 2j)}
    state = {
        name: runtime.new_tensor(tuple(own.shape), own.dtype, number % runtime.devices_count, values=own)
        for number, (name, own) in enumerate(values.items())
    }
    state["turned"] = state["turned"].t()
    state |= {name: state[name].conj() for name in ("complex", "one.complex")}
    return {**state, "host": torch.randn(30, generator=rng)}


@pytest.mark.parametrize(("seed", "kernels"), [(1, "plain"), (2, "torch"), (3, "plain"), (4, "library")])
def test_every_byte_comes_over(tmp_path: Path, seed: int, kernels: Any) -> None:
    runtime = SimulatedRuntime(2, seed=seed, kernels=kernels)
    with runtime.installed():
        state = state_on(runtime, seed)
        column = runtime.new_tensor((500, 30), torch.float32, values=torch.arange(15000.0))
        save_one(tmp_path, hashtables={"rows": FixedTable("rows", lambda: {"embedding": column})}, tensors=state)
        expected = {name: runtime.read(tensor) for name, tensor in state.items()}
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    rows = torch.zeros(500, 30)
    asyncckpt.Loader(tmp_path, {"rows": FixedTable("rows", lambda: {"embedding": rows})}, targets).load()
    assert [name for name in expected if not torch.equal(targets[name], expected[name])] == []
    assert torch.equal(rows.reshape(-1), torch.arange(15000.0))


@pytest.mark.any_core
def test_small_tensors_come_over_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimulatedRuntime(seed=5)
    waits: list[object] = []
    record = runtime.record
    with runtime.installed():
        state = {f"t{n}": runtime.new_tensor((4,), torch.int64, values=torch.full((4,), n)) for n in range(300)}
        with asyncckpt.Saver(path=tmp_path, tensors=state, parallel=1) as saver:
            monkeypatch.setattr(runtime, "record", lambda stream: waits.append(stream) or record(stream))
            saver.save(1)
    assert len(waits) < 30


@pytest.mark.any_core
def test_what_was_copied_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the pinned memory of a blocking save would be as large as what it saves."""
    runtime = SimulatedRuntime(seed=6)
    held: list[int] = []
    fill = stream._FileStream.fill

    def noted(self: Any, begin: int, end: int, address: int) -> None:
        fill(self, begin, end, address)
        runtime._pinned.collect()
        held.append(sum(runtime._pinned.live.values()))

    monkeypatch.setattr(stream._FileStream, "fill", noted)
    with runtime.installed():
        state = state_on(runtime, 6)
        column = runtime.new_tensor((500, 30), torch.float32, values=torch.arange(15000.0))
        table = FixedTable("rows", lambda: {"embedding": column})
        save_one(tmp_path, hashtables={"rows": table}, tensors=state)
    assert len(held) > 10
    assert max(held) < CHUNK_BYTES
