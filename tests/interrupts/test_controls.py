"""Controls: each protection is needed. Without it, the places where it is missed are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interrupts.protections import without_protection
from tests.shares import share_of

TESTS = Path(__file__).parents[1]
LIMIT_S = 280

# What is left unprotected, and the test that finds it.
CONTROLS = {
    "asyncckpt.tables.table_lock:uninterrupted": "test_interrupts.py::test_uses_of_tables",
    "asyncckpt.tables.sparse_optimizer:SparseOptimizer._update_tables": "test_interrupts.py::test_step_of_an_optimizer",
    "asyncckpt.saver:Saver.save_async": "test_interrupts.py::test_calls_of_a_saver[_save_async]",
    "asyncckpt.saver:Saver.save": "test_interrupts.py::test_calls_of_a_saver[_save_blocking]",
    "asyncckpt.saver:Saver.prepare": "test_interrupts.py::test_calls_of_a_saver[_prepare]",
    "asyncckpt.saver:Saver.compact": "test_interrupts.py::test_calls_of_a_saver[_compact]",
    "asyncckpt.saver:open_saver": "test_interrupts.py::test_calls_of_a_saver[_close_and_open]",
    "asyncckpt.loader:load_now": "test_interrupts.py::test_loads[_load]",
    "asyncckpt.loader:uninterrupted": "test_interrupts.py::test_loads[_load_async]",
    "asyncckpt.tables.trained_table:uninterrupted": "test_interrupts.py::test_admission[lookup]",
    "asyncckpt.strategies.load_state:use_stored": "test_other_calls.py::test_strategies[_load]",
    "asyncckpt.engine.features.steps:uninterrupted": "test_steps_that_wait.py::test_steps[True]",
}


@pytest.mark.parametrize("protected", CONTROLS)
def test_what_the_controls_leave_unprotected_is_protected(protected: str) -> None:
    owner, attribute, plain = without_protection(protected)
    assert getattr(owner, attribute) is not plain


@pytest.mark.slow
@pytest.mark.parametrize("unprotected", share_of(CONTROLS, "controls"))
def test_a_missing_protection_is_found(unprotected: str, tmp_path: Path) -> None:
    test = f"tests/interrupts/{CONTROLS[unprotected]}"
    environment = {
        **os.environ,
        "ASYNCCKPT_UNPROTECTED": unprotected,
        "ASYNCCKPT_INTERRUPT_PLACES": "1000000",
        "ASYNCCKPT_EVERY": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/t", test]
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1, done.stdout
    assert "AssertionError: 1 of" in done.stdout, done.stdout
