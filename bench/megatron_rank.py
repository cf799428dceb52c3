"""A pytest plugin for one rank of bench.megatron_tests: the ranks go from test to test together.

What a test did is told to all ranks; where it failed on one of them, all leave the process group, and the next test
begins with a new one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from packaging.version import Version

from bench.cuda_as_cpu import groups

PORT, WHOSE, REPORT = "ASYNCCKPT_TESTS_PORT", "ASYNCCKPT_TESTS_WHOSE", "ASYNCCKPT_TESTS_REPORT"
OWN_FORMAT, OUR_FORMAT = "torch_dist", "asyncckpt"
# What the tests import, and need neither here: one fetches data, one needs Triton.
LEFT_OUT = (
    "tests.test_utils.python_scripts.download_unit_tests_dataset",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
)
# A rank may still wait for the time of a collective, or of a test.
STEP_TIMEOUT = timedelta(seconds=900)


class Steps:
    """The tests in their order, the same on all ranks."""

    def __init__(self) -> None:
        self.rank, self.ranks_count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store, self._groups = (
            dist.TCPStore("localhost", int(os.environ[PORT]), is_master=False, timeout=STEP_TIMEOUT) for _ in range(2)
        )
        self._at = 0
        self._groups_count = 0

    def rendezvous(self, *_: Any, **__: Any) -> Iterator[tuple[Any, int, int]]:
        """Find the other ranks in the place of torch's function of this name; in a store of each group's own."""
        self._groups_count += 1
        yield dist.PrefixStore(f"group{self._at}.{self._groups_count}", self._groups), self.rank, self.ranks_count

    def end(self, outcome: str) -> bool:
        """Wait for the other ranks; return whether the test passed, or was skipped, on all of them."""
        self._store.set(f"{self._at}/{self.rank}", outcome)
        said = {self._store.get(f"{self._at}/{rank}").decode() for rank in range(self.ranks_count)}
        self._at += 1
        self._groups_count = 0
        return said <= {"passed", "skipped"}


def use_our_strategies() -> None:
    """Let Megatron's registry give ours for its own format, and its class of that format make ours."""
    from megatron.core.dist_checkpointing.strategies import base, torch

    from asyncckpt.strategies import register_with_megatron

    ours = register_with_megatron(parallel=2)
    register_own = torch.register_default_torch_strategies

    def register() -> None:
        register_own()
        for action in (base.StrategyAction.SAVE_SHARDED, base.StrategyAction.LOAD_SHARDED):
            known = base.default_strategies[action.value]
            known[OWN_FORMAT, 1] = known[OUR_FORMAT, 1]

    places: Any = torch
    places.register_default_torch_strategies = register
    places.TorchDistSaveShardedStrategy = lambda *_, **__: ours.save_sharded


class Plugin:
    """The hooks of a rank."""

    def __init__(self) -> None:
        self.steps = Steps()
        self._outcomes: list[tuple[str, str]] = []
        self._status = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give the tests that take the name of a format ours, under the same test id."""
        marks = metafunc.definition.own_markers
        for place, mark in enumerate(marks):
            if os.environ[WHOSE] == "ours" and mark.args[1:] == ([OWN_FORMAT],):
                marks[place] = pytest.mark.parametrize(mark.args[0], [OUR_FORMAT], ids=[OWN_FORMAT]).mark

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        why = report.longrepr.reprcrash if hasattr(report.longrepr, "reprcrash") else report.longrepr
        self._outcomes.append((report.outcome, "" if report.outcome == "passed" else str(why)))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        worst = next((one for one in ("failed", "skipped") if one in dict(self._outcomes)), "passed")
        said = {"test": nodeid, "outcome": worst, "why": " | ".join(why for _, why in self._outcomes if why)}
        with Path(os.environ[REPORT]).open("a") as report:
            report.write(json.dumps(said) + "\n")
        self._outcomes = []
        if not self.steps.end(worst):
            _leave_groups()

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._status = 0 if exitstatus == pytest.ExitCode.TESTS_FAILED else exitstatus

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        sys.stdout.flush()
        os._exit(self._status)  # To free groups may wait for what will never come.


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Prepare this process before the tests' own conftest.py imports anything."""
    plugin = Plugin()
    early_config.pluginmanager.register(plugin)
    replaced: Any = dist
    replaced.rendezvous = plugin.steps.rendezvous
    for name in LEFT_OUT:
        sys.modules[name] = mock.MagicMock(__name__=name, __spec__=None)
    from megatron.core import utils

    utils._te_version = utils._te_version or Version("0")  # Where Transformer Engine is not there, it cannot compare.
    if os.environ[WHOSE] == "ours":
        use_our_strategies()


def _leave_groups() -> None:
    utilities = sys.modules.get("tests.unit_tests.test_utilities")
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    groups.clear()
    if utilities is not None:
        utilities.Utils.inited = False
