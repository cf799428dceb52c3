"""`Checkpointer.restore(fallback=True)`: what is damaged is passed by, put aside, and never lost; what fails is not."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import checkpoints
from asyncckpt.errors import CorruptError, with_earlier
from asyncckpt.storage.directory import Directory
from tests.worlds.directories import flip_byte, manifest_path
from tests.worlds.filled import Filled, check_all, damage


def data_file(path: Path, step: int) -> Path:
    return max((path / name for name in asyncckpt.describe(path, step).files), key=lambda file: file.stat().st_size)


def cut_file(path: Path, step: int) -> None:
    os.truncate(data_file(path, step), 100)


def lost_file(path: Path, step: int) -> None:
    data_file(path, step).unlink()


def lost_folder(path: Path, step: int) -> None:
    folder = data_file(path, step).parent
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def damaged_manifest(path: Path, step: int) -> None:
    flip_byte(manifest_path(path, step), at=40)


def empty_manifest(path: Path, step: int) -> None:
    manifest_path(path, step).write_bytes(b"")


DAMAGE = [damage, cut_file, lost_file, lost_folder, damaged_manifest, empty_manifest]


def saved(path: Path, **options: Any) -> None:
    state = Filled()
    with state.open(path, **options) as ckpt:
        state.run(ckpt)
    assert asyncckpt.list_steps(path) == [10, 20, 23]


def tree(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and file.name != "LOCK")
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def inside(path: Path, *above: str) -> dict[str, bytes]:
    """Return the files in folders of a directory, by their paths there."""
    return {name.split("/", 1)[1]: raw for name, raw in tree(path).items() if name.split("/")[0] in above}


def put_aside(path: Path) -> dict[str, bytes]:
    return {name.split("/", 1)[1]: raw for name, raw in inside(path, "damaged").items()}


@pytest.mark.parametrize("harm", DAMAGE, ids=lambda harm: harm.__name__)
def test_what_is_damaged_is_passed_by_and_put_aside_whole(
    tmp_path: Path, harm: Callable[[Path, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    harm(tmp_path, 20)
    harm(tmp_path, 23)
    before = tree(tmp_path)
    newer = {name: raw for name, raw in inside(tmp_path, "data", "manifests").items() if int(name[:12]) > 10}
    state = Filled()
    with state.open(tmp_path) as ckpt:
        assert ckpt.restore(fallback=True) == 11
        assert ckpt.report is not None
        assert (ckpt.report.step, ckpt.report.fallback_from) == (10, (23, 20))
        assert tree(tmp_path) == before  # Of a run that saves nothing, too.
        state.run(ckpt, 11)
    assert check_all(tmp_path) == [10, 20, 23]
    assert put_aside(tmp_path) == newer
    told = [record.getMessage() for record in caplog.records]
    for text, step in zip(told[:2], (23, 20), strict=True):
        assert text.startswith(f"step {step} of {tmp_path} is damaged and passed by, step ")
    assert told[2].startswith(f"damaged steps of {tmp_path} are put aside until somebody removes them: ")
    checkpoints.collect_garbage(tmp_path)
    checkpoints.prune(tmp_path, keep=1)
    assert put_aside(tmp_path) == newer


def test_a_pinned_step_and_deltas_above_a_damaged_one_are_put_aside(tmp_path: Path) -> None:
    deltas = asyncckpt.DeltaPolicy(bytes_share_max=10.0)
    saved(tmp_path, deltas=deltas)
    checkpoints.pin(tmp_path, 23)
    assert asyncckpt.describe(tmp_path, 23).kind == "delta"
    lost_file(tmp_path, 20)
    state = Filled()
    with state.open(tmp_path, deltas=deltas) as ckpt:
        assert ckpt.restore(fallback=True) == 11
        state.run(ckpt, 11)
    assert check_all(tmp_path) == [10, 20, 23]
    assert checkpoints.pinned_steps(tmp_path) == []
    assert "000000000023.pin" in put_aside(tmp_path)


def test_nothing_that_is_sound_is_an_error_of_the_newest(tmp_path: Path) -> None:
    saved(tmp_path)
    for step in (10, 20, 23):
        damage(tmp_path, step)
    before = tree(tmp_path)
    with Filled().open(tmp_path) as ckpt:
        with pytest.raises(asyncckpt.CorruptError, match=r"no .* is sound: step 23: .*; step 20: .*; step 10: "):
            ckpt.restore(fallback=True)
        with pytest.raises(asyncckpt.UsageError, match="not above step 23"):
            ckpt.step(11)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_step_that_cannot_be_read_is_not_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    saved(tmp_path)

    def open_file(folder: Directory, name: str, **options: Any) -> int:
        if name.endswith(".safetensors") and folder.path.name.startswith("000000000023"):
            raise asyncckpt.errors.IOFailedError(f"{name!r} cannot be opened", errno=code)
        return whole(folder, name, **options)

    whole = Directory.open_file
    state = Filled()
    with state.open(tmp_path) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(Directory, "open_file", open_file)
            with pytest.raises(asyncckpt.errors.IOFailedError):
                ckpt.restore(fallback=True)
        assert ckpt.restore(fallback=True) == 24
    assert put_aside(tmp_path) == {}


def test_a_step_of_another_model_is_not_passed_by(tmp_path: Path) -> None:
    saved(tmp_path)
    other = asyncckpt.Checkpointer(tmp_path, every=10, z=Filled().y)
    with other, pytest.raises(asyncckpt.IncompatibleError):
        other.restore(fallback=True)


@pytest.mark.parametrize(
    "options",
    [{"step": 10}, {"discard_newer": True}, {"strict": False}, {"resize": ["y"]}, {"filter_func": dict}],
    ids=lambda options: next(iter(options)),
)
def test_what_could_leave_parts_of_a_damaged_step_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    saved(tmp_path)
    damage(tmp_path, 23)
    state = Filled()
    with state.open(tmp_path) as ckpt:
        with pytest.raises(asyncckpt.UsageError, match="fallback is for the newest step"):
            ckpt.restore(fallback=True, **options)
        assert state.y.unique().tolist() == [0]
        assert ckpt.restore(fallback=True) == 21


def test_nothing_is_saved_beside_what_cannot_be_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention would count it, and let sound ones go."""
    saved(tmp_path)
    damage(tmp_path, 20)
    damage(tmp_path, 23)
    moved: list[str] = []

    def move(folder: Directory, source: str, target: str, **options: Any) -> None:
        if len(moved) == 3:  # All of step 23, and the data of step 20.
            raise asyncckpt.errors.IOFailedError(f"{source!r} cannot be moved", errno=errno.EIO)
        moved.append(source)
        whole(folder, source, target, **options)

    whole = Directory.move
    state = Filled()
    with state.open(tmp_path) as ckpt:
        ckpt.restore(fallback=True)
        monkeypatch.setattr(Directory, "move", move)
        for _ in range(2):
            with pytest.raises(asyncckpt.errors.IOFailedError, match=r"damaged steps of .* cannot be put aside: "):
                ckpt.save_now(11)
        assert asyncckpt.list_steps(tmp_path) == [10, 20]
        monkeypatch.undo()
        state.run(ckpt, 11)
    assert check_all(tmp_path) == [10, 20, 23]


def test_a_refused_call_puts_nothing_aside(tmp_path: Path) -> None:
    saved(tmp_path)
    damage(tmp_path, 23)
    before = tree(tmp_path)
    state = Filled()
    with state.open(tmp_path) as ckpt:
        assert ckpt.restore(fallback=True) == 21
        for call in (
            lambda: ckpt.save_now(),
            lambda: ckpt.save_now(5),
            lambda: ckpt.save_now(21, metadata={"a": object()}),
            lambda: ckpt.step(21, save="yes"),  # type: ignore[arg-type]
            lambda: ckpt.step(5),
        ):
            with pytest.raises(asyncckpt.UsageError):
                call()
        assert tree(tmp_path) == before
        damage(tmp_path, 20)
        with pytest.raises(asyncckpt.CorruptError):
            ckpt.restore()
        with pytest.raises(asyncckpt.UsageError, match="not above step 23"):
            ckpt.step(12)
    assert put_aside(tmp_path) == {}


def test_no_delta_builds_upon_what_was_passed_by(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """By the Checkpointer that has saved it."""
    state = Filled()
    with state.open(tmp_path, deltas=asyncckpt.DeltaPolicy(bytes_share_max=10.0)) as ckpt:
        state.run(ckpt)
        ckpt.save_now(23)
        damage(tmp_path, 23)
        assert ckpt.restore(fallback=True) == 21
        for step in range(21, 31):
            state.train(step)
            ckpt.step(step)
    assert check_all(tmp_path) == [10, 20, 30]
    asyncckpt.verify(tmp_path, 30)
    assert not [one for one in recwarn if "base" in str(one.message)]


@pytest.mark.parametrize("fallback", [False, True])
def test_a_new_history_after_a_failed_restore_is_no_delta_of_the_old_one(tmp_path: Path, fallback: bool) -> None:
    state = Filled()
    with state.open(tmp_path, deltas=asyncckpt.DeltaPolicy(bytes_share_max=10.0)) as ckpt:
        state.run(ckpt)
        ckpt.save_now(23)
        for step in (10, 20, 23) if fallback else (23,):
            damage(tmp_path, step)
        with pytest.raises(asyncckpt.CorruptError):
            ckpt.restore(fallback=fallback)
        ckpt.begin_anew()
        assert ckpt.save_now(24).kind == "full"
    asyncckpt.verify(tmp_path, 24)


@pytest.mark.parametrize(("strict", "verify"), [(True, True), (False, True), (False, False)])
def test_a_loader_mixes_no_parts_of_a_damaged_step(tmp_path: Path, strict: bool, verify: bool) -> None:
    new, both = torch.full((1 << 16,), 2.0), torch.full((1 << 16,), 2.0)
    with asyncckpt.Saver(path=tmp_path, tensors={"both": both}) as saver:
        saver.save(1)
    with asyncckpt.Saver(path=tmp_path, tensors={"new": new, "both": both + 1}) as saver:
        saver.save(2)
    flip_byte(data_file(tmp_path, 2))
    state = {"new": torch.zeros(1 << 16), "both": torch.zeros(1 << 16)}
    loader = asyncckpt.Loader(tmp_path, tensors=state, fallback=True, strict=strict, verify=verify)
    if strict:
        with pytest.raises(asyncckpt.CorruptError, match=r"step 2 is damaged, .* and step 1 does not match"):
            loader.load()
    else:
        assert loader.load().fallback_from == (2,)
        assert state["both"].unique().tolist() == [2.0]
        assert state["new"].unique().tolist() == [0.0]


def test_a_loop_whose_older_step_does_not_fit_saves_nothing(tmp_path: Path) -> None:
    new, both = torch.full((1 << 16,), 2.0), torch.full((1 << 16,), 2.0)
    with asyncckpt.Checkpointer(tmp_path, every=1, both=both) as ckpt:
        ckpt.step(1)
    with asyncckpt.Checkpointer(tmp_path, every=1, new=new, both=both) as ckpt:
        ckpt.step(2)
    flip_byte(data_file(tmp_path, 2))
    with asyncckpt.Checkpointer(tmp_path, every=1, on_error="warn", new=torch.zeros(1 << 16), both=both) as ckpt:
        with pytest.raises(asyncckpt.CorruptError, match=r"step 2 is damaged, .* and step 1 does not match"):
            ckpt.restore(fallback=True)
        with pytest.raises(asyncckpt.UsageError, match="the state is not saved: loading step 2 has failed"):
            ckpt.step(3)
    assert asyncckpt.list_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("fallback", [False, True])
def test_an_error_that_names_its_directory_is_told_once(tmp_path: Path, fallback: bool) -> None:
    """It was its own cause under another text, so that tracebacks and warnings showed it twice."""
    for step in (1, 2):
        asyncckpt.save(tmp_path, {"x": torch.ones(1000)}, step=step, durability="none")
        (name,) = asyncckpt.describe(tmp_path, step).files
        flip_byte(tmp_path / name)
    with pytest.raises(CorruptError) as raised:
        asyncckpt.Loader(tmp_path, tensors={"x": torch.zeros(1000)}, fallback=fallback).load()
    told = with_earlier(raised.value)
    assert told.count("no checkpoint in" if fallback else "step 2 is damaged") == 1
    assert repr(str(tmp_path)) in str(raised.value)
