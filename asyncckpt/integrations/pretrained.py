"""A step that was saved through Hugging Face's Trainer, as a folder for `from_pretrained`.

The model is made from the config in the checkpoint, filled, and written by its own `save_pretrained`, because that
knows how names in memory and in files differ. The folder is there all at once, or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncckpt.arguments import check_type
from asyncckpt.checkpoints import list_steps
from asyncckpt.commit.new_entry import NewEntry
from asyncckpt.errors import NotFoundError, UnsupportedError
from asyncckpt.integrations.needed import needed
from asyncckpt.integrations.synced import sync_path
from asyncckpt.loader import Loader
from asyncckpt.plan.load_offer import LoadInfo
from asyncckpt.storage.directory import check_path

transformers = needed("transformers", "transformers")
BEST = "best"


class Pretrained:
    """Class and configs of a model as plain values; empty unless it is from transformers."""

    def __init__(self, model: Any = None) -> None:
        self._model = model
        self.values: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        model = base_of(self._model)
        if not isinstance(model, transformers.PreTrainedModel):
            return {"class": None, "dtype": None, "config": None, "generation_config": None}
        generation = getattr(model, "generation_config", None)
        values = {
            "class": type(model).__name__,
            "dtype": model.dtype,
            "config": model.config.to_json_string(use_diff=False),
            "generation_config": None if generation is None else generation.to_json_string(use_diff=False),
        }
        if model is self._model:
            return values
        return {**values, "adapters": {name: _text(config) for name, config in self._model.peft_config.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = state


def base_of(model: Any) -> Any:
    """Return the model that PEFT has put adapters into; any other one itself."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _text(config: Any) -> str:
    """Return the config of an adapter as PEFT itself writes it."""
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return json.dumps(values, sort_keys=True)


class _State:
    def __init__(self) -> None:
        self.values: Mapping[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = json.loads(state["json"])


def export_pretrained(
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    model_class: type | None = None,
    tokenizer: Any = None,
) -> int:
    """Make a folder that `from_pretrained` reads, of the newest step, a given one, or "best"; return the step.

    The adapters of a model of PEFT are exported without it, as Hugging Face's own Trainer saves them.

    path         a directory of checkpoints that a Trainer of asyncckpt.integrations.transformers wrote to
    step         "best": the one with the best metric, as Hugging Face's TrainerState in the newest step says
    model_class  the class of the model; None: the one of transformers that has the stored name
    tokenizer    a processing class that is saved beside it

    Needs memory for the model. ConflictError for a name that is taken; NotFoundError; UnsupportedError for a model that
    is not from transformers.
    """
    directory = check_path(path)
    if step == BEST:
        step = _best_step(directory)
    if step is not None:
        check_type("step", step, int)
    described = Pretrained()
    report = Loader(directory, tensors={"pretrained": described}, step=step).load()  # type: ignore[arg-type]
    model = _made(described.values, model_class)
    if "adapters" in described.values:
        model = _with_adapters(model, described.values["adapters"])
        _load_adapters(directory, model, report.step)
    else:
        Loader(directory, tensors={"model": model}, step=report.step).load()
    target = check_path(folder)
    with NewEntry(target, kind="hf", durability="fsync") as entry:
        entry.make_folder()
        model.save_pretrained(entry.temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(entry.temporary)
        for file in entry.temporary.iterdir():
            sync_path(file)
        entry.sync()
        entry.give_name(target.is_dir)
    return report.step


def _best_step(directory: Path) -> int:
    state = _State()
    report = Loader(directory, tensors={"trainer": state}).load()
    best = state.values.get("best_global_step")
    if not best:
        what = f"no step up to {report.step} in {str(directory)!r} has a metric"
        if any(name.startswith("eval_") for entry in state.values.get("log_history", ()) for name in entry):
            raise NotFoundError(f"{what} that chooses it", hint="a metric that is nan chooses none; or give a step")
        raise NotFoundError(what, hint="set metric_for_best_model, and evaluate at the steps that are saved")
    if best not in (steps := list_steps(directory)):
        what = f"the best step, {best}, is not in {str(directory)!r}"
        hint = "evaluate at the steps that are saved: save_steps a multiple of eval_steps; or give a step"
        raise NotFoundError(what, found=steps, hint=hint)
    return int(best)


def _made(values: Mapping[str, Any], model_class: Any) -> Any:
    name = values["class"]
    if name is None:
        raise UnsupportedError("the model that was saved is not a transformers class and has no config")
    kind = getattr(transformers, name, None) if model_class is None else model_class
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        what = f"{name!r} is not a class of transformers"
        raise UnsupportedError(what, found=kind, hint="pass model_class, if the model is your own")
    config = kind.config_class.from_dict(json.loads(values["config"]))  # type: ignore[attr-defined]
    if values.get("dtype") is not None:  # Which the config need not say right.
        config.dtype = values["dtype"]
    model = kind._from_config(config)  # type: ignore[attr-defined]
    if values["generation_config"] is not None:
        model.generation_config = transformers.GenerationConfig.from_dict(json.loads(values["generation_config"]))
    return model


def _with_adapters(base: Any, adapters: Mapping[str, str]) -> Any:
    peft = needed("peft", "transformers")
    model = base
    for number, (name, text) in enumerate(adapters.items()):
        config = peft.PeftConfig.from_peft_type(**json.loads(text))
        if number == 0:
            model = peft.get_peft_model(base, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    return model


def _load_adapters(directory: Path, model: Any, step: int) -> None:
    """Fill what adapters have added or train. What is frozen stays: it is not exported, and may have been quantized."""
    parts = {f".{name}." for name in model.peft_config}
    wanted = {
        f"model.{name}"
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or any(part in f".{name}." for part in parts)
    }

    def only_wanted(info: LoadInfo) -> dict[str, dict[str, list[str]]]:
        return {name: sources for name, sources in info.items() if name in wanted}

    report = Loader(directory, tensors={"model": model}, step=step, filter_func=only_wanted, strict=False).load()
    if missing := sorted(wanted.intersection(report.missing)):
        raise NotFoundError(f"step {step} in {str(directory)!r} lacks tensors of its adapters", found=missing[:8])
