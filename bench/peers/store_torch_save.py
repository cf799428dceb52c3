"""Clone everything in the training thread, then torch.save to memory and obstore's put in a thread."""

from __future__ import annotations

import io
from pathlib import Path

import obstore
import torch
from obstore.store import S3Store

from bench.peers.protocol import BUCKET, FutureHandle, Handle
from bench.peers.torch_save import load_torch_file
from bench.peers.torch_save_thread_clone import TorchSaveThreadClone
from bench.state import State


class StoreTorchSave(TorchSaveThreadClone):
    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        self._store = S3Store(BUCKET, prefix=directory.name, client_options={"allow_http": True})

    def save_async(self, step: int) -> Handle:
        return FutureHandle(self._executor.submit(self._save, step, self._snapshot()))

    def _save(self, step: int, snapshot: dict[str, torch.Tensor]) -> None:
        file = io.BytesIO()
        torch.save(snapshot, file)
        obstore.put(self._store, str(step), file.getbuffer())

    def load(self, step: int, target: State) -> None:
        load_torch_file(io.BytesIO(obstore.get(self._store, str(step)).bytes()), target)


PEER = StoreTorchSave
