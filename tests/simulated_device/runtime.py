"""The simulated runtime: devices.contract.Runtime over simulated memory and a seeded schedule.

Calls that fail do so as CUDA's: a lost device fails in every call from then on; memory that is not there fails once.
The copy engine refuses host memory that is pinned in part, and the device goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch

from asyncckpt.devices import current_runtime as chosen
from asyncckpt.devices.batch import failing, not_pinned
from asyncckpt.devices.contract import Kernels
from asyncckpt.devices.cuda_runtime import host_view
from asyncckpt.devices.side_memory import SideMemory
from asyncckpt.devices.torch_kernels import TorchKernels
from asyncckpt.staging.pool import pool
from tests.simulated_device.library import Library, PlainLibrary, QueuedLibrary, library_on_cpu
from tests.simulated_device.memory import Allocator, OutOfMemory, Region, is_mapped
from tests.simulated_device.ranges import Reach
from tests.simulated_device.schedule import DeviceLost, DeviceSchedule, Point, QueuedWork, SimulationFault, Stream
from tests.simulated_device.torch_queue import QueueingMode, alias
from tests.worlds.arenas import close_free

DEVICE_BYTES = 32 << 20
PINNED_BYTES = 64 << 20

KernelsChoice = Literal["plain", "library", "torch"]


class SimulatedEvent:
    """Implements contract.Event."""

    def __init__(self, runtime: SimulatedRuntime, stream: Stream) -> None:
        self.point = Point(stream)
        self._runtime = runtime

    def is_done(self) -> bool:
        with self._runtime.calling(self.point.stream.device, "a copy"):
            return self.point.is_passed

    def wait(self) -> None:
        schedule, device = self._runtime.schedule, self.point.stream.device
        with self._runtime.calling(device, "a copy"):
            schedule.pass_point(self.point)
            if device in schedule.lost:
                raise DeviceLost


class SimulatedRuntime(Reach):
    """Implements contract.Runtime.

    seed: of the order of things. kernels: "torch" for TorchKernels; else LibraryKernels, "library" over the sources of
    the CUDA library compiled for the CPU, "plain" over copies of the core.
    """

    def __init__(
        self,
        devices_count: int = 1,
        *,
        seed: int = 0,
        kernels: KernelsChoice = "plain",
        device_bytes: int = DEVICE_BYTES,
    ) -> None:
        self._regions = [Region(device_bytes, protected=True) for _ in range(devices_count)]
        self._memory = [Allocator(region) for region in self._regions]
        self._pinned_region = Region(PINNED_BYTES, protected=False)
        self._pinned = Allocator(self._pinned_region)
        self.registered: dict[int, int] = {}
        self.schedule = DeviceSchedule(self._regions, seed)
        self._default = [self.schedule.new_stream(device, "default") for device in range(devices_count)]
        self._side = [self.schedule.new_stream(device, "side") for device in range(devices_count)]
        self._side_memory = SideMemory(lambda device: self._memory[device].unused_bytes, self._new_memory)
        self._kernels_choice = kernels
        self._kernels: dict[int, Kernels] = {}
        self._here = threading.local()
        self.calls_count = 0
        self._calls_to_failure: int | None = None
        self._failure: Callable[[], Exception] = DeviceLost
        self._allocations_to_failure: int | None = None
        self.flushes_count = 0  # Times at which the allocator gave back its cache and waited for the device.
        self.is_out_of_memory = False
        self.allocation_bytes_max: int | None = None  # Of one on a device: memory is in pieces.
        self.refuses_to_pin = False

    @property
    def devices_count(self) -> int:
        return len(self._regions)

    # -- for tests -----------------------------------------------------------------------------------------------

    @contextmanager
    def installed(self) -> Iterator[SimulatedRuntime]:
        """Be the runtime of this process, and let torch's operations of this thread be queued. Faults end in errors."""
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # Tensors are small, and operations run one after the other in any case.
            stack.enter_context(chosen.use(self))
            stack.callback(_let_go_of_arenas)  # They are registered with this runtime.
            stack.enter_context(QueueingMode(self))
            try:
                yield self
            except Exception as error:
                if self.schedule.faults and not isinstance(error, SimulationFault):
                    raise AssertionError(self.schedule.faults) from error
                raise
            self.schedule.run_all()
        self.check()

    def check(self) -> None:
        """Raise what real devices would not have allowed, or not noticed."""
        for address, bytes in self.registered.items():
            if not is_mapped(address, bytes):
                self.schedule.fault(f"{bytes} bytes at {address:#x} were unmapped while they were registered")
        if self.schedule.faults:
            raise AssertionError(self.schedule.faults)

    def new_tensor(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: int = 0,
        *,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A contiguous tensor of a device, from the current stream's pool. values: what is copied to it, from the host.

        Without, it holds garbage.
        """
        shape = torch.Size(shape)
        bytes = shape.numel() * dtype.itemsize
        stream = self.current_stream(device)
        storage = self._allocate(device, bytes, stream).untyped_storage()
        made = torch.empty(0, dtype=dtype).set_(storage, 0, shape)
        if values is not None:
            given, target = values.detach().clone().to(dtype).reshape(shape), alias(made)
            self.queue(stream, partial(target.copy_, given), name="first values")
        return made

    def new_strided(self, like: torch.Tensor, device: int) -> torch.Tensor:
        """A tensor of a device with the sizes and strides of another one."""
        elements = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True)) if like.numel() else 0
        flat = self.new_tensor((elements,), like.dtype, device)
        return torch.empty(0, dtype=like.dtype).set_(flat.untyped_storage(), 0, like.size(), like.stride())

    def new_stream(self, device: int = 0, name: str = "user") -> Stream:
        return self.schedule.new_stream(device, name)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make a stream current in this thread."""
        current = self._current()
        before = current.get(stream.device)
        current[stream.device] = stream
        try:
            yield
        finally:
            if before is None:
                del current[stream.device]
            else:
                current[stream.device] = before

    @contextmanager
    def on_all(self, streams: Sequence[Stream]) -> Iterator[None]:
        """Make streams of several devices current in this thread."""
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(self.on(stream))
            yield

    def training_op(self, stream: Stream, function: Callable[[], object]) -> None:
        """Queue what a trainer does: `function` reads and writes tensors of the device when its turn has come."""
        self.queue(stream, function, name="training")

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of a tensor behind all that is queued on the current stream, on the host."""
        device = self.device_of(tensor)
        if device is None:
            return tensor.detach().resolve_conj().resolve_neg().clone()
        found: list[torch.Tensor] = []
        own, stream = alias(tensor.detach()), self.current_stream(device)
        self.queue(stream, lambda: found.append(own.resolve_conj().resolve_neg().clone().contiguous()), name="read")
        self.record(stream).wait()
        return found[0]

    def queue(self, stream: Stream, work: Callable[[], object], *, name: str) -> None:
        """Queue an operation."""
        self.schedule.push(stream, QueuedWork(name, work=work))
        self.schedule.advance()

    def fail_at(self, n: int, error: Callable[[], Exception] = DeviceLost) -> None:
        """Let the n-th call from now on (0: the next one) raise; with DeviceLost the device is lost from then on."""
        self._calls_to_failure, self._failure = n, error

    def fail_allocation(self, n: int) -> None:
        """Let there be no memory for the n-th allocation from now on (0: the next one), on a device or pinned, once."""
        self._allocations_to_failure = n

    def fail_operation(self, n: int) -> None:
        """Let the n-th operation to run from now on do nothing, and its device be lost."""
        self.schedule.runs_to_failure = n

    def recover(self) -> bool:
        """Have all devices again, as a new process would. What was queued on a lost one is gone.

        Returns whether everything that was to fail has failed.
        """
        self.schedule.run_all()
        to_come = (self._calls_to_failure, self._allocations_to_failure, self.schedule.runs_to_failure)
        self.schedule.lost.clear()
        self._calls_to_failure = self._allocations_to_failure = self.schedule.runs_to_failure = None
        return to_come == (None, None, None)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Record this thread's work into a graph."""
        self._here.is_capturing = True
        try:
            yield
        finally:
            self._here.is_capturing = False

    def call(self, device: int) -> None:
        """What every call of the runtime begins with; raises what it fails with."""
        with self.schedule.lock:
            self.calls_count += 1
            if self._calls_to_failure is not None:
                self._calls_to_failure -= 1
                if self._calls_to_failure < 0:
                    self._calls_to_failure = None
                    error = self._failure()
                    if isinstance(error, DeviceLost):
                        self.schedule.lost.add(device)
                    raise error
            if device in self.schedule.lost:
                raise DeviceLost
            self.schedule.advance()

    @contextmanager
    def calling(self, device: int, what: str) -> Iterator[None]:
        """A call; errors of the runtime become DeviceError, those for want of memory MemoryError."""
        with failing(what):
            self.call(device)
            yield

    def allocating(self, bytes: int) -> None:
        """What every allocation begins with; raises OutOfMemory."""
        with self.schedule.lock:
            if self._allocations_to_failure is not None:
                self._allocations_to_failure -= 1
                if self._allocations_to_failure < 0:
                    self._allocations_to_failure = None
                    raise OutOfMemory(f"CUDA out of memory. Tried to allocate {bytes} bytes.")

    # -- where memory is -----------------------------------------------------------------------------------------

    def device_at(self, address: int) -> int | None:
        return next((device for device, region in enumerate(self._regions) if region.holds(address)), None)

    def stream_of(self, handle: int) -> Stream:
        return next(stream for stream in self.schedule.streams if stream.handle == handle)

    # -- contract.Runtime ----------------------------------------------------------------------------------------

    def device_of(self, tensor: torch.Tensor) -> int | None:
        if tensor.layout is not torch.strided or tensor.is_meta:
            return None
        return self.device_at(tensor.untyped_storage().data_ptr())

    def devices_in_use(self) -> list[int]:
        return list(range(self.devices_count))

    def side_stream(self, device: int) -> Stream:
        return self._side[device]

    def current_stream(self, device: int) -> Stream:
        return self._current().get(device, self._default[device])

    def device_of_stream(self, stream: Stream) -> int:
        return stream.device

    def is_capturing(self) -> bool:
        return getattr(self._here, "is_capturing", False)

    def enqueue(self, stream: Stream, work: Callable[[], None]) -> None:
        with failing("queueing a copy"), self.on(stream), torch.no_grad(), QueueingMode(self):
            work()

    def handle(self, stream: Stream) -> int:
        return stream.handle

    def record(self, stream: Stream) -> SimulatedEvent:
        with self.calling(stream.device, "recording an event"):
            event = SimulatedEvent(self, stream)
            self.schedule.push(stream, QueuedWork("record", passes=event.point))
            return event

    def hold_back(self, stream: Stream, event: Any) -> None:
        assert isinstance(event, SimulatedEvent)
        with self.calling(stream.device, "ordering a stream"):
            self.schedule.push(stream, QueuedWork("hold back", awaits=event.point))

    def new_pinned(self, bytes: int) -> torch.Tensor:
        with self.calling(0, "allocating pinned memory"), self.schedule.lock:
            self.allocating(bytes)
            memory = self._pinned.allocate(bytes, None)
            memory.numpy()[:] = self.schedule.random.randrange(256)
            return memory

    def new_memory(self, device: int, bytes: int) -> torch.Tensor:
        return self._side_memory.new(device, bytes)

    def _new_memory(self, device: int, bytes: int) -> torch.Tensor:
        with self.calling(device, f"allocating memory on device {device}"):
            return self._allocate(device, bytes, self._side[device])

    def view(self, address: int, bytes: int, device: int | None) -> torch.Tensor:
        if device != self.device_at(address):
            raise self.schedule.fault(f"memory of device {self.device_at(address)} was taken for that of {device}")
        return host_view(address, bytes)

    def register(self, address: int, bytes: int) -> None:
        with self.calling(0, "pinning memory"), self.schedule.lock:
            if self.refuses_to_pin:
                raise not_pinned(bytes, found="the simulated system refuses")
            try:
                self.allocating(bytes)
            except OutOfMemory as error:
                raise not_pinned(bytes, found=str(error)) from error
            if address % 4096 or bytes % 4096 or bytes <= 0 or not is_mapped(address, bytes):
                raise self.schedule.fault(f"{bytes} bytes at {address:#x} are not whole pages")
            if any(address < at + size and at < address + bytes for at, size in self.registered.items()):
                raise self.schedule.fault(f"{bytes} bytes at {address:#x} are registered already")
            self.registered[address] = bytes

    def unregister(self, address: int) -> None:
        with self.schedule.lock:
            if address not in self.registered:
                raise self.schedule.fault(f"memory at {address:#x} is not registered")
            bytes = self.registered.pop(address)
            if not is_mapped(address, bytes):
                raise self.schedule.fault(f"{bytes} bytes at {address:#x} were unmapped before they were unregistered")

    def kernels(self, device: int) -> Kernels:
        with self.schedule.lock:
            if device not in self._kernels:
                self._kernels[device] = self._new_kernels(device)
            return self._kernels[device]

    def _new_kernels(self, device: int) -> Kernels:
        if self._kernels_choice == "torch":
            return TorchKernels(self, device)
        from asyncckpt.devices.library_kernels import LibraryKernels

        library: Library = PlainLibrary() if self._kernels_choice == "plain" else library_on_cpu(self.devices_count)
        queued: Any = QueuedLibrary(self, library)
        return LibraryKernels(self, device, queued)

    def _allocate(self, device: int, bytes: int, stream: Stream) -> torch.Tensor:
        with self.schedule.lock:
            self.allocating(bytes)
            limit = 0 if self.is_out_of_memory else self.allocation_bytes_max
            if limit is not None and bytes > limit:
                self.flushes_count += 1
                raise OutOfMemory(f"CUDA out of memory. Tried to allocate {bytes} bytes.")
            try:
                memory = self._memory[device].allocate(bytes, stream)
            except OutOfMemory:
                self.flushes_count += 1
                raise
            garbage = self.schedule.random.randrange(256)
            self.queue(stream, partial(alias(memory).fill_, garbage), name="garbage")
            return memory

    def _current(self) -> dict[int, Stream]:
        if not hasattr(self._here, "current"):
            self._here.current = {}
        current: dict[int, Stream] = self._here.current
        return current


def _let_go_of_arenas() -> None:
    """Unmap what no save is using; also what was discarded, for the devices that might have written to it are gone."""
    close_free(pool)
    while pool._lost:
        pool._lost.pop().close()
