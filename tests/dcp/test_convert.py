"""Checkpoints of DCP's own FileSystemWriter come in, and go out."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

import asyncckpt
from asyncckpt.dcp import StorageReader, convert, export_checkpoint, import_checkpoint
from asyncckpt.dcp.dcp_metadata import read_dcp_metadata
from tests.dcp.model import differences, image_of, make, train
from tests.dcp.test_one_process import blank, rich_state
from tests.worlds.objects import Evil
from tests.worlds.saves import save_one

pytestmark = [pytest.mark.any_core, pytest.mark.filterwarnings("ignore:torch.distributed is")]


def storable_state() -> dict[str, Any]:
    """All but the dtypes that this torch cannot store itself, and the values that it does not read as plain ones."""
    state = rich_state(2)
    for part in ("dtypes", "values"):
        state[part] = {name: value for name, value in state[part].items() if is_storable(value)}
    return state


def is_storable(value: Any) -> bool:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except (KeyError, pickle.UnpicklingError):
        return False
    return True


def test_this_torch_stores_most() -> None:
    kept, all_of = storable_state(), rich_state(2)
    assert len(kept["values"]) >= len(all_of["values"]) - 1


@pytest.mark.parametrize("thread_count", [1, 3])
def test_a_dcp_checkpoint_comes_in(tmp_path: Path, thread_count: int) -> None:
    state = storable_state()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp", thread_count=thread_count))
    assert import_checkpoint(tmp_path / "dcp", tmp_path / "ckpt", step=12) == 12
    found = blank(state)
    dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt", step=12))
    assert differences(image_of(found), image_of(state)) == []
    assert asyncckpt.verify(tmp_path / "ckpt").strays == ()


def test_a_model_and_its_optimizer_come_in_for_a_loader(tmp_path: Path) -> None:
    model, optimizer = make(seed=1)
    train(model, optimizer)
    dcp.save({"model": model, "epoch": 4}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    import_checkpoint(tmp_path / "dcp", tmp_path / "ckpt")
    other, _ = make(seed=2)
    report = asyncckpt.Loader(tmp_path / "ckpt", tensors={"model": other, "epoch": 0}).load()
    assert report.values == {"epoch": 4}
    assert differences(image_of(other.state_dict()), image_of(model.state_dict())) == []


def test_chunks_of_a_spread_tensor_come_in_as_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As several ranks would have written it: two chunks of one tensor."""
    whole = torch.arange(35, dtype=torch.float32).reshape(7, 5)
    dcp.save(
        {"a": whole[:, :2].clone(), "b": whole[:, 2:].clone()}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp")
    )
    metadata = read_dcp_metadata(tmp_path / "dcp")
    first, second = (metadata.state_dict_metadata[name] for name in "ab")
    chunks = [
        ChunkStorageMetadata(offsets=torch.Size([0, begin]), sizes=item.size)
        for begin, item in ((0, first), (2, second))
    ]
    joined = TensorStorageMetadata(properties=first.properties, size=torch.Size([7, 5]), chunks=chunks)
    places = metadata.storage_data
    places = {
        MetadataIndex("w", (0, 0)): places[MetadataIndex("a", (0, 0))],
        MetadataIndex("w", (0, 2)): places[MetadataIndex("b", (0, 0))],
    }
    raw = pickle.dumps(Metadata(state_dict_metadata={"w": joined}, planner_data={"w": ("w",)}, storage_data=places))
    halved = dataclasses.replace(joined, chunks=chunks[:1])
    half = Metadata(state_dict_metadata={"w": halved}, planner_data={"w": ("w",)}, storage_data=places)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(half))
    with pytest.raises(asyncckpt.CorruptError, match="is incomplete"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "ckpt")
    (tmp_path / "dcp" / ".metadata").write_bytes(raw)
    monkeypatch.setattr("asyncckpt.staging.chunks.CHUNK_BYTES", 4096)
    import_checkpoint(tmp_path / "dcp", tmp_path / "ckpt")
    found = {"w": torch.zeros(7, 5)}
    dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt"))
    assert torch.equal(found["w"], whole)
    assert [block.shape for block in asyncckpt.describe(tmp_path / "ckpt").blocks] == [(7, 2), (7, 3)]


def test_a_checkpoint_goes_out(tmp_path: Path) -> None:
    state = storable_state()
    save_one(tmp_path / "ckpt", 0, tensors=state)
    export_checkpoint(tmp_path / "ckpt", tmp_path / "dcp")
    found = blank(state)
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    assert differences(image_of(found), image_of(state)) == []
    with pytest.raises(asyncckpt.ConflictError):
        export_checkpoint(tmp_path / "ckpt", tmp_path / "dcp")


def test_tables_that_are_left_out_are_named(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 2)
    table.insert(torch.arange(3), torch.ones(3, 2))
    save_one(tmp_path / "ckpt", 0, hashtables={"user": table}, tensors={"x": torch.ones(2)})
    with pytest.warns(RuntimeWarning, match=r"tables \['user'\] are left out"):
        export_checkpoint(tmp_path / "ckpt", tmp_path / "dcp")


def without_no_dist(function: Callable[..., Any]) -> Callable[..., Any]:
    """As torch 2.4 has it."""

    def call(*arguments: Any, **named: Any) -> Any:
        if "no_dist" in named:
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument 'no_dist'")
        return function(*arguments, **named)

    return call


def test_a_checkpoint_goes_out_by_an_older_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.arange(5.0), "n": 3}
    save_one(tmp_path / "ckpt", 0, tensors=state)
    for module in (dcp, state_dict_loader, state_dict_saver, convert):
        for name in ("load", "save"):
            monkeypatch.setattr(module, name, without_no_dist(getattr(dcp, name)), raising=False)
    export_checkpoint(tmp_path / "ckpt", tmp_path / "dcp")
    monkeypatch.undo()
    found = {"w": torch.zeros(5), "n": 0}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    assert (found["w"].tolist(), found["n"]) == (state["w"].tolist(), 3)


def test_a_pickle_that_runs_something_is_refused(tmp_path: Path) -> None:
    """In the metadata, as pytorch#189308 says, and in an item."""
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "evil")))
    with pytest.raises(asyncckpt.UnsupportedError, match=r"posix.mkdir"):
        import_checkpoint(tmp_path / "dcp", tmp_path / "ckpt")
    dcp.save({"a": torch.ones(2), "it": Evil(tmp_path / "evil")}, storage_writer=dcp.FileSystemWriter(tmp_path / "two"))
    with pytest.raises(asyncckpt.UnsupportedError, match="'it'"):
        import_checkpoint(tmp_path / "two", tmp_path / "ckpt")
    assert not (tmp_path / "evil").exists()
    assert not (tmp_path / "ckpt").exists()


def saved(tmp_path: Path) -> Path:
    dcp.save({"a": torch.ones(20), "v": 1}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    return tmp_path / "dcp"


def test_what_is_not_there_or_damaged_is_said(tmp_path: Path) -> None:
    with pytest.raises(asyncckpt.NotFoundError):
        import_checkpoint(tmp_path / "nothing", tmp_path / "ckpt")
    folder = saved(tmp_path)
    raw = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(raw[:-20])
    with pytest.raises(asyncckpt.CorruptError):
        import_checkpoint(folder, tmp_path / "ckpt")
    (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(asyncckpt.CorruptError):
        import_checkpoint(folder, tmp_path / "ckpt")
    (folder / ".metadata").write_bytes(raw)
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(asyncckpt.CorruptError):
        import_checkpoint(folder, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists() or asyncckpt.list_steps(tmp_path / "ckpt") == []


@pytest.mark.parametrize("name", ["../dcp/__0_0.distcp", "/etc/passwd", "..", ""])
def test_a_file_outside_is_not_opened(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path)
    metadata = read_dcp_metadata(folder)
    for place in metadata.storage_data.values():
        place.relative_path = name
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(asyncckpt.CorruptError, match="no place"):
        import_checkpoint(folder, tmp_path / "ckpt")


def test_a_step_is_not_overwritten_by_an_import(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    assert import_checkpoint(folder, tmp_path / "ckpt") == 0
    assert import_checkpoint(folder, tmp_path / "ckpt") == 1
    with pytest.raises(asyncckpt.ConflictError):
        import_checkpoint(folder, tmp_path / "ckpt", step=1)


def test_reading_what_is_no_checkpoint_fails(tmp_path: Path) -> None:
    assert not StorageReader.validate_checkpoint_id(saved(tmp_path))
    with pytest.raises((CheckpointException, AssertionError)):
        dcp.load({"a": torch.ones(20)}, storage_reader=StorageReader(tmp_path / "dcp"))


@pytest.mark.parametrize("inside", [{}, {"z": torch.ones(2)}])
def test_keys_that_would_be_the_same_text_are_refused(tmp_path: Path, inside: dict[str, Any]) -> None:
    asyncckpt.save(tmp_path / "ckpt", {"k": {1: {"y": torch.ones(1), **inside}, "1": {"x": 2}}})
    with pytest.raises(asyncckpt.UnsupportedError, match="two keys of 'k' would be the same"):
        export_checkpoint(tmp_path / "ckpt", tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()


def test_a_plain_optimizer_of_dcp_says_how_it_is_loaded(tmp_path: Path) -> None:
    """DCP makes text of the numbers of parameters, which torch's load_state_dict passes over without a word."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]

    def made() -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": weights[:1]}, {"params": weights[1:]}])

    adam = made()
    for weight in weights:
        weight.grad = torch.ones(2)
    adam.step()
    dcp.save({"adam": adam.state_dict()}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    import_checkpoint(tmp_path / "dcp", tmp_path / "ckpt")
    with pytest.raises(asyncckpt.IncompatibleError, match=r"make the keys of its 'state' int"):
        asyncckpt.Loader(tmp_path / "ckpt", tensors={"adam": made()}).load()
    found, again = asyncckpt.load(tmp_path / "ckpt")["adam"], made()
    found["state"] = {int(number): state for number, state in found["state"].items()}
    again.load_state_dict(found)
    assert all(torch.equal(again.state[weight]["exp_avg"], adam.state[weight]["exp_avg"]) for weight in weights)
