"""Order the work of a background thread after what its caller had queued, on any stream.

Each thread has its own current stream. So a load in the background calls

    1. CallerStreams()   on the caller's thread: record its streams
    2. follow            on the loading thread: order what it queues from now on after that
    3. wait              on the loading thread, at the end: for what it has queued, so that no stream has to
"""

from __future__ import annotations

from asyncckpt.devices.current_runtime import check_not_capturing, runtime


class CallerStreams:
    """What this thread's streams have queued so far, on every device in use.

    Raises UsageError while a graph is being captured, DeviceError.
    """

    def __init__(self) -> None:
        check_not_capturing("a load")
        self._runtime = found = runtime()
        devices = [] if found is None else found.devices_in_use()
        self._events = [(device, found.record(found.current_stream(device))) for device in devices if found is not None]

    def follow(self) -> None:
        """Make the streams of this thread wait for those of the caller, not the host. Raises DeviceError."""
        for device, event in self._events:
            assert self._runtime is not None
            self._runtime.hold_back(self._runtime.current_stream(device), event)

    def wait(self) -> None:
        """Wait for everything that this thread has queued on these devices. Raises DeviceError."""
        for device, _ in self._events:
            assert self._runtime is not None
            self._runtime.record(self._runtime.current_stream(device)).wait()
