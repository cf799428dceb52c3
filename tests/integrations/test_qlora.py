"""A base of 4 bits under an adapter, as bitsandbytes and PEFT make it: it trains on as with the library's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from asyncckpt.integrations import transformers as ours

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")


def losses(folder: Path, base: Path, kind: type[Any], *, double: bool) -> list[float]:
    """Train 4 steps, resume from the checkpoint of step 3, and return the losses of the resumed run."""
    rows = torch.randint(0, 64, (40, 8), generator=torch.Generator().manual_seed(3))

    def trainer(steps: int) -> Any:
        form = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=double,
            bnb_4bit_compute_dtype=torch.float32,
        )
        model = LlamaForCausalLM.from_pretrained(base, quantization_config=form, device_map="cpu")
        torch.manual_seed(1)
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        arguments = TrainingArguments(
            str(folder), max_steps=steps, save_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1,
            seed=5, learning_rate=1e-2, lr_scheduler_type="constant",
        )  # fmt: skip
        return kind(model=adapted, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])

    trainer(4).train()
    resumed = trainer(6)
    resumed.train(resume_from_checkpoint=True)
    return [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]


@pytest.mark.parametrize("double", [False, True])
def test_qlora_resumes_as_with_the_librarys_own_trainer(tmp_path: Path, double: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    own, mine = (
        losses(tmp_path / name, tmp_path / "base", kind, double=double)
        for name, kind in (("own", Trainer), ("ours", ours.Trainer))
    )
    assert len(own) == 6
    assert mine == own
