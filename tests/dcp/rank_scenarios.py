"""What ranks do together. Each function returns what went wrong; all ranks call the same ones in the same order."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import asyncckpt
import asyncckpt.dcp
from asyncckpt.commit.transaction import Transaction
from asyncckpt.errors import ConflictError, IndeterminateError, IOFailedError, UsageError
from asyncckpt.shard.files import ShardFiles
from asyncckpt.storage.directory import Directory, io_failed
from tests.dcp.model import differences, image_of, make, put_back, state_of, train


def save_fsdp(folder: Path) -> list[str]:
    """Step 0 by save, step 1 by async_save, whose state is trained on as soon as it returns."""
    model, optimizer = make(seed=0)
    # Of its own: DCP's collectives in the background would meet those of the training in the default group.
    group = dist.new_group()
    problems = []
    for step in (0, 1):
        train(model, optimizer)
        state = state_of(model, optimizer) | {"epoch": step, "who": {"rank": dist.get_rank()}}
        image = image_of({"model": state["model"], "optim": state["optim"]})
        if dist.get_rank() == 0:
            np.savez(folder / f"image-{step}.npz", **image)
        writer = asyncckpt.dcp.StorageWriter(folder / "ckpt")
        if step == 0:
            dcp.save(state, storage_writer=writer)
        else:
            saved = dcp.async_save(state, storage_writer=writer, process_group=group)
            train(model, optimizer)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            getattr(saved, "upload_completion", saved).result()
        problems += load_step(folder, step)
    return problems


def load_fsdp(folder: Path) -> list[str]:
    """What another number of ranks has saved."""
    folder = folder.parent / "save_fsdp"
    return load_step(folder, 0) + load_step(folder, 1)


def load_step(folder: Path, step: int) -> list[str]:
    model, optimizer = make(seed=9)
    state = state_of(model, optimizer) | {"epoch": -1}
    dcp.load(state, storage_reader=asyncckpt.dcp.StorageReader(folder / "ckpt", step=step))
    put_back(model, optimizer, state)
    image = image_of(state_of(model, optimizer))
    with np.load(folder / f"image-{step}.npz") as expected:
        problems = differences(image, dict(expected))
    return [f"step {step}: {name}" for name in problems] + ([] if state["epoch"] == step else [f"epoch of {step}"])


def spread_state(seed: int) -> dict[str, Any]:
    """Replicas and a value beside two-dimensional boxes on a mesh of [world / 2, 2] or [1, world]."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2) if world > 2 else (1, world))
    whole = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5) + seed
    return {
        "boxes": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
        "columns": distribute_tensor(whole.clone(), mesh, [Replicate(), Shard(1)]),
        "narrow": distribute_tensor(whole[:1].clone(), mesh, [Shard(0), Shard(0)]),
        "replica": whole.clone().t(),
        "nested": [{"replica": torch.full((3,), seed)}],
        "step": torch.tensor(float(seed)),
        "value": ("text", seed),
    }


def save_boxes(folder: Path) -> list[str]:
    """Three saves by each planner that keeps plans: what is saved is what was there at each."""
    problems = []
    planners: dict[str, Callable[[], Any]] = {"default": DefaultSavePlanner, "own": asyncckpt.dcp.SavePlanner}
    if "enable_plan_caching" in DefaultSavePlanner.__init__.__code__.co_varnames:
        planners["caching"] = lambda: DefaultSavePlanner(enable_plan_caching=True)
    for name, planner in planners.items():
        for seed in range(3):
            path = folder / name
            dcp.save(spread_state(seed), storage_writer=asyncckpt.dcp.StorageWriter(path), planner=planner())
            problems += [f"{name} {seed} {problem}" for problem in check_boxes(path, seed)]
    return problems + save_changed(folder / "own", 3)


def save_changed(path: Path, seed: int) -> list[str]:
    """The state of one rank alone has changed: it sends a plan, the others a token."""
    state = spread_state(seed) | ({"only": "here"} if dist.get_rank() == 1 else {})
    dcp.save(state, storage_writer=asyncckpt.dcp.StorageWriter(path), planner=asyncckpt.dcp.SavePlanner())
    found = spread_state(-1) | {"only": None}
    dcp.load(found, storage_reader=asyncckpt.dcp.StorageReader(path))
    problems = check_boxes(path, seed)
    return problems if found["only"] == "here" else [*problems, f"changed: {found['only']!r}"]


def save_alone_in_between(folder: Path) -> list[str]:
    """Rank 1 saves the same state also by itself, where it is its own coordinator."""
    problems = []
    for seed in range(3):
        state = {name: torch.full((16,), float(seed)) for name in ("a", "b")}
        if dist.get_rank() == 1:
            writer = asyncckpt.dcp.StorageWriter(folder / "alone")
            dcp.save(state, storage_writer=writer, planner=asyncckpt.dcp.SavePlanner(), no_dist=True)
        dist.barrier()
        for path in (folder / "one", folder / "other"):
            dcp.save(state, storage_writer=asyncckpt.dcp.StorageWriter(path), planner=asyncckpt.dcp.SavePlanner())
        for path in (folder / "alone", folder / "one", folder / "other"):
            found = {name: torch.zeros(16) for name in state}
            dcp.load(found, storage_reader=asyncckpt.dcp.StorageReader(path), no_dist=True)
            problems += [f"{path.name} {seed}: {name}" for name in found if not torch.equal(found[name], state[name])]
        dist.barrier()
    return problems


def load_boxes(folder: Path) -> list[str]:
    """What another number of ranks has saved: verified, and reading only the rows needed."""
    path = folder.parent / "save_boxes" / "own"
    return check_boxes(path, 3) + check_boxes(path, 3, verify=False)


def check_boxes(path: Path, seed: int, **options: Any) -> list[str]:
    state = spread_state(-1)
    dcp.load(state, storage_reader=asyncckpt.dcp.StorageReader(path, **options))
    return differences(image_of(state), image_of(spread_state(seed)))


def fail(folder: Path) -> list[str]:
    """Whatever fails on whichever rank: all ranks raise, no manifest is there, and the next save commits."""
    problems = []
    rank = dist.get_rank()

    def attempt(what: str, wanted: type[BaseException], *, step: int | None = None, value: Any = 0) -> None:
        state = spread_state(1) | {"value": value}
        before = steps_of(folder / "ckpt")
        dist.barrier()
        try:
            dcp.save(state, storage_writer=asyncckpt.dcp.StorageWriter(folder / "ckpt", step=step))
        except CheckpointException as error:
            kinds = [type(cause) for cause, _ in error.failures.values()]
            if not kinds or not all(issubclass(kind, wanted) for kind in kinds):
                problems.append(f"{what}: {error}")
        else:
            problems.append(f"{what} did not raise")
        dist.barrier()
        if steps_of(folder / "ckpt") != before:
            problems.append(f"{what} has committed")

    def succeed(what: str) -> None:
        dcp.save(spread_state(2), storage_writer=asyncckpt.dcp.StorageWriter(folder / "ckpt"))
        dist.barrier()
        problems.extend(f"after {what}: {problem}" for problem in check_boxes(folder / "ckpt", 2))
        if rank == 0:
            found = asyncckpt.verify(folder / "ckpt")
            problems.extend(f"after {what}: {stray} is left" for stray in found.strays)

    with failing_on(rank == 1, ShardFiles, "close"):
        attempt("ENOSPC on rank 1", IOFailedError)
    succeed("ENOSPC on rank 1")
    with failing_on(rank == 1, Directory, "sync"):
        attempt("a folder that rank 1 cannot sync", IOFailedError)
    succeed("a folder that rank 1 cannot sync")
    with failing_on(rank == 0, ShardFiles, "close"):
        attempt("ENOSPC on rank 0", IOFailedError)
    succeed("ENOSPC on rank 0")
    attempt("a value that is not plain", UsageError, value=object() if rank == 1 else 0)
    attempt("a step that exists", ConflictError, step=min(steps_of(folder / "ckpt")))
    succeed("a step that exists")
    with failing_on(rank == 0, Transaction, "_give_name"):
        attempt("a rename that fails", IOFailedError)
    succeed("a rename that fails")
    problems += fail_in_doubt(folder)
    return problems


def fail_in_doubt(folder: Path) -> list[str]:
    """The manifest has its name, but is perhaps not durable: every rank hears that, and can find out."""
    with failing_on(dist.get_rank() == 0, Directory, "sync", after=2):
        try:
            dcp.save(spread_state(5), storage_writer=asyncckpt.dcp.StorageWriter(folder / "doubt", step=5))
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
        else:
            return ["a sync that fails behind the rename did not raise"]
    dist.barrier()
    if not all(isinstance(cause, IndeterminateError) and cause.resolve() for cause in causes):
        return [f"in doubt: {causes}"]
    return check_boxes(folder / "doubt", 5)


def steps_of(path: Path) -> list[int]:
    return asyncckpt.list_steps(path) if path.exists() else []


class failing_on:
    """The function of this name raises ENOSPC, on this rank."""

    def __init__(self, here: bool, owner: Any, name: str, *, after: int | None = None) -> None:
        self._here, self._owner, self._name, self._after = here, owner, name, after

    def __enter__(self) -> None:
        self._kept = kept = getattr(self._owner, self._name)
        after = self._after

        def failing(*arguments: Any, **options: Any) -> Any:
            is_manifests = after is not None and arguments[0].path.name == "manifests"
            if after is None or (is_manifests and os.path.exists(arguments[0].path / f"{5:012d}.json")):
                raise io_failed("no room", OSError(errno.ENOSPC, "no room"))
            return kept(*arguments, **options)

        if self._here:
            setattr(self._owner, self._name, failing)

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._kept)
