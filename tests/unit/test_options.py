"""Records of options check themselves when they are made, and name the field that is wrong."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.engine.process.save_lock import Ticket, save_lock
from asyncckpt.options import SaveOptions

RECORDS = (
    asyncckpt.BusyPolicy,
    asyncckpt.DebugOptions,
    asyncckpt.DeltaPolicy,
    asyncckpt.DeviceOptions,
    asyncckpt.RankOptions,
    SaveOptions,
)


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        (asyncckpt.BusyPolicy, {"action": "wait!"}),
        (asyncckpt.BusyPolicy, {"action": None}),
        *[(asyncckpt.BusyPolicy, {"deadline": value}) for value in (-1, float("inf"), float("nan"), "1", True, None)],
        (asyncckpt.DeltaPolicy, {"deltas_max": 0}),
        (asyncckpt.DeltaPolicy, {"deltas_max": True}),
        (asyncckpt.DeltaPolicy, {"bytes_share_max": None}),
        (asyncckpt.DeltaPolicy, {"seconds_max": 0}),
        (asyncckpt.DeviceOptions, {"scratch_bytes": -1}),
        (asyncckpt.DeviceOptions, {"scratch_bytes": None}),
        (asyncckpt.DeviceOptions, {"scratch_bytes": True}),
        (asyncckpt.DeviceOptions, {"pinned_memory_limit": 1.5}),
        (asyncckpt.DeviceOptions, {"pinned_memory_limit": -1}),
        (asyncckpt.DeviceOptions, {"optimizers": [torch.nn.Linear(1, 1)]}),
        (asyncckpt.DeviceOptions, {"optimizers": 5}),
        (asyncckpt.DeviceOptions, {"streams": None}),
        (asyncckpt.DeviceOptions, {"fingerprints": "yes"}),
        (asyncckpt.DeviceOptions, {"host_level": "first"}),
        (asyncckpt.DebugOptions, {"refresh": None}),
        (asyncckpt.DebugOptions, {"audit": 1}),
        *[(asyncckpt.RankOptions, {"peer_deadline": value}) for value in (0, -1, float("nan"), "1", True, None)],
        (SaveOptions, {"parallel": 0}),
        (SaveOptions, {"parallel": 1000}),
        (SaveOptions, {"durability": "maybe"}),
        (SaveOptions, {"host_memory_limit": -1}),
        (SaveOptions, {"keep": 1}),
        (SaveOptions, {"deltas": {}}),
        (SaveOptions, {"device": 1 << 20}),
        (SaveOptions, {"debug": False}),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_and_named(record: Any, wrong: dict[str, Any]) -> None:
    name = {"action": "on_busy", "deadline": "deadline of on_busy"}.get(next(iter(wrong)), next(iter(wrong)))
    with pytest.raises(asyncckpt.UsageError, match=f"{name} must be") as caught:
        record(**wrong)
    assert "; got " in str(caught.value)


@pytest.mark.parametrize("record", RECORDS)
def test_records_cannot_be_changed_and_say_what_every_field_is(record: Any) -> None:
    made = record()
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, None)
        assert record is SaveOptions or f"\n{field.name} " in inspect.getdoc(record)


def test_one_way_to_name_an_action() -> None:
    policy = asyncckpt.BusyPolicy("queue", deadline=2.0)
    assert asyncckpt.BusyPolicy.of(policy, deadline=7.0) is policy
    assert asyncckpt.BusyPolicy.of("wait", deadline=7.0) == asyncckpt.BusyPolicy("wait", deadline=7.0)
    with pytest.raises(asyncckpt.UsageError, match="on_busy must be"):
        asyncckpt.BusyPolicy.of(policy, actions=("raise", "wait"))


def test_lists_are_copied() -> None:
    streams = [object()]
    options = asyncckpt.DeviceOptions(streams=streams)
    streams.clear()
    assert len(options.streams) == 1


def test_a_call_may_have_a_policy_of_its_own(tmp_path: Path) -> None:
    """It brings its own deadline; a word keeps the Saver's."""
    state = {"x": torch.ones(3)}
    with asyncckpt.Saver(path=tmp_path, tensors=state, on_busy=asyncckpt.BusyPolicy("queue", deadline=0.02)) as saver:
        load = Ticket(kind="load", path=tmp_path, step=0)
        save_lock.acquire(load, on_busy="raise", deadline_s=0)
        try:
            with pytest.raises(asyncckpt.DeadlineError, match=r"did not end within 0\.01 s"):
                saver.save(1, on_busy=asyncckpt.BusyPolicy("wait", deadline=0.01))
            with pytest.raises(asyncckpt.DeadlineError, match=r"did not end within 0\.02 s"):
                saver.save(1, on_busy="wait")
            assert saver.save_async(1, on_busy="skip").result(60).skipped
            with pytest.raises(asyncckpt.SaveInProgressError):
                saver.save(1, on_busy="raise")
        finally:
            save_lock.release(load)


def test_a_word_may_be_that_of_an_enum() -> None:
    word = enum.Enum("Word", {"QUEUE": "queue"}, type=str)
    assert asyncckpt.BusyPolicy(word.QUEUE).action == "queue"  # type: ignore[arg-type]
