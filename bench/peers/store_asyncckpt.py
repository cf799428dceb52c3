"""asyncckpt, its directory in the store: a save is durable when it is there."""

from __future__ import annotations

from pathlib import Path

from bench.peers.asyncckpt import Asyncckpt
from bench.peers.protocol import store_url


class StoreAsyncckpt(Asyncckpt):
    def _place(self, directory: Path) -> str:
        return store_url(directory)


PEER = StoreAsyncckpt
