"""A small model with dropout trained by Lightning: DIRECTORY [SIGNAL STEP] ends itself by that signal in that step."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from asyncckpt.integrations import lightning as ours
from asyncckpt.trainer_state import ResumableSampler
from tests.integrations.jobs import tell

STEPS = 20
# Lightning saves no random numbers, so its own callback cannot resume what draws them.
DROPOUT = 0.0 if "MODEL_CHECKPOINT" in os.environ else 0.5


class TwoLayers(pl.LightningModule):
    def __init__(self, number: int | None = None, step: int = 0, *, is_told: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(DROPOUT), torch.nn.Linear(16, 1))
        self._signal, self._signal_step, self._is_told = number, step, is_told

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        if self._is_told:
            tell("loss", self.global_step + 1, loss.item())
        if self._signal is not None and self.global_step + 1 == self._signal_step:
            os.kill(os.getpid(), self._signal)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", (self.net(batch) - batch.sum(1, keepdim=True)).square().mean())

    def on_validation_end(self) -> None:
        if self._is_told and not self.trainer.sanity_checking:
            tell("log", self.global_step, self.trainer.callback_metrics["val_loss"].item())

    def configure_optimizers(self) -> Any:
        adam = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": adam, "lr_scheduler": torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)}


def samples() -> torch.Tensor:
    return torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


def batches() -> ours.Batches:
    data = samples()
    return ours.Batches(torch.utils.data.DataLoader(data, batch_size=4, sampler=ResumableSampler(data, seed=7)))


def held_out() -> Any:
    return torch.utils.data.DataLoader(samples()[:8], batch_size=4)


def trainer(folder: object, *callbacks: Any, **more: Any) -> pl.Trainer:
    usual: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(default_root_dir=str(folder), callbacks=list(callbacks), **{**usual, **more})


def main() -> None:
    folder = Path(sys.argv[1])
    number = signal.Signals[sys.argv[2]] if len(sys.argv) > 2 else None
    model = TwoLayers(number, int(sys.argv[3]) if number else 0, is_told=True)
    if os.environ.get("PLANT") == "random numbers":
        ours.AsyncCheckpoint.load_state_dict = lambda self, state: None  # type: ignore[method-assign]
    if "MODEL_CHECKPOINT" in os.environ:  # Lightning's own callback, with our plugin.
        own = pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=4, save_last=True, save_top_k=1)
        running = trainer(folder, own, plugins=[ours.AsyncCheckpointIO()])
    else:
        monitor = "val_loss" if "MONITOR" in os.environ else None
        running = trainer(folder, ours.AsyncCheckpoint(folder, every_n_train_steps=4, monitor=monitor))
    running.fit(model, batches(), held_out(), ckpt_path="last")
    print("ended at", running.global_step, flush=True)


if __name__ == "__main__":
    main()
