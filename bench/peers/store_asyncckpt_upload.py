"""asyncckpt on the disk, and uploaded from there: a save counts as durable when it is in the store too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.peers.asyncckpt import Asyncckpt
from bench.peers.protocol import DURABLE_SECONDS_MAX, Handle, store_url


class UploadHandle:
    def __init__(self, future: Any) -> None:
        self._future = future

    def wait_durable(self) -> None:
        self._future.wait_uploaded(DURABLE_SECONDS_MAX)


class StoreAsyncckptUpload(Asyncckpt):
    def _upload(self, directory: Path) -> str:
        return store_url(directory)

    def save_async(self, step: int) -> Handle:
        return UploadHandle(self._saver.save_async(step))


PEER = StoreAsyncckptUpload
