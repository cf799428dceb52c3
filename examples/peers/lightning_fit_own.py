"""lightning_fit.py with Lightning's own ModelCheckpoint: blocking, without random numbers and position in the data."""

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint  # checkpoint


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        self.loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        return self.loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


path, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = Model()
data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
batches = torch.utils.data.DataLoader(data, 8, shuffle=True)
keeping = {"save_last": True, "save_top_k": 3, "monitor": "step", "mode": "max"}  # checkpoint
saved = ModelCheckpoint(path, every_n_train_steps=5, save_on_exception=True, **keeping)  # checkpoint
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
pl.Trainer(max_steps=steps, callbacks=[saved], **quiet).fit(model, batches, ckpt_path="last")  # checkpoint
print(f"loss {model.loss.item()!r}")
