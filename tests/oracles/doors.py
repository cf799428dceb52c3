"""Every way of a run into a checkpoint and back: torch's own two, which are the oracles, and ours.

A door saves a run below a folder, and loads what is there into another run. torch's own load_state_dict wants names
without wrappers where a plain module loads: `may_wrap` says whether a save or a load may meet wrapped ones.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
import asyncckpt.dcp
from asyncckpt.formats import torch_file
from tests.oracles.runs import RandomLoop, give, state_dicts
from tests.worlds.saves import save_one

FAST: Any = {"durability": "none"}
Save = Callable[[RandomLoop, Path], None]
Load = Callable[[Path, RandomLoop], None]


@dataclass(frozen=True)
class Door:
    """may_wrap: whether runs may be wrapped where they are saved, and where they are loaded. early: how many steps
    before the wanted one it is given the run. needs_twin: a run that is loaded has to have been trained as long.
    """

    save: Save
    load: Load
    may_wrap: tuple[bool, bool] = (True, True)
    early: int = 0
    needs_twin: bool = False


# -- torch's own -------------------------------------------------------------------------------------------------------


def save_file(run: RandomLoop, path: Path) -> None:
    torch.save(state_dicts(run.state), path / "state.pt")


def load_file(path: Path, run: RandomLoop) -> None:
    give(run.state, torch.load(path / "state.pt", weights_only=False))


def load_file_exactly(path: Path, run: RandomLoop) -> None:
    """As torch does it, but that states of optimizers keep the dtype that they had, as in a run that goes on."""
    load_file(path, run)
    stored = torch.load(path / "state.pt", weights_only=False)
    found: dict[str, Any] = {}
    for name, one in _by_name(run.state, stored):
        found[name] = one
    for number, optimizer in enumerate(run.optimizers):
        state = found[f"optimizer{number}"]
        _keep_dtypes(getattr(optimizer, "inner", optimizer), state.get("inner", state))


def _by_name(state: Any, stored: Any) -> Any:
    for name, one in stored.items():
        if name == "nested":
            yield from zip(list(_objects_below(state["nested"])), [*one["of"], *one["all"].values()], strict=True)
        else:
            yield name, one


def _objects_below(nested: Any) -> Any:
    names = ["optimizer0"] if nested["of"] else []
    yield from [*names, *nested["all"]]


def _keep_dtypes(optimizer: torch.optim.Optimizer, stored: Any) -> None:
    own = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in stored["param_groups"] for number in group["params"]]
    for number, param in zip(numbers, own, strict=True):
        for key, value in stored["state"].get(number, {}).items():
            optimizer.state[param][key] = _kept(optimizer.state[param][key], value)


def _kept(found: Any, stored: Any) -> Any:
    if isinstance(stored, torch.Tensor) and found.dtype is not stored.dtype:
        return stored.clone()
    if isinstance(stored, dict):
        return {key: _kept(found[key], value) for key, value in stored.items()}
    if isinstance(stored, (list, tuple)):
        return type(stored)(_kept(one, value) for one, value in zip(found, stored, strict=True))
    return found


def save_dcp(run: RandomLoop, path: Path) -> None:
    dcp.save(state_dicts(run.state), storage_writer=dcp.FileSystemWriter(path / "dcp"))


def load_dcp(path: Path, run: RandomLoop) -> None:
    _through_dcp(run, dcp.FileSystemReader(path / "dcp"))


def _through_dcp(run: RandomLoop, reader: Any) -> None:
    state = copy.deepcopy(state_dicts(run.state))
    dcp.load(state, storage_reader=reader)
    give(run.state, state)


# -- ours --------------------------------------------------------------------------------------------------------------


def save_async(run: RandomLoop, path: Path) -> None:
    """Training goes on before the save is durable."""
    with asyncckpt.Saver(path=path / "run", tensors=run.state, **FAST) as saver:
        future = saver.save_async(run.step)
        run.train(1)
        future.result(60)


def save_now(run: RandomLoop, path: Path) -> None:
    save_one(path / "run", run.step, tensors=run.state, **FAST)


def save_in_small_memory(run: RandomLoop, path: Path) -> None:
    """What does not fit goes straight from the tensors into files."""
    save_one(path / "run", run.step, staged=True, tensors=run.state, host_memory_limit=0, **FAST)


def save_as_dict(run: RandomLoop, path: Path) -> None:
    asyncckpt.save(path / "run", run.state, **FAST)


def save_state_dicts(run: RandomLoop, path: Path) -> None:
    asyncckpt.save(path / "run", state_dicts(run.state), **FAST)


def save_by_checkpointer(run: RandomLoop, path: Path) -> None:
    with asyncckpt.Checkpointer(path / "run", every=1, options=FAST, **run.state) as checkpoints:
        checkpoints.step(run.step)


def save_periodically(run: RandomLoop, path: Path) -> None:
    with (
        asyncckpt.Saver(path=path / "run", tensors=run.state, **FAST) as saver,
        asyncckpt.PeriodicSaver(saver, every_steps=math.inf) as periodic,
    ):
        periodic.step(run.step, save=True)


def save_by_dcp(run: RandomLoop, path: Path) -> None:
    dcp.save(state_dicts(run.state), storage_writer=asyncckpt.dcp.StorageWriter(path / "run", **FAST))


def save_async_by_dcp(run: RandomLoop, path: Path) -> None:
    writer = asyncckpt.dcp.StorageWriter(path / "run", **FAST)
    saved: Any = dcp.async_save(state_dicts(run.state), storage_writer=writer)
    getattr(saved, "upload_completion", saved).result(60)


def save_often_and_compact(run: RandomLoop, path: Path) -> None:
    """The same Saver has saved an earlier step, and this one as a delta of it."""
    with asyncckpt.Saver(path=path / "run", tensors=run.state, deltas=asyncckpt.DeltaPolicy(), **FAST) as saver:
        saver.save_async(run.step).result(60)
        run.train(run.case.steps - run.step)
        with run.in_its_world():
            saver.save_async(run.case.steps + 1).result(60)
    asyncckpt.compact(path / "run")


def save_file_and_import(run: RandomLoop, path: Path) -> None:
    save_file(run, path)
    torch_file.import_checkpoint(path / "state.pt", path / "run", **FAST)


def save_dcp_and_import(run: RandomLoop, path: Path) -> None:
    save_dcp(run, path)
    asyncckpt.dcp.import_checkpoint(path / "dcp", path / "run", **FAST)


def load_in_place(path: Path, run: RandomLoop) -> None:
    asyncckpt.Loader(path / "run", tensors=run.state).load()


def load_verified(path: Path, run: RandomLoop) -> None:
    asyncckpt.Loader(path / "run", tensors=run.state, verify="before").load_async().result(60)


def load_as_dict(path: Path, run: RandomLoop) -> None:
    give(run.state, asyncckpt.load(path / "run"))


def load_by_checkpointer(path: Path, run: RandomLoop) -> None:
    with asyncckpt.Checkpointer(path / "run", every=math.inf, options=FAST, **run.state) as checkpoints:
        checkpoints.restore()


def load_twice(path: Path, run: RandomLoop) -> None:
    """Load into a run between, save that, and load what it has saved."""
    try:
        between = RandomLoop(run.case, 3, is_wrapped=not run.is_wrapped, grown=run.grown)
    except RuntimeError:  # Torch compiles no scripted module.
        between = RandomLoop(run.case, 3, is_wrapped=run.is_wrapped, grown=run.grown)
    with between.in_its_world():
        load_by_checkpointer(path, between)
        save_by_checkpointer(between, path / "again")
    # The numbers that are drawn are those of the run, unless it has loaded them.
    with run.in_its_world():
        load_by_checkpointer(path / "again", run)


def load_exported(path: Path, run: RandomLoop) -> None:
    torch_file.export_checkpoint(path / "run", path / "out.pt", **FAST)
    give(run.state, torch.load(path / "out.pt", weights_only=True))


def load_by_dcp(path: Path, run: RandomLoop) -> None:
    _through_dcp(run, asyncckpt.dcp.StorageReader(path / "run"))


def load_exported_dcp(path: Path, run: RandomLoop) -> None:
    asyncckpt.dcp.export_checkpoint(path / "run", path / "dcp_out")
    _through_dcp(run, dcp.FileSystemReader(path / "dcp_out"))


TORCH_SAVE, TORCH_SAVE_EXACT = Door(save_file, load_file), Door(save_file, load_file_exactly)
TORCH_DCP = Door(save_dcp, load_dcp, needs_twin=True)
DOORS: dict[str, Door] = {
    "Saver and Loader": Door(save_async, load_in_place),
    "a blocking save, verified before": Door(save_now, load_verified),
    "a Saver without memory, and load": Door(save_in_small_memory, load_as_dict, (True, False)),
    "save and load": Door(save_as_dict, load_as_dict, (True, False)),
    "Checkpointer": Door(save_by_checkpointer, load_by_checkpointer),
    "state dicts": Door(save_state_dicts, load_as_dict, (False, False)),
    "two Checkpointers": Door(save_by_checkpointer, load_twice),
    "PeriodicSaver": Door(save_periodically, load_by_checkpointer),
    "export torch": Door(save_as_dict, load_exported, (True, False)),
    "import of a file": Door(save_file_and_import, load_in_place, (False, True)),
    "import of a file, as a dict": Door(save_file_and_import, load_as_dict, (False, False)),
    "deltas and compaction": Door(save_often_and_compact, load_in_place, early=1),
    "our storage of DCP": Door(save_by_dcp, load_by_dcp, (False, False), needs_twin=True),
    "our storage of DCP, async": Door(save_async_by_dcp, load_by_dcp, (False, False), needs_twin=True),
    "import of a DCP directory": Door(save_dcp_and_import, load_by_dcp, (False, False), needs_twin=True),
    "export of a DCP directory": Door(save_as_dict, load_exported_dcp, (False, False), needs_twin=True),
}
