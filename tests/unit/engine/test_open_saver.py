"""A Saver has the features that it was asked for, and a save calls them in the order that open_saver.py gives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.engine import open_saver
from asyncckpt.engine.open_saver import ORDER, in_order
from asyncckpt.engine.save.feature import SaveFeature
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.options import DebugOptions, DeltaPolicy, DeviceOptions, RankOptions


def new_state() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


MODEL, OPTIMIZER = new_state()
ASKED: dict[str, dict[str, Any]] = {
    "EventLine": {"debug": DebugOptions(on_event=lambda event: None)},
    "Filters": {"filter_func": lambda blocks: blocks},
    "Deltas": {"deltas": DeltaPolicy()},
    "StepFences": {"device": DeviceOptions(optimizers=[OPTIMIZER])},
    "Retention": {"keep": 2},
}


def features_of(saver: asyncckpt.Saver) -> list[str]:
    return [type(feature).__name__ for feature in saver._target.features]


def test_a_plain_saver_has_none(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"model": MODEL}) as saver:
        assert features_of(saver) == []


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_for_is_one_feature(tmp_path: Path, name: str) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"model": MODEL}, **ASKED[name]) as saver:
        assert features_of(saver) == [name]
        assert saver.save_async(0).result().step == 0
    asyncckpt.verify(tmp_path, 0)


def test_the_order_is_that_of_the_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncckpt")
    asked = {key: value for options in reversed(ASKED.values()) for key, value in options.items()}
    ranks = RankOptions(in_turn=True)
    with asyncckpt.Saver(0, 2, path=tmp_path, tensors={"model": MODEL}, ranks=ranks, **asked) as saver:
        found = features_of(saver)
    assert found == ["EventLine", "LogLines", "SharesWithRanks", "Filters", "Deltas", "StepFences", "Retention"]
    assert list(ORDER) == ["events", "log", "ranks", "filters", "deltas", "steps", "uploads", "retention"]
    made = {name: SaveFeature() for name in reversed(ORDER)}
    assert in_order(made) == tuple(made[name] for name in ORDER)


class NotingFeature(SaveFeature):
    """Notes each place of a save to which it is called."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def begin(self, *_: Any) -> None:
        self.log.append("begin")

    def flattened(self, *_: Any) -> None:
        self.log.append("flattened")

    def frozen(self, *_: Any) -> None:
        self.log.append("frozen")

    def chosen(self, *_: Any) -> None:
        self.log.append("chosen")

    def planned(self, *_: Any) -> None:
        self.log.append("planned")

    def captured(self, *_: Any) -> None:
        self.log.append("captured")

    async def before_files(self, *_: Any) -> None:
        self.log.append("before_files")

    def committed(self, *_: Any) -> None:
        self.log.append("committed")

    def skipped(self, *_: Any) -> None:
        self.log.append("skipped")


def test_a_save_calls_each_place_once_and_the_state_may_change_after_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    make, fence = open_saver.make_features, Cut.fence

    def noting(asked: Any) -> dict[str, SaveFeature]:
        return {**make(asked), "filters": NotingFeature(log)}

    def fence_noted(cut: Cut) -> None:
        if not cut.fenced:
            log.append("fence")
        fence(cut)

    monkeypatch.setattr("asyncckpt.saver.make_features", noting)
    monkeypatch.setattr(Cut, "fence", fence_noted)
    with asyncckpt.Saver(path=tmp_path, tensors={"model": MODEL}) as saver:
        saver.save_async(0).result()
        staged = list(log)
        log.clear()
        saver.save(1)
    assert staged == [
        "begin",
        "flattened",
        "frozen",
        "chosen",
        "planned",
        "captured",
        "fence",
        "before_files",
        "committed",
    ]
    assert log == ["begin", "flattened", "frozen", "chosen", "planned", "before_files", "committed", "fence"]


@pytest.mark.parametrize(
    "place", [name for name in vars(SaveFeature) if not name.startswith("_") and name != "skipped"]
)
def test_a_feature_that_fails_ends_the_save_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """At whatever place: the next save begins anew, and waits for nothing."""
    make: Callable[[Any], dict[str, SaveFeature]] = open_saver.make_features
    failing = NotingFeature([])
    monkeypatch.setattr("asyncckpt.saver.make_features", lambda asked: {**make(asked), "filters": failing})
    with asyncckpt.Saver(path=tmp_path, tensors={"model": MODEL}) as saver:

        def fail(*_: Any) -> None:
            raise ValueError(place)

        with monkeypatch.context() as patch:
            patch.setattr(failing, place, fail)
            with pytest.raises(ValueError, match=place):
                saver.save_async(0).result()
        steps = asyncckpt.list_steps(tmp_path)
        assert steps == ([0] if place == "committed" else [])
        assert saver.save_async(1).result(30).step == 1
        assert saver.save(2).step == 2
    assert [path.name for path in (tmp_path / "data").iterdir() if int(path.name[:12]) == 0] == [] or steps == [0]
