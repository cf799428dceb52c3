"""torch.distributed.checkpoint.async_save in a thread, with the stager it makes for itself at every save."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bench.peers.protocol import Handle, TreeHandle
from bench.state import State

# It says at every save and load that there is one process; here that is meant.
warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")


class DcpThread:
    hashtables = False
    checkpointer = AsyncCheckpointerType.THREAD

    def __init__(self, state: State, directory: Path) -> None:
        self._state, self._directory = state, directory

    def prepare(self) -> None:
        pass

    def save_async(self, step: int) -> Handle:
        path = self._directory / str(step)
        # Its writer syncs every file (sync_files=True is its default) and no folder.
        return TreeHandle(path, self._begin(checkpoint_id=path), sync_files=False)

    def _begin(self, **where: Any) -> Future[Any]:
        response: Any = state_dict_saver.async_save(
            self._state.tensors(),
            async_checkpointer_type=self.checkpointer,
            async_stager=self._stager(),
            **where,
        )
        future: Future[Any] = getattr(response, "upload_completion", response)
        return future

    def _stager(self) -> Any:
        return None

    def load(self, step: int, target: State) -> None:
        state_dict_loader.load(target.tensors(), checkpoint_id=self._directory / str(step))

    def close(self) -> None:
        pass


PEER = DcpThread
