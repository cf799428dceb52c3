"""Clone everything in the training thread, then torch.save in a thread: the usual hand-made asynchronous save."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.peers.protocol import Handle, TreeHandle
from bench.peers.torch_save import FILE_NAME, load_torch_file
from bench.state import State


class TorchSaveThreadClone:
    hashtables = False

    def __init__(self, state: State, directory: Path) -> None:
        self._state, self._directory = state, directory
        self._executor = ThreadPoolExecutor(max_workers=1)

    def prepare(self) -> None:
        pass

    def save_async(self, step: int) -> Handle:
        path = self._directory / str(step)
        path.mkdir()
        future = self._executor.submit(torch.save, self._snapshot(), path / FILE_NAME)
        return TreeHandle(path, future, sync_files=True)

    def _snapshot(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._state.tensors().items()}

    def load(self, step: int, target: State) -> None:
        load_torch_file(self._directory / str(step) / FILE_NAME, target)

    def close(self) -> None:
        self._executor.shutdown()


PEER = TorchSaveThreadClone
