"""A loop with Accelerate: DIRECTORY [SIGNAL STEP] ends itself by that signal in that step."""

from __future__ import annotations

import os
import signal
import sys

import torch
from accelerate import Accelerator

from asyncckpt.integrations.accelerate import checkpointer
from asyncckpt.trainer_state import DataPosition, ResumableSampler
from tests.integrations.jobs import tell

STEPS = 20


def main() -> None:
    folder = sys.argv[1]
    number, at = (signal.Signals[sys.argv[2]], int(sys.argv[3])) if len(sys.argv) > 2 else (None, 0)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(adam, 3, 0.5)
    data = torch.randn(40 * accelerator.num_processes, 4, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=ResumableSampler(data, seed=7))
    position = DataPosition(loader)  # It shares samples among the processes, so the loader is not prepared.
    model, adam, schedule = accelerator.prepare(model, adam, schedule)
    with checkpointer(accelerator, folder, every=4, data=position) as ckpt:
        step = ckpt.restore()
        if os.environ.get("PLANT") == "random numbers":
            torch.manual_seed(1)
        print("resumes", step, flush=True)
        while step < STEPS:
            for batch in position:
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                if number is not None and step == at:
                    os.kill(os.getpid(), number)
                adam.step()
                schedule.step()
                adam.zero_grad()
                tell("loss", step, accelerator.gather(loss.detach()).sum().item())
                ckpt.step(step)
                step += 1
    print("ended at", step, flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
