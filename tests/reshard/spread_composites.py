"""One rank of a job whose DTensors are over composites. Its words: rank, ranks, folder, and what to do with which name:

save:NAME, own:NAME, whole:NAME     save a tensor whose scale is the same on all ranks; each rank's own; that is not cut
load:NAME                           load it into another one
momentum:NAME                       train with momentum of such tensors, save, and go on
resume:NAME, partly:NAME            resume in a fresh job, or in one where a parameter has a state already, and go on
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import asyncckpt
from tests.worlds.composites import Int8Rows, Momentum8, OneScale

ROWS, WIDTH = 12, 4


def codes(seed: int) -> torch.Tensor:
    return torch.randint(-100, 100, (ROWS, WIDTH), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def spread(seed: int, scale: float, *, is_whole: bool = False) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = ROWS // dist.get_world_size()
    own = codes(seed) if is_whole else codes(seed)[rows * dist.get_rank() :][:rows].clone()
    placements = [Replicate() if is_whole else Shard(0)]
    return DTensor.from_local(OneScale(own, torch.tensor(scale)), mesh, placements, run_check=False)


def here(tensor: Any) -> dict[str, Any]:
    local = tensor._local_tensor
    return {"codes": local.codes.tolist(), "scale": local.scale.item()}


def resumed(folder: Path, own: dict[str, Any], how: str) -> dict[str, Any]:
    """Train 3 steps and save, or load, where one of two weights may have a state; then train 3 more."""
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = [torch.nn.Parameter(distribute_tensor(torch.randn(ROWS, WIDTH), mesh, [Shard(0)])) for _ in range(2)]
    optimizer = Momentum8(weights)
    state = {"weights": weights, "optimizer": optimizer}

    def train(first: int) -> None:
        for step in range(first, first + 3):
            for number, weight in enumerate(weights):
                drawn = torch.Generator().manual_seed(10 * step + number)
                weight.grad = distribute_tensor(torch.randn(ROWS, WIDTH, generator=drawn), mesh, [Shard(0)])
            optimizer.step()

    if how != "momentum":
        if how == "partly":
            weights[0].grad = distribute_tensor(torch.ones(ROWS, WIDTH), mesh, [Shard(0)])
            optimizer.step()
        asyncckpt.Loader(folder, tensors=state, **own).load()
    else:
        train(0)
        with asyncckpt.Saver(path=folder, tensors=state, **own) as saver:
            saver.save(3)
    train(3)
    locals = [optimizer.state[weight]["momentum"]._local_tensor for weight in weights]
    found = {"codes": [local.codes for local in locals], "scale": [local.scale for local in locals]}
    found["weight"] = [weight.detach().to_local() for weight in weights]
    return {key: torch.stack(each, 1).tolist() for key, each in found.items()}


def done(word: str, folder: Path, own: dict[str, Any]) -> Any:
    how, _, name = word.partition(":")
    name = folder / name  # type: ignore[assignment]
    if how in ("momentum", "resume", "partly"):
        return resumed(name, own, how)  # type: ignore[arg-type]
    if how in ("save", "own", "whole"):
        scale = 2.0 + dist.get_rank() if how == "own" else 2.0
        tensor = spread(1, scale, is_whole=how == "whole")
        with asyncckpt.Saver(path=name, tensors={"w": tensor}, **own) as saver:
            saver.save(1)
        return here(tensor)
    target = spread(2, 9.0)
    try:
        asyncckpt.Loader(name, tensors={"w": target}, **own).load()
    except asyncckpt.IncompatibleError as error:
        return f"{error} / {here(target) == here(spread(2, 9.0))}"
    return here(target)


def main(rank: int, ranks_count: int, folder: Path, words: list[str]) -> None:
    store = dist.FileStore(str(folder / f"store-{ranks_count}-{words[0].replace(':', '-')}"), ranks_count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks_count)
    torch.serialization.add_safe_globals([Int8Rows, OneScale])
    own = {"shard_index": rank, "shard_num": ranks_count}
    found = [done(word, folder, own) for word in words]
    (folder / f"found-{ranks_count}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
