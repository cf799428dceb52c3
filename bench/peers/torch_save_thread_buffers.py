"""As `torch_save_thread_clone`, but the copies go into buffers that were touched before and are used again."""

from __future__ import annotations

from pathlib import Path

import torch

from bench.peers.torch_save_thread_clone import TorchSaveThreadClone
from bench.state import State


class TorchSaveThreadBuffers(TorchSaveThreadClone):
    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        self._buffers: dict[str, torch.Tensor] = {}

    def prepare(self) -> None:
        self._buffers = super()._snapshot()

    def _snapshot(self) -> dict[str, torch.Tensor]:
        for name, tensor in self._state.tensors().items():
            self._buffers[name].copy_(tensor)
        return self._buffers


PEER = TorchSaveThreadBuffers
