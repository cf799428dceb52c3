"""Copies to devices: everything comes to its place, behind the trainer, out of windows that are used again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from asyncckpt.devices import library_kernels
from asyncckpt.devices import uploads as of_uploads
from asyncckpt.devices.cuda_runtime import CudaRuntime
from asyncckpt.devices.current_runtime import CallerStreams
from asyncckpt.devices.uploads import WINDOWS_COUNT, Uploads
from asyncckpt.errors import DeviceError, UsageError
from asyncckpt.native import U8
from tests.simulated_device import SimulatedRuntime
from tests.simulated_device.torch_queue import alias
from tests.worlds.bits import raw_of

pytestmark = pytest.mark.any_core  # Of all this, only the simulated devices use the core.

DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex64, torch.complex128)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few bytes are a large segment, and a wide gap."""
    monkeypatch.setattr(of_uploads, "LARGE_BYTES", 300)
    monkeypatch.setattr(library_kernels, "LARGE_BYTES", 300)
    monkeypatch.setattr(of_uploads, "GAP_BYTES_MAX", 40)


def some_values(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = dtype.itemsize * int(np.prod(shape))
    raw = torch.frombuffer(bytearray(rng.randbytes(size) or b"\0"), dtype=torch.uint8)[:size]
    return ((raw % 2).bool() if dtype is torch.bool else raw.view(dtype)).reshape(shape)


@dataclass
class RandomPuts:
    """Puts of random kinds, and what all targets have to hold in the end."""

    runtime: SimulatedRuntime
    rng: random.Random
    uploads: Uploads
    # Nobody may print what is on a device.
    expected: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list, repr=False)

    def target(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of a device, and a copy of what it holds; both are written in the same way."""
        device = self.rng.randrange(self.runtime.devices_count)
        model = some_values(self.rng, shape, dtype)
        made = self.runtime.new_tensor(shape, dtype, device, values=model)
        self.runtime.record(self.runtime.current_stream(device)).wait()
        self.expected.append((made, model))
        return made, model

    def in_window(self, window: U8, used: int, values: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The same values in the window, as a view of it."""
        begin = -(-used // 16) * 16 + self.rng.choice([0, 0, 16, 64])
        place = window[begin : begin + values.nbytes]
        place[:] = np.frombuffer(raw_of(values), dtype=np.uint8)
        return torch.from_numpy(place).view(values.dtype).view(values.shape), begin + values.nbytes

    def fill_one_window(self, bytes: int) -> None:
        window = self.uploads.window(bytes)
        used = 0
        while True:
            dtype = self.rng.choice(DTYPES)
            rows, width = self.rng.choice([(0, 3), (1, 1), (3, 2), (7, 5), (20, 4)])
            values = some_values(self.rng, (rows, width), dtype)
            if used + values.nbytes + 96 > len(window):
                break
            if self.rng.random() < 0.8:
                values, used = self.in_window(window, used, values)
            self.rng.choice([self.put_bytes, self.put, self.put_box, self.put_strided, self.put_rows])(values)
        self.uploads.launch()

    def put_bytes(self, values: torch.Tensor) -> None:
        target, model = self.target(tuple(values.shape), values.dtype)
        model.copy_(values)
        raw = values.reshape(-1).view(torch.uint8).numpy()
        half = self.rng.randrange(raw.size + 1)
        self.uploads.put_bytes(target, 0, raw[:half])
        self.uploads.put_bytes(target, half, raw[half:])

    def put(self, values: torch.Tensor) -> None:
        target, model = self.target((len(values) + 2, *values.shape[1:]), values.dtype)
        self.uploads.put(target[1:-1], values)
        model[1:-1] = values

    def put_box(self, values: torch.Tensor) -> None:
        """A part of what lies in the window."""
        box = values[: max(1, len(values) - 1), values.shape[1] // 2 :]
        target, model = self.target(tuple(box.shape), values.dtype)
        self.uploads.put(target, box)
        model.copy_(box)

    def put_strided(self, values: torch.Tensor) -> None:
        target, model = self.target((values.shape[1], len(values) + 1), values.dtype)
        is_conjugated = values.is_complex() and self.rng.random() < 0.5
        view, own = target[:, 1:].t(), model[:, 1:].t()
        self.uploads.put(view.conj() if is_conjugated else view, values)
        (own.conj() if is_conjugated else own).copy_(values)

    def put_rows(self, values: torch.Tensor) -> None:
        count = self.rng.randint(0, len(values))
        is_all = self.rng.random() < 0.3
        positions = None if is_all else np.array(sorted(self.rng.sample(range(len(values)), count)), dtype=np.int64)
        wanted = values if positions is None else values[torch.from_numpy(positions)]
        table_rows = len(values) + 5
        rows = np.array(self.rng.sample(range(table_rows), len(wanted)), dtype=np.int64)
        wider = self.rng.random() < 0.3  # Columns of which every row is a part of something.
        target, model = self.target((table_rows, values.shape[1] + wider), values.dtype)
        self.uploads.put_rows(target[:, wider:], rows, values, positions)
        model[:, int(wider) :][torch.from_numpy(rows)] = wanted

    def check(self) -> None:
        """For every stream everything is in place."""
        streams = [self.runtime.new_stream(device) for device in range(self.runtime.devices_count)]
        for target, model in self.expected:
            device = self.runtime.device_of(target)
            assert device is not None
            with self.runtime.on(streams[device]):
                found = raw_of(self.runtime.read(target))
            assert found == raw_of(model)


def cases() -> Iterator[Any]:
    for seed in range(16):
        yield pytest.param(seed, ("plain", "torch")[seed % 2], id=f"{seed}-{('plain', 'torch')[seed % 2]}")
    yield pytest.param(16, "library", id="16-library")


@pytest.mark.parametrize(("seed", "kernels"), list(cases()))
def test_everything_comes_to_its_place(seed: int, kernels: Any) -> None:
    rng = random.Random(seed)
    runtime = SimulatedRuntime(rng.choice([1, 2]), seed=seed, kernels=kernels)
    with runtime.installed():
        world = RandomPuts(runtime, rng, Uploads(runtime))
        with world.uploads:
            for _ in range(5):
                world.fill_one_window(3000)
        world.check()


def numbers(count: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + count, dtype=torch.int64)


def upload(uploads: Uploads, target: torch.Tensor, values: torch.Tensor) -> None:
    window = uploads.window(values.nbytes)
    window[:] = values.view(torch.uint8).numpy()
    uploads.put_bytes(target, 0, window)
    uploads.launch()


def upload_all(uploads: Uploads, targets: list[torch.Tensor]) -> None:
    with uploads:
        for target in targets:
            upload(uploads, target, numbers(target.numel()))


@pytest.mark.parametrize("seed", range(8))
def test_uploads_come_behind_what_the_caller_has_queued(seed: int) -> None:
    runtime = SimulatedRuntime(seed=seed)
    with runtime.installed():
        own = runtime.new_stream()
        with runtime.on(own):
            target = runtime.new_tensor((500,), torch.int64, values=numbers(500))
            seen = target + 1
            target.zero_()
            with Uploads(runtime) as uploads:
                upload(uploads, target, numbers(500, first=1000))
        found = runtime.read(target)
        with runtime.on(own):
            seen_before = runtime.read(seen)
        assert found.tolist() == numbers(500, first=1000).tolist()
        assert seen_before.tolist() == numbers(500, first=1).tolist()


@pytest.mark.parametrize("seed", range(8))
def test_a_thread_comes_behind_the_streams_of_the_caller(seed: int) -> None:
    runtime = SimulatedRuntime(2, seed=seed)
    with runtime.installed(), ThreadPoolExecutor(1) as thread:
        own = [runtime.new_stream(device) for device in range(2)]
        with runtime.on(own[0]), runtime.on(own[1]):
            targets = [runtime.new_tensor((50,), torch.int64, device, values=numbers(50)) for device in range(2)]
            for target in targets:
                target.zero_()
            streams = CallerStreams()

        def load() -> None:
            streams.follow()
            # What a table does itself goes by the thread's own stream.
            runtime.training_op(runtime.current_stream(0), partial(alias(targets[0]).add_, 1))
            with Uploads(runtime) as uploads:
                upload(uploads, targets[1], numbers(50, first=7))
            streams.wait()

        thread.submit(load).result()
        by_table, by_upload = (runtime.read(target) for target in targets)
        assert by_table.tolist() == [1] * 50
        assert by_upload.tolist() == numbers(50, first=7).tolist()


def test_a_window_is_used_again_when_it_has_arrived() -> None:
    """With a device that does as little as it may: a window that came back too early would be seen."""
    runtime = SimulatedRuntime(seed=1)
    runtime.schedule.pace = 0.0
    with runtime.installed():
        targets = [runtime.new_tensor((40,), torch.int64) for _ in range(7)]
        with Uploads(runtime) as uploads:
            for number, target in enumerate(targets):
                upload(uploads, target, numbers(40, first=100 * number))
            on_their_way = [run for window in uploads._windows for run in window.running]
            assert len(on_their_way) == WINDOWS_COUNT
            assert not on_their_way[-1][1].is_done()
        found = [runtime.read(target).tolist() for target in targets]
        assert found == [numbers(40, first=100 * number).tolist() for number in range(7)]


def test_a_target_that_nobody_else_holds_stays_until_it_is_filled() -> None:
    runtime = SimulatedRuntime(seed=1)
    runtime.schedule.pace = 0.0
    with runtime.installed():
        with Uploads(runtime) as uploads:
            upload(uploads, runtime.new_tensor((40,), torch.int64), numbers(40))
            other = runtime.new_tensor((40,), torch.int64, values=numbers(40, first=500))
            runtime.record(runtime.current_stream(0)).wait()
        found = runtime.read(other)
        assert found.tolist() == numbers(40, first=500).tolist()


@pytest.mark.parametrize("kernels", ["plain", "torch"])
def test_many_small_targets_take_a_few_operations(kernels: Any) -> None:
    runtime = SimulatedRuntime(seed=3, kernels=kernels)
    runtime.schedule.pace = 1e9
    with runtime.installed():
        targets = [runtime.new_tensor((4,), torch.int64) for _ in range(200)]
        with Uploads(runtime) as uploads:
            window = uploads.window(200 * 64)
            for number, target in enumerate(targets):
                part = window[64 * number : 64 * number + 32]
                part[:] = numbers(4, first=number).view(torch.uint8).numpy()
                uploads.put_bytes(target, 0, part)
            before = runtime.schedule.runs_count
            uploads.launch()
            used = runtime.schedule.runs_count - before
        assert used < (10 if kernels == "plain" else 210)
        found = [runtime.read(target)[0].item() for target in targets]
        assert found == list(range(200))


@pytest.mark.parametrize("kernels", ["plain", "torch"])
def test_one_part_of_a_window_goes_to_several_targets(kernels: Any) -> None:
    """A short one within a long one, as of two boxes of one block: what follows them has a place of its own."""
    runtime = SimulatedRuntime(seed=4, kernels=kernels)
    with runtime.installed():
        parts = [(0, 280), (0, 40), (80, 160), (480, 760)]
        targets = [runtime.new_tensor((end - begin,), torch.uint8) for begin, end in parts]
        with Uploads(runtime) as uploads:
            window = uploads.window(800)
            window[:] = np.random.default_rng(4).integers(0, 256, 800, dtype=np.uint8)
            expected = [window[begin:end].tolist() for begin, end in parts]
            for target, (begin, end) in zip(targets, parts, strict=True):
                uploads.put_bytes(target, 0, window[begin:end])
            uploads.launch()
        assert [runtime.read(target).tolist() for target in targets] == expected


@pytest.mark.parametrize("kernels", ["plain", "torch"])
@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_device_that_is_lost(at: int, kernels: Any) -> None:
    """Whichever call fails: DeviceError, and nothing is left behind."""
    rng = random.Random(at)
    runtime = SimulatedRuntime(seed=at, kernels=kernels)
    with runtime.installed():
        world = RandomPuts(runtime, rng, Uploads(runtime))
        world.fill_one_window(400)
        world.uploads.settle()
        targets = [runtime.new_tensor((30,), torch.int64) for _ in range(4)]
        runtime.fail_at(at)
        with pytest.raises(DeviceError, match="device failed"):
            upload_all(world.uploads, 3 * targets)
        assert not any(window.running for window in world.uploads._windows)
        runtime.recover()


def test_an_error_of_the_load_comes_first() -> None:
    runtime = SimulatedRuntime(seed=2)
    with runtime.installed():
        target = runtime.new_tensor((30,), torch.int64)

        def load() -> None:
            with Uploads(runtime) as uploads:
                upload(uploads, target, numbers(30))
                runtime.fail_at(0)
                raise ValueError("damaged")

        with pytest.raises(ValueError, match="damaged"):
            load()
        runtime.recover()


@pytest.mark.parametrize("kernels", ["plain", "torch"])
def test_without_pinned_memory(kernels: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(11)
    runtime = SimulatedRuntime(seed=11, kernels=kernels)
    small = runtime.new_pinned

    def refuse(bytes: int) -> torch.Tensor:
        if bytes == 2000:
            raise DeviceError("no more memory can be pinned")
        return small(bytes)

    monkeypatch.setattr(runtime, "new_pinned", refuse)
    with runtime.installed():
        world = RandomPuts(runtime, rng, Uploads(runtime))
        with world.uploads:
            for _ in range(3):
                world.fill_one_window(2000)
        world.check()
    assert "no more memory can be pinned" in caplog.text


def touching_host(runtime: SimulatedRuntime, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that touch memory of the host from now on."""
    found: list[str] = []
    check = runtime.check_reachable

    def noting(spans: Any, device: int, what: str) -> None:
        if not runtime.is_on_device(spans, device).all():
            found.append(what)
        check(spans, device, what)

    monkeypatch.setattr(runtime, "check_reachable", noting)
    return found


@pytest.mark.parametrize("kernels", ["plain", "library"])
def test_windows_go_up_by_the_copy_engine(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels spread what is on the device already."""
    runtime = SimulatedRuntime(2, seed=8, kernels=kernels)
    found = touching_host(runtime, monkeypatch)
    with runtime.installed():
        world = RandomPuts(runtime, random.Random(8), Uploads(runtime))
        with world.uploads:
            for _ in range(5):
                world.fill_one_window(3000)
        world.check()
    assert found == []


@pytest.mark.parametrize(
    ("kernels", "puts", "touching"),
    [
        ("plain", ["put_bytes", "put_rows"], True),
        ("library", ["put_bytes", "put_rows"], True),
        ("torch", ["put_bytes"], False),
    ],
)
def test_a_full_device_is_filled_without_scratch_memory(
    kernels: Any, puts: list[str], touching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By kernels that read the window, or piece by piece."""
    runtime = SimulatedRuntime(seed=9, kernels=kernels)
    found = touching_host(runtime, monkeypatch)
    with runtime.installed():
        targets = [runtime.new_tensor((6, 3), torch.int64, values=numbers(18).view(6, 3)) for _ in range(4)]
        values, rows = numbers(18, first=500).view(6, 3), np.arange(5, -1, -1)
        runtime.is_out_of_memory = True
        with Uploads(runtime) as uploads:
            window = uploads.window(4 * 160)
            for number, target in enumerate(targets):
                place = window[160 * number : 160 * number + values.nbytes]
                place[:] = np.frombuffer(raw_of(values), dtype=np.uint8)
                if puts[number % len(puts)] == "put_bytes":
                    uploads.put_bytes(target, 0, place)
                else:
                    uploads.put_rows(target, rows, torch.from_numpy(place).view(torch.int64).view(6, 3), None)
            uploads.launch()
        runtime.is_out_of_memory = False
        for number, target in enumerate(targets):
            expected = values if puts[number % len(puts)] == "put_bytes" else values.flip(0)
            assert runtime.read(target).tolist() == expected.tolist()
    assert bool(found) == touching


def test_what_needs_memory_of_a_full_device_is_told() -> None:
    runtime = SimulatedRuntime(seed=5)
    with runtime.installed():
        target = runtime.new_tensor((30, 2), torch.int64)
        runtime.is_out_of_memory = True
        uploads = Uploads(runtime)
        uploads.put(target.t(), numbers(60).view(2, 30))
        with pytest.raises(DeviceError, match="device 0 has no memory"):
            uploads.launch()


def test_no_load_in_the_capture_of_a_graph() -> None:
    runtime = SimulatedRuntime(seed=6)
    with runtime.installed(), runtime.capturing(), pytest.raises(UsageError, match="graph is being captured"):
        CallerStreams()


def test_only_devices_in_use_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of any other would start it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device in (1, 3), raising=False)
    assert CudaRuntime().devices_in_use() == [1, 3]
