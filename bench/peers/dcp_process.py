"""DCP async_save in a process of its own, fed through a kept stager in shared memory."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bench.peers.dcp_thread_cached import DcpThreadCached
from bench.state import State


class DcpProcess(DcpThreadCached):
    checkpointer = AsyncCheckpointerType.PROCESS
    share_memory = True

    def __init__(self, state: State, directory: Path) -> None:
        super().__init__(state, directory)
        # It asks the process group for its rank, so there has to be one, of one process.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def close(self) -> None:
        super().close()
        dist.destroy_process_group()


PEER = DcpProcess
