"""Two ranks under DDP: DIRECTORY EPOCHS, of five steps each; each rank has its own share of the data, and dropout."""

from __future__ import annotations

import sys

import torch

from asyncckpt.integrations.lightning import AsyncCheckpoint
from tests.integrations.lightning_job import TwoLayers, batches, trainer


def main() -> None:
    folder, epochs = sys.argv[1], int(sys.argv[2])
    saved = AsyncCheckpoint(folder, every_n_train_steps=3)
    running = trainer(folder, saved, max_epochs=epochs, devices=2, strategy="ddp")
    torch.distributed.init_process_group("gloo")
    running.fit(TwoLayers(is_told=True), batches(), ckpt_path="last")
    print("ended at", running.global_step, flush=True)


if __name__ == "__main__":
    main()
