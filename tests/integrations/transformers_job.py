"""A tiny Llama trained by Hugging Face's Trainer: OUTPUT [SIGNAL STEP] ends itself by that signal in that step."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from asyncckpt.integrations import transformers as ours
from tests.integrations.jobs import tell, wait_for_step

STEPS = 20


def model() -> LlamaForCausalLM:
    set_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attention_dropout=0.2))


def samples(count: int = 40) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, 64, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in drawn]


def arguments(output: object, **more: Any) -> TrainingArguments:
    usual = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "logging_steps": 3,
        "metric_for_best_model": "loss",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(str(output), **{**usual, **more})


def trainer(output: object, callbacks: list[Any] | None = None, **more: Any) -> ours.Trainer:
    own = {
        name: more.pop(name)
        for name in ("checkpoint_dir", "discard_newer", "checkpointing", "restoring")
        if name in more
    }
    data = samples()
    return ours.Trainer(
        model=model(),
        args=arguments(output, **more),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=callbacks,
        **own,
    )


class Told(TrainerCallback):
    """Prints the losses, and sends this process a signal in the middle of a step."""

    def __init__(self, number: int | None, step: int) -> None:
        self._number, self._step = number, step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._number is not None and state.global_step + 1 == self._step:
            if torch.distributed.is_initialized():  # Ranks train faster than a slow machine commits.
                wait_for_step(Path(args.output_dir) / "checkpoints")
            os.kill(os.getpid(), self._number)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            tell("log", state.global_step, logs["loss"])


class Telling:
    def training_step(self, *given: Any, **more: Any) -> torch.Tensor:
        loss = super().training_step(*given, **more)  # type: ignore[misc]
        tell("loss", self.state.global_step + 1, loss.item())
        return loss


class TellingTrainer(Telling, ours.Trainer):
    """Saves by the mixin."""


class TellingOther(Telling, Trainer):
    """Saves as transformers does, but for the callback."""


def main() -> None:
    number = signal.Signals[sys.argv[2]] if len(sys.argv) > 2 else None
    data = samples()
    kind, callbacks = (TellingOther, [ours.AsyncCheckpoint()]) if "CALLBACK" in os.environ else (TellingTrainer, [])
    running = kind(
        model=model(),
        args=arguments(sys.argv[1], gradient_accumulation_steps=1),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=[*callbacks, Told(number, int(sys.argv[3]) if number else 0)],
    )
    if os.environ.get("PLANT") == "random numbers":
        ours.HeldRng.set_held = lambda self: None  # type: ignore[method-assign]
    if os.environ.get("PLANT") == "loss":
        ours.TrainerValues.set_loss = lambda self: None  # type: ignore[method-assign]
    resumes = running.has_checkpoint()
    print("resumes", resumes)
    running.train(resume_from_checkpoint=resumes)
    print("ended at", running.state.global_step, flush=True)


if __name__ == "__main__":
    main()
