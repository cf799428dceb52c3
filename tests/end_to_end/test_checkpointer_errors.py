"""Errors of a Checkpointer reach somebody, whatever else happens; and a forked child has none of it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.model.result import SaveResult

IN_A_CHILD: dict[str, Callable[[asyncckpt.Checkpointer], object]] = {
    "restore": lambda ckpt: ckpt.restore(),
    "restore of an earlier step": lambda ckpt: ckpt.restore(1, discard_newer=True),
    "begin_anew": lambda ckpt: ckpt.begin_anew(),
    "step that is due": lambda ckpt: ckpt.step(4),
    "step that is not due": lambda ckpt: ckpt.step(5),
    "save_now": lambda ckpt: ckpt.save_now(4),
    "with": lambda ckpt: ckpt.__enter__(),
}


def test_a_forked_child_uses_nothing_of_it_and_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with asyncckpt.Checkpointer(tmp_path, every=1, x=torch.zeros(2)) as ckpt:
        for step in range(1, 4):
            ckpt.save_now(step)
        ckpt.step(4, save=False)  # Which the end of the block is to save.
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            told = []
            for call in IN_A_CHILD.values():
                try:
                    call(ckpt)
                except asyncckpt.UsageError as error:
                    told.append(str(error))
            ckpt.__exit__(None, None, None)
            ckpt.close()
            sys.stderr.flush()
            os.write(write, json.dumps(told).encode())
            os._exit(0)
        os.close(write)
        told = json.loads(os.fdopen(read, "rb").read())
        assert os.waitpid(child, 0)[1] == 0
        assert told == ["this Checkpointer belongs to the parent process (make a new one in this process)"] * len(told)
        assert len(told) == len(IN_A_CHILD)
        assert asyncckpt.list_steps(tmp_path) == [1, 2, 3]
    assert asyncckpt.list_steps(tmp_path) == [1, 2, 3, 4]
    assert capfd.readouterr().err == ""


def failing_save(tmp_path: Path, then: Callable[[], object]) -> asyncckpt.Checkpointer:
    """Return one whose save of step 1 has failed, unheard; each later one calls `then` before it is written."""

    def filter_func(blocks: Any) -> Any:
        if not failed:
            failed.append(True)
            raise ValueError("the first one")
        then()
        return blocks

    failed: list[bool] = []
    ckpt = asyncckpt.Checkpointer(tmp_path, every=1, x=torch.zeros(2), options={"filter_func": filter_func})
    ckpt.step(1)
    ckpt._saver._wait_in_flight(20)
    return ckpt


@pytest.mark.parametrize("how", ["save_now", "last save"])
def test_a_ctrl_c_tells_of_the_save_that_has_failed_before(tmp_path: Path, how: str) -> None:
    sent: list[bool] = []

    def interrupt() -> None:
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    ckpt = failing_save(tmp_path, interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        ckpt.save_now(2) if how == "save_now" else ckpt.close()
    assert "the first one" in "".join(traceback.format_exception(caught.value))
    ckpt.close()


def test_a_warning_tells_of_both_saves_that_have_failed(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("the second one")

    ckpt = failing_save(tmp_path, fail)
    ckpt._periodic._on_error = "warn"
    with pytest.warns(RuntimeWarning, match=r"the second one.*; before that: .*the first one"):
        ckpt.close()


def test_a_note_tells_of_both_saves_that_have_failed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("the second one")

    ckpt = failing_save(tmp_path, fail)
    with pytest.raises(IndexError) as caught, ckpt:
        raise IndexError
    told = "".join(getattr(caught.value, "__notes__", ())) + capfd.readouterr().err  # Notes are of Python 3.11.
    assert re.search(r"the second one.*; before that: .*the first one", told)


def test_a_last_save_that_another_rank_has_skipped_is_not_taken_for_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt = asyncckpt.Checkpointer(tmp_path, every=10, x=torch.zeros(2))
    skipped = SaveResult(step=1, kind="full", path=tmp_path, skipped=True)
    with monkeypatch.context() as patched:
        patched.setattr(ckpt._saver, "save", lambda *_, **__: skipped)
        assert ckpt.save_now(1).skipped
    assert ckpt.statistics().skipped_count == 1
    assert ckpt.statistics().last_result is None
    ckpt.close()
    assert asyncckpt.list_steps(tmp_path) == [1]
