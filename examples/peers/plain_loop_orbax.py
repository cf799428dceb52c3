"""plain_loop.py with Orbax, which saves trees of arrays: tensors go through NumPy. Needs jax; not run by the suite."""

import sys

import numpy as np  # checkpoint
import orbax.checkpoint as ocp  # checkpoint
import torch

path, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
adam = torch.optim.AdamW(model.parameters(), lr=1e-2)


def as_arrays(state):  # checkpoint
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda one: np.array(one), state)  # checkpoint


def as_tensors(state):  # checkpoint
    return torch.utils._pytree.tree_map_only(np.ndarray, torch.from_numpy, state)  # checkpoint


options = ocp.CheckpointManagerOptions(save_interval_steps=20, max_to_keep=3)  # checkpoint
manager = ocp.CheckpointManager(path, options=options)  # checkpoint
first = 0  # checkpoint
if manager.latest_step() is not None:  # checkpoint
    found = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())  # checkpoint
    model.load_state_dict(as_tensors(found["model"]))  # checkpoint
    groups = {int(key): value for key, value in as_tensors(found["state"]).items()}  # checkpoint
    adam.load_state_dict({"state": groups, "param_groups": adam.state_dict()["param_groups"]})  # checkpoint
    first = manager.latest_step() + 1  # checkpoint
for step in range(first, steps):
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    adam.step()
    adam.zero_grad()
    state = {"model": dict(model.state_dict()), "state": adam.state_dict()["state"]}  # checkpoint
    saved = ocp.args.StandardSave(as_arrays(state))  # checkpoint
    manager.save(step, args=saved, force=step == steps - 1)  # checkpoint
manager.wait_until_finished()  # checkpoint
print(f"loss {loss.item()!r}")
