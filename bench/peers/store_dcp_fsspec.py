"""torch.distributed.checkpoint.async_save in a thread, with torch's own writer for fsspec, here s3fs."""

from __future__ import annotations

from pathlib import Path

import s3fs  # noqa: F401 - fsspec finds it by its name; where it is not installed, this peer is left out.
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from bench.peers.dcp_thread import DcpThread
from bench.peers.protocol import FutureHandle, Handle, store_url
from bench.state import State


class StoreDcpFsspec(DcpThread):
    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        self._url = store_url(directory)

    def save_async(self, step: int) -> Handle:
        return FutureHandle(self._begin(storage_writer=FsspecWriter(f"{self._url}/{step}")))

    def load(self, step: int, target: State) -> None:
        state_dict_loader.load(target.tensors(), storage_reader=FsspecReader(f"{self._url}/{step}"))


PEER = StoreDcpFsspec
