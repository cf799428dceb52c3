"""Saves and loads within what torch lets a program hold around its calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode

import asyncckpt
import asyncckpt.dcp
from tests.process_defaults.defaults import DEFAULTS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()


def test_an_optimizer_loaded_in_inference_mode_trains_on(tmp_path: Path) -> None:
    model, optimizer = trained()
    asyncckpt.save(tmp_path, {"model": model, "optimizer": optimizer})
    other_model, other = trained()
    with torch.inference_mode():
        asyncckpt.Loader(tmp_path, tensors={"model": other_model, "optimizer": other}).load()
    train(model, optimizer)
    train(other_model, other)
    assert torch.equal(model.weight, other_model.weight)


def test_tensors_loaded_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    asyncckpt.save(tmp_path, {"whole": whole, "part": whole[2:4], "apart": torch.ones(3)})
    with torch.inference_mode():
        loaded = asyncckpt.load(tmp_path)
    assert not any(tensor.is_inference() for tensor in loaded.values())


def test_dcp_stages_on_the_host_with_another_default_device(tmp_path: Path) -> None:
    state = {"x": torch.arange(1000.0), "none": torch.zeros(0, 3)}
    with torch.device("meta"):
        dcp.async_save(state, storage_writer=asyncckpt.dcp.StorageWriter(tmp_path, host_memory_limit=0)).result()
    loaded = {"x": torch.zeros(1000)}
    dcp.load(loaded, storage_reader=asyncckpt.dcp.StorageReader(tmp_path))
    assert torch.equal(loaded["x"], state["x"])


def test_a_load_gives_tensors_of_the_host_with_another_default_device(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"x": torch.arange(10.0), "none": torch.zeros(0, 3)})
    with torch.device("meta"):
        loaded = asyncckpt.load(tmp_path)
    assert [tensor.device.type for tensor in loaded.values()] == ["cpu", "cpu"]


def test_saves_and_loads_are_refused_within_fake_tensors(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"x": torch.arange(10.0)})
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(asyncckpt.UsageError, match="traces or transforms"):
            asyncckpt.save(tmp_path / "other", {"x": torch.arange(10.0, device="cpu")})
        with pytest.raises(asyncckpt.UsageError, match="traces or transforms"):
            asyncckpt.load(tmp_path)


def test_a_path_outside_the_encoding_of_file_names_is_refused_by_name(tmp_path: Path) -> None:
    program = f"import asyncckpt; asyncckpt.Loader({str(tmp_path)!r} + '/gr\\xfc\\xdfe')"
    environment = os.environ | DEFAULTS["ascii names"].environment
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert "UsageError: path is not in the encoding of file names" in done.stderr
