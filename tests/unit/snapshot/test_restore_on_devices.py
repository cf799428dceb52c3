"""Whole checkpoints into devices: dense tensors, tables whose columns are there, deltas, encodings, failures."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import filters
from asyncckpt.adapters import FixedTable
from asyncckpt.devices import library_kernels, uploads
from asyncckpt.errors import CorruptError, DeviceError, UsageError
from asyncckpt.snapshot import windows
from tests.simulated_device import SimulatedRuntime
from tests.worlds.saves import save_one

pytestmark = pytest.mark.any_core  # What is read is the same as on the host, and so is how.

ROWS, DIM = 300, 6
Columns = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a load of a few kilobytes takes many windows, and some of its tensors are large."""
    monkeypatch.setattr(windows, "WINDOW_BYTES", 8192)
    monkeypatch.setattr(uploads, "LARGE_BYTES", 4096)
    monkeypatch.setattr(library_kernels, "LARGE_BYTES", 4096)


def dense_state(seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    state = {f"small.{number}": torch.randn(number % 7 + 1, generator=rng) for number in range(60)}
    state["large"] = torch.randn(200, 50, generator=rng)
    state["bfloat16"] = torch.randn(33, 5, generator=rng).bfloat16()
    state["bool"] = torch.rand(70, generator=rng) < 0.5
    state["complex"] = torch.randn(9, 9, dtype=torch.complex64, generator=rng)
    state["number"] = torch.tensor(7)
    state["empty"] = torch.zeros(0, 3)
    state["strided"] = torch.randn(40, 30, generator=rng)
    state["conjugated"] = torch.randn(12, 4, dtype=torch.complex128, generator=rng)
    return state


def dense_targets(runtime: SimulatedRuntime, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the devices in turn."""
    found = {}
    for number, (name, saved) in enumerate(state.items()):
        device = number % runtime.devices_count
        shape = tuple(reversed(saved.shape)) if name == "strided" else tuple(saved.shape)
        target = runtime.new_tensor(shape, saved.dtype, device)
        found[name] = target.t() if name == "strided" else target.conj() if name == "conjugated" else target
    return found


def columns_of(seed: int, rows: int = ROWS) -> Columns:
    rng = torch.Generator().manual_seed(1000 + seed)
    return {
        "embedding": torch.randn(rows, DIM, generator=rng),
        "sum": torch.randn(rows, generator=rng).double(),
        "step": torch.randint(0, 1 << 40, (rows, 1), generator=rng),
    }


def table_of(columns: Columns, first_id: int = 0, ids_end: int | None = None) -> FixedTable:
    return FixedTable("rows", lambda: columns, first_id=first_id, ids_end=ids_end)


def columns_on(runtime: SimulatedRuntime, rows: int = ROWS, device: int = 0) -> Columns:
    """Garbage; the last column's rows are parts of something."""
    like = columns_of(0, rows)
    found = {name: runtime.new_tensor(tuple(column.shape), column.dtype, device) for name, column in like.items()}
    found["step"] = runtime.new_tensor((rows, 3), torch.int64, device)[:, 1:2]
    return found


def read_all(runtime: SimulatedRuntime, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As a stream sees them that has waited for nothing."""
    streams = [runtime.new_stream(device) for device in range(runtime.devices_count)]
    found = {}
    for name, tensor in tensors.items():
        with runtime.on(streams[runtime.device_of(tensor) or 0]):
            found[name] = runtime.read(tensor)
    return found


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize(
    ("seed", "kernels", "verify"),
    [
        (1, "plain", True),
        (2, "torch", True),
        (3, "plain", False),
        (4, "torch", False),
        (5, "library", True),
        (6, "torch", "before"),
    ],
)
def test_state_and_table_into_devices(tmp_path: Path, seed: int, kernels: Any, verify: Any) -> None:
    state, columns = dense_state(seed), columns_of(seed)
    save_one(tmp_path, hashtables={"rows": table_of(columns)}, tensors=state)
    runtime = SimulatedRuntime(2, seed=seed, kernels=kernels)
    with runtime.installed():
        targets, own = dense_targets(runtime, state), columns_on(runtime, device=1)
        report = asyncckpt.Loader(tmp_path, {"rows": table_of(own)}, targets, verify=verify).load()
        found, found_columns = read_all(runtime, targets), read_all(runtime, own)
    assert report.rows == {"rows": ROWS}
    assert differing(found, state) == []
    assert differing(found_columns, columns) == []


@pytest.mark.parametrize("seed", range(4))
def test_load_async_follows_the_streams_of_its_caller(tmp_path: Path, seed: int) -> None:
    state, columns = dense_state(seed), columns_of(seed)
    save_one(tmp_path, hashtables={"rows": table_of(columns)}, tensors=state)
    runtime = SimulatedRuntime(2, seed=seed)
    runtime.schedule.pace = (0.0, 0.4)[seed % 2]
    with runtime.installed():
        targets, own = dense_targets(runtime, state), columns_on(runtime)
        streams = [runtime.new_stream(device) for device in range(2)]
        with runtime.on(streams[0]), runtime.on(streams[1]):
            for target in (*targets.values(), *own.values()):
                target.zero_()
            asyncckpt.Loader(tmp_path, {"rows": table_of(own)}, targets).load_async().result(60)
        found, found_columns = read_all(runtime, targets), read_all(runtime, own)
        for stream in streams:  # Now even what came late has come.
            runtime.record(stream).wait()
        found_later, found_columns_later = read_all(runtime, targets), read_all(runtime, own)
    assert differing(found, state) == differing(found_later, state) == []
    assert differing(found_columns, columns) == differing(found_columns_later, columns) == []


@pytest.mark.parametrize("kernels", ["plain", "torch"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_part_of_the_rows(tmp_path: Path, kernels: Any, verify: bool) -> None:
    """As a rank does that holds other rows than the one that saved."""
    columns = columns_of(8)
    save_one(tmp_path, hashtables={"rows": table_of(columns)})
    runtime = SimulatedRuntime(seed=8, kernels=kernels)
    with runtime.installed():
        own = columns_on(runtime, rows=140)
        table = table_of(own, first_id=90, ids_end=ROWS)
        report = asyncckpt.Loader(tmp_path, {"rows": table}, verify=verify).load()
        found = read_all(runtime, own)
    assert report.rows == {"rows": 140}
    assert differing(found, {name: column[90:230] for name, column in columns.items()}) == []


@pytest.mark.parametrize("kernels", ["plain", "torch"])
def test_a_chain_of_deltas(tmp_path: Path, kernels: Any) -> None:
    """Each layer brings the rows that no newer one has, wherever they are."""
    columns, rng = columns_of(9), random.Random(9)
    table = table_of(columns)
    table.track()
    policy = asyncckpt.DeltaPolicy()
    with asyncckpt.Saver(path=tmp_path, hashtables={"rows": table}, deltas=policy) as saver:
        saver.save(1)
        for step in (2, 3):
            rows = torch.tensor(rng.sample(range(ROWS), 70))
            for column in columns.values():
                column[rows] += step
            table.touch(rows)
            result = saver.save(step)
            assert result.kind == "delta"
    runtime = SimulatedRuntime(seed=9, kernels=kernels)
    with runtime.installed():
        own = columns_on(runtime)
        asyncckpt.Loader(tmp_path, {"rows": table_of(own)}).load()
        found = read_all(runtime, own)
    assert differing(found, columns) == []


@pytest.mark.parametrize("kernels", ["plain", "torch"])
def test_encoded_tensors_and_columns(tmp_path: Path, kernels: Any) -> None:
    state, columns = dense_state(10), columns_of(10)
    columns["embedding"] = torch.randint(-8, 8, (ROWS, DIM)).float()
    kinds = [filters.cast("rows@embedding", torch.bfloat16), filters.compress("zstd", level=1)]
    save_one(tmp_path, hashtables={"rows": table_of(columns)}, tensors=state, filters=kinds)
    runtime = SimulatedRuntime(seed=10, kernels=kernels)
    with runtime.installed():
        targets, own = dense_targets(runtime, state), columns_on(runtime)
        asyncckpt.Loader(tmp_path, {"rows": table_of(own)}, targets).load()
        part = columns_on(runtime, rows=100)
        asyncckpt.Loader(tmp_path, {"rows": table_of(part, first_id=50, ids_end=ROWS)}, strict=False).load()
        found, found_columns, found_part = (read_all(runtime, own) for own in (targets, own, part))
    assert differing(found, state) == []
    assert differing(found_columns, columns) == []
    assert differing(found_part, {name: column[50:150] for name, column in columns.items()}) == []


class CountedTable(FixedTable):
    """Notes how its loads end."""

    ends: tuple[bool, ...] = ()

    def begin_load(self, **options: Any) -> Any:
        load = super().begin_load(**options)
        end = load.end

        def noted(ok: bool) -> None:
            self.ends += (ok,)
            end(ok)

        load.end = noted  # type: ignore[method-assign]
        return load


def saved_for_failures(path: Path) -> None:
    save_one(path, hashtables={"rows": table_of(columns_of(11))}, tensors=dense_state(11), parallel=1)


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_block(tmp_path: Path, seed: int) -> None:
    saved_for_failures(tmp_path)
    whole = dense_state(11)["large"].numpy().tobytes()
    [damaged] = [path for path in tmp_path.rglob("*.safetensors") if whole in path.read_bytes()]
    raw = bytearray(damaged.read_bytes())
    raw[raw.index(whole) + len(whole) // 2] ^= 1
    damaged.write_bytes(raw)
    runtime = SimulatedRuntime(2, seed=seed)
    with runtime.installed():
        targets, own = dense_targets(runtime, dense_state(11)), columns_on(runtime)
        table = CountedTable("rows", lambda: own)
        with pytest.raises(CorruptError, match="'large' in"):
            asyncckpt.Loader(tmp_path, {"rows": table}, targets).load()
        assert table.ends == (False,)


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("at", [0, 3, 10, 20])
def test_a_device_that_is_lost(tmp_path: Path, at: int, in_background: bool) -> None:
    """The load fails, tables are told, and the next load is sound."""
    saved_for_failures(tmp_path)
    state, columns = dense_state(11), columns_of(11)
    runtime = SimulatedRuntime(seed=at)
    with runtime.installed():
        targets, own = dense_targets(runtime, state), columns_on(runtime)
        table = CountedTable("rows", lambda: own)
        loader = asyncckpt.Loader(tmp_path, {"rows": table}, targets)
        runtime.schedule.run_all()
        if in_background:
            runtime.fail_operation(at)
            future = loader.load_async()
            with pytest.raises(DeviceError, match="device failed"):
                future.result(60)
        else:
            runtime.fail_operation(at)
            with pytest.raises(DeviceError, match="device failed"):
                loader.load()
        assert table.ends == (False,)
        for stream in runtime.schedule.streams:
            stream.queue.clear()  # A lost device does nothing any more.
        runtime.recover()
        loader.load()
        found, found_columns = read_all(runtime, targets), read_all(runtime, own)
    assert table.ends == (False, True)
    assert differing(found, state) == []
    assert differing(found_columns, columns) == []


def test_tables_are_told_when_everything_is_in_place(tmp_path: Path) -> None:
    saved_for_failures(tmp_path)
    runtime = SimulatedRuntime(seed=12)
    runtime.schedule.pace = 0.0
    with runtime.installed():
        own = columns_on(runtime)
        left: list[int] = []

        class Watching(CountedTable):
            def begin_load(self, **options: Any) -> Any:
                load = super().begin_load(**options)
                end = load.end
                load.end = lambda ok: (left.append(len(runtime.side_stream(0).queue)), end(ok))
                return load

        asyncckpt.Loader(tmp_path, {"rows": Watching("rows", lambda: own)}, strict=False).load()
    assert left == [0]


@pytest.mark.parametrize("name", ["load", "load_async"])
def test_no_load_in_the_capture_of_a_graph(tmp_path: Path, name: str) -> None:
    saved_for_failures(tmp_path)
    runtime = SimulatedRuntime(seed=13)
    with runtime.installed():
        targets, own = dense_targets(runtime, dense_state(11)), columns_on(runtime)
        table = CountedTable("rows", lambda: own)
        loader = asyncckpt.Loader(tmp_path, {"rows": table}, targets)
        with runtime.capturing(), pytest.raises(UsageError, match="graph is being captured"):
            getattr(loader, name)()
        assert table.ends == ()
        loader.load()
