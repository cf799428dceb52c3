"""A disk that is full: what the error of a save says, and what doctor says before it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.program import invoke
from tests.read_only import small_disk

STATE = {"x": torch.arange(1 << 20, dtype=torch.float64)}  # 8 MiB.


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
