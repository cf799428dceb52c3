"""Ranks that write only a part of what they hold; run by test_left_out.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import asyncckpt
from asyncckpt.errors import CheckpointError, FilterError
from tests.ranks.job_ranks import PEER_DEADLINE_S, WAIT_S_MAX, group_of

Blocks = Sequence[asyncckpt.filters.WriteBlock]
SHAPE = (6, 8)


def whole() -> torch.Tensor:
    return torch.arange(48.0).reshape(SHAPE)


def spread(how: str, rank: int) -> Any:
    if how == "rows":
        return asyncckpt.sharded(whole()[3 * rank : 3 * rank + 3].contiguous(), (3 * rank, 0), SHAPE)
    if how == "columns":
        return asyncckpt.sharded(whole()[:, 4 * rank : 4 * rank + 4].contiguous(), (0, 4 * rank), SHAPE)
    begins = [(0, 0), (4, 4)] if rank == 0 else [(0, 4), (4, 0)]
    sizes = [(4, 4), (2, 4)]
    pieces = [
        asyncckpt.Piece(whole()[top : top + rows, left : left + columns].contiguous(), (top, left))
        for (top, left), (rows, columns) in zip(begins, sizes, strict=True)
    ]
    return asyncckpt.Sharded(whole_shape=SHAPE, dtype=torch.float32, pieces=tuple(pieces))


def change(how: str, blocks: Blocks) -> Blocks:
    if how == "drop":
        return [block for block in blocks if block.tensor_name() != "other"]
    if how == "rename":
        return [block.replace(name="v") if block.tensor_name() == "w" else block for block in blocks]
    return [block.replace(data=block.data.bfloat16()) if block.tensor_name() == "w" else block for block in blocks]


def cast(blocks: Blocks) -> Blocks:
    return [block.replace(data=block.data.bfloat16()) for block in blocks]


def filtered(layout: str, how: str, rank: int, folder: Path) -> None:
    """Both ranks do the same to their boxes."""
    with asyncckpt.Saver(
        rank,
        2,
        path=folder / "checkpoints",
        tensors={"w": spread(layout, rank), "other": torch.ones(3)},
        filter_func=partial(change, how),
        ranks=asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S),
    ) as saver:
        saver.save_async(1).result(WAIT_S_MAX)
        saver.save(2)


def one_piece_less(rank: int, folder: Path) -> None:
    """A filter that drops one of two boxes, or gives one another form, is refused."""
    answers: list[Any] = [
        lambda blocks: blocks[1:],
        lambda blocks: [blocks[0].replace(data=blocks[0].data.bfloat16()), *blocks[1:]],
        lambda blocks: [block.replace(data=block.data[:, :1]) for block in blocks],
        lambda blocks: [blocks[0], blocks[0], *blocks[1:]],
    ]
    with asyncckpt.Saver(
        rank,
        2,
        path=folder / "checkpoints",
        tensors={"w": spread("pieces", rank)},
        filter_func=lambda blocks: answers[0](blocks) if rank == 0 else blocks,
        ranks=asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S),
    ) as saver:
        for step in range(len(answers)):
            error = saver.save_async(step).exception(WAIT_S_MAX)
            assert isinstance(error, FilterError if rank == 0 else CheckpointError), error
            answers.pop(0)


def only_replicated_tables(rank: int, folder: Path) -> None:
    """All of it is written by one of the ranks."""
    torch.manual_seed(0)
    modules = torch.nn.ModuleDict({"e": torch.nn.Embedding(10, 4)})
    ranks = asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S)
    with asyncckpt.Saver(rank, 2, path=folder / "checkpoints", hashtables=modules, ranks=ranks) as saver:
        assert saver.save_async(1).result(WAIT_S_MAX).step == 1
        assert saver.save_async(2).result(WAIT_S_MAX).step == 2
        assert saver.save(3).step == 3


def one_group_of_a_mesh(rank: int, folder: Path) -> None:
    """Each row of a mesh holds everything, and saves by itself, as does each rank that holds everything alone."""
    group_of(rank, 4, folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    group, first = mesh["part"].get_group(), 3 * (rank % 2)
    layouts = {
        "all": (whole(), [Replicate(), Replicate()]),
        "rows": (whole()[first : first + 3].clone(), [Replicate(), Shard(0)]),
    }
    for layout, (local, placements) in layouts.items():
        tensors = {f"w{n}": DTensor.from_local(local + n, mesh, placements, run_check=False) for n in range(6)}
        ranks = asyncckpt.RankOptions(process_group=group, peer_deadline=PEER_DEADLINE_S)
        with asyncckpt.Saver(path=folder / f"{layout}-{rank // 2}", tensors=tensors, ranks=ranks) as saver:
            for step in range(3):  # Who writes what is agreed upon in the first.
                saver.save_async(step).result(WAIT_S_MAX)
        alone = asyncckpt.RankOptions(alone=True)
        if layout == "all":
            with asyncckpt.Saver(path=folder / f"alone-{rank}", tensors=tensors, ranks=alone) as saver:
                saver.save(2)
        else:
            with (
                asyncckpt.Saver(path=folder / f"part-{rank}", tensors=tensors, ranks=alone) as saver,
                pytest.raises(asyncckpt.UsageError, match="'w0' is not here in full"),
            ):
                saver.save(2)
    dist.barrier()


def as_many_ranks_as_a_mesh_has(rank: int, folder: Path) -> None:
    """They save, and are not those of the mesh: each has a replica, or some have nothing of it."""
    group_of(rank, 4, folder)
    meshes = [DeviceMesh("cpu", pair) for pair in ([0, 1], [2, 3], [1, 3])]
    for place, saving, own in (("two", (1, 3), meshes[rank // 2]), ("one", (2, 3), meshes[2])):
        group = dist.new_group(list(saving))
        if rank in saving:
            tensors = {
                f"w{n}": distribute_tensor(whole() + n, own, [Replicate()], src_data_rank=None) for n in range(6)
            }
            ranks = asyncckpt.RankOptions(process_group=group, peer_deadline=PEER_DEADLINE_S)
            with asyncckpt.Saver(path=folder / place, tensors=tensors, ranks=ranks) as saver:
                for step in range(3):
                    saver.save_async(step).result(WAIT_S_MAX)
    dist.barrier()


def placed_anew(rank: int, folder: Path) -> None:
    """Boxes that begin where they did, and are larger."""
    group_of(rank, 4, folder)
    meshes = [DeviceMesh("cpu", pair) for pair in ([0, 1], [2, 3])]
    tensors: dict[str, Any] = {}
    with asyncckpt.Saver(
        rank, 4, path=folder / "saved", tensors=tensors, ranks=asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S)
    ) as saver:
        for step, placement in enumerate((Shard(0), Replicate(), Shard(1), Replicate())):
            tensors["w"] = distribute_tensor(whole() + step, meshes[rank // 2], [placement], src_data_rank=None)
            saver.save_async(step).result(WAIT_S_MAX)
    dist.barrier()


def written_by_nobody(leaf: Callable[[int], Any], filter_func: Any, rank: int, folder: Path) -> None:
    """A tensor of which each rank says that another one has it is not left out without a word."""
    ranks = asyncckpt.RankOptions(peer_deadline=PEER_DEADLINE_S)
    tensors = {"w": leaf(rank), "other": torch.ones(3)}
    path = folder / "checkpoints"
    with asyncckpt.Saver(rank, 2, path=path, tensors=tensors, filter_func=filter_func, ranks=ranks) as saver:
        error = saver.save_async(1).exception(WAIT_S_MAX)
        assert isinstance(error, (asyncckpt.ConflictError, asyncckpt.PeerError)), error
        assert "tensor 'w' of step 1" in str(error)


def says_that_another_rank_writes(rank: int) -> Any:
    return asyncckpt.sharded(whole()[3 * rank : 3 * rank + 3].clone(), (3 * rank, 0), SHAPE, is_writer=False)


def holds_nothing(_: int) -> Any:
    return asyncckpt.Sharded(whole_shape=SHAPE, dtype=torch.float32, pieces=())


def one_rank_holds_a_part(rank: int) -> Any:
    return asyncckpt.sharded(whole()[:4].clone(), (0, 0), SHAPE) if rank == 0 else holds_nothing(rank)
