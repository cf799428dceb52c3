"""torch.distributed.checkpoint with tensors on the device: dcp.save, async_save with every stager, loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from tests.gpu.device import DEVICE, current_stream, is_busy, keep_busy
from tests.gpu.state import CountingState, blank, differences

dcp = pytest.importorskip("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
own = pytest.importorskip("asyncckpt.dcp")
WAIT_S = 120
HAS_ASYNC_STAGING = hasattr(dcp.state_dict_saver, "AsyncSaveResponse")


def upload(saved: Any) -> Any:
    """What dcp.async_save returns, waited for."""
    return getattr(saved, "upload_completion", saved).result(WAIT_S)


def assert_loads(path: Path, expected: dict[str, torch.Tensor]) -> None:
    found = blank(expected)
    dcp.load(found, storage_reader=own.StorageReader(path))
    assert differences(found, expected) == []
    found = blank(expected)
    asyncckpt.Loader(path, tensors=found).load()
    assert differences(found, expected) == []


@pytest.mark.parametrize(
    "limits", [{}, {"host_memory_limit": 0}, {"device": asyncckpt.DeviceOptions(pinned_memory_limit=0)}], ids=str
)
def test_a_save_follows_what_is_queued(tmp_path: Path, limits: dict[str, int]) -> None:
    state = CountingState(1)
    keep_busy()
    state.advance()
    dcp.save(state.tensors, storage_writer=own.StorageWriter(tmp_path, **limits))
    state.advance()
    assert_loads(tmp_path, state.expected(1))


@pytest.mark.parametrize(
    "limits", [{}, {"host_memory_limit": 0}, {"device": asyncckpt.DeviceOptions(pinned_memory_limit=0)}], ids=str
)
@pytest.mark.parametrize("apart", [False, True])
def test_async_save_keeps_what_was_there_at_the_call(tmp_path: Path, limits: dict[str, int], apart: bool) -> None:
    """The writer stages by itself, or a stager of its own does."""
    state = CountingState(2)
    stager = {"async_stager": own.AsyncStager(**limits)} if apart else {}
    writer = own.StorageWriter(tmp_path, **({} if apart else limits))
    keep_busy()
    state.advance()
    saved = dcp.async_save(state.tensors, storage_writer=writer, **stager)
    state.advance()
    upload(saved)
    assert_loads(tmp_path, state.expected(1))


@pytest.mark.skipif(not HAS_ASYNC_STAGING, reason="this version of DCP has no asynchronous staging")
@pytest.mark.parametrize("scratch", [0, 1 << 30])
def test_asynchronous_staging_does_not_wait_for_the_device(tmp_path: Path, scratch: int) -> None:
    state = CountingState(3)
    stager = own.AsyncStager(use_async_staging=True, device=asyncckpt.DeviceOptions(scratch_bytes=scratch))
    steps = {}
    for step in range(3):
        keep_busy()
        keep_busy()
        state.advance()
        steps[step] = state.steps
        saved = dcp.async_save(
            state.tensors, storage_writer=own.StorageWriter(tmp_path, step=step), async_stager=stager
        )
        still_busy = is_busy(current_stream())
        state.advance()
        saved.staging_completion.result(WAIT_S)
        upload(saved)
        stager.synchronize_staging()
    assert still_busy  # The first save makes what later ones use.
    for step, count in steps.items():
        found = blank(state.expected())
        dcp.load(found, storage_reader=own.StorageReader(tmp_path, step=step))
        assert differences(found, state.expected(count)) == []


def test_our_stager_with_the_writer_of_dcp(tmp_path: Path) -> None:
    state = CountingState(4)
    keep_busy()
    state.advance()
    saved = dcp.async_save(state.tensors, checkpoint_id=tmp_path, async_stager=own.AsyncStager())
    state.advance()
    upload(saved)
    found = blank(state.expected())
    dcp.load(found, checkpoint_id=tmp_path)
    assert differences(found, state.expected(1)) == []


def test_a_staged_state_is_on_the_host(tmp_path: Path) -> None:
    state = {"x": torch.arange(5.0, device=DEVICE), "y": [torch.ones(2), 3], "z": {"c": torch.ones(2, device=DEVICE)}}
    staged = own.AsyncStager().stage(state)
    assert [staged["x"].device.type, staged["z"]["c"].device.type] == ["cpu", "cpu"]
    assert staged["x"].tolist() == [0, 1, 2, 3, 4]
    assert staged["y"][1] == 3
