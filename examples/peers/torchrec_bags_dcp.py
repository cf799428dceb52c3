"""torchrec_bags.py with torch.distributed.checkpoint, doing what the Checkpointer does."""

import os  # checkpoint
import re  # checkpoint
import shutil  # checkpoint
import sys

import torch
import torch.distributed.checkpoint as dcp  # checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # checkpoint
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

path, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
table = EmbeddingBagConfig(name="item", embedding_dim=8, num_embeddings=1000, feature_names=["item"])
model = torch.nn.ModuleDict({"bags": EmbeddingBagCollection(tables=[table]), "top": torch.nn.Linear(8, 1)})
adam = torch.optim.Adam(model.parameters(), lr=1e-2)


def saved_steps():  # checkpoint
    names = os.listdir(path) if os.path.isdir(path) else []  # checkpoint
    complete = [name for name in names if os.path.exists(os.path.join(path, name, ".metadata"))]  # checkpoint
    return sorted(int(name[5:]) for name in complete if re.fullmatch(r"step-\d+", name))  # checkpoint


first, pending = 0, None  # checkpoint
if saved_steps():  # checkpoint
    model_state, adam_state = get_state_dict(model, adam)  # checkpoint
    state = {"model": model_state, "adam": adam_state}  # checkpoint
    dcp.load(state, checkpoint_id=os.path.join(path, f"step-{saved_steps()[-1]}"))  # checkpoint
    set_state_dict(model, adam, model_state_dict=state["model"], optim_state_dict=state["adam"])  # checkpoint
    first = saved_steps()[-1] + 1  # checkpoint
for step in range(first, steps):
    ids = torch.randint(0, 1000, (32,), generator=torch.Generator().manual_seed(step))
    bags = KeyedJaggedTensor(keys=["item"], values=ids, lengths=torch.full((8,), 4))
    loss = (model["top"](model["bags"](bags).values()) - 1).square().mean()
    loss.backward()
    adam.step()
    adam.zero_grad()
    if (step > 0 and step % 20 == 0) or step == steps - 1:  # checkpoint
        if pending is not None:  # checkpoint
            pending.result()  # checkpoint
            for old in saved_steps()[:-3]:  # checkpoint
                shutil.rmtree(os.path.join(path, f"step-{old}"))  # checkpoint
        model_state, adam_state = get_state_dict(model, adam)  # checkpoint
        state = {"model": model_state, "adam": adam_state}  # checkpoint
        pending = dcp.async_save(state, checkpoint_id=os.path.join(path, f"step-{step}"))  # checkpoint
if pending is not None:  # checkpoint
    pending.result()  # checkpoint
print(f"loss {loss.item()!r}")
