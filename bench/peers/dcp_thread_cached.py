"""DCP async_save in a thread with one stager kept for all saves, so that its copies go into memory it has already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from bench.peers.dcp_thread import DcpThread
from bench.state import State


class DcpThreadCached(DcpThread):
    share_memory = False

    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        # Pinning, side streams and non-blocking copies need a GPU.
        self._kept_stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.share_memory,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def _stager(self) -> Any:
        return self._kept_stager

    def close(self) -> None:
        self._kept_stager.close()


PEER = DcpThreadCached
