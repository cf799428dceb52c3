"""torch.save in the training thread: what most loops do."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import torch

from bench.peers.protocol import TreeHandle
from bench.state import State

FILE_NAME = "state.pt"


class TorchSave:
    hashtables = False

    def __init__(self, state: State, directory: Path) -> None:
        self._state, self._directory = state, directory

    def prepare(self) -> None:
        pass

    def save_async(self, step: int) -> TreeHandle:
        path = self._directory / str(step)
        path.mkdir()
        torch.save(self._state.tensors(), path / FILE_NAME)
        return TreeHandle(path, sync_files=True)

    def load(self, step: int, target: State) -> None:
        load_torch_file(self._directory / str(step) / FILE_NAME, target)

    def close(self) -> None:
        pass


def load_torch_file(path: Path | BinaryIO, target: State) -> None:
    """Fill the target from a file of torch.save."""
    loaded = torch.load(path, weights_only=True, map_location="cpu")
    for name, tensor in target.tensors().items():
        tensor.copy_(loaded[name])


PEER = TorchSave
