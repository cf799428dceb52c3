"""What the kernel takes to send bytes away: one copy, then one socket to a process that drops them unread.

No store can take less of this machine: there is no request, no digest, no encryption, and no server.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from bench.peers.store_put import StorePut
from bench.state import State

SEND_BYTES = 16 << 20
SINK = Path(__file__).with_name("byte_sink.py")


class StoreSocket(StorePut):
    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            number = listening.fileno()
            self._reader = subprocess.Popen([sys.executable, SINK, str(number)], pass_fds=[number])
            self._connection = socket.create_connection(listening.getsockname())

    def _put(self, step: int) -> None:
        image = memoryview(self._image())
        for begin in range(0, len(image), SEND_BYTES):
            self._connection.sendall(image[begin : begin + SEND_BYTES])

    def read(self, step: int, *, threads: int) -> None:
        """Nothing was kept: the image is in the arena still."""

    def close(self) -> None:
        super().close()
        self._connection.close()
        self._reader.wait()


PEER = StoreSocket
