"""Tables of TorchRec: python examples/jobs/torchrec_bags.py /tmp/run 100"""

import sys

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import asyncckpt  # checkpoint

path, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
table = EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=1000, feature_names=["item"])
model = torch.nn.ModuleDict({"bags": EmbeddingBagCollection(tables=[table]), "top": torch.nn.Linear(8, 1)})
adam = torch.optim.Adam(model.parameters(), lr=1e-2)
with asyncckpt.Checkpointer(path, every=20, keep=3, model=model, adam=adam) as ckpt:  # checkpoint
    for step in range(ckpt.restore(), steps):  # checkpoint
        ids = torch.randint(0, 1000, (32,), generator=torch.Generator().manual_seed(step))
        bags = KeyedJaggedTensor(keys=["item"], values=ids, lengths=torch.full((8,), 4))
        loss = (model["top"](model["bags"](bags).values()) - 1).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        ckpt.step(step)  # checkpoint
print(f"loss {loss.item()!r}")
