"""safetensors.torch.save_file in the training thread."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from bench.peers.protocol import TreeHandle
from bench.state import State

FILE_NAME = "state.safetensors"


class Safetensors:
    hashtables = False

    def __init__(self, state: State, directory: Path) -> None:
        self._state, self._directory = state, directory

    def prepare(self) -> None:
        pass

    def save_async(self, step: int) -> TreeHandle:
        path = self._directory / str(step)
        path.mkdir()
        save_file(self._state.tensors(), path / FILE_NAME)
        return TreeHandle(path, sync_files=True)

    def load(self, step: int, target: State) -> None:
        with safe_open(self._directory / str(step) / FILE_NAME, framework="pt") as source:
            for name, tensor in target.tensors().items():
                tensor.copy_(source.get_tensor(name))

    def close(self) -> None:
        pass


PEER = Safetensors
