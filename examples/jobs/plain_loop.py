"""A plain training loop: python examples/jobs/plain_loop.py /tmp/run 100"""

import sys

import torch

import asyncckpt  # checkpoint

path, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
with asyncckpt.Checkpointer(path, every=20, keep=3, model=model, adam=adam) as ckpt:  # checkpoint
    for step in range(ckpt.restore(), steps):  # checkpoint
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        ckpt.step(step)  # checkpoint
print(f"loss {loss.item()!r}")
