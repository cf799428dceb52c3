"""A step that goes before its compaction has ended was removed by somebody who may: training goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
import asyncckpt.engine.compact.run_compaction
from asyncckpt.engine.process.background import REWRITERS_MAX, rewriters
from tests.end_to_end.chains import TrainingRun
from tests.end_to_end.state import load_image

WAIT_S = 60


@pytest.mark.parametrize("asked_for", [None, 2])
@pytest.mark.parametrize("removed_by", ["retention", "going back"])
def test_a_compaction_whose_step_goes_before_its_turn_is_skipped(
    tmp_path: Path, asked_for: int | None, removed_by: str
) -> None:
    """The threads that compact are busy, so the step goes first."""
    may_begin = threading.Event()
    with TrainingRun(tmp_path, keep=1 if removed_by == "retention" else None) as run:
        run.save(1, "full")
        run.save(2)
        busy = [rewriters.submit(may_begin.wait, WAIT_S) for _ in range(REWRITERS_MAX)]
        compaction = run.saver.compact(asked_for)
        if removed_by == "retention":
            run.save(3, "full")
            run.saver._target.memory.behind["retention"].result(WAIT_S)
        else:
            asyncckpt.checkpoints.remove_after(tmp_path, 1)
        assert 2 not in asyncckpt.list_steps(tmp_path)
        may_begin.set()
        assert [one.result(WAIT_S) for one in busy] == [True] * REWRITERS_MAX
        assert compaction.exception(WAIT_S) is None
        assert compaction.result().skipped
        run.save(4)
    assert load_image(tmp_path) == run.images[4]


@pytest.mark.parametrize("is_saved_anew", [False, True])
def test_a_compaction_whose_step_goes_while_it_writes_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_saved_anew: bool
) -> None:
    """By another process, which no lock keeps away."""
    write = asyncckpt.engine.compact.run_compaction._write
    manifest = tmp_path / "manifests" / f"{2:012d}.json"
    saved_anew = b""

    def write_and_lose(*arguments: Any, **options: Any) -> Any:
        written = write(*arguments, **options)
        manifest.unlink()
        if is_saved_anew:
            manifest.write_bytes(saved_anew)
        return written

    with TrainingRun(tmp_path / "other") as other:
        other.save(2)
        saved_anew = next((tmp_path / "other" / "manifests").glob("*.json")).read_bytes()
        for folder in (tmp_path / "other" / "data").iterdir():
            (tmp_path / "data").mkdir()
            folder.rename(tmp_path / "data" / folder.name)
    with TrainingRun(tmp_path) as run:
        run.save(1)
        run.save(2)
        monkeypatch.setattr(asyncckpt.engine.compact.run_compaction, "_write", write_and_lose)
        compaction = run.saver.compact()
        run.saver._errors.wait(WAIT_S)
        assert not list((tmp_path / "manifests").glob("*.full.json"))
        run.save(3, "full")
        assert compaction.result().skipped
    assert load_image(tmp_path) == run.images[3]


def test_a_compaction_of_a_step_that_was_never_there_is_an_error(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.zeros(1)}) as saver:
        saver.save(1)
        with pytest.raises(asyncckpt.NotFoundError, match="step 9 is not in"):
            saver.compact(9).result(WAIT_S)
