"""Data parallel: torchrun --nproc-per-node 2 examples/jobs/ddp.py /tmp/run 100"""

import sys

import torch
import torch.distributed as dist

import asyncckpt  # checkpoint

path, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model = torch.nn.parallel.DistributedDataParallel(net)
adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
with asyncckpt.Checkpointer(path, every=20, keep=3, model=model, adam=adam) as ckpt:  # checkpoint
    for step in range(ckpt.restore(), steps):  # checkpoint
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        ckpt.step(step)  # checkpoint
if dist.get_rank() == 0:
    print(f"loss {loss.item()!r}")
dist.destroy_process_group()
