"""Through dcp.save, dcp.async_save and dcp.load in one process, without a process group."""

from __future__ import annotations

import dataclasses
import errno
import gc
import os
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

import asyncckpt
import asyncckpt.dcp
from asyncckpt.commit.retention import retain
from asyncckpt.dcp import StorageReader, StorageWriter, save_planner
from asyncckpt.dcp.attempt import save_lock_held
from asyncckpt.dcp.save_planner import PlanToken
from asyncckpt.engine.process.background import retainer
from asyncckpt.shard.files import ShardFiles
from asyncckpt.staging.pool import ArenaState, pool
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.owner_lock import _lock_file
from tests.dcp.model import blank, differences, image_of, make, train
from tests.worlds.arenas import close_free
from tests.worlds.directories import flip_byte
from tests.worlds.saves import save_one

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is")
pytestmark = ALONE


def rich_state(seed: int = 0) -> dict[str, Any]:
    """Every supported dtype, shapes without elements or dimensions, views that are not contiguous, nested values."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = {}
    for dtype in asyncckpt.checkpoints.supported_dtypes():
        if dtype.itemsize and "float4" not in str(dtype) and "bits" not in str(dtype):
            count = 2 * dtype.itemsize
            raw = torch.randint(0, 2, (3, count), generator=generator, dtype=torch.uint8)
            dtypes[str(dtype)] = raw.view(dtype)
    matrix = torch.randn(6, 5, generator=generator)
    return {
        "dtypes": dtypes,
        "strided": matrix.t(),
        "sliced": matrix[1:4, 2:],
        "conjugated": torch.randn(4, dtype=torch.complex64, generator=generator).conj(),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "list": [seed, {"inner": matrix.clone()}, "text"],
        "values": {"float": 0.1 * seed, "none": None, "bytes": b"\x00\xff", "tuple": (1, (2.5, "x")), "big": 2**70},
    }


def upload(saved: Any) -> Any:
    """What dcp.async_save returns, waited for."""
    return getattr(saved, "upload_completion", saved).result(60)


def cause_of(raised: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    ((cause, _),) = raised.value.failures.values()
    return cause


@pytest.mark.parametrize("host_memory_limit", [None, 0])
@pytest.mark.parametrize("verify", [True, False])
def test_everything_comes_back_bit_for_bit(tmp_path: Path, host_memory_limit: int | None, verify: bool) -> None:
    state = rich_state(3)
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "ckpt", host_memory_limit=host_memory_limit))
    found = blank(state)
    dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt", verify=verify))
    assert differences(image_of(found), image_of(state)) == []
    assert asyncckpt.verify(tmp_path / "ckpt").strays == ()


def test_stateful_objects_come_back(tmp_path: Path) -> None:
    model, optimizer = make(seed=1)
    train(model, optimizer)
    dcp.save({"model": model, "optim": optimizer}, storage_writer=StorageWriter(tmp_path / "ckpt"))
    other, its_optimizer = make(seed=2)
    train(other, its_optimizer, steps=1)
    dcp.load({"model": other, "optim": its_optimizer}, storage_reader=StorageReader(tmp_path / "ckpt"))
    for one in (model, optimizer), (other, its_optimizer):
        train(*one)
    assert differences(image_of(other.state_dict()), image_of(model.state_dict())) == []


@pytest.mark.parametrize("stager", [None, asyncckpt.dcp.AsyncStager])
@pytest.mark.parametrize("host_memory_limit", [None, 0])
def test_async_save_keeps_what_was_there_at_the_call(
    tmp_path: Path, stager: Callable[[], Any] | None, host_memory_limit: int | None
) -> None:
    """As in pytorch#144657: tensors on the CPU are copied too, and other objects."""
    state = rich_state(4)
    expected = image_of(state)
    writer = StorageWriter(tmp_path / "ckpt", host_memory_limit=host_memory_limit)
    saved = dcp.async_save(state, storage_writer=writer, **({} if stager is None else {"async_stager": stager()}))
    for tensor in [*state["dtypes"].values(), state["strided"], state["sliced"], state["list"][1]["inner"]]:
        tensor.view(torch.uint8).zero_() if tensor.is_contiguous() else tensor.zero_()
    state["list"][1].clear()
    state["values"]["float"] = -1.0
    upload(saved)
    found = blank(rich_state(4))
    dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt"))
    assert differences(image_of(found), expected) == []


def test_arenas_go_back_when_a_staged_state_is_gone() -> None:
    stager = asyncckpt.dcp.AsyncStager()
    staged = stager.stage({"a": torch.ones(1000), "b": [torch.zeros(3)]})
    kept = staged["a"][10:20]
    del staged
    gc.collect()
    held = [arena for arena in pool._arenas if arena.state is ArenaState.DRAINING]
    assert len(held) == 1
    close_free(pool)
    assert kept.sum() == 10
    del kept
    gc.collect()
    assert all(arena.state is ArenaState.FREE for arena in pool._arenas)


def test_staging_keeps_tied_tensors_tied() -> None:
    tensor = torch.arange(4.0)
    staged = asyncckpt.dcp.AsyncStager().stage({"a": tensor, "b": [tensor]})
    assert staged["a"] is staged["b"][0]
    assert staged["a"].data_ptr() != tensor.data_ptr()


def test_two_saves_to_one_directory_are_two_steps(tmp_path: Path) -> None:
    """DCP's own writer replaces the first one, and a crash in between leaves the old metadata with new bytes."""
    writer = StorageWriter(tmp_path / "ckpt")
    for seed in (0, 1):
        dcp.save(rich_state(seed), storage_writer=writer, checkpoint_id=tmp_path / "named")
    assert asyncckpt.list_steps(tmp_path / "named") == [0, 1]
    assert not (tmp_path / "ckpt").exists()
    for seed in (0, 1):
        found = blank(rich_state())
        dcp.load(found, storage_reader=StorageReader(tmp_path / "named", step=seed))
        assert differences(image_of(found), image_of(rich_state(seed))) == []


def test_a_step_is_never_overwritten(tmp_path: Path) -> None:
    dcp.save(rich_state(0), storage_writer=StorageWriter(tmp_path / "ckpt", step=7))
    with pytest.raises(CheckpointException) as raised:
        dcp.save(rich_state(1), storage_writer=StorageWriter(tmp_path / "ckpt", step=7))
    assert isinstance(cause_of(raised), asyncckpt.ConflictError)
    found = blank(rich_state())
    dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt"))
    assert differences(image_of(found), image_of(rich_state(0))) == []


def test_reads_at_once_through_one_reader_have_files_of_their_own(tmp_path: Path) -> None:
    dcp.save(rich_state(0), storage_writer=StorageWriter(tmp_path / "ckpt"))
    reader = StorageReader(tmp_path / "ckpt")
    reader.read_metadata()
    files = reader._files
    assert files is not None
    with reader._take_files(files[0]) as first:
        reader._files = files  # So it is for another thread that has looked before.
        with reader._take_files(files[0]) as second:
            assert first is files[1]
            assert second is not first


def test_saves_at_once_through_one_writer_are_steps_of_their_own(tmp_path: Path) -> None:
    """DCP's own writer lets both run into one directory, and mixes their files."""
    writer = StorageWriter(tmp_path / "ckpt")
    both_planned = threading.Barrier(2)

    class Waiting(DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            both_planned.wait(60)
            return super().finish_plan(new_plan)

    saves = [dcp.async_save(rich_state(seed), storage_writer=writer, planner=Waiting()) for seed in (1, 2)]
    for saved in saves:
        upload(saved)
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [0, 1]
    images = []
    for step in (0, 1):
        found = blank(rich_state())
        dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt", step=step))
        images.append(image_of(found))
    wanted = [image_of(rich_state(seed)) for seed in (1, 2)]
    assert [[differences(image, one) for one in wanted].count([]) for image in images] == [1, 1]
    assert differences(images[0], images[1]) != []


def test_saves_at_once_through_one_writer_go_where_each_was_sent(tmp_path: Path) -> None:
    """Each has named its directory before one of them opens it."""
    both_named = threading.Barrier(2)

    class Waiting(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            both_named.wait(60)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    writer, folders = StorageWriter(tmp_path / "ckpt"), [tmp_path / "a", tmp_path / "b"]
    saves = []
    for number, folder in enumerate(folders):
        state = {"number": torch.tensor(number)}
        saves.append(dcp.async_save(state, checkpoint_id=folder, storage_writer=writer, planner=Waiting()))
    for saved in saves:
        upload(saved)
    for number, folder in enumerate(folders):
        found = {"number": torch.tensor(-1)}
        dcp.load(found, storage_reader=StorageReader(folder))
        assert found["number"] == number
    dcp.save({"number": torch.tensor(2)}, storage_writer=writer)
    assert sorted(len(asyncckpt.list_steps(folder)) for folder in folders) == [1, 2]


@pytest.mark.parametrize("writers", [1, 4])
def test_no_room_in_one_file_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: int) -> None:
    """DCP's own writer returns, and commits what the other threads have written, when one of them fails."""
    dcp.save(rich_state(0), storage_writer=StorageWriter(tmp_path / "ckpt", parallel=writers))
    with monkeypatch.context() as patch:
        patch.setattr(ShardFiles, "close", failing)
        with pytest.raises(CheckpointException) as raised:
            dcp.save(rich_state(1), storage_writer=StorageWriter(tmp_path / "ckpt", parallel=writers))
        saved = dcp.async_save(rich_state(1), storage_writer=StorageWriter(tmp_path / "ckpt"))
        with pytest.raises(CheckpointException):
            upload(saved)
    assert isinstance(cause_of(raised), asyncckpt.IOFailedError)
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [0]
    assert asyncckpt.verify(tmp_path / "ckpt").strays == ()
    assert [folder.name[:12] for folder in (tmp_path / "ckpt" / "data").iterdir()] == ["000000000000"]
    dcp.save(rich_state(1), storage_writer=StorageWriter(tmp_path / "ckpt"))
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [0, 1]


def failing(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "no space left")


def test_a_failed_staging_is_not_a_save(tmp_path: Path) -> None:
    """DCP reports success of a staging that has failed."""
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    with pytest.raises(asyncckpt.UsageError, match="freed or shrunk"):
        dcp.async_save({"freed": freed}, storage_writer=StorageWriter(tmp_path / "ckpt"))
    with pytest.raises(CheckpointException, match="freed or shrunk"):
        dcp.save({"freed": freed}, storage_writer=StorageWriter(tmp_path / "ckpt"))
    assert asyncckpt.list_steps(tmp_path / "ckpt") == []


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    for state, name in (
        ({"deep": {"er": [1, {object()}]}}, "'deep.er'"),
        ({"sparse": torch.eye(3).to_sparse()}, "'sparse'"),
        ({"meta": torch.empty(3, device="meta")}, "'meta'"),
    ):
        with pytest.raises(CheckpointException) as raised:
            dcp.save(state, storage_writer=StorageWriter(tmp_path / "ckpt"))
        assert isinstance(cause_of(raised), asyncckpt.CheckpointError)
        assert name in str(cause_of(raised))
    assert asyncckpt.list_steps(tmp_path / "ckpt") == []
    assert list((tmp_path / "ckpt" / "data").iterdir()) == []


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something is pickled")

    state = rich_state(5)
    with monkeypatch.context() as patch:
        for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
            patch.setattr(pickle, name, refuse)
        patch.setattr(torch, "save", refuse)
        patch.setattr(torch, "load", refuse)
        dcp.save(state, storage_writer=StorageWriter(tmp_path / "ckpt"))
        found = blank(state)
        dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt"))
    assert differences(image_of(found), image_of(state)) == []
    files = [path for path in (tmp_path / "ckpt").rglob("*") if path.is_file() and path.name != "LOCK"]
    assert len(files) == 2
    for path in files:
        is_manifest = path.suffix == ".json"
        begin = path.read_bytes()[: 16 if not is_manifest else None]
        # Protocol 2 and above begin with it; a manifest is text throughout.
        assert not begin.startswith(b"\x80")
        assert not is_manifest or begin.decode("utf-8")
        assert b"PK\x03\x04" not in begin


def test_a_saver_s_checkpoint_is_loaded_by_dcp(tmp_path: Path) -> None:
    model, optimizer = make(seed=1)
    train(model, optimizer)
    state = {"model": model, "optim": optimizer, "epoch": 3, "blob": rich_state(1)}
    save_one(tmp_path / "ckpt", 5, tensors=state)
    other, its_optimizer = make(seed=2)
    train(other, its_optimizer, steps=1)
    found = {"model": other, "optim": its_optimizer, "epoch": 0, "blob": blank(rich_state())}
    dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt"))
    assert found["epoch"] == 3
    assert differences(image_of(found["blob"]), image_of(rich_state(1))) == []
    assert differences(image_of(other.state_dict()), image_of(model.state_dict())) == []
    assert differences(image_of(its_optimizer.state_dict()), image_of(optimizer.state_dict())) == []


def test_a_saver_s_delta_and_tables_are_in_nobody_s_way(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 4)
    table.lookup(torch.arange(10))
    weight = torch.randn(5)
    with asyncckpt.Saver(path=tmp_path / "ckpt", hashtables={"user": table}, tensors={"w": weight}) as saver:
        saver.save(0)
        weight += 1
        saver.save(1, kind="delta")
    found = {"w": torch.zeros(5)}
    dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt"))
    assert torch.equal(found["w"], weight)
    assert list(StorageReader(tmp_path / "ckpt").read_metadata().state_dict_metadata) == ["w"]


def test_a_dcp_checkpoint_is_loaded_by_a_loader(tmp_path: Path) -> None:
    model, optimizer = make(seed=1)
    train(model, optimizer)
    matrix = torch.randn(3, 4)
    state = {"model": model, "list": [matrix, {"a": matrix + 1}], "epoch": 3, "betas": (0.9, 0.99)}
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "ckpt"))
    other, _ = make(seed=2)
    targets = [torch.zeros(3, 4), {"a": torch.zeros(3, 4)}]
    report = asyncckpt.Loader(tmp_path / "ckpt", tensors={"model": other, "list": targets, "epoch": 0}).load()
    assert report.values == {"epoch": 3, "betas": (0.9, 0.99)}
    assert differences(image_of(other.state_dict()), image_of(model.state_dict())) == []
    assert differences(image_of(targets), image_of([matrix, {"a": matrix + 1}])) == []


def test_loading_converts_dtypes_and_fills_strided_targets_as_dcp_does(tmp_path: Path) -> None:
    matrix = torch.randn(4, 6)
    dcp.save({"a": matrix, "b": matrix}, storage_writer=StorageWriter(tmp_path / "ckpt"))
    found = {"a": torch.zeros(4, 6, dtype=torch.float64), "b": torch.zeros(6, 4).t()}
    dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt"))
    assert torch.equal(found["a"], matrix.double())
    assert torch.equal(found["b"], matrix)


def shrunk() -> torch.Tensor:
    tensor = torch.zeros(3, 20_000)
    tensor.untyped_storage().resize_(1000)
    return tensor


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("target", [torch.zeros(20_000).expand(3, -1), shrunk()], ids=["expanded", "shrunk"])
def test_a_target_without_memory_for_every_element_is_refused(
    tmp_path: Path, target: torch.Tensor, verify: bool
) -> None:
    dcp.save({"first": torch.randn(3, 20_000)}, storage_writer=StorageWriter(tmp_path / "ckpt"))
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"first": target}, storage_reader=StorageReader(tmp_path / "ckpt", verify=verify))
    assert isinstance(cause_of(raised), asyncckpt.UsageError)
    assert "'first'" in str(cause_of(raised))


def test_a_truncated_file_is_found_before_a_target_is_touched(tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(5000)}, storage_writer=StorageWriter(tmp_path / "ckpt"))
    (shard,) = (tmp_path / "ckpt" / "data").rglob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    found = {"a": torch.ones(5000)}
    with pytest.raises(CheckpointException) as raised:
        dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt", verify=False))
    assert isinstance(cause_of(raised), asyncckpt.CorruptError)
    assert bool(found["a"].all())


class _Retires(DefaultLoadPlanner):
    """While it plans, the trainer commits the next step, and the one that is loaded is let go."""

    def __init__(self, saver: asyncckpt.Saver) -> None:
        super().__init__()
        self._saver = saver

    def create_global_plan(self, global_plan: Any) -> Any:
        self._saver.save(2)
        self._saver.wait_idle()
        return super().create_global_plan(global_plan)


def test_a_checkpoint_that_is_let_go_while_it_is_planned_is_read_to_its_end(tmp_path: Path) -> None:
    state = {"x": torch.ones(1000)}
    with asyncckpt.Saver(path=tmp_path, tensors=state, keep=1) as saver:
        saver.save(1)
        reader, found = StorageReader(tmp_path), {"x": torch.zeros(1000)}
        state["x"] = torch.full((1000,), 2.0)
        dcp.load(found, storage_reader=reader, planner=_Retires(saver))
    assert found["x"].unique().tolist() == [1.0]
    assert asyncckpt.list_steps(tmp_path) == [2]
    dcp.load(found, storage_reader=reader)
    assert found["x"].unique().tolist() == [2.0], "a reader is used again for what is the newest then"


class _LoadsAtOnce(DefaultLoadPlanner):
    """Does what another dcp.load does with the same reader, before that waits for this one."""

    def __init__(self, reader: StorageReader) -> None:
        super().__init__()
        self._reader = reader

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        self._reader.reset()
        self._reader.read_metadata()
        return super().resolve_tensor(read_item)


def test_two_loads_through_one_reader_do_not_close_each_others_files(tmp_path: Path) -> None:
    save_one(tmp_path, tensors={"x": torch.ones(1000)})
    reader, found = StorageReader(tmp_path), {"x": torch.zeros(1000)}
    dcp.load(found, storage_reader=reader, planner=_LoadsAtOnce(reader))
    assert found["x"].unique().tolist() == [1.0]
    assert open_shards(tmp_path) == 1, "those of the other load"
    reader.reset()
    assert open_shards(tmp_path) == 0


def test_a_refused_read_closes_the_files_that_it_has_opened(tmp_path: Path) -> None:
    save_one(tmp_path, tensors={"x": torch.ones(1000)})
    reader = StorageReader(tmp_path)
    reader.read_metadata()
    for _ in ("those that are open", "those that it opens"):
        with save_lock_held("load", tmp_path, 1), pytest.raises(asyncckpt.UsageError, match="cannot wait for"):
            reader.read_data(LoadPlan([]), DefaultLoadPlanner())
        assert open_shards(tmp_path) == 0


def open_shards(path: Path) -> int:
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith(f"{path}/data/") for link in links if link.is_symlink())


def test_files_of_a_checkpoint_that_is_only_looked_at_are_closed(tmp_path: Path) -> None:
    save_one(tmp_path, tensors={"x": torch.ones(1000)})
    reader = StorageReader(tmp_path)
    for _ in range(3):
        reader.read_metadata()
        assert open_shards(tmp_path) == 1
    reader.reset()
    assert open_shards(tmp_path) == 0
    reader.read_metadata()
    del reader
    gc.collect()
    assert open_shards(tmp_path) == 0


@pytest.mark.parametrize("verify", [True, False])
def test_a_flipped_byte_is_found_where_it_is_looked_for(tmp_path: Path, verify: bool) -> None:
    dcp.save({"a": torch.zeros(5000)}, storage_writer=StorageWriter(tmp_path / "ckpt"))
    (shard,) = (tmp_path / "ckpt" / "data").rglob("*.safetensors")
    flip_byte(shard)
    found = {"a": torch.ones(5000)}
    if not verify:
        dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt", verify=False))
        return
    with pytest.raises(CheckpointException) as raised:
        dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt"))
    assert isinstance(cause_of(raised), asyncckpt.CorruptError)


def test_planners_that_change_values_are_asked(tmp_path: Path) -> None:
    """Overridden hooks of DCP's planners are called, for tensors and for values."""

    class Halving(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:
            found = super().transform_object(write_item, object)
            return found / 2 if isinstance(found, torch.Tensor) else found

    class Counting(DefaultLoadPlanner):
        loaded: ClassVar[list[str]] = []

        def load_bytes(self, read_item: Any, value: Any) -> None:
            self.loaded.append(read_item.dest_index.fqn)
            super().load_bytes(read_item, value)

    state = {"a": torch.full((3,), 4.0), "v": {"x": 1}}
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "ckpt"), planner=Halving())
    found = {"a": torch.zeros(3), "v": {"x": 0}}
    dcp.load(found, storage_reader=StorageReader(tmp_path / "ckpt"), planner=Counting())
    assert found["a"].tolist() == [2.0] * 3
    assert found["v"] == {"x": 1}
    assert Counting.loaded == ["v.x"]


def test_a_tensor_that_is_not_there_in_full_is_not_committed(tmp_path: Path) -> None:
    """As of DTensors of other ranks, in a save that is told that there are none."""

    class Half(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            (item,) = plan.items
            assert item.tensor_data is not None
            data = dataclasses.replace(item.tensor_data, size=torch.Size([8]))
            return dataclasses.replace(plan, items=[dataclasses.replace(item, tensor_data=data)])

    with pytest.raises(CheckpointException) as raised:
        dcp.save({"a": torch.ones(4)}, storage_writer=StorageWriter(tmp_path / "ckpt"), planner=Half())
    assert "is incomplete" in str(cause_of(raised))
    assert asyncckpt.list_steps(tmp_path / "ckpt") == []
    assert list((tmp_path / "ckpt" / "data").iterdir()) == []


def test_unflattened_states_keep_values_whole(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "v": {"x": [1, 2]}}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "ckpt"), planner=planner)
    found: dict[str, Any] = {"a": torch.zeros(2), "v": None}
    reader = StorageReader(tmp_path / "ckpt")
    dcp.load(found, storage_reader=reader, planner=DefaultLoadPlanner(False, False))
    assert found["v"] == {"x": [1, 2]}
    assert torch.equal(found["a"], state["a"])


def test_old_checkpoints_go(tmp_path: Path) -> None:
    for seed in range(4):
        dcp.save(rich_state(seed), storage_writer=StorageWriter(tmp_path / "ckpt", keep=2))
    await_retention()
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [2, 3]


def await_retention() -> None:
    """There is one thread for it, and what is begun later ends later."""
    retainer.submit(int).result(60)


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_does_not_wait_for_old_checkpoints_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The directory stays locked until they are gone, also where that fails."""
    saved, seen = threading.Event(), []

    def slow(*args: Any, **options: Any) -> None:
        seen.append((saved.wait(60), can_lock(tmp_path / "ckpt")))
        if fails:
            raise asyncckpt.IOFailedError("the disk is gone")
        retain(*args, **options)

    monkeypatch.setattr("asyncckpt.commit.retention.retain", slow)
    for _ in range(2):
        dcp.save({"a": torch.ones(3)}, storage_writer=StorageWriter(tmp_path / "ckpt", keep=1))
        saved.set()
        await_retention()
        assert seen.pop() == (True, False)
        assert can_lock(tmp_path / "ckpt")
        saved.clear()
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [0, 1][0 if fails else 1 :]


def can_lock(path: Path) -> bool:
    """Whether another process could write to the directory now: a lock belongs to its open file, not to a process."""
    with Directory.open(path) as folder:
        try:
            os.close(_lock_file(folder, "LOCK"))
        except asyncckpt.ConflictError:
            return False
    return True


def test_a_directory_that_another_writer_of_the_process_holds_is_shared(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path / "ckpt", tensors={"a": torch.ones(3)}) as saver:
        saver.save(0)
        dcp.save({"a": torch.zeros(3)}, storage_writer=StorageWriter(tmp_path / "ckpt"))
        saver.save()
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [0, 1, 2]


@pytest.mark.parametrize("options", [{"step": -1}, {"durability": "maybe"}, {"parallel": 0}, {"keep": 0}])
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(asyncckpt.UsageError):
        StorageWriter(tmp_path / "ckpt", **options)
    assert list(tmp_path.iterdir()) == []


def test_own_planner_plans_once_and_sees_what_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import default_planner

    planned = []
    kept = default_planner.create_default_local_save_plan
    monkeypatch.setattr(default_planner, "create_default_local_save_plan", lambda *a: (planned.append(1), kept(*a))[1])

    def save(state: dict[str, Any]) -> int:
        planned.clear()
        path = tmp_path / "ckpt"
        dcp.save(state, storage_writer=StorageWriter(path), planner=asyncckpt.dcp.SavePlanner())
        found = blank(state)
        dcp.load(found, storage_reader=StorageReader(path))
        assert differences(image_of(found), image_of(state)) == []
        return len(planned)

    assert [save(rich_state(seed)) for seed in range(3)] == [1, 0, 0]
    other = rich_state(3) | {"scalar": torch.zeros(2)}
    assert save(other) == 1
    assert save(rich_state(4)) == 0
    assert save(rich_state(5) | {"more": 1}) == 1


def test_own_planner_plans_anew_after_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(step: int | None = None) -> None:
        planner = asyncckpt.dcp.SavePlanner()
        dcp.save({"a": torch.ones(3)}, storage_writer=StorageWriter(tmp_path / "ckpt", step=step), planner=planner)

    save()
    for _ in range(2):
        with pytest.raises(CheckpointException):
            save(0)
        save()
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [0, 1, 2]


def test_a_token_that_nobody_knows_fails_the_plan() -> None:
    plan = SavePlan([], planner_data=PlanToken("0" * 32, 0))
    with pytest.raises(asyncckpt.ConflictError):
        asyncckpt.dcp.SavePlanner().create_global_plan([plan])


def test_own_planner_sends_a_token_only_to_the_coordinator_that_it_has_it_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of two groups that save the same state; the first time in the second group is the exception."""
    monkeypatch.setattr(save_planner, "_memory", save_planner._Memory())
    state = {"a": torch.ones(3)}

    def sent(path: str, *, coordinator: str, is_coordinator: bool = False) -> str | None:
        planner = asyncckpt.dcp.SavePlanner()
        planner.set_up_planner(state, StorageMeta(checkpoint_id=path), is_coordinator)
        plan = planner.create_local_plan()
        answer = PlanToken(f"of {coordinator}", 1, coordinator)
        planner.finish_plan(dataclasses.replace(plan, planner_data=answer))
        return getattr(plan.planner_data, "coordinator", None)

    assert sent("one", coordinator="first") is None
    assert sent("one", coordinator="first") == "first"
    assert sent("step 5", coordinator="first") == "first", "paths may be new each time"
    assert sent("alone", coordinator="myself", is_coordinator=True) is None
    assert sent("one", coordinator="first") == "first"
    assert sent("alone", coordinator="myself", is_coordinator=True) == "myself"
    sent("other", coordinator="second")
    assert sent("other", coordinator="second") == "second"
    assert sent("one", coordinator="first") == "first"
    assert sent("step 6", coordinator="second") is None, "nobody knows whose it is"


def test_warnings_are_none(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save({"a": torch.ones(3)}, storage_writer=StorageWriter(tmp_path / "ckpt"))
        dcp.load({"a": torch.ones(3)}, storage_reader=StorageReader(tmp_path / "ckpt"))
