"""bench.megatron_tests on a tiny upstream: a Megatron with a registry and nothing else, and four tests."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from bench.megatron_tests import run_tests, table

MEGATRON = {
    "__init__.py": "",
    "utils.py": "_te_version = None",
    "parallel_state.py": "def destroy_model_parallel(): pass",
    "dist_checkpointing/__init__.py": "",
    "dist_checkpointing/mapping.py": "class ShardedTensor: pass\nclass ShardedObject: pass",
    "dist_checkpointing/strategies/__init__.py": "",
    "dist_checkpointing/strategies/base.py": """
from abc import ABC
from collections import defaultdict
from asyncckpt.strategies.base import StrategyAction
class SaveCommonStrategy(ABC): pass
class LoadCommonStrategy(ABC): pass
class AsyncSaveShardedStrategy(ABC): pass
class LoadShardedStrategy(ABC): pass
default_strategies = defaultdict(dict)
""",
    "dist_checkpointing/strategies/torch.py": """
from megatron.core.dist_checkpointing.strategies.base import default_strategies
class TorchDistSaveShardedStrategy:
    def __init__(self, backend, version):
        self.backend = backend
def register_default_torch_strategies():
    default_strategies["save_sharded"]["torch_dist", 1] = TorchDistSaveShardedStrategy("torch_dist", 1)
""",
}
TESTS = """
import subprocess
from pathlib import Path
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import base, torch as strategies

def begin_group():
    store, rank, ranks_count = next(dist.rendezvous("tcp://", 0, 0))
    dist.init_process_group(backend="nccl", store=store, rank=rank, world_size=ranks_count)

def test_both_run_on_cpu():
    begin_group()
    found = torch.ones(2, device="cuda").cuda()
    dist.all_reduce(found)
    assert found.tolist() == [2.0, 2.0]

def test_one_rank_fails():
    assert dist.get_rank() == 0

def test_groups_are_new():
    assert not dist.is_initialized()
    begin_group()
    dist.barrier(device_ids=[torch.cuda.current_device()])

@pytest.mark.parametrize("save_format", ["torch_dist"])
def test_formats(save_format):
    strategies.register_default_torch_strategies()
    assert base.default_strategies["save_sharded"]["torch_dist", 1].backend == save_format

def test_own_class():
    assert strategies.TorchDistSaveShardedStrategy("torch_dist", 1).backend == "torch_dist"

def test_worker_that_is_left():
    worker = subprocess.Popen(["sleep", "600"])
    with (Path(__file__).parent / "workers").open("a") as workers:
        print(worker.pid, file=workers)

def test_skipped():
    pytest.skip("for both")
"""


def make_upstream(root: Path) -> Path:
    folder = root / "tests" / "unit_tests" / "dist_checkpointing"
    files = {root / "megatron" / "core" / name: text for name, text in MEGATRON.items()}
    for path, text in {**files, folder / "test_tiny.py": TESTS}.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ranks_run_tests_together_with_own_strategies_and_with_ours(tmp_path: Path) -> None:
    folder = make_upstream(tmp_path)
    own, ours = (run_tests(folder, [], ranks_count=2, whose=whose) for whose in ("own", "ours"))
    expected = {
        "test_tiny.py::test_both_run_on_cpu": ("passed", "passed"),
        "test_tiny.py::test_one_rank_fails": ("failed", "failed"),
        "test_tiny.py::test_groups_are_new": ("passed", "passed"),
        "test_tiny.py::test_formats[torch_dist]": ("passed", "passed"),
        "test_tiny.py::test_own_class": ("passed", "failed"),
        "test_tiny.py::test_worker_that_is_left": ("passed", "passed"),
        "test_tiny.py::test_skipped": ("skipped", "skipped"),
    }
    assert {test: (own[test].kind, ours[test].kind) for test in own} == expected
    workers = [int(line) for line in (folder / "workers").read_text().split()]
    assert len(workers) == 4
    while any(is_running(pid) for pid in workers):
        time.sleep(0.01)
    text = table(2, own, ours)
    assert "test_tiny.py                               5      4   1 fail, 1 skipped" in text
    assert "fails with ours only: test_tiny.py::test_own_class" in text
