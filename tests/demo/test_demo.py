"""The demo tells the truth: at a size of seconds it kills, resumes and compares, and it fails when bits differ."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import asyncckpt
import demo.__main__ as command
from demo.child import Child, ChildFailedError
from demo.crash import was_torn
from demo.digests import differences, digests
from demo.model import FILES, Recommender
from demo.spec import RunSpec
from demo.story import CHECKPOINTS_NAME, RunShape, StoryFailedError, check_same, tell_story

TINY = RunShape(steps=130, every_steps=20, cold_rows_count=60_000, dim=8, batch_size=64, files_max=30)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("cache_rows", [0, 2000])
def test_killed_and_resumed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path, cache_rows: int) -> None:
    text = io.StringIO()
    picture = tmp_path / "timeline.png"
    tell_story(
        replace(TINY, cache_rows=cache_rows), runs=tmp_path, picture=picture, console=Console(file=text, width=110)
    )
    assert "SIGKILL hit the save of step" in text.getvalue()
    assert "bit for bit the same" in text.getvalue()
    assert picture.read_bytes().startswith(b"\x89PNG")
    # The resumed run went on to the end and swept away what the killed save left.
    assert asyncckpt.list_steps(tmp_path / CHECKPOINTS_NAME)[-1] == TINY.steps
    assert not any(was_torn(tmp_path / CHECKPOINTS_NAME, step) for step in range(1, TINY.steps + 1))


def test_digests_do_not_depend_on_the_order_of_rows_and_see_a_single_bit() -> None:
    left, right = Recommender(dim=4, seed=1), Recommender(dim=4, seed=1)
    for recommender, ids in ((left, [3, -7]), (right, [-7, 3])):
        recommender.tables[FILES].lookup(torch.tensor(ids))
    assert differences(digests(left), digests(right)) == []
    right.tables[FILES].slot("last_seen")[0] ^= 1
    assert differences(digests(left), digests(right)) == ["files.last_seen"]


def test_difference_is_a_failure_that_names_it() -> None:
    with pytest.raises(StoryFailedError, match=r"left and right differ in 2 of 2 parts: items\.sum, step"):
        check_same("left", {"items.sum": "a", "step": "1"}, "right", {"items.sum": "b", "step": "2"})


def test_nothing_compared_is_a_failure() -> None:
    with pytest.raises(StoryFailedError):
        check_same("left", {}, "right", {})


def test_failure_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoryFailedError("left and right differ")

    monkeypatch.setattr(command, "tell_story", fail)
    result = CliRunner().invoke(command.app, ["--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "left and right differ" in result.output
    assert len(list(tmp_path.glob("runs-*"))) == 1  # Kept to be looked at.


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(command.app, ["--gpu", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert result.output == f"--gpu needs a GPU: torch {torch.__version__} finds none that it can use\n"
    assert not list(tmp_path.iterdir())


def test_a_gpu_gets_the_mlp_and_a_cache_of_each_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shapes: list[RunShape] = []
    monkeypatch.setattr(command, "tell_story", lambda shape, **_: shapes.append(shape))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for arguments in ([], ["--gpu"]):
        CliRunner().invoke(command.app, ["--out", str(tmp_path), *arguments], catch_exceptions=False)
    assert [(shape.device, shape.cache_rows) for shape in shapes] == [("cpu", 0), ("cuda", command.CACHE_ROWS)]


def test_training_process_that_fails_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    spec = RunSpec("asyncckpt", str(tmp_path / "run"), str(tmp_path / "no-log.npz"), 1, 1, 0)
    with (
        Child(spec, stderr_path=tmp_path / "stderr") as child,
        pytest.raises(ChildFailedError, match=r"status 1[^$]*no-log\.npz"),
    ):
        list(child.events())


def test_save_is_torn_when_it_has_data_and_no_manifest(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"step": 1}) as saver:
        saver.save(1)
    folder = tmp_path / "data" / f"{2:012d}-{'0' * 32}"
    folder.mkdir()
    assert not was_torn(tmp_path, 1)
    assert not was_torn(tmp_path, 2)  # It had not begun to write.
    (folder / "r00000-000.safetensors").write_bytes(b"x" * 4096)
    assert was_torn(tmp_path, 2)
