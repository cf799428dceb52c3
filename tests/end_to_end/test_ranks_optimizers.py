"""Modules and optimizers over DTensors, loaded from any sharding; and which rank a Loader is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.model.sharded import Piece, Sharded
from tests.end_to_end.merged_ranks import as_boxes, save_each
from tests.end_to_end.ranks_world import chunk
from tests.worlds.objects import Stateful

pytestmark = pytest.mark.any_core


@contextmanager
def one_rank_of(rank: int, ranks_count: int) -> Iterator[Any]:
    """This process as one rank of many that are not there, and their mesh.

    torch remembers meshes: in one process, always the same rank of a number of ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks_count, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks_count,))
    finally:
        dist.destroy_process_group()


def spread_module(mesh: Any) -> torch.nn.Module:
    from torch.distributed.tensor import Shard, distribute_tensor

    module = torch.nn.Linear(6, 5)
    for name, parameter in list(module.named_parameters()):
        leaf = distribute_tensor(torch.zeros_like(parameter), mesh, [Shard(0)], src_data_rank=None)
        setattr(module, name, torch.nn.Parameter(leaf))
    return module


@pytest.mark.parametrize("saved_ranks", [1, 2])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(("rank", "ranks_count"), [(0, 8), (2, 5), (5, 7)])
def test_optimizers_over_sharded_parameters(
    tmp_path: Path, saved_ranks: int, fresh: bool, rank: int, ranks_count: int
) -> None:
    """Moments come back as DTensors of their parameters, in a fresh optimizer too; steps come whole."""
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    names = ["model.weight", "model.bias"]
    names += [f"optim.state.{number}.{moment}" for number in (0, 1) for moment in ("exp_avg", "exp_avg_sq")]
    states, boxes = [], {}
    for saver in range(saved_ranks):
        low, high = chunk(5, saver, saved_ranks)
        part = torch.nn.Linear(6, high - low)
        part_optimizer = torch.optim.AdamW(part.parameters())
        for own, all_of in zip(part.parameters(), model.parameters(), strict=True):
            own.data.copy_(all_of.data[low:high])
            state = optimizer.state[all_of]
            part_optimizer.state[own] = {
                key: value.clone() if key == "step" else value[low:high].clone() for key, value in state.items()
            }
        states.append({"model": part, "optim": part_optimizer})
        for name in names:
            shape = (5,) if name.endswith("bias") or ".1." in name else (5, 6)
            boxes[saver, name] = ((low,) + (0,) * (len(shape) - 1), shape)
    only = {f"optim.state.{number}.step": 0 for number in (0, 1)}
    root = save_each(tmp_path, states, change=as_boxes(boxes, only=only))
    with one_rank_of(rank, ranks_count) as mesh:
        target = spread_module(mesh)
        restored = torch.optim.AdamW(target.parameters(), lr=0.5)
        if not fresh:
            for parameter in target.parameters():
                parameter.grad = torch.zeros_like(parameter)
            restored.step()
        asyncckpt.Loader(root, tensors={"model": target, "optim": restored}).load()
        assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        low, high = chunk(5, rank, ranks_count)
        for mine, theirs in zip(target.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.data[low:high])
            for key in ("exp_avg", "exp_avg_sq"):
                moment = restored.state[mine][key]
                assert moment.placements == mine.placements
                assert torch.equal(moment.to_local(), optimizer.state[theirs][key][low:high])
            step = restored.state[mine]["step"]
            assert type(step) is torch.Tensor
            assert torch.equal(step, optimizer.state[theirs]["step"])


def test_optimizer_without_sharded_parameters_gets_whole_tensors(tmp_path: Path) -> None:
    states = [{"o": Stateful({"t": torch.arange(6.0)[rank * 3 : rank * 3 + 3]})} for rank in range(2)]
    root = save_each(tmp_path, states, change=as_boxes({(rank, "o.t"): ((rank * 3,), (6,)) for rank in range(2)}))
    fresh, spread = Stateful({}), Stateful({"t": Sharded((6,), torch.float32, (Piece(torch.zeros(2), (3,)),))})
    asyncckpt.Loader(root, tensors={"o": fresh}).load()
    assert fresh.state["t"].tolist() == list(range(6))
    piece = spread.state["t"].pieces[0].tensor
    asyncckpt.Loader(root, tensors={"o": spread}).load()
    assert piece.tolist() == [3, 4]
    assert isinstance(spread.state["t"], Sharded)


def test_the_rank_of_a_reader(tmp_path: Path) -> None:
    root = save_each(tmp_path, [{"rank": rank} for rank in range(3)])
    for rank in range(3):
        with one_rank_of(rank, 3):
            assert asyncckpt.Loader(root).load().values == {"rank": rank}
            assert asyncckpt.Loader(root, shard_index=1, shard_num=3).load().values == {"rank": 1}
            with pytest.raises(asyncckpt.UsageError, match="not those of the process group"):
                asyncckpt.Loader(
                    root, shard_index=rank, shard_num=4, ranks=asyncckpt.RankOptions(process_group=dist.group.WORLD)
                )
    assert asyncckpt.Loader(root).load().values == {"rank": 0}
    no_group = asyncckpt.RankOptions(process_group="x")
    for wrong in ({"shard_index": 1}, {"shard_num": 2}, {"shard_index": 2, "shard_num": 2}, {"ranks": no_group}):
        with pytest.raises(asyncckpt.UsageError):
            asyncckpt.Loader(root, **wrong)


class Exchanges(torch.nn.Module):
    """Before version 2, a was b."""

    def __init__(self, version: int, a: Any, b: Any) -> None:
        super().__init__()
        self._version = version
        self.a, self.b = torch.nn.Parameter(a), torch.nn.Parameter(b)

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if metadata.get("version") == 1:
            state[f"{prefix}a"], state[f"{prefix}b"] = state[f"{prefix}b"], state[f"{prefix}a"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_a_module_over_dtensors_makes_its_tensors_of_those_that_were_stored(tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, Shard

    asyncckpt.save(tmp_path, {"model": Exchanges(1, torch.ones(4), torch.full((4,), 2.0))}, durability="none")
    with one_rank_of(1, 2) as mesh:
        a, b = (DTensor.from_local(torch.zeros(2), mesh, [Shard(0)]) for _ in range(2))
        model = Exchanges(2, a, b)
        asyncckpt.Loader(tmp_path, tensors={"model": model}).load()
        found = [parameter.to_local().tolist() for parameter in (model.a, model.b)]  # type: ignore[attr-defined]
    assert found == [[2.0, 2.0], [1.0, 1.0]]
