"""A Checkpointer over what an Accelerator has prepared, in the place of `save_state` and `load_state`.

    from asyncckpt.integrations.accelerate import checkpointer

    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    with checkpointer(accelerator, "ckpt", every=100) as ckpt:
        for step in range(ckpt.restore(), steps):
            train(step)
            ckpt.step(step)

It holds what `save_state` saves: models, optimizers, schedulers, the scaler, data loaders that keep their position,
what was given to `register_for_checkpointing`, and the random numbers of every rank.
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
    return Checkpointer(path, **arguments, **found)


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
    yield "random", RngState()  # Loaded last: what others draw meanwhile does not count.


def _named(name: str, objects: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for number, one in enumerate(objects):
        yield name if len(objects) == 1 else f"{name}_{number}", one


def _check_supported(accelerator: Any) -> None:
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    is_first_fsdp = kind == "FSDP" and getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2
    if kind in _NOT_TAKEN_APART or is_first_fsdp:
        raise UnsupportedError("this way of training holds a state that is not taken apart here", found=kind)
