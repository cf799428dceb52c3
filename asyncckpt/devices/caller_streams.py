"""The order of a call whose work another thread does: behind what its caller had queued, whatever stream that was on.

The current stream is a matter of each thread. So a load in the background

    1. CallerStreams()   on the caller's thread: notes where its streams are
    2. follow            on the thread that loads: what it queues from now on comes behind that
    3. wait              on that thread, in the end: for what it has queued itself, so that no stream has to
"""

from __future__ import annotations

from asyncckpt.devices.chosen import runtime
from asyncckpt.errors import UsageError


class CallerStreams:
    """Where this thread's streams are now, on every device in use.

    UsageError while a graph is being captured; DeviceError.
    """

    def __init__(self) -> None:
        check_not_capturing("a load")
        self._runtime = found = runtime()
        devices = [] if found is None else found.devices_in_use()
        self._events = [(device, found.record(found.current_stream(device))) for device in devices if found is not None]

    def follow(self) -> None:
        """Let the streams of this thread come behind those of the caller; the host waits for nothing. DeviceError."""
        for device, event in self._events:
            assert self._runtime is not None
            self._runtime.hold_back(self._runtime.current_stream(device), event)

    def wait(self) -> None:
        """Wait until all that this thread has queued on these devices is done. DeviceError."""
        for device, _ in self._events:
            assert self._runtime is not None
            self._runtime.record(self._runtime.current_stream(device)).wait()


def check_not_capturing(what: str) -> None:
    """UsageError when this thread's work is being recorded into a graph; `what` is called then."""
    found = runtime()
    if found is not None and found.is_capturing():
        raise UsageError(f"{what} was called while a graph is being captured", hint="call it between replays")
