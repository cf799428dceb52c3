"""The floor of a store: one copy at memory bandwidth into one buffer, and obstore's put of that in a thread."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import obstore
from obstore.store import S3Store

from bench.peers.protocol import BUCKET, FutureHandle, Handle
from bench.peers.raw_floor import RawFloor
from bench.state import State

PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4


class StorePut(RawFloor):
    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        self._store = S3Store(BUCKET, prefix=directory.name, client_options={"allow_http": True})

    def save_async(self, step: int) -> Handle:
        self.copy()
        return FutureHandle(self._executor.submit(self._put, step))

    def _put(self, step: int) -> None:
        obstore.put(self._store, str(step), self._image(), chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def _image(self) -> np.ndarray:
        return np.frombuffer((ctypes.c_uint8 * self.bytes).from_address(self.address), dtype=np.uint8)

    def read(self, step: int, *, threads: int) -> None:
        self._image()[:] = np.frombuffer(obstore.get(self._store, str(step)).bytes(), dtype=np.uint8)


PEER = StorePut
