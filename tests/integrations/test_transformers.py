"""Hugging Face's own Trainer with ours: resumed runs are bit-equal, the best model comes out, retention is theirs."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

import asyncckpt
from asyncckpt.integrations.transformers import AsyncCheckpoint, export_pretrained
from asyncckpt.integrations.transformers import Trainer as OurTrainer
from tests.integrations.jobs import differences, run_job
from tests.integrations.transformers_job import STEPS, arguments, model, samples, trainer

KILLED, TERMINATED = -signal.SIGKILL, 128 + signal.SIGTERM


def test_a_run_killed_and_terminated_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    whole, _ = run_job("transformers_job", tmp_path / "whole")
    parts = [run_job("transformers_job", tmp_path / "parts", "SIGKILL", 7, expected=[KILLED])[0]]
    part, _ = run_job("transformers_job", tmp_path / "parts", "SIGTERM", 10, expected=[TERMINATED])
    assert max(step for _, step in part) == 10  # The step in which it came is the last one.
    assert asyncckpt.list_steps(tmp_path / "parts" / "checkpoints")[-1] == 10
    shutil.copytree(tmp_path / "parts", tmp_path / "planted")
    parts += [part, run_job("transformers_job", tmp_path / "parts", "SIGKILL", 15, expected=[KILLED])[0]]
    last, printed = run_job("transformers_job", tmp_path / "parts")
    assert "resumes True" in printed
    assert f"ended at {STEPS}" in printed
    assert differences(whole, *parts, last) == {}
    # Step 10 is no multiple of logging_steps, and dropout draws: each of both shows when it is not restored.
    for planted in ("random numbers", "loss"):
        wrong, _ = run_job(
            "transformers_job", tmp_path / "planted", "SIGKILL", 13, expected=[KILLED], environment={"PLANT": planted}
        )
        assert {name for name, _ in wrong if differences(whole, wrong)} != set()
        assert any(whole[key] != values for key, values in wrong.items())


def test_the_callback_alone_resumes_bit_for_bit_too(tmp_path: Path) -> None:
    callback = {"CALLBACK": "1"}
    whole, _ = run_job("transformers_job", tmp_path / "whole")
    parts = [run_job("transformers_job", tmp_path / "parts", "SIGKILL", 7, expected=[KILLED], environment=callback)[0]]
    term = run_job("transformers_job", tmp_path / "parts", "SIGTERM", 10, expected=[TERMINATED], environment=callback)
    last, printed = run_job("transformers_job", tmp_path / "parts", environment=callback)
    assert "resumes True" in printed
    assert not list((tmp_path / "parts").glob("checkpoint-*"))
    assert differences(whole, *parts, term[0], last) == {}


def test_callbacks_of_a_resumed_run_end_in_the_state_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole, resumed = trainer(tmp_path / "whole"), trainer(tmp_path / "resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-8"))
    assert resumed.state.global_step == whole.state.global_step
    assert resumed.state.stateful_callbacks == whole.state.stateful_callbacks


def test_the_callback_takes_the_trainer_that_it_is_given_to(tmp_path: Path) -> None:
    class Other(Trainer):
        pass

    def made(*callbacks: object) -> Trainer:
        given = {"model": model(), "args": arguments(tmp_path, eval_strategy="no"), "train_dataset": samples()}
        return Other(**given, callbacks=list(callbacks))

    running = made(AsyncCheckpoint(tmp_path / "elsewhere"))
    assert isinstance(running, Other)
    assert type(running).__name__ == "Other"
    assert running.checkpoint_dir == tmp_path / "elsewhere"
    assert not hasattr(made(), "checkpoint_dir"), "the class itself stays as it is"
    late = made()
    late.add_callback(AsyncCheckpoint())
    with pytest.raises(asyncckpt.UsageError, match="after the Trainer"):
        late.train()
    with pytest.raises(asyncckpt.UsageError, match="in the background already"):
        trainer(tmp_path, callbacks=[AsyncCheckpoint()])


def test_several_ranks_resume_together(tmp_path: Path) -> None:
    whole, _ = run_job("transformers_job", tmp_path / "whole", ranks=2)
    run_job("transformers_job", tmp_path / "parts", "SIGKILL", 7, ranks=2, expected=[1, KILLED, 137])
    last, printed = run_job("transformers_job", tmp_path / "parts", ranks=2)
    assert "resumes True" in printed
    wrong = {key: values for key, values in last.items() if values != whole[key]}
    assert wrong == {}


def test_the_best_model_is_loaded_in_the_end_and_exported(tmp_path: Path) -> None:
    running = trainer(tmp_path, load_best_model_at_end=True, save_total_limit=2)
    running.train()
    best = running.state.best_global_step
    assert running.state.best_metric == min(e["eval_loss"] for e in running.state.log_history if "eval_loss" in e)
    saved = asyncckpt.list_steps(running.checkpoint_dir)
    assert saved[-1] == STEPS
    assert best in saved
    assert len(saved) <= 3
    assert running.export_pretrained(tmp_path / "best", "best") == best
    assert export_pretrained(running.checkpoint_dir, tmp_path / "last") == STEPS
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    for name, tensor in running.model.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name])
    whole = asyncckpt.load(running.checkpoint_dir, STEPS)["model"]
    last = AutoModelForCausalLM.from_pretrained(tmp_path / "last").state_dict()
    assert all(torch.equal(whole[name], last[name]) for name in last)
    with pytest.raises(asyncckpt.ConflictError, match="already exists"):
        export_pretrained(running.checkpoint_dir, tmp_path / "last")
    assert not list(tmp_path.glob(".hf-*"))


def test_the_last_step_is_that_of_training_not_the_best_model(tmp_path: Path) -> None:
    running = trainer(tmp_path, load_best_model_at_end=True, greater_is_better=True, learning_rate=5.0)
    running.train()
    assert running.state.best_global_step < STEPS
    last = asyncckpt.load(running.checkpoint_dir)["model"]
    assert any(not torch.equal(last[name], tensor) for name, tensor in running.model.state_dict().items())


def test_resuming_by_the_path_of_a_step(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.train()
    with pytest.raises(asyncckpt.UsageError, match="cannot resume from step"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    with pytest.raises(asyncckpt.UsageError, match="no step 7"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    elsewhere = trainer(tmp_path / "other")
    elsewhere.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    again = trainer(tmp_path, discard_newer=True)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoints" / "checkpoint-8"))
    for other in (elsewhere, again):
        for name, tensor in first.model.state_dict().items():
            assert torch.equal(tensor, other.model.state_dict()[name])
        assert [e.get("loss") for e in other.state.log_history] == [e.get("loss") for e in first.state.log_history]
    assert asyncckpt.list_steps(elsewhere.checkpoint_dir) == [12, 16, 20]


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_changed_model_is_resumed_as_it_says(tmp_path: Path, is_elsewhere: bool) -> None:
    first = trainer(tmp_path)
    first.train()
    path = str(tmp_path / "checkpoints" / "checkpoint-8")
    weights = asyncckpt.load(first.checkpoint_dir, 8)["model"]
    seen: list[Any] = []

    class Looks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if not seen:
                seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})

    def changed(**more: Any) -> Any:
        where = tmp_path / "other" if is_elsewhere else tmp_path
        running = trainer(where, callbacks=[Looks()], discard_newer=True, **more)
        running.model.new_layer = torch.nn.Linear(3, 2)
        return running

    with pytest.raises(asyncckpt.IncompatibleError, match=r"only in this state .*new_layer"):
        changed().train(resume_from_checkpoint=path)
    with pytest.raises(asyncckpt.UsageError, match="restoring has no 'stric'"):
        changed(restoring={"stric": False})
    with pytest.warns(RuntimeWarning, match=r"'optimizer' .*its parameters are others.*it stays as it is"):
        changed(restoring={"strict": False}).train(resume_from_checkpoint=path)
    assert all(torch.equal(seen[-1][name], weights[name]) for name in weights)


def test_a_run_of_transformers_itself_goes_on_here(tmp_path: Path) -> None:
    data = samples()
    theirs = Trainer(model=model(), args=arguments(tmp_path), train_dataset=data, eval_dataset=data[:8])
    theirs.train()
    shutil.rmtree(tmp_path / "checkpoint-16")
    shutil.rmtree(tmp_path / "checkpoint-20")
    ours = trainer(tmp_path)
    assert ours.has_checkpoint()
    ours.train(resume_from_checkpoint=True)
    for name, tensor in theirs.model.state_dict().items():
        assert torch.equal(tensor, ours.model.state_dict()[name])
    assert asyncckpt.list_steps(ours.checkpoint_dir) == [16, 20]


def test_a_second_run_does_not_go_into_the_directory_of_another(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=4).train()
    with pytest.raises(asyncckpt.UsageError, match="holds another run"):
        trainer(tmp_path, max_steps=4).train()
    assert asyncckpt.list_steps(tmp_path / "checkpoints") == [4]


@pytest.mark.parametrize(("strategy", "expected"), [("epoch", [10, 20]), ("no", []), ("best", None)])
def test_when_to_save_is_up_to_the_arguments(tmp_path: Path, strategy: str, expected: list[int] | None) -> None:
    evaluated = "epoch" if strategy != "no" else "no"
    running = trainer(tmp_path, save_strategy=strategy, eval_strategy=evaluated, save_only_model=strategy == "best")
    running.train()
    found = asyncckpt.list_steps(running.checkpoint_dir) if expected != [] else []
    assert found == expected or (expected is None and running.state.best_global_step in found)
    assert (tmp_path / "checkpoints").exists() == (expected != [])


def test_an_interrupted_run_saves_its_last_step(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
            if state.global_step == 6:  # type: ignore[attr-defined]
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, callbacks=[Interrupt()]).train()
    assert asyncckpt.list_steps(tmp_path / "checkpoints") == [4, 6]
    assert asyncckpt.Loader(tmp_path / "checkpoints").load().metadata["asyncckpt.half_way"] is False


def test_the_best_step_may_lie_in_the_directory_that_was_resumed_from(tmp_path: Path) -> None:
    first = trainer(tmp_path / "a", load_best_model_at_end=True, greater_is_better=True, learning_rate=0.3)
    first.train()
    best = first.state.best_global_step
    assert best < 12
    other = trainer(tmp_path / "b", load_best_model_at_end=True, greater_is_better=True, learning_rate=0.3)
    other.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-12"))
    assert other.state.best_global_step == best
    for name, tensor in asyncckpt.load(first.checkpoint_dir, best)["model"].items():
        assert torch.equal(tensor, other.model.state_dict()[name])


def test_a_model_of_another_dtype_than_its_config_says_is_exported(tmp_path: Path) -> None:
    running = trainer(tmp_path, max_steps=4)
    running.model.config.dtype = torch.bfloat16
    running.train()
    assert export_pretrained(running.checkpoint_dir, tmp_path / "out") == 4
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in running.model.state_dict().items():
        assert torch.equal(tensor, found[name])


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    running = trainer(tmp_path)
    running.args.push_to_hub, running.args.hub_strategy = True, "every_save"
    with pytest.raises(asyncckpt.UnsupportedError, match="not pushed"):
        running.train()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [False, True])
def test_each_trial_of_a_search_has_a_folder_of_its_own(tmp_path: Path, given: bool) -> None:
    where = tmp_path / "elsewhere" if given else None
    data = samples()
    running = OurTrainer(
        model_init=lambda trial=None: model(),
        args=arguments(tmp_path / "out", num_train_epochs=1),
        train_dataset=data,
        eval_dataset=data[:8],
        checkpoint_dir=where,
    )

    def space(trial: Any) -> dict[str, float]:
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2)}

    best = running.hyperparameter_search(hp_space=space, n_trials=3, backend="optuna", direction="minimize")
    assert best.run_id in ("0", "1", "2")
    for number in range(3):
        name = f"run-{number}"
        directory = where / name if where is not None else tmp_path / "out" / name / "checkpoints"
        assert asyncckpt.list_steps(directory)
    running.train()
    assert asyncckpt.list_steps(where or tmp_path / "out" / "checkpoints"), "the run after the search has its own"


@pytest.mark.parametrize("kind", ["lora", "two adapters", "modules to save", "prompts"])
def test_adapters_are_exported_as_the_trainer_itself_saves_them(tmp_path: Path, kind: str) -> None:
    def adapted() -> Any:
        more = {"modules_to_save": ["lm_head"]} if kind == "modules to save" else {}
        config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", bias="all", **more)
        if kind == "prompts":
            config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        made = peft.get_peft_model(model(), config)
        if kind == "two adapters":
            made.add_adapter("other", peft.LoraConfig(target_modules=["v_proj"]))
        return made

    data = samples()
    given = {"args": arguments(tmp_path / "own", num_train_epochs=1), "train_dataset": data, "eval_dataset": data[:8]}
    theirs = Trainer(model=adapted(), **given)
    theirs.train()
    theirs.save_model(str(tmp_path / "theirs"))
    running = OurTrainer(model=adapted(), **given, checkpoint_dir=tmp_path / "ours")
    running.train()
    running.export_pretrained(tmp_path / "exported")
    own, exported = tmp_path / "theirs", tmp_path / "exported"
    names = sorted(path.relative_to(own) for path in own.rglob("adapter_*"))
    assert len(names) == (4 if kind == "two adapters" else 2)
    for name in names:
        if name.suffix == ".safetensors":
            one, other = load_file(own / name), load_file(exported / name)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
        else:
            assert json.loads((own / name).read_text()).keys() == json.loads((exported / name).read_text()).keys()
    with_adapter = peft.PeftModel.from_pretrained(model(), exported)
    before, after = running.model.eval(), with_adapter.eval()
    tokens = data[0]["input_ids"][None]
    assert torch.equal(before(input_ids=tokens).logits, after(input_ids=tokens).logits)


def test_why_there_is_no_best_step(tmp_path: Path) -> None:
    values = {4: 2.0, 8: 3.0, 12: 1.0, 16: 4.0, 20: 5.0}

    def evaluated(running: Any, loss: dict[int, float]) -> None:
        real = running.evaluation_loop

        def loop(*given: Any, **more: Any) -> Any:
            output = real(*given, **more)
            output.metrics["eval_loss"] = loss.get(running.state.global_step, math.nan)
            return output

        running.evaluation_loop = loop
        running.train()

    running = trainer(tmp_path / "nan")
    evaluated(running, {})
    with pytest.raises(asyncckpt.NotFoundError, match=r"a metric that chooses it \(a metric that is nan chooses none"):
        running.export_pretrained(tmp_path / "exported", step="best")
    running = trainer(tmp_path / "unsaved", save_steps=10)
    evaluated(running, values)
    with pytest.raises(asyncckpt.NotFoundError, match=r"the best step, 12, is not in .*found \[10, 20\].*multiple"):
        running.export_pretrained(tmp_path / "exported", step="best")
