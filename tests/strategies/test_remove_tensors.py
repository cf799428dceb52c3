"""Tensors are removed by a commit: all of it or nothing, and no file that a manifest names is changed."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt.commit.attempt import claims
from asyncckpt.errors import ConflictError, IncompatibleError, NotFoundError, UnsupportedError, UsageError
from asyncckpt.strategies import ShardedLoad, ShardedSave, remove_tensors
from asyncckpt.strategies.mapping import ShardedObject, ShardedTensor

SAVE, LOAD = ShardedSave(), ShardedLoad()


def state() -> dict[str, Any]:
    return {
        "model": [
            ShardedTensor.from_rank_offsets("model.w", torch.arange(6.0)[n * 3 : n * 3 + 3].clone(), (0, n, 2))
            for n in range(2)
        ],
        "optimizer": {
            name: ShardedTensor.from_rank_offsets(f"optimizer.{name}", torch.full((50_000,), 2.0))
            for name in ("exp_avg", "exp_avg_sq")
        },
        "rng": ShardedObject("rng", {"seed": 5, "state": torch.arange(3)}, (1,), (0,)),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupted_removal_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    SAVE.save(state(), tmp_path)
    write, ended = remove_tensors._write, threading.Event()

    def slow_write(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        ended.set()
        if fails:
            raise OSError(errno.ENOSPC, "no space left")
        return write(*args)

    monkeypatch.setattr(remove_tensors, "_write", slow_write)
    with pytest.raises(KeyboardInterrupt) as raised:
        LOAD.remove_sharded_tensors(tmp_path, "optimizer")
    assert ended.is_set()
    assert claims.held == {}
    notes = getattr(raised.value, "__notes__", [])
    assert any("no space left" in note.lower() for note in notes) == (fails and sys.version_info >= (3, 11))
    assert "optimizer.exp_avg" in LOAD.load_tensors_metadata(tmp_path)


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "LOCK"
    }


def check_model(folder: Path) -> None:
    wanted = {
        "w": ShardedTensor("model.w", None, torch.float32, (6,), (6,), (0,), None),
        "rng": ShardedObject("rng", None, (1,), (0,)),
    }
    got = LOAD.load(wanted, folder)
    assert got["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert got["rng"]["seed"] == 5
    assert got["rng"]["state"].tolist() == [0, 1, 2]


def test_tensors_of_a_prefix_go_and_their_bytes_too(tmp_path: Path) -> None:
    SAVE.save(state(), tmp_path)
    before = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    LOAD.remove_sharded_tensors(tmp_path, "optimizer.")
    assert set(LOAD.load_tensors_metadata(tmp_path)) == {"model.w"}
    assert set(LOAD.load_sharded_metadata(tmp_path)) == {"model.w", "rng/shard_0_1"}
    check_model(tmp_path)
    asyncckpt.verify(tmp_path / "sharded")
    after = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert after < before - 2 * 50_000 * 4 + 20_000
    assert len(list((tmp_path / "sharded" / "data").iterdir())) == 1
    with pytest.raises(NotFoundError, match=r"optimizer\.exp_avg"):
        LOAD.load([item.without_data() for item in state()["optimizer"].values()], tmp_path)


def test_removing_again_and_all_of_it(tmp_path: Path) -> None:
    SAVE.save(state(), tmp_path)
    LOAD.remove_sharded_tensors(tmp_path, "optimizer.exp_avg_sq")
    assert set(LOAD.load_tensors_metadata(tmp_path)) == {"model.w", "optimizer.exp_avg"}
    LOAD.remove_sharded_tensors(tmp_path, "")
    assert set(LOAD.load_sharded_metadata(tmp_path)) == {"rng/shard_0_1"}
    SAVE.save(state(), tmp_path)
    check_model(tmp_path)


def test_nothing_to_remove_changes_nothing(tmp_path: Path) -> None:
    SAVE.save(state(), tmp_path)
    before = files(tmp_path)
    with pytest.warns(UserWarning, match=r"'adam\.'"):
        LOAD.remove_sharded_tensors(tmp_path, "adam.")
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "where", ["engine.compact.copy_blocks.stream_sources", "commit.transaction.Transaction._prepare"]
)
def test_a_failure_before_the_commit_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    SAVE.save(state(), tmp_path)
    before = files(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(f"asyncckpt.{where}", refuse)
        with pytest.raises(asyncckpt.IOFailedError, match="No space left"):
            LOAD.remove_sharded_tensors(tmp_path, "optimizer.")
    assert files(tmp_path) == before
    LOAD.remove_sharded_tensors(tmp_path, "optimizer.")
    check_model(tmp_path)


def test_old_files_that_cannot_be_removed_are_a_warning_and_swept_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    SAVE.save(state(), tmp_path)
    before = files(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("asyncckpt.commit.retention.retain", lambda *_, **__: 1 / 0)
        LOAD.remove_sharded_tensors(tmp_path, "optimizer.")
    assert "were kept" in caplog.text
    assert before.items() <= files(tmp_path).items()
    assert set(LOAD.load_tensors_metadata(tmp_path)) == {"model.w"}
    SAVE.save(state(), tmp_path)
    assert len(list((tmp_path / "sharded" / "data").iterdir())) == 1
    check_model(tmp_path)


def test_a_damaged_block_is_not_copied(tmp_path: Path) -> None:
    SAVE.save(state(), tmp_path)
    (file,) = (tmp_path / "sharded" / "data").glob("*/*.safetensors")
    raw = bytearray(file.read_bytes())
    at = raw.rindex(torch.arange(3.0).numpy().tobytes())
    raw[at] ^= 1
    file.write_bytes(raw)
    with pytest.raises(asyncckpt.CorruptError, match=r"model\.w"):
        LOAD.remove_sharded_tensors(tmp_path, "optimizer.")
    assert asyncckpt.list_steps(tmp_path / "sharded") == [0]


def test_a_dtype_of_a_newer_version_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SAVE.save(state(), tmp_path)
    read = remove_tensors.read_manifest

    def newer(*where: Any) -> Any:
        manifest = read(*where)
        [part] = manifest.parts
        block = part.blocks[0]
        spec = replace(block.placed.spec, dtype="float7", stored_dtype="")
        blocks = (replace(block, placed=replace(block.placed, spec=spec)), *part.blocks[1:])
        return replace(manifest, parts=(replace(part, blocks=blocks),))

    before = files(tmp_path)
    monkeypatch.setattr(remove_tensors, "read_manifest", newer)
    with pytest.raises(UnsupportedError, match="float7"):
        LOAD.remove_sharded_tensors(tmp_path, "optimizer")
    assert files(tmp_path) == before


def test_what_is_no_checkpoint_of_a_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        LOAD.remove_sharded_tensors(tmp_path, "w")
    with asyncckpt.Saver(path=tmp_path / "sharded", tensors={"tensors": {"w": torch.ones(1)}}) as saver:
        saver.save()
    with pytest.raises(IncompatibleError, match="not saved by a strategy"):
        LOAD.remove_sharded_tensors(tmp_path, "w")
    with pytest.raises(UsageError, match="key_prefix"):
        LOAD.remove_sharded_tensors(tmp_path, None)  # type: ignore[arg-type]


def test_a_number_that_somebody_has_taken_meanwhile_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SAVE.save(state(), tmp_path)
    from asyncckpt.strategies import remove_tensors

    real = remove_tensors.read_manifest

    def older(root: Any, step: int) -> Any:
        manifest = real(root, step)
        return replace(manifest, head=replace(manifest.head, step=manifest.step - 1))

    SAVE.save(state(), tmp_path)
    monkeypatch.setattr(remove_tensors, "read_manifest", older)
    with pytest.raises(ConflictError, match="step 1 already exists"):
        LOAD.remove_sharded_tensors(tmp_path, "optimizer.")
    check_model(tmp_path)
