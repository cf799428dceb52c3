"""A regression on two workers of Ray Train: OUTPUT [STEP] ends worker 1 by SIGKILL in that step, once.

Every worker notes its losses in a file of OUTPUT, since Ray takes what workers print.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import asyncckpt
from asyncckpt.integrations.ray import checkpointer, report, saved_step

STEPS = 20
WORKERS = 2
SHARED_MEMORY_BYTES = 100 << 20


def train_loop(config: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    noted = Path(config["output"], f"losses-{rank}.txt")
    with checkpointer(every=4, keep=3, model=model, adam=adam) as ckpt:
        first = ckpt.restore()
        for step in range(first, STEPS):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + rank))
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            if rank == 1 and step == config["killed_step"] and first == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            adam.step()
            adam.zero_grad()
            with noted.open("a") as file:
                file.write(f"loss {step} {loss.item()!r}\n")
            ckpt.step(step)
            report(ckpt, {"loss": loss.item(), "first": first})
    report(ckpt, {"loss": loss.item(), "first": first})


def main() -> None:
    output = Path(sys.argv[1]).resolve()
    output.mkdir(parents=True)
    config = {"output": str(output), "killed_step": int(sys.argv[2]) if len(sys.argv) > 2 else -1}
    temporary = tempfile.mkdtemp(prefix="ray-")  # Ray's sockets need a short path.
    ray.init(num_cpus=WORKERS, object_store_memory=SHARED_MEMORY_BYTES, include_dashboard=False, _temp_dir=temporary)
    run_config = RunConfig(
        storage_path=str(output),
        name="run",
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(num_to_keep=1),
    )
    trainer = TorchTrainer(
        train_loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=WORKERS), run_config=run_config
    )
    result = trainer.fit()
    path, step = saved_step(result.checkpoint)
    for rank in range(WORKERS):
        for line in (output / f"losses-{rank}.txt").read_text().splitlines():
            name, number, loss = line.split()
            print(name, int(number) * WORKERS + rank, loss)
    print("ended at", step, "from", result.metrics["first"], "tensors", len(asyncckpt.load(path, step)["model"]))
    print("directory", path == str(output / "run" / "checkpoints"), "steps", asyncckpt.list_steps(path))
    ray.shutdown()
    shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    main()
