"""A control: nothing is sent. Another process hashes for as long as the server of a store would compute for as much.

With the trainer on one core it keeps to the server's core, so it shows what a trainer loses to whoever else computes.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from bench.peers.protocol import FutureHandle, Handle
from bench.peers.raw_floor import RawFloor
from bench.state import GIB

SERVER_S_PER_GIB = 8.0
_HASH = """
import hashlib, os, sys, time
if len(sys.argv) > 2:
    os.sched_setaffinity(0, {int(sys.argv[2])})
block = bytes(1 << 20)
while time.process_time() < float(sys.argv[1]):
    hashlib.md5(block)
"""


class StoreNeighbour(RawFloor):
    def save_async(self, step: int) -> Handle:
        self.copy()
        last_core = [str(max(range(os.cpu_count() or 1)))] if torch.get_num_threads() == 1 else []
        seconds = SERVER_S_PER_GIB * self.bytes / GIB
        process = subprocess.Popen([sys.executable, "-c", _HASH, str(seconds), *last_core])
        return FutureHandle(self._executor.submit(self._wait, process))

    def read(self, step: int, *, threads: int) -> None:
        """What was copied is where it was."""

    @staticmethod
    def _wait(process: subprocess.Popen[bytes]) -> None:
        process.wait()


PEER = StoreNeighbour
