"""What programs set for their whole process, or hold around a call, each of which runs tests of the suite.

A plugin of pytest, for a process per default: `ASYNCCKPT_DEFAULT="no grad" pytest -p tests.process_defaults.defaults`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._device import DeviceContext

PACKAGE = str(Path(__file__).resolve().parents[2] / "asyncckpt") + os.sep
TORCH = str(Path(torch.__file__).parent) + os.sep
TORCH_DATA = TORCH + os.path.join("utils", "data") + os.sep
OPEN_FILES_MAX = 160
FRAMES_BELOW_CALLS = 120


@dataclass(frozen=True)
class Default:
    """`apply` comes before the package is imported; `within` is held around every call of its doors."""

    apply: Callable[[], object] = lambda: None
    within: Callable[[], AbstractContextManager[object]] | None = None
    options: tuple[str, ...] = ()  # Of Python.
    pytest_options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    but: dict[str, str] = field(
        default_factory=dict
    )  # Of names of tests that do not hold under it themselves, and why.


class MetaInPackage(DeviceContext):  # type: ignore[misc]
    """The default device of a program that names the device of each tensor of its own: those of the package move."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(TORCH):
            if frame.f_code.co_filename.startswith(TORCH_DATA):
                break  # A DataLoader draws from a generator of the host, and fails by itself with another default.
            frame = frame.f_back
        if frame.f_code.co_filename.startswith(PACKAGE):
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **kwargs or {})


def _without_streams() -> AbstractContextManager[object]:
    found = contextlib.ExitStack()
    for name in ("stdin", "stdout", "stderr"):
        found.callback(setattr, sys, name, getattr(sys, name))
        setattr(sys, name, None)
    return found


@contextlib.contextmanager
def _few_frames() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(min(before, len(inspect.stack(0)) + FRAMES_BELOW_CALLS))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@contextlib.contextmanager
def _with_dtype(dtype: torch.dtype) -> Iterator[None]:
    """In calls alone: tests mix tensors of the default dtype with tables of float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _use_uvloop() -> None:
    import uvloop

    uvloop.install()


def _print_little() -> None:
    np.set_printoptions(precision=1, threshold=2, edgeitems=1)
    torch.set_printoptions(precision=1, threshold=2, edgeitems=1)


_OWN_DTYPE = {
    "test_each_checkpoint_holds": "its objects make tensors of the default dtype within calls",
    "test_case_103": "its filter makes a table, with tensors of the default dtype, within a load",
}
_FILLED = dict.fromkeys(
    ("torch.bits8", "torch.float4", "test_any_state_comes_back_into_another_one"),
    "torch makes no tensor of bits8 or float4 under it",
)
_WITHIN = {"test_one_warning_names_the_faster_call": "a warning names the line above the call, here one of this file"}

DEFAULTS = {
    "device meta": Default(lambda: MetaInPackage(torch.device("meta")).__enter__()),
    "dtype float64": Default(within=partial(_with_dtype, torch.float64), but=_OWN_DTYPE),
    "dtype bfloat16": Default(within=partial(_with_dtype, torch.bfloat16), but=_OWN_DTYPE),
    "no grad": Default(within=torch.no_grad),
    "inference": Default(
        within=torch.inference_mode,
        but={
            "test_case_092": "tensors of this mode are refused outside of it",
            "test_case_101_target_that_cannot_be_written[inference]": "within this mode it can",
        },
    ),
    "autocast": Default(within=lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "denormals are zeros": Default(
        lambda: torch.set_flush_denormal(True), but={"test_any_state_comes_back": "hypothesis draws denormals"}
    ),
    "deterministic": Default(lambda: torch.use_deterministic_algorithms(True), but=_FILLED),
    "one thread": Default(lambda: torch.set_num_threads(1), environment={"OMP_NUM_THREADS": "1"}),
    "many threads": Default(lambda: torch.set_num_threads(64)),
    "umask 077": Default(lambda: os.umask(0o077)),
    "ascii names": Default(
        environment={"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        but={
            "test_case_056_component_too_long[name0]": "it names a file in letters that are not ASCII",
            "test_case_056_longest_component[name0]": "it names a file in letters that are not ASCII",
            "test_case_063_foreign_files_are_left_alone": "it names a file in digits that are not ASCII",
            "test_wrapped_modules_are_saved_as_themselves[compile]": "torch reads a file of its own as ASCII",
        },
    ),
    "warnings": Default(
        pytest_options=("-W", "error", "-W", "ignore:torch.distributed is", "-W", "ignore:ComplexHalf"),
        but={
            "test_a_numpy_scalar_is_its_own_target": "it loads nothing on purpose, which warns",
            "test_deltas_drop_rows_that_are_not_kept_any_more": "it writes in place on purpose, which warns",
            "test_a_delta_holds_what_was_trained_during_skipped_saves": "it writes in place on purpose, which warns",
            "test_wrapped_modules_are_saved_as_themselves[compile]": "torch warns of itself",
        },
    ),
    "without asserts": Default(options=("-O",)),
    "development mode": Default(options=("-X", "dev")),
    "no collector": Default(gc.disable),
    "always the collector": Default(lambda: gc.set_threshold(10, 2, 2)),
    "few frames": Default(
        within=_few_frames,
        but=dict.fromkeys(
            ("test_a_state_that_is_nested_too_deeply", "test_a_module_that_is_nested_deeply"),
            "it asks for more frames on purpose",
        ),
    ),
    "numpy raises": Default(lambda: np.seterr(all="raise")),
    "no streams": Default(within=_without_streams),
    "no descriptor 0": Default(lambda: os.close(0)),
    "few files": Default(_limit_files),
    "uvloop": Default(_use_uvloop),
    "short numbers": Default(_print_little, environment={"PYTHONINTMAXSTRDIGITS": "640"}),
    "spawn": Default(lambda: multiprocessing.set_start_method("spawn", force=True)),
}


def _within(call: Callable[..., Any], held: Callable[[], AbstractContextManager[object]]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with held():
            return call(*args, **kwargs)

    return wrapped


def hold_within_calls(held: Callable[[], AbstractContextManager[object]]) -> None:
    """Put it around every public function and method that begins, ends or waits for saves or loads."""
    import torch.distributed.checkpoint as dcp

    import asyncckpt

    doors = [asyncckpt.Saver, asyncckpt.Loader, asyncckpt.Checkpointer, asyncckpt.PeriodicSaver, asyncckpt.SaveFuture]
    for door in doors:
        for name, call in list(vars(door).items()):
            if inspect.isfunction(call) and (name == "__init__" or not name.startswith("_")):
                setattr(door, name, _within(call, held))
    functions = {asyncckpt: ("save", "load", "compact", "describe", "verify"), dcp: ("save", "async_save", "load")}
    for module, names in functions.items():
        for name in names:
            setattr(module, name, _within(getattr(module, name), held))


def chosen() -> Default:
    return DEFAULTS[os.environ["ASYNCCKPT_DEFAULT"]]


def left_out() -> dict[str, str]:
    """Return the tests that do not hold under the default, and why."""
    return chosen().but | (_WITHIN if chosen().within is not None else {})


def pytest_configure(config: pytest.Config) -> None:
    if not __debug__:
        pytest.register_assert_rewrite("tests")  # Those of helpers hold still.
    chosen().apply()
    held = chosen().within
    if held is not None:
        hold_within_calls(held)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not any(name in item.name for name in left_out())]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, reason in left_out().items():
        terminalreporter.write_line(f"{name} is left out: {reason}")
