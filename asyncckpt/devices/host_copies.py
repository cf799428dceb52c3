"""The copies of one save from devices to host memory: listed, launched together, awaited in the background.

    side stream   follow the trainer's | direct, to scratch | FENCE | later ones | STEP FENCE | from scratch | END
    trainer's                                               waits for FENCE ...   step() waits for STEP FENCE

1. The capture adds copies in their order: `on(device).add...`. A copy that overlaps another one comes after it. What
   the host itself copies after the call is in `steps` (step_copies.py).
2. `launch` queues all of them. As many as fit, from the last one back, go through scratch memory of the device; the
   others go directly to the host first. The trainer's streams wait for the fence, the host for nothing. Copies of what
   only an optimizer step changes come after the fence; the step waits for them.
3. `Pending.settle`, in the background: after it, the host may read what was copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from asyncckpt.devices.batch import Batch, settle_all
from asyncckpt.devices.contract import ComparesRows, Event, Runtime, Stream
from asyncckpt.devices.copies import ChangedRowsCopy, Copy, DeviceFingerprints, RowCopy, SegmentCopy, TensorCopy, Work
from asyncckpt.devices.step_copies import StepCopies
from asyncckpt.devices.stepped_memory import NOTHING_STEPPED, SteppedMemory
from asyncckpt.errors import DeadlineError, DeviceError, IOFailedError, UsageError
from asyncckpt.native import I64, U64
from asyncckpt.signals import Guard

_log = logging.getLogger("asyncckpt")


class DeviceCopies:
    """Copies of one device, in their order."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.later: list[Copy] = []
        self.works: list[Callable[[], None]] = []
        self.kept: list[object] = []

    def add(self, segments: U64, *keep: object, stepped: bool = False) -> None:
        """Copy segments (source on the device, target on the host, bytes), uint64 [n, 3]; `keep` holds their memory.

        stepped: only an optimizer step changes the memory, so only the step waits for the copies.
        """
        segments = segments[segments[:, 2] > 0]
        if len(segments):
            (self.later if stepped else self.copies).append(SegmentCopy(segments))
            self.kept += keep

    def add_rows(self, columns: U64, source_rows: I64 | None, target_rows: I64 | None, *keep: object) -> None:
        """Copy row source_rows[i] of columns (source, target, row bytes) to row target_rows[i]; None: row i."""
        rows = RowCopy(columns[columns[:, 2] > 0], source_rows, target_rows)
        if rows.bytes:
            self.copies.append(rows)
            self.kept += keep

    def add_changed_rows(self, columns: U64, before: object, now: DeviceFingerprints, *keep: object) -> None:
        """Copy the rows of columns (source, target, row bytes) that differ from fingerprints `before`.

        Copies all rows if `before` does not fit, and fingerprints all rows to `now`.
        """
        earlier = before if isinstance(before, DeviceFingerprints) and now.fits(before) else None
        copy = ChangedRowsCopy(columns, before=earlier, now=now)
        if copy.bytes:
            self.copies.append(copy)
            self.kept += keep

    def add_tensor(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the values of a tensor to a contiguous one on the host of the same dtype and shape."""
        if target.numel():
            self.copies.append(TensorCopy(target, source))

    def add_work(self, work: Callable[[], None]) -> None:
        """Run work on the host when all copies of the device are done."""
        self.works.append(work)


@dataclass(frozen=True)
class Launched:
    """The running copies of one device.

    Sources may change from `fence` on, those that only a step changes from `step_fence` on. All is on the host at
    `end`.
    """

    batch: Batch
    fence: Event
    step_fence: Event
    end: Event


class Pending:
    """Running copies, one batch per device, and those of the host that a step waits for.

    is_lost: a device has failed, and may still write to its targets.
    """

    def __init__(
        self, batches: Sequence[Launched] = (), *, steps: StepCopies | None = None, is_lost: bool = False
    ) -> None:
        self.is_lost = is_lost
        self.steps = StepCopies(NOTHING_STEPPED) if steps is None else steps
        self._batches = list(batches)
        self._guard = Guard()
        self._failed: Exception | None = None

    @property
    def devices(self) -> list[int]:
        return [item.batch.device for item in self._batches]

    @property
    def is_running(self) -> bool:
        """Whether something is not on the host yet."""
        return bool(self._batches) or not self.steps.is_copied

    def fence(self, stream: Stream = None) -> None:
        """Make a stream (None: the current ones of this thread) wait until the sources may change; not the host."""
        for item in list(self._batches):
            runtime = item.batch.runtime
            # A stream may wait for an event of another device.
            runtime.hold_back(runtime.current_stream(item.batch.device) if stream is None else stream, item.step_fence)

    def end(self) -> None:
        """Copy no more for steps, and wait for the rest. Waits for the snapshot get the errors."""
        with suppress(Exception):
            self.steps.drop()
            self.settle()

    def settle(self) -> None:
        """Wait until all is on the host, for all devices even if one fails. Raises DeviceError, DeadlineError, and
        UsageError for what was changed before it was copied.

        Any thread may call it. A second call waits for the first one and raises the same. An interrupt is raised at the
        end: the memory must not be used before the devices are done.
        """
        with self._guard:
            running = [(item.batch, item.end) for item in self._batches]
            errors = settle_all(running) if running else []
            self._batches = []  # Only now: `fence` may be called while another thread waits here.
            self.is_lost = self.is_lost or any(isinstance(error, (DeviceError, DeadlineError)) for error in errors)
            self._failed = self._failed or next((error for error in errors if isinstance(error, Exception)), None)
        if errors:
            raise errors[0]
        if self._failed is not None:
            raise self._failed
        self.steps.settle()


class HostCopies:
    """The copies of one save. runtime None: there are no devices, and no copies of theirs are ever added.

    stepped: what only steps of optimizers change.
    """

    def __init__(
        self,
        runtime: Runtime | None,
        *,
        scratch_bytes: int = 0,
        streams: Sequence[Stream] = (),
        stepped: SteppedMemory = NOTHING_STEPPED,
    ) -> None:
        self.runtime = runtime
        self.steps = StepCopies(stepped)
        self._scratch_bytes = scratch_bytes
        self._streams = streams
        self._devices: dict[int, DeviceCopies] = {}
        self.pending = Pending(steps=self.steps)

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Return the device from which a tensor is copied; None: the host reads it."""
        return None if self.runtime is None else self.runtime.device_of(tensor)

    def can_compare(self, device: int) -> bool:
        """Return whether a device can compare rows."""
        return self.runtime is not None and isinstance(self.runtime.kernels(device), ComparesRows)

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the values of any tensor to a contiguous one on the host, now or with the other copies."""
        device = self.device_of(source)
        if device is None:
            target.copy_(source)
        else:
            self.on(device).add_tensor(target, source)

    def on(self, device: int) -> DeviceCopies:
        """Return the copies of a device, to add to them."""
        return self._devices.setdefault(device, DeviceCopies())

    @property
    def targets(self) -> tuple[int, int]:
        """Return the address range [begin, end) of all targets; (0, 0) without any."""
        ranges = [copy.targets for item in self._devices.values() for copy in [*item.copies, *item.later]]
        if not ranges:
            return 0, 0
        return min(begin for begin, _ in ranges), max(end for _, end in ranges)

    def launch(self, *, reachable: Sequence[tuple[int, int]] = ()) -> Pending:
        """Queue everything, and make the trainer's streams wait for the fence. reachable: pinned (address, bytes).

        Raises UsageError while a graph is being captured, DeviceError, IOFailedError for memory that is not there.
        Nothing is running any more then, unless `pending.is_lost`.
        """
        listed = {device: item for device, item in self._devices.items() if item.copies or item.later or item.works}
        if not listed:
            return self.pending
        runtime = self.runtime
        assert runtime is not None
        if runtime.is_capturing():
            raise UsageError("a save was called while a graph is being captured", hint="save between replays")
        batches = {device: Batch(runtime, device, reachable=reachable) for device in listed}
        try:
            launched = [self._queue(batches[device], item) for device, item in listed.items()]
        except BaseException as error:
            # Queued copies use memory that is freed now.
            lost = _wait_for_side_streams(runtime, list(batches.values()))
            if lost is not None:
                self.pending = Pending(is_lost=True)
                raise lost from error
            if isinstance(error, MemoryError):
                raise IOFailedError(
                    f"there is no memory for what a save copies through a device: {error}",
                    hint="allow more pinned host memory (pinned_memory_limit), or free memory of the device",
                ) from error
            raise
        self.pending = Pending(launched, steps=self.steps)
        return self.pending

    def _queue(self, batch: Batch, item: DeviceCopies) -> Launched:
        runtime = batch.runtime
        batch.keep(*item.kept)
        own = [stream for stream in self._streams if runtime.device_of_stream(stream) == batch.device]
        batch.follow(own)
        direct, scratch, left = _divide(item.copies, self._scratch_bytes)
        outward = _queue_by_scratch(batch, direct, scratch)
        fence = batch.record()
        for stream in (runtime.current_stream(batch.device), *own):
            runtime.hold_back(stream, fence)
        direct, scratch, _ = _divide(item.later, left)
        outward += _queue_by_scratch(batch, direct, scratch)
        step_fence = batch.record() if item.later else fence
        for work in outward:
            batch.enqueue(partial(work, batch))
        for host_work in item.works:
            batch.enqueue(partial(batch.afterwards, host_work))
        return Launched(batch=batch, fence=fence, step_fence=step_fence, end=batch.record())


def _wait_for_side_streams(runtime: Runtime, batches: Sequence[Batch]) -> DeviceError | None:
    """Wait for what was queued before an error; return the error of a device that does not finish."""
    lost: DeviceError | None = None
    for batch in batches:
        try:
            runtime.record(batch.stream).wait()
        except DeviceError as found:
            lost = found
        except (DeadlineError, MemoryError) as found:
            batch.abandon()
            lost = DeviceError(f"device {batch.device} does not finish its copies: {found}")
    return lost


def _queue_by_scratch(batch: Batch, direct: Sequence[Copy], scratch: Sequence[Copy]) -> list[Work]:
    """Queue the direct copies and those to scratch memory; return the works that copy the latter to the host."""
    found = [copy.by_scratch() for copy in scratch]
    address = 0
    try:
        if found:
            address = batch.device_memory(sum(bytes for bytes, _ in found))
    except MemoryError as error:
        _log.warning("asyncckpt: no scratch memory on the device, the trainer waits for the host: %s", error)
        found = []
        direct = [*direct, *scratch]
    for copy in direct:
        batch.enqueue(partial(copy.run, batch))
    outwards: list[Work] = []
    for bytes, halves in found:
        inward, outward = halves(address)
        batch.enqueue(partial(inward, batch))
        outwards.append(outward)
        address += bytes
    return outwards


def _divide(copies: Sequence[Copy], scratch_bytes: int) -> tuple[list[Copy], list[Copy], int]:
    """Return (copies directly to the host, copies through scratch memory, what is left of it).

    The latter are a part from the end, so that a copy that overlaps another one comes after it both ways.
    """
    direct, scratch = list(copies), list[Copy]()
    left = scratch_bytes
    while direct:
        first, last = direct.pop().split(left)
        if last is not None:
            scratch.insert(0, last)
            left -= last.by_scratch()[0]
        if first is not None:
            direct.append(first)
            break
    return direct, scratch, left
