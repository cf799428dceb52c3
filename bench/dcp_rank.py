"""One rank of the bench of DCP: `python -m bench.dcp_rank <rank> '<spec>'`; rank 0 writes `figures.json`.

    dcp, FileSystemWriter      as it comes: files are synced (sync_files=True), folders are not
    dcp, not synced            sync_files=False: what is measured is a write into the page cache
    dcp, caching, 4 threads    enable_plan_caching where this torch has it, thread_count=4
    asyncckpt                  our StorageWriter, DCP's planner: files and folders are synced
    asyncckpt, own planner     ... with asyncckpt.dcp.SavePlanner
    planning, ...              a writer that writes nothing: what DCP itself takes

Of every way, one save that is not counted (arenas, caches), then in each round one dcp.save and one dcp.async_save
beside a loop of bytecode on the training thread. Time lost: from the call to the end of the step in which the save
became durable, less the idle time of so many steps.
"""

from __future__ import annotations

import gc
import json
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future

import asyncckpt.dcp
from bench.round import step_seconds
from bench.trainer import PythonLoop

THEIRS = "dcp, FileSystemWriter"
THEIRS_UNSYNCED = "dcp, not synced"
THEIRS_BEST = "dcp, caching, 4 threads"
OURS = "asyncckpt"
OURS_PLANNED = "asyncckpt, own planner"
PLANNING = "planning, DCP's"
PLANNING_OURS = "planning, own planner"
WAYS = (THEIRS, THEIRS_UNSYNCED, THEIRS_BEST, OURS, OURS_PLANNED, PLANNING, PLANNING_OURS)


@dataclass(frozen=True)
class DcpSpec:
    """sizes: by name, bytes of a whole tensor; each of two ranks holds half of its rows."""

    directory: str
    world: int
    tensors_count: int
    sizes: dict[str, int]
    ways: list[str]
    rounds: int
    idle_steps_count: int


class NullWriter(StorageWriter):
    """Takes every call and writes nothing."""

    def __init__(self, path: Path) -> None:
        self.checkpoint_id = path

    def reset(self, checkpoint_id: Any = None) -> None: ...
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...
    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Any, results: Any) -> None: ...
    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class CachingPlanner(DefaultSavePlanner):
    """DCP keeps plans by the name of the class."""

    def __init__(self) -> None:
        has_caching = "enable_plan_caching" in DefaultSavePlanner.__init__.__code__.co_varnames
        super().__init__(**({"enable_plan_caching": True} if has_caching else {}))


def writer_and_planner(way: str, path: Path) -> tuple[StorageWriter, SavePlanner]:
    if way == THEIRS:
        return dcp.FileSystemWriter(path), DefaultSavePlanner()
    if way == THEIRS_UNSYNCED:
        return dcp.FileSystemWriter(path, sync_files=False), DefaultSavePlanner()
    if way == THEIRS_BEST:
        return dcp.FileSystemWriter(path, thread_count=4), CachingPlanner()
    if way == PLANNING:
        return NullWriter(path), DefaultSavePlanner()
    if way == PLANNING_OURS:
        return NullWriter(path), asyncckpt.dcp.SavePlanner()
    planner = asyncckpt.dcp.SavePlanner() if way == OURS_PLANNED else DefaultSavePlanner()
    return asyncckpt.dcp.StorageWriter(path), planner


def make_state(spec: DcpSpec, tensor_bytes: int) -> dict[str, Any]:
    """Layers of 16 tensors; with several ranks, DTensors that are spread by rows."""
    rows = tensor_bytes // 4 // 64
    state: dict[str, Any] = {}
    mesh = None
    if spec.world > 1:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (spec.world,))
    for number in range(spec.tensors_count):
        tensor: torch.Tensor = torch.full((rows // spec.world, 64), float(number))
        if mesh is not None:
            from torch.distributed.tensor import DTensor, Shard

            tensor = DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
        state.setdefault(f"layer.{number // 16}", {})[f"weight.{number}"] = tensor
    return state


class Rank:
    """Measures on rank 0; the others do the same saves in the same order."""

    def __init__(self, rank: int, spec: DcpSpec) -> None:
        self.rank, self.spec = rank, spec
        self.state: dict[str, Any] = {}
        # Of its own: collectives in the background must not meet others.
        self.group = dist.new_group() if spec.world > 1 else None
        self.figures: list[dict[str, Any]] = []

    def run(self) -> None:
        for size, tensor_bytes in self.spec.sizes.items():
            self.state = make_state(self.spec, tensor_bytes)
            for index in range(-1, self.spec.rounds):
                for way in self.spec.ways:
                    saved = self._measure(way, index, self._save)
                    asynchronous = self._measure(way, index, self._async_save)
                    if index >= 0:
                        self.figures.append({"size": size, "way": way, "round": index, **saved, **asynchronous})

    def _measure(self, way: str, index: int, how: Callable[[StorageWriter, SavePlanner], Any]) -> Any:
        path = Path(self.spec.directory) / f"{WAYS.index(way)}-{index}"
        gc.collect()
        self._meet()
        found = how(*writer_and_planner(way, path))
        self._meet()
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        self._meet()
        return found

    def _save(self, writer: StorageWriter, planner: SavePlanner) -> dict[str, float]:
        begin = time.perf_counter()
        dcp.save(self.state, storage_writer=writer, planner=planner, process_group=self.group)
        return {"save_seconds": time.perf_counter() - begin}

    def _async_save(self, writer: StorageWriter, planner: SavePlanner) -> dict[str, float]:
        work = PythonLoop()
        idle = median(step_seconds(work, self.spec.idle_steps_count))
        self._meet()
        begin = time.perf_counter()
        saved = dcp.async_save(self.state, storage_writer=writer, planner=planner, process_group=self.group)
        returned = time.perf_counter()
        future = getattr(saved, "upload_completion", saved)
        steps_count = 0
        while not future.done():
            work.step()
            steps_count += 1
        end = time.perf_counter()
        future.result()
        return {
            "call_seconds": returned - begin,
            "durable_seconds": end - begin,
            "lost_seconds": end - begin - steps_count * idle,
            "idle_step_seconds": idle,
        }

    def _meet(self) -> None:
        if self.spec.world > 1:
            dist.barrier()


def main(rank: int, spec: DcpSpec) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    folder = Path(spec.directory)
    if spec.world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=spec.world)
    one = Rank(rank, spec)
    one.run()
    if rank == 0:
        (folder / "figures.json").write_text(json.dumps(one.figures))
    if spec.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), DcpSpec(**json.loads(sys.argv[2])))
