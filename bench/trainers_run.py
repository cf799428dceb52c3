"""One run of a trainer for bench/trainers.py, in a process of its own; the last line of its output has the figures."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

BATCH = 64
LAYERS = 6


class Net(torch.nn.Module):
    """Linear layers; gives the loss, as Hugging Face's Trainer wants it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) - x).square().mean()}


def run_transformers(spec: dict[str, Any], net: Net, ends: list[float]) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:  # The step before has ended, with its save.
            ends.append(time.perf_counter())

    x = torch.randn(BATCH, spec["width"])
    data = [{"x": row, "labels": row} for row in x.repeat(spec["steps"], 1)]
    arguments = TrainingArguments(
        spec["folder"],
        max_steps=spec["steps"],
        per_device_train_batch_size=BATCH,
        save_strategy="no" if spec["kind"] == "none" else "steps",
        save_steps=spec["every"],
        logging_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    if spec["kind"] == "ours":
        from asyncckpt.integrations.transformers import Trainer  # In the place of theirs.
    trainer = Trainer(model=net, args=arguments, train_dataset=data, callbacks=[Clock()])
    trainer.train()


def run_lightning(spec: dict[str, Any], net: Net, ends: list[float]) -> None:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            ends.append(time.perf_counter())
            return self.net(batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    data = torch.randn(BATCH, spec["width"]).repeat(spec["steps"], 1)
    callbacks: list[Any] = []
    if spec["kind"] == "own":
        callbacks = [pl.callbacks.ModelCheckpoint(spec["folder"], every_n_train_steps=spec["every"], save_top_k=-1)]
    if spec["kind"] == "ours":
        from asyncckpt.integrations.lightning import AsyncCheckpoint

        callbacks = [AsyncCheckpoint(spec["folder"], every_n_train_steps=spec["every"])]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(
        max_steps=spec["steps"], callbacks=callbacks, enable_checkpointing=spec["kind"] != "none", **quiet
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=BATCH))


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.manual_seed(0)
    net = Net(spec["width"])
    ends: list[float] = []
    {"transformers": run_transformers, "lightning": run_lightning}[spec["trainer"]](spec, net, ends)
    ended = time.perf_counter()
    size = 3 * 4 * sum(parameter.numel() for parameter in net.parameters())
    # The first step allocates, and the last of `ends` is where the last step began.
    print(json.dumps({"steps_s": ends[-1] - ends[1], "rest_s": ended - ends[-1], "bytes": size}))


if __name__ == "__main__":
    main()
