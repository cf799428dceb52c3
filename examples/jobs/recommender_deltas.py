"""A recommender that saves often, by deltas: python examples/jobs/recommender_deltas.py /tmp/run 100"""

import sys

import torch

import asyncckpt  # checkpoint
from asyncckpt import HashTable, nn, optim

path, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
items = nn.HashEmbeddingBag(HashTable("item", 8, optimizer_slots={"sum": torch.float32}), mode="sum")
model = torch.nn.Sequential(items, torch.nn.Linear(8, 1))
adam, adagrad = torch.optim.Adam(model.parameters()), optim.SparseAdagrad(model, lr=0.1)
state = {"model": model, "adam": adam, "adagrad": adagrad}
deltas = asyncckpt.DeltaPolicy()  # checkpoint
with asyncckpt.Checkpointer(path, every=5, keep=3, deltas=deltas, **state) as ckpt:  # checkpoint
    for step in range(ckpt.restore(), steps):  # checkpoint
        ids = torch.randint(0, 20_000, (64, 4), generator=torch.Generator().manual_seed(step))
        loss = (model(ids) - (ids % 2).float().mean(1, keepdim=True)).square().mean()
        loss.backward()
        for optimizer in (adam, adagrad):
            optimizer.step()
            optimizer.zero_grad()
        ckpt.step(step)  # checkpoint
print(f"loss {loss.item()!r}")
