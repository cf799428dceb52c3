"""asyncckpt: tables as asyncckpt.HashTable, the rest as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import asyncckpt
from bench.peers.protocol import DURABLE_SECONDS_MAX, FutureHandle, Handle
from bench.state import State


class Asyncckpt:
    hashtables = True

    def __init__(self, state: State, directory: Path) -> None:
        self._path = self._place(directory)
        # All peers copy everything at every save; what is gained where few rows change: python -m bench touched.
        self._saver = asyncckpt.Saver(
            path=self._path,
            upload=self._upload(directory),
            hashtables=state.hashtables(),
            tensors=state.plain_tensors(),
            debug=asyncckpt.DebugOptions(refresh=False),
            device=asyncckpt.DeviceOptions(optimizers=self._optimizers(state)),
        )

    def _place(self, directory: Path) -> str:
        return str(directory)

    def _upload(self, directory: Path) -> str | None:
        return None

    def _optimizers(self, state: State) -> Sequence[torch.optim.Optimizer]:
        return ()

    def prepare(self) -> None:
        self._saver.prepare().result(DURABLE_SECONDS_MAX)

    def save_async(self, step: int) -> Handle:
        # The future resolves after the commit, which has synced every file and folder.
        return FutureHandle(self._saver.save_async(step))

    def load(self, step: int, target: State) -> None:
        # Checksums are verified: that is the default.
        asyncckpt.Loader(self._path, hashtables=target.hashtables(), tensors=target.plain_tensors(), step=step).load()

    def close(self) -> None:
        self._saver.close()


PEER = Asyncckpt
