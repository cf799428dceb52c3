"""Train, save, go on; load into a fresh model, go on; compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import asyncckpt
from asyncckpt.adapters import dense_state_of, tables_of
from tests.torchrec.models import EVICTION_INTERVAL, Training

# Between two evictions of a managed collision module.
SAVED_STEP = EVICTION_INTERVAL + 1
STEPS = 3 * EVICTION_INTERVAL


def run(make: Callable[[int], Training], folder: Path) -> list[str]:
    """Return what went wrong."""
    path = folder / f"rank{dist.get_rank()}"
    uninterrupted = make(0)
    for number in range(SAVED_STEP):
        uninterrupted.step(number)
    with asyncckpt.Saver(path=path, hashtables=tables_of(uninterrupted.model), tensors=dense(uninterrupted)) as saver:
        at_cut = uninterrupted.image()
        future = saver.save_async(SAVED_STEP)
        for number in range(SAVED_STEP, STEPS):
            uninterrupted.step(number)
        future.result(120)
    resumed = make(7)
    problems = [] if differences(resumed.image(), at_cut) else ["a fresh model is equal to the saved one"]
    report = asyncckpt.Loader(path, tables_of(resumed.model), dense(resumed)).load()
    if report.missing or report.unexpected:
        problems.append(f"missing {report.missing}, unexpected {report.unexpected}")
    problems += [f"after the load: {name}" for name in differences(resumed.image(), at_cut)]
    for number in range(SAVED_STEP, STEPS):
        resumed.step(number)
    problems += [f"after going on: {name}" for name in differences(resumed.image(), uninterrupted.image())]
    if not differences(uninterrupted.image(), at_cut):
        problems.append("training changed nothing after the save")
    return problems


def dense(training: Training) -> dict[str, Any]:
    state: dict[str, Any] = {"model": dense_state_of(training.model)}
    return state if training.optimizer is None else {**state, "optimizer": training.optimizer}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
