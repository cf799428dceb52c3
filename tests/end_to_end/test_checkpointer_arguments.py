"""What a Checkpointer is told: the time it has, and options of the Saver behind it."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import checkpointer as module


def test_max_hours_leaves_time_for_a_step_and_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    with asyncckpt.Checkpointer(tmp_path, every=1000, max_hours=1, x=torch.zeros(2)) as ckpt:
        for step in range(6):
            now[0] += 500.0
            ckpt.step(step)
        assert asyncckpt.list_steps(tmp_path) == []
        now[0] += 500.0
        with pytest.raises(SystemExit) as ended:  # At 3,500 s; the next step would end at 4,000 s.
            ckpt.step(6)
    assert ended.value.code == 143
    assert asyncckpt.list_steps(tmp_path) == [6]


def test_max_hours_are_checked_as_hours(tmp_path: Path) -> None:
    for wrong in (-1, 0, 0.0):
        with pytest.raises(asyncckpt.UsageError, match=rf"^max_hours must be more than 0 hours; got {wrong}$"):
            asyncckpt.Checkpointer(tmp_path, every=1, max_hours=wrong, x=torch.zeros(2))
    with pytest.raises(asyncckpt.UsageError, match=r"^max_hours must be a number of hours in .*; got nan$"):
        asyncckpt.Checkpointer(tmp_path, every=1, max_hours=float("nan"), x=torch.zeros(2))


def test_max_hours_leaves_time_for_the_longest_save_and_one_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was that of the last save: of a small delta, and nothing for the one that has to be waited for first."""
    now, saves_s = [0.0], [700.0, 10.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    save = asyncckpt.Saver.save

    def timed(saver: asyncckpt.Saver, *arguments: Any, **more: Any) -> asyncckpt.SaveResult:
        return replace(save(saver, *arguments, **more), seconds=saves_s.pop(0) if saves_s else 0.0)

    monkeypatch.setattr(asyncckpt.Saver, "save", timed)
    with asyncckpt.Checkpointer(tmp_path, every=1000, max_hours=1, x=torch.zeros(2)) as ckpt:
        for step in range(4):
            now[0] += 500.0
            if saves_s:
                ckpt.save_now(step)
            ckpt.step(step)
        now[0] += 500.0
        with pytest.raises(SystemExit):
            ckpt.step(4)
    # At 2,500 s: a save that begins now may take until 3,200 s, and that of the last step until 3,900 s.
    assert asyncckpt.list_steps(tmp_path)[-1] == 4


def test_options_are_those_of_a_saver(tmp_path: Path) -> None:
    with asyncckpt.Checkpointer(tmp_path, every=2, options={"durability": "none"}, x=torch.zeros(2)) as ckpt:
        ckpt.step(1)
    assert ckpt.path == str(tmp_path)
    with pytest.raises(asyncckpt.UsageError, match="say when to save: every=STEPS or every_seconds=SECONDS"):
        asyncckpt.Checkpointer(tmp_path, x=torch.zeros(2))
    with pytest.raises(asyncckpt.UsageError, match=r"every must be .*; got 0"):
        asyncckpt.Checkpointer(tmp_path, every=0, x=torch.zeros(2))


def test_a_state_that_has_grown_is_refused_by_an_error_that_says_what_loads_it(tmp_path: Path) -> None:
    old = torch.ones(2)
    with asyncckpt.Checkpointer(tmp_path, every=2, x=old) as ckpt:
        ckpt.step(1)
    state = {"x": torch.zeros(2), "y": torch.full((2,), 7.0)}
    with asyncckpt.Checkpointer(tmp_path, every=2, **state) as ckpt:
        with pytest.raises(asyncckpt.IncompatibleError, match="strict=False loads what matches"):
            ckpt.restore()
        assert ckpt.restore(strict=False) == 2
        assert ckpt.report is not None
        assert (ckpt.report.step, ckpt.report.missing) == (1, ("y",))
        ckpt.step(2)
    found = asyncckpt.load(tmp_path, 2)
    assert (found["x"].tolist(), found["y"].tolist()) == ([1.0, 1.0], [7.0, 7.0])


RIGHT: dict[str, Any] = {  # An option of each parameter of a Saver that is none of the Checkpointer's own.
    "shard_index": None,  # With shard_num alone.
    "shard_num": 1,
    "parallel": 2,
    "filter_func": list,
    "on_busy": "wait",
    "durability": "none",
    "host_memory_limit": 1 << 30,
    "filters": (),
    "device": asyncckpt.DeviceOptions(),
    "ranks": asyncckpt.RankOptions(),
    "debug": asyncckpt.DebugOptions(),
}


@pytest.mark.parametrize("name", [*inspect.signature(asyncckpt.Saver).parameters, "keyword", 7])
def test_every_wrong_option_is_named(tmp_path: Path, name: Any) -> None:
    """It was a TypeError of a call that nobody had written, or it took the place of an argument of the same name."""
    if RIGHT.get(name) is not None:
        with asyncckpt.Checkpointer(tmp_path, every=2, options={name: RIGHT[name]}, x=torch.zeros(2)) as ckpt:
            ckpt.step(1)
    before = sorted(tmp_path.iterdir())
    for value in (object(), 3.5, "word", None) if name in RIGHT else (None, {}):
        if value is None and name in ("on_busy", "host_memory_limit", "upload"):
            continue
        with pytest.raises(asyncckpt.UsageError, match=re.escape(str(name))):
            asyncckpt.Checkpointer(tmp_path, every=2, options={name: value}, x=torch.zeros(2))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["ranks", "filter_func", "rng"])
def test_what_no_save_would_take_is_refused_before_anything_is_trained(tmp_path: Path, name: str) -> None:
    """It was found by the first save that was due, so a run of fewer steps was lost."""
    given = {"ranks": asyncckpt.RankOptions(), "filter_func": lambda blocks: blocks, "rng": torch.Generator()}[name]
    with pytest.raises(asyncckpt.UsageError, match=rf"'{name}' (cannot be saved|is an argument of Saver).*options="):
        asyncckpt.Checkpointer(tmp_path, every=1000, x=torch.zeros(2), **{name: given})
