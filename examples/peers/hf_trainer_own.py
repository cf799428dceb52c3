"""hf_trainer.py with Hugging Face's own saving: blocking, files of torch.save; what follows the last one is lost."""

import os  # checkpoint
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint  # checkpoint

path, steps = sys.argv[1], int(sys.argv[2])
set_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, **layers))
rows = torch.randint(0, 64, (160, 8), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in rows]
saving = {"save_steps": 5, "save_total_limit": 3}  # checkpoint
usual = {"lr_scheduler_type": "constant", "logging_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
trainer = Trainer(model=model, args=TrainingArguments(path, max_steps=steps, **usual, **saving), train_dataset=data)
last = get_last_checkpoint(path) if os.path.isdir(path) else None  # checkpoint
trainer.train(resume_from_checkpoint=last)  # checkpoint
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[-1]!r}")
