"""A process that has the shim loaded and torch and asyncckpt imported, and forks a child for every call it is sent.

Importing torch takes seconds and a fork milliseconds, so this is what makes thousands of crashes affordable. A fork is
safe only while the process has one thread: the server itself never saves, loads or computes in parallel.

Run by fork_lanes.py, which is the other end of the two pipes. A call is (function, arguments, kill_after_s): the child
runs function(channel, *arguments) and may send any number of messages; with kill_after_s it is killed that long after
its first message. The answer is a ChildEnd.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

CHILD_SECONDS_MAX = 300.0
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended: by a signal, or on its own (`error`: a traceback of what it raised), and what it had sent."""

    killed_by: int | None
    error: str | None
    messages: tuple[Any, ...]


@dataclass(frozen=True)
class _Raised:
    traceback: str


class Channel:
    """The child's end of its pipe. What was sent before a kill arrives."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, message: object) -> None:
        write_all(self._fd, framed(message))


Call = tuple[Callable[..., None], tuple[Any, ...], "float | None"]


def framed(message: object) -> bytes:
    """A message with its length in front."""
    raw = pickle.dumps(message)
    return _LENGTH.pack(len(raw)) + raw


def write_all(fd: int, raw: bytes) -> None:
    while raw:
        raw = raw[os.write(fd, raw) :]


def read_message(stream: IO[bytes]) -> Any:
    """The next message; EOFError at the end."""
    length = stream.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(_LENGTH.unpack(length)[0]))


def _messages(raw: bytes) -> list[Any]:
    """All whole messages; a kill may cut the last one."""
    found = []
    while len(raw) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(raw)[0]
        if end > len(raw):
            break
        found.append(pickle.loads(raw[_LENGTH.size : end]))
        raw = raw[end:]
    return found


def run_child(call: Call) -> ChildEnd:
    """Fork, wait, and tell how it went."""
    function, arguments, kill_after_s = call
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run_and_exit(Channel(writing), function, arguments)
    os.close(writing)
    try:
        raw = _gather(reading, child, kill_after_s)
    finally:
        os.close(reading)
    _, status = os.waitpid(child, 0)
    messages = _messages(raw)
    raised = next((message.traceback for message in messages if isinstance(message, _Raised)), None)
    return ChildEnd(
        killed_by=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        error=raised,
        messages=tuple(message for message in messages if not isinstance(message, _Raised)),
    )


def _gather(reading: int, child: int, kill_after_s: float | None) -> bytes:
    """What the child writes until its end; kills it when its time has come, or when it hangs."""
    raw = b""
    until = time.monotonic() + CHILD_SECONDS_MAX
    kill_is_timed = False
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            until = time.monotonic() + CHILD_SECONDS_MAX
            continue
        part = os.read(reading, 1 << 16)
        if not part:
            return raw
        raw += part
        if kill_after_s is not None and not kill_is_timed:
            kill_is_timed = True
            until = time.monotonic() + kill_after_s


def _run_and_exit(channel: Channel, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # A hanging child tells where it hangs, well before it is killed for it.
    faulthandler.dump_traceback_later(CHILD_SECONDS_MAX / 2, exit=True)
    try:
        function(channel, *arguments)
    except BaseException:
        with contextlib.suppress(OSError):
            channel.send(_Raised(traceback.format_exc()))
        os._exit(1)
    # Not sys.exit: the interpreter's end is not what is tested, and takes long with torch.
    os._exit(0)


def main() -> None:
    import child_runs  # Imports torch and asyncckpt, and is where the functions are.

    # Retention that fails logs a warning, which the fault tests bring about by the hundred.
    logging.getLogger("asyncckpt").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    child_runs.warm_up()
    # What is there now is not collected, and so not copied, in every child.
    gc.collect()
    gc.freeze()
    threads_count = len(os.listdir("/proc/self/task"))
    assert threads_count == 1, f"{threads_count} threads: a fork would copy one of them"
    requests, answers = sys.stdin.buffer, os.dup(1)
    # Whatever prints must not disturb the answers.
    os.dup2(2, 1)
    write_all(answers, framed("ready"))
    while True:
        try:
            call = read_message(requests)
        except EOFError:
            return
        write_all(answers, framed(run_child(call)))


if __name__ == "__main__":
    # Pickles name this module, not __main__.
    import fork_server

    fork_server.main()
