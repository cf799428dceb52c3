"""What the logger `asyncckpt` says by itself: at INFO what goes well, at WARNING, not too often, what does not."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.engine.process import log
from asyncckpt.model.result import SaveResult

STATE = {"w": torch.ones(1 << 18)}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "asyncckpt")
    monkeypatch.setattr(log, "_told", {})
    return caplog


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name[10:]: value for name, value in vars(record).items() if name.startswith("asyncckpt_")}


def test_a_run_that_is_ended_by_sigterm_and_goes_on(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    path = str(tmp_path)
    with asyncckpt.Checkpointer(path, every=2, **STATE) as ckpt:
        for step in range(ckpt.restore(), 3):
            ckpt.step(step)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            ckpt.step(3)
    with asyncckpt.Checkpointer(path, every=2, more=torch.ones(1), **STATE) as ckpt:
        ckpt.restore(strict=False)
    said = [record.getMessage().replace(path, "DIR") for record in lines.records]
    assert said[0] == "DIR is open and locked: no checkpoint"
    assert said[1].startswith("step 2 of DIR is committed: full, 1.0 MiB in 0.")
    assert said[2].startswith("step 3 of DIR is committed: full, 1.0 MiB in 0.")
    assert said[3] == "step 3 of DIR is saved, and the process ends: SIGTERM"
    assert said[4] == "DIR is open and locked: 2 checkpoints, the newest of step 3"
    assert said[5].startswith("step 3 of DIR is restored: 1.0 MiB in 0.")
    assert said[5].endswith("s, missing: more")
    assert len(said) == 6
    told = list(map(fields, lines.records))
    assert [each["event"] for each in told] == ["opened", "committed", "committed", "ended", "opened", "restored"]
    assert told[1].keys() == {"event", "path", "step", "kind", "bytes", "seconds", "stall_seconds"}
    assert (told[5]["step"], told[5]["missing"]) == (3, ["more"])


def test_parts_of_ranks_in_turn_are_no_commit(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    ranks = asyncckpt.RankOptions(in_turn=True)
    for rank in range(2):
        assert not any("is committed" in record.getMessage() for record in lines.records)
        with asyncckpt.Saver(rank, 2, path=tmp_path, tensors={f"w{rank}": STATE["w"]}, ranks=ranks) as saver:
            saver.save(1)
    said = [record.getMessage() for record in lines.records]
    assert sum("is open" in line for line in said) == sum("step 1 of" in line for line in said) == 1


def test_a_last_step_that_another_rank_has_skipped_is_not_called_saved(lines: pytest.LogCaptureFixture) -> None:
    skipped = SaveResult(step=3, kind="full", path=Path("DIR"), skipped=True)
    log.log_ended(skipped, "SIGTERM", rank=0)
    log.log_ended(skipped, "SIGTERM", rank=1)
    said = [record.getMessage() for record in lines.records]
    assert said == ["step 3 of DIR is not saved, another rank has skipped it, and the process ends: SIGTERM"]


def test_who_logs_nothing_has_no_feature_for_it(tmp_path: Path) -> None:
    logging.getLogger("asyncckpt").setLevel(logging.NOTSET)
    assert not log.is_logged()
    with asyncckpt.Saver(path=tmp_path, tensors=STATE) as saver:
        assert saver._target.features == ()


def test_skips_are_told_when_they_are_three_in_a_row_and_then_at_times(
    tmp_path: Path, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def waits(blocks: Any) -> Any:
        gate.wait(60)
        return blocks

    with asyncckpt.Saver(path=tmp_path, tensors=STATE, filter_func=waits, on_busy="skip") as saver:
        saver.save_async(1)
        for step in range(2, 8):
            saver.save_async(step)
            if step == 6:
                monkeypatch.setattr(log, "OFTEN_S", 0.0)
        gate.set()
    said = [record.getMessage() for record in lines.records if record.levelno == logging.WARNING]
    why = f"the last because of the save of step 1 in '{tmp_path}'"
    assert said == [
        f"3 saves of {tmp_path} in a row were skipped, {why}",
        f"6 saves of {tmp_path} in a row were skipped, {why}; 2 more since the last such line",
    ]


def test_every_save_that_blocks_for_want_of_memory_is_counted(
    tmp_path: Path, lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors=STATE, host_memory_limit=1) as saver:
        for step in (1, 2, 3):
            if step == 3:
                monkeypatch.setattr(log, "OFTEN_S", 0.0)
            with pytest.warns(RuntimeWarning, match="blocks until"):
                saver.save_async(step)
    said = [record.getMessage() for record in lines.records if record.levelno == logging.WARNING]
    assert [line.partition(" of ")[0] for line in said] == ["step 1", "step 3"]
    assert said[1].endswith("; 1 more since the last such line")


def test_a_handler_that_raises_ends_no_save(tmp_path: Path, lines: pytest.LogCaptureFixture) -> None:
    class Fails(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("as planned")

    handler = Fails()
    logging.getLogger("asyncckpt").addHandler(handler)
    try:
        with asyncckpt.Saver(path=tmp_path, tensors=STATE) as saver:
            assert saver.save_async(1).result().step == 1
    finally:
        logging.getLogger("asyncckpt").removeHandler(handler)
