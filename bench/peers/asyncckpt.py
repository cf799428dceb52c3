"""asyncckpt: tables as asyncckpt.HashTable, the rest as plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import asyncckpt
from bench.peers.protocol import DURABLE_SECONDS_MAX
from bench.state import State


class FutureHandle:
    def __init__(self, future: Any) -> None:
        self._future = future

    def wait_durable(self) -> None:
        # The future resolves after the commit, which has synced every file and folder.
        self._future.result(DURABLE_SECONDS_MAX)


class Asyncckpt:
    hashtables = True

    def __init__(self, state: State, directory: Path) -> None:
        self._directory = directory
        # All peers copy everything at every save; what is gained where few rows change: python -m bench touched.
        self._saver = asyncckpt.Saver(
            path=str(directory),
            hashtables=state.hashtables(),
            tensors=state.plain_tensors(),
            debug=asyncckpt.DebugOptions(refresh=False),
            device=asyncckpt.DeviceOptions(optimizers=self._optimizers(state)),
        )

    def _optimizers(self, state: State) -> Sequence[torch.optim.Optimizer]:
        return ()

    def prepare(self) -> None:
        self._saver.prepare().result(DURABLE_SECONDS_MAX)

    def save_async(self, step: int) -> FutureHandle:
        return FutureHandle(self._saver.save_async(step))

    def load(self, step: int, target: State) -> None:
        # Checksums are verified: that is the default.
        asyncckpt.Loader(
            str(self._directory), hashtables=target.hashtables(), tensors=target.plain_tensors(), step=step
        ).load()

    def close(self) -> None:
        self._saver.close()


PEER = Asyncckpt
