"""Processes that end, or are forked, beside a store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import asyncckpt
from tests.cloud import seaweed
from tests.cloud.fault_proxy import FaultProxy, Mishap
from tests.end_to_end.test_endings import NO_THREADS_AT_THE_EXIT
from tests.interrupts.test_children import end_of

S_MAX = 60.0

LOOP = """
ckpt = asyncckpt.Checkpointer(sys.argv[1], every=1000, x=x, options=eval(sys.argv[2]))
for step in range(5):
    x += 1
    ckpt.step(step)
"""


@pytest.mark.parametrize("is_uploaded", [False, True])
def test_the_last_step_gets_into_a_store_when_no_thread_can_be_started_any_more(
    owner: seaweed.Server, url: str, tmp_path: Path, is_uploaded: bool
) -> None:
    """Of a tensor of several chunks, which are written one by one."""
    path, options = (str(tmp_path / "run"), {"upload": url}) if is_uploaded else (url, {})
    program = f"{NO_THREADS_AT_THE_EXIT}x = torch.zeros(40 << 20)\n{LOOP}"
    command = [sys.executable, "-c", program, path, repr(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=S_MAX)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool((asyncckpt.load(url)["x"] == 5).all())


def test_a_compaction_in_flight_is_ended_when_the_interpreter_ends(owner: seaweed.Server, url: str) -> None:
    program = """
import sys, torch, asyncckpt

table = asyncckpt.HashTable("t", 4)
saver = asyncckpt.Saver(path=sys.argv[1], hashtables={"t": table})
for step in range(3):
    table.insert(torch.arange(step * 10, step * 10 + 100), torch.full((100, 4), float(step)))
    saver.save(step, kind="delta" if step else "full")
saver.compact()
"""
    done = subprocess.run([sys.executable, "-c", program, url], capture_output=True, text=True, timeout=S_MAX)
    assert (done.returncode, done.stderr) == (0, "")
    assert asyncckpt.describe(url).kind == "full"
    asyncckpt.verify(url)


def test_a_line_says_that_the_interpreter_ends_behind_uploads(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    program = """
import sys, torch, asyncckpt

upload = asyncckpt.UploadOptions(sys.argv[2], request_deadline=0.5, deadline=0.0)
saver = asyncckpt.Saver(path=sys.argv[1], tensors={"x": torch.ones(3)}, upload=upload)
saver.save(0)
"""
    proxy.fault = lambda request: Mishap(silent=True) if "/data/" in request.path else None
    command = [sys.executable, "-c", program, str(tmp_path), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=S_MAX)
    assert f"asyncckpt: the interpreter ends after uploads to {url!r}\n" in done.stderr


def is_refused_to_a_child(call: Callable[[], object]) -> bool:
    child = os.fork()
    if not child:
        try:
            call()
        except asyncckpt.UsageError:
            os._exit(0)
        finally:
            os._exit(1)
    return end_of(child) == 0


def test_a_child_does_not_wait_for_an_upload_of_its_parent(proxy: FaultProxy, url: str, tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}, upload=url) as saver:
        proxy.fault = lambda request: Mishap(answer=(503, "SlowDown"))
        future = saver.save_async(0)
        future.result()
        is_refused = is_refused_to_a_child(future.wait_uploaded)
        proxy.fault = lambda request: None
        future.wait_uploaded()
    assert is_refused


def test_a_child_of_a_process_that_has_used_a_store_cannot_use_one(owner: seaweed.Server, url: str) -> None:
    asyncckpt.save(url, {"x": torch.ones(3)}, step=0)
    assert is_refused_to_a_child(lambda: asyncckpt.load(url))
    assert is_refused_to_a_child(lambda: asyncckpt.Saver(path=url, tensors={"x": torch.ones(3)}))
    assert asyncckpt.list_steps(url) == [0]
