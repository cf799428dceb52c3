"""One save of all ranks into one part of a checkpoint, begun by a Saver of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncckpt.model.own_rank import own_rank
from asyncckpt.options import PEER_DEADLINE_S, SAVE_DEADLINE_S, Durability, RankOptions
from asyncckpt.saver import Saver
from asyncckpt.strategies.layout import writing_path
from asyncckpt.strategies.running_save import RunningSave


def begin_save(
    checkpoint_dir: str | Path,
    name: str,
    make_state: Callable[[], Mapping[str, Any]],
    *,
    process_group: Any = None,
    peer_deadline: float = PEER_DEADLINE_S,
    parallel: int = 8,
    durability: Durability = "fsync",
    deadline: float = SAVE_DEADLINE_S,
    other_processes: bool = False,
) -> RunningSave:
    """Capture the state of this rank, of as many as the group has; what is committed replaces what was there before.

    name: of the part. other_processes: see RunningSave. To be called on all ranks. An error of make_state is raised
    here, and by the saves of the other ranks as PeerError. Raises PeerError when the ranks do not find each other.
    """
    rank, ranks_count = own_rank(None, None, process_group)
    state: Mapping[str, Any] = {}
    failed: Exception | None = None
    try:
        state = make_state()
    except Exception as error:
        if ranks_count == 1:
            raise
        failed = error  # The others would wait for this rank.
    saver = Saver(
        shard_index=rank,
        shard_num=ranks_count,
        path=writing_path(checkpoint_dir, name),
        parallel=parallel,
        tensors=state,
        ranks=RankOptions(process_group, peer_deadline),
        keep_latest=1,
        on_busy="queue",
        durability=durability,
    )
    try:
        if failed is not None:
            saver._leave_out_call(failed)
            raise failed
        future = saver.save_async()
    except BaseException:
        saver.close()
        raise
    return RunningSave(saver, future, deadline=deadline, other_processes=other_processes)
