"""Train a model under FSDP2 on any number of ranks, be interrupted, go on with another number of ranks:

    torchrun --nproc-per-node 2 examples/dcp_fsdp.py /tmp/run --steps 40
    torchrun --nproc-per-node 4 examples/dcp_fsdp.py /tmp/run --steps 80

torch.distributed.checkpoint plans and reshards; asyncckpt.dcp stages, writes, commits and reads.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import asyncckpt
import asyncckpt.dcp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="the checkpoint directory, the same for all ranks")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    saving = dist.new_group(backend="gloo")  # What is saved in the background must not meet the training's collectives.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.ReLU(), torch.nn.Linear(33, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    first = resume(arguments.path, model, optimizer) + 1 if has_checkpoint(arguments.path) else 1
    saved = None
    for step in range(first, arguments.steps + 1):
        loss = train(model, optimizer, step)
        if step % arguments.every == 0:
            if saved is not None:
                saved.result()  # One save at a time; an error of the last one is raised here.
            model_state, optimizer_state = get_state_dict(model, optimizer)
            saved = dcp.async_save(
                {"model": model_state, "optimizer": optimizer_state, "step": step},
                storage_writer=asyncckpt.dcp.StorageWriter(arguments.path, step=step, keep=3),
                planner=asyncckpt.dcp.SavePlanner(),
                process_group=saving,
            )
            saved = getattr(saved, "upload_completion", saved)
    if saved is not None:
        saved.result()
    if dist.get_rank() == 0 and first <= arguments.steps:
        print(f"step {arguments.steps}: loss {loss:.6f}, checkpoints {asyncckpt.list_steps(arguments.path)}")
    dist.destroy_process_group()


def has_checkpoint(path: str) -> bool:
    return os.path.isdir(os.path.join(path, "manifests")) and bool(asyncckpt.list_steps(path))


def resume(path: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint; returns its step."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, storage_reader=asyncckpt.dcp.StorageReader(path))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if dist.get_rank() == 0:
        print(f"resumed at step {state['step']}")
    return state["step"]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on a batch that depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 16, generator=generator)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    main()
