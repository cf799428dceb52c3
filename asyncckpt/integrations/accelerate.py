"""A Checkpointer over what an Accelerator has prepared, in the place of `save_state` and `load_state`.

    from asyncckpt.integrations.accelerate import checkpointer

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    with checkpointer(accelerator, "ckpt", every=100) as ckpt:
        for step in range(ckpt.restore(), steps):
            train(step)
            ckpt.step(step)

It holds what `save_state` saves: models, optimizers, schedulers, the scaler, data loaders that keep their position,
what was given to `register_for_checkpointing`, and the random numbers of every rank; where gradients are accumulated,
also the position among the batches of a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.integrations.needed import needed
from asyncckpt.trainer_state import DataPosition, RngState

__all__ = ["checkpointer"]

accelerate = needed("accelerate", "accelerate")
_NOT_TAKEN_APART = ("DEEPSPEED", "MEGATRON_LM", "XLA", "TP")


def checkpointer(accelerator: Any, path: str | os.PathLike[str], **arguments: Any) -> Checkpointer:
    """Return a Checkpointer of everything that is prepared and registered by now; arguments are those of Checkpointer.

    UnsupportedError where the state is held by DeepSpeed, Megatron-LM or the first version of FSDP.
    """
    _check_supported(accelerator)
    found = dict(_parts(accelerator))
    taken = sorted(found.keys() & arguments.keys())
    if taken:
        raise UsageError("names of the state are those of what is prepared", found=taken, hint="call them otherwise")
    if not accelerator._models:
        raise UsageError("nothing is prepared yet", hint="call it after accelerator.prepare(...)")
    made = _Prepared(path, **arguments, **found)
    made.accelerator = accelerator
    made.there = _there(accelerator)
    return made


class _Prepared(Checkpointer):
    """Refuses to save and restore when something was prepared or registered since, which it would leave out."""

    accelerator: Any
    there: list[tuple[str, int]]

    def restore(self, *args: Any, **kwargs: Any) -> int:
        self._check()
        return super().restore(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return super().step(*args, **kwargs)

    def save_now(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return super().save_now(*args, **kwargs)

    def _check(self) -> None:
        found = _there(self.accelerator)
        if found != self.there:
            raise UsageError(
                "something was prepared or registered after checkpointer(...), and would not be saved",
                found=dict(found),
                expected=dict(self.there),
                hint="call it after the last accelerator.prepare(...) and register_for_checkpointing(...)",
            )


class _Accumulation:
    """How many batches an Accelerator has seen of a step that accumulates gradients."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"batches": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["batches"]


def _there(accelerator: Any) -> list[tuple[str, int]]:
    found = (("models", "_models"), ("optimizers", "_optimizers"), ("schedulers", "_schedulers"))
    return [
        (name, len(getattr(accelerator, attribute)))
        for name, attribute in (*found, ("data loaders", "_dataloaders"), ("registered objects", "_custom_objects"))
    ]


def _parts(accelerator: Any) -> Iterator[tuple[str, Any]]:
    """Give everything by name: `model`, or `model_0`, `model_1` where there are several."""
    models = [accelerator.unwrap_model(model) for model in accelerator._models]
    yield from _named("model", models)
    yield from _named("optimizer", [optimizer.optimizer for optimizer in accelerator._optimizers])
    yield from _named("scheduler", accelerator._schedulers)
    yield from _named("registered", accelerator._custom_objects)
    loaders = [loader for loader in accelerator._dataloaders if getattr(loader, "use_stateful_dataloader", False)]
    yield from _named("data", [DataPosition(loader) for loader in loaders])
    if accelerator.scaler is not None:
        yield "scaler", accelerator.scaler
    if accelerator.gradient_accumulation_steps > 1:
        yield "accumulation", _Accumulation(accelerator)
    yield "random", RngState()  # Loaded last: what others draw meanwhile does not count.


def _named(name: str, objects: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for number, one in enumerate(objects):
        yield name if len(objects) == 1 else f"{name}_{number}", one


def _check_supported(accelerator: Any) -> None:
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    is_first_fsdp = kind == "FSDP" and getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2
    if kind in _NOT_TAKEN_APART or is_first_fsdp:
        raise UnsupportedError("this way of training holds a state that is not taken apart here", found=kind)
