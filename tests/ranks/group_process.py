"""One of three gloo ranks: opens channels on groups and checks what they do. Started by test_group_channels.py.

Arguments: rank, and "tcp" (with MASTER_ADDR and MASTER_PORT set) or the path of a store file.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist

from asyncckpt.coordination.store_channel import CLOSE_S_MAX, StoreChannel, open_store_channel
from asyncckpt.errors import DeadlineError, PeerError, UsageError
from tests.ranks.channels import DEADLINE_S, gather

RANKS_COUNT = 3
PART_BYTES = 20 << 20


def talk(channel: StoreChannel, word: bytes) -> None:
    """A call as a save makes it."""
    others = list(range(1, channel.ranks_count))
    if channel.rank == 0:
        assert sorted(gather(channel, 1, len(others))) == [(rank, word + b"%d" % rank) for rank in others]
        channel.send(1, None, word)
        assert {len(channel.get(1, f"part/{rank}", DEADLINE_S)) for rank in others} == {PART_BYTES}
        channel.send(1, None, b"committed")
    else:
        channel.send(1, 0, word + b"%d" % channel.rank)
        channel.put(1, f"part/{channel.rank}", bytes(PART_BYTES))
        assert gather(channel, 1, 2) == [(0, word), (0, b"committed")]


def several_channels_of_one_group(rank: int) -> None:
    first = open_store_channel(None, deadline_s=DEADLINE_S)
    second = open_store_channel(dist.group.WORLD, deadline_s=DEADLINE_S)
    assert (first.rank, first.ranks_count) == (rank, RANKS_COUNT)
    if rank:
        second.send(1, 0, b"in the second")
    else:
        assert sorted(gather(second, 1, 2)) == [(1, b"in the second"), (2, b"in the second")]
    talk(first, b"first")
    first.close()
    if rank:
        second.send(1, 0, b"after the first")
    else:
        assert sorted(gather(second, 1, 2)) == [(1, b"after the first"), (2, b"after the first")]
    second.close()


def sub_groups(rank: int) -> None:
    """Overlapping groups, each with a rank 0 of its own; who is no member is refused."""
    for members in ([0, 2], [1, 2]):
        group = dist.new_group(members)
        if rank not in members:
            with pytest.raises(UsageError, match="not in the process group"):
                open_store_channel(group, deadline_s=DEADLINE_S)
            continue
        channel = open_store_channel(group, deadline_s=DEADLINE_S)
        assert (channel.rank, channel.ranks_count) == (members.index(rank), 2)
        talk(channel, b"of group %d" % members[0])
        channel.close()


def rank_0_comes_too_late(rank: int) -> None:
    """Those that waited for it give up; what all open after that is one channel again."""
    if rank:
        with pytest.raises(PeerError, match="not announced its address") as caught:
            open_store_channel(None, deadline_s=0.2)
        assert caught.value.rank == 0
    dist.barrier()
    if rank == 0:
        late = open_store_channel(None, deadline_s=DEADLINE_S)
    channel = open_store_channel(None, deadline_s=DEADLINE_S)
    talk(channel, b"again")
    channel.close()
    if rank == 0:
        late._line.hang_up()


def rank_0_is_stopped(rank: int, others: dist.ProcessGroup) -> None:
    """Nobody waits for it longer than asked for, and when it goes on, all goes on."""
    channel = open_store_channel(None, deadline_s=DEADLINE_S)
    if rank == 0:
        channel.send(1, None, b"%d" % os.getpid())
        gather(channel, 1, 2)
        os.kill(os.getpid(), signal.SIGSTOP)
        assert sorted(gather(channel, 2, 2)) == [(1, b"while stopped"), (2, b"while stopped")]
        channel.send(2, None, b"committed")
    else:
        ((_, pid),) = gather(channel, 1, 1)
        channel.send(1, 0, b"stop")
        while not is_stopped(int(pid)):
            pass
        channel.send(2, 0, b"while stopped")
        channel.put(2, "part", bytes(PART_BYTES))
        assert channel.receive(2, 0.1) == []
        with pytest.raises(DeadlineError):
            channel.get(2, "part", 0.1)
        dist.barrier(others)
        if rank == 1:
            os.kill(int(pid), signal.SIGCONT)
        assert gather(channel, 2, 1) == [(0, b"committed")]
    channel.close()


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] == "T"


def rank_0_dies(rank: int) -> None:
    channel = open_store_channel(None, deadline_s=DEADLINE_S)
    unclosed = open_store_channel(None, deadline_s=DEADLINE_S)
    if rank == 0:
        gather(channel, 1, 2)
        print("done", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    channel.send(1, 0, b"ready")
    with pytest.raises(PeerError) as caught:
        gather(channel, 1, 1)
    assert caught.value.rank == 0
    with pytest.raises(PeerError):
        channel.send(1, 0, b"more")
    channel.close()
    assert unclosed.rank == rank  # Closed at exit, which must not hang.


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    with pytest.raises(UsageError, match="no process group"):
        open_store_channel(None, deadline_s=1.0)
    method = "env://" if store == "tcp" else f"file://{store}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS_COUNT)
    others = dist.new_group([1, 2])
    if rank:
        dist.barrier(others)  # Its connections are there before rank 0 stops.
    several_channels_of_one_group(rank)
    sub_groups(rank)
    rank_0_comes_too_late(rank)
    rank_0_is_stopped(rank, others)
    dist.barrier()
    rank_0_dies(rank)
    print("done", flush=True)


if __name__ == "__main__":
    assert CLOSE_S_MAX < DEADLINE_S
    main()
