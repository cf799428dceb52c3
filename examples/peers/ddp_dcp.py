"""ddp.py with torch.distributed.checkpoint, doing what the Checkpointer does: newest, three stay, last step."""

import os  # checkpoint
import re  # checkpoint
import shutil  # checkpoint
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp  # checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # checkpoint

path, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model = torch.nn.parallel.DistributedDataParallel(net)
adam = torch.optim.AdamW(model.parameters(), lr=1e-2)


def saved_steps():  # checkpoint
    names = os.listdir(path) if os.path.isdir(path) else []  # checkpoint
    complete = [name for name in names if os.path.exists(os.path.join(path, name, ".metadata"))]  # checkpoint
    return sorted(int(name[5:]) for name in complete if re.fullmatch(r"step-\d+", name))  # checkpoint


# Messages of the background must not mix with those of training.
group = dist.new_group()  # checkpoint
first, pending = 0, None  # checkpoint
if saved_steps():  # checkpoint
    model_state, adam_state = get_state_dict(model, adam)  # checkpoint
    state = {"model": model_state, "adam": adam_state}  # checkpoint
    dcp.load(state, checkpoint_id=os.path.join(path, f"step-{saved_steps()[-1]}"))  # checkpoint
    set_state_dict(model, adam, model_state_dict=state["model"], optim_state_dict=state["adam"])  # checkpoint
    first = saved_steps()[-1] + 1  # checkpoint
for step in range(first, steps):
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    adam.step()
    adam.zero_grad()
    if (step > 0 and step % 20 == 0) or step == steps - 1:  # checkpoint
        if pending is not None:  # checkpoint
            pending.result()  # checkpoint
            for old in saved_steps()[:-3] if dist.get_rank() == 0 else []:  # checkpoint
                shutil.rmtree(os.path.join(path, f"step-{old}"))  # checkpoint
        model_state, adam_state = get_state_dict(model, adam)  # checkpoint
        state = {"model": model_state, "adam": adam_state}  # checkpoint
        name = os.path.join(path, f"step-{step}")  # checkpoint
        pending = dcp.async_save(state, checkpoint_id=name, process_group=group)  # checkpoint
if pending is not None:  # checkpoint
    pending.result()  # checkpoint
if dist.get_rank() == 0:
    print(f"loss {loss.item()!r}")
# The group's threads end here: one that lets go of a tensor while the interpreter ends makes torch abort.
del group
dist.destroy_process_group()
