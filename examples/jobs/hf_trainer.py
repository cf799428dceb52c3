"""Hugging Face's Trainer: python examples/jobs/hf_trainer.py /tmp/run 20"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from asyncckpt.integrations.transformers import Trainer  # checkpoint

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
trainer.train(resume_from_checkpoint=trainer.has_checkpoint())  # checkpoint
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(f"loss {losses[-1]!r}")
