"""A disk that is full: what the error of a save says, and what doctor says before it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import asyncckpt
from asyncckpt.shard import files
from tests.program import invoke
from tests.read_only import small_disk

STATE = {"x": torch.arange(1 << 20, dtype=torch.float64)}  # 8 MiB.


def test_a_disk_that_is_gone_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks how much the files held raised in place of the error, and closed none of them."""

    def gone(*_: object, **__: object) -> object:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with asyncckpt.Saver(path=tmp_path, tensors=STATE) as saver:
        monkeypatch.setattr(files.ShardTarget, "end_file", gone)
        monkeypatch.setattr(files, "os", SimpleNamespace(**{**vars(os), "fstat": gone}))
        with pytest.raises(asyncckpt.IOFailedError, match="shard files of step 1 in"):
            saver.save(1)
        monkeypatch.undo()
        held = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert not [path for path in held if "safetensors" in path and str(tmp_path) in path]


def test_the_error_and_doctor_say_where_how_much_and_what_to_do(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with small_disk(tmp_path, mib=20):
        with asyncckpt.Saver(path=run, tensors=STATE, keep=2) as saver:
            for step in (1, 2):
                saver.save(step)
            with pytest.raises(asyncckpt.IOFailedError) as raised:
                saver.save(3)
        assert re.search(
            r"step 3 in '.*run' cannot be written, 8.0 MiB wanted and 4.0 MiB free on the disk: No space left",
            str(raised.value),
        )
        assert "one checkpoint more than `keep`" in str(raised.value)
        found = invoke("doctor", run, "--mib", 0)
        assert found.exit_code == 5
        assert re.search(r"saves fail: 3\.\d+ MiB free, the newest full checkpoint has 8", found.stdout)
        asyncckpt.checkpoints.remove(run, 1)
        assert invoke("doctor", run, "--mib", 0).exit_code == 0
        with asyncckpt.Saver(path=run, tensors=STATE) as saver:
            saver.save(4)
        assert asyncckpt.list_steps(run) == [2, 4]
