"""A loop in torchtitan's shape under FSDP2: DIRECTORY STEPS."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from asyncckpt.integrations.torchtitan import CheckpointManager
from asyncckpt.trainer_state import StepCounter
from tests.integrations.jobs import tell


def main() -> None:
    folder, steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank, ranks_count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks_count,)))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 3, 0.5)
    counter = StepCounter()
    torch.manual_seed(rank)
    own = CheckpointManager(None, [model], adam, schedule, {"train_state": counter}, folder=folder, interval=4)
    print("loaded", own.load(), flush=True)
    while int(counter) < steps:
        step = counter.advance()
        batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        adam.step()
        schedule.step()
        adam.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        tell("loss", step, total.item())
        own.maybe_wait_for_staging()
        own.save(step, last_step=step == steps)
    own.maybe_wait_for_saving()
    own.close()
    print("ended at", int(counter), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
