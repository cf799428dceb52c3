"""Sharded tensors and objects of one process: any boxes into any boxes, and what a save promises its caller."""

from __future__ import annotations

import io
import itertools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt.errors import CorruptError, IncompatibleError, NotFoundError, UsageError
from asyncckpt.strategies import ShardedLoad, ShardedSave
from asyncckpt.strategies.async_utils import AsyncCallsQueue
from asyncckpt.strategies.mapping import ShardedObject, ShardedTensor
from tests.worlds.directories import flip_byte

SAVE, LOAD = ShardedSave(), ShardedLoad()
KEYS = ["w", "a.b/c", "", "ü ☃", "tensors", "x" * 300, "new\nline", "../up", "k#2"]


def box(key: str, whole: torch.Tensor, begin: tuple[int, ...], shape: tuple[int, ...], **more: Any) -> ShardedTensor:
    """A piece of a whole, with its data."""
    data = whole[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))].clone()
    return ShardedTensor(key, data, whole.dtype, shape, tuple(whole.shape), begin, None, **more)


def empty(leaf: ShardedTensor) -> ShardedTensor:
    return leaf.without_data()


def cuts(draw: random.Random, size: int) -> list[tuple[int, int]]:
    """Ranges that make up [0, size)."""
    at = sorted({0, size, *(draw.randint(0, size) for _ in range(draw.randint(0, 3)))})
    return list(itertools.pairwise(at))


def grid(draw: random.Random, key: str, whole: torch.Tensor) -> list[ShardedTensor]:
    """Pieces that cover a whole."""
    ranges = [cuts(draw, size) for size in whole.shape]
    return [
        box(key, whole, tuple(b for b, _ in spans), tuple(e - b for b, e in spans))
        for spans in itertools.product(*ranges)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_any_boxes_load_into_any_other_boxes(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    wholes = {}
    for number, key in enumerate(draw.sample(KEYS, 4)):
        shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(1, 3)))
        dtype = draw.choice([torch.float32, torch.int64, torch.bfloat16])
        wholes[key] = (torch.arange(torch.Size(shape).numel()).reshape(shape) + 100 * number).to(dtype)
    SAVE.save({key: grid(draw, key, whole) for key, whole in wholes.items()}, tmp_path / "iter")
    wanted = {key: grid(draw, key, whole) for key, whole in wholes.items()}
    got = LOAD.load({key: [empty(leaf) for leaf in leaves] for key, leaves in wanted.items()}, tmp_path / "iter")
    for key, leaves in wanted.items():
        assert len(got[key]) == len(leaves)
        for found, leaf in zip(got[key], leaves, strict=True):
            assert found.dtype is leaf.dtype
            assert torch.equal(found, leaf.data)
    assert {key: item.global_shape for key, item in LOAD.load_tensors_metadata(tmp_path / "iter").items()} == {
        key: tuple(whole.shape) for key, whole in wholes.items()
    }


def test_prepended_axes_and_scalars(tmp_path: Path) -> None:
    layers = [torch.full((2, 3), float(number)) for number in range(4)]
    state = {
        "layers": [
            ShardedTensor.from_rank_offsets("l", layer, (0, n, 4), prepend_axis_num=1) for n, layer in enumerate(layers)
        ],
        "step": ShardedTensor.from_rank_offsets("step", torch.tensor(7)),
    }
    SAVE.save(state, tmp_path)
    assert LOAD.load_tensors_metadata(tmp_path)["l"].global_shape == (4, 2, 3)
    third = ShardedTensor("l", None, torch.float32, (2, 3), (4, 2, 3), (2, 0, 0), None, prepend_axis_num=1)
    got = LOAD.load({"third": third, "step": empty(state["step"])}, tmp_path)
    assert torch.equal(got["third"], layers[2])
    assert got["step"].item() == 7


def test_flattened_ranges_are_boxes_too(tmp_path: Path) -> None:
    """As a distributed optimizer of old has them: each rank has a range of a flattened piece."""
    whole = torch.arange(24.0).reshape(4, 6)

    def part(start: int, stop: int, data: torch.Tensor | None) -> ShardedTensor:
        return ShardedTensor("w", data, torch.float32, (4, 6), (4, 6), (0, 0), None, flattened_range=slice(start, stop))

    flat = whole.flatten()
    cut = [(0, 5), (5, 5), (5, 16), (16, 24)]
    SAVE.save({str(n): part(b, e, flat[b:e].clone()) for n, (b, e) in enumerate(cut)}, tmp_path)
    got = LOAD.load({"whole": box("w", torch.zeros(4, 6), (0, 0), (4, 6)), "part": part(3, 21, None)}, tmp_path)
    assert torch.equal(got["whole"], whole)
    assert torch.equal(got["part"], flat[3:21])


def test_only_main_replicas_are_saved(tmp_path: Path) -> None:
    state = {
        "main": box("w", torch.ones(4), (0,), (4,), replica_id=(0, 0)),
        "copy": box("w", torch.zeros(4), (0,), (4,), replica_id=(0, 1)),
        "object": ShardedObject("o", "main", (1,), (0,)),
        "other": ShardedObject("o", "copy", (1,), (0,), replica_id=3),
    }
    SAVE.save(state, tmp_path)
    got = LOAD.load({"w": empty(state["copy"]), "o": state["other"].without_data()}, tmp_path)
    assert got["w"].tolist() == [1.0] * 4
    assert got["o"] == "main"


def test_tied_tensors_are_all_filled(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    SAVE.save([box("w", whole, (0,), (6,))], tmp_path)
    pieces = [((0,), (6,)), ((0,), (6,)), ((2,), (3,)), ((1,), (2,))]
    got = LOAD.load([empty(box("w", whole, begin, shape)) for begin, shape in pieces], tmp_path)
    assert [tensor.tolist() for tensor in got] == [[*range(6)], [*range(6)], [2, 3, 4], [1, 2]]


def test_a_leafs_own_tensor_is_filled_in_place(tmp_path: Path) -> None:
    SAVE.save({"w": box("w", torch.arange(12.0).reshape(3, 4), (0, 0), (3, 4))}, tmp_path)
    parameter = torch.nn.Parameter(torch.zeros(4, 3).t())
    leaf = ShardedTensor("w", parameter, torch.float32, (3, 4), (3, 4), (0, 0), None)
    got = LOAD.load({"w": leaf}, tmp_path)["w"]
    assert got.data_ptr() == parameter.data_ptr()
    assert not got.requires_grad
    assert torch.equal(parameter, torch.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize("stored", [torch.int64, torch.uint8])
def test_integers_load_as_floating_point_numbers(tmp_path: Path, stored: torch.dtype) -> None:
    whole = torch.arange(6).reshape(2, 3).to(stored)
    SAVE.save({"a": ShardedTensor.from_rank_offsets("a", whole)}, tmp_path)
    target = torch.full((2, 3), -1.0)
    LOAD.load({"a": ShardedTensor.from_rank_offsets("a", target)}, tmp_path)
    assert target.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        *((torch.float32, torch.int64), (torch.bool, torch.float32), (torch.int64, torch.int32)),
        *((torch.int64, torch.float16), (torch.int16, torch.float8_e4m3fn)),
    ],
)
def test_dtypes_that_could_not_hold_the_values_are_refused(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    SAVE.save({"a": ShardedTensor.from_rank_offsets("a", torch.ones(4, dtype=stored))}, tmp_path)
    target = torch.zeros(4, dtype=wanted)
    with pytest.raises(IncompatibleError, match="has dtype"):
        LOAD.load({"a": ShardedTensor.from_rank_offsets("a", target)}, tmp_path)
    assert target.tolist() == [0] * 4


@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float4_e2m1fn_x2"])
def test_dtypes_without_a_sign_or_of_pairs_convert_to_and_from_nothing(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    of_bytes = torch.ones(4, dtype=torch.uint8).view(dtype)
    SAVE.save({"a": ShardedTensor.from_rank_offsets("a", torch.full((4,), -3.0))}, tmp_path / "a")
    SAVE.save({"a": ShardedTensor.from_rank_offsets("a", of_bytes)}, tmp_path / "b")
    for part, target in (("a", torch.zeros(4, dtype=torch.uint8).view(dtype)), ("b", torch.zeros(4))):
        with pytest.raises(IncompatibleError, match="has dtype"):
            LOAD.load({"a": ShardedTensor.from_rank_offsets("a", target)}, tmp_path / part)
        assert target.view(torch.uint8).sum() == 0
    found = torch.zeros(4, dtype=torch.uint8).view(dtype)
    LOAD.load({"a": ShardedTensor.from_rank_offsets("a", found)}, tmp_path / "b")
    assert torch.equal(found.view(torch.uint8), of_bytes.view(torch.uint8))


def test_a_flattened_range_of_a_tensor_without_elements_is_saved(tmp_path: Path) -> None:
    def leaf(data: torch.Tensor | None) -> ShardedTensor:
        return ShardedTensor("g", data, torch.float32, (0, 2), (0, 2), (0, 0), None, flattened_range=slice(0, 0))

    SAVE.save({"g": leaf(torch.empty(0))}, tmp_path)
    assert LOAD.load({"g": leaf(None)}, tmp_path)["g"].numel() == 0


def test_a_piece_beside_the_whole_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sharded tensor 'w'"):
        SAVE.save({"w": box("w", torch.ones(2), (3,), (4,))}, tmp_path)


def test_another_floating_point_dtype_is_converted(tmp_path: Path) -> None:
    whole = torch.tensor([1.0, 2.5, -3.0])
    SAVE.save({"w": box("w", whole, (0,), (3,))}, tmp_path)
    got = LOAD.load({"w": ShardedTensor("w", None, torch.bfloat16, (2,), (3,), (1,), None)}, tmp_path)
    assert torch.equal(got["w"], whole[1:].bfloat16())


def test_a_piece_of_a_large_tensor_takes_its_own_room_only(tmp_path: Path) -> None:
    """Megatron's own tests look for this in files of its own format."""
    large = torch.ones(1_000_000)
    SAVE.save({"w": box("w", large[:10], (0,), (10,))}, tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 10_000


@pytest.mark.parametrize("size", [2, 7])
def test_a_mismatch_of_shapes_may_be_allowed(tmp_path: Path, size: int) -> None:
    """As for a vocabulary that is padded to another size: what is not stored is zero."""
    SAVE.save({"w": box("w", torch.arange(1.0, 5.0), (0,), (4,))}, tmp_path)
    wanted = ShardedTensor("w", torch.full((size,), 9.0), torch.float32, (size,), (size,), (0,), None)
    with pytest.raises(IncompatibleError, match="shape"):
        LOAD.load({"w": wanted}, tmp_path)
    assert wanted.data.tolist() == [9.0] * size
    wanted.allow_shape_mismatch = True
    behind = ShardedTensor("w", None, torch.float32, (3,), (12,), (9,), None, allow_shape_mismatch=True)
    got = LOAD.load({"w": wanted, "behind": behind}, tmp_path)
    assert got["w"].tolist() == [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0][:size]
    assert got["behind"].tolist() == [0.0] * 3


def test_objects_come_back_as_they_were(tmp_path: Path) -> None:
    things = {
        "bytes": io.BytesIO(b"state"),
        "rng": [{"np": ("MT19937", np.arange(5, dtype=np.uint32), 3), "torch": torch.arange(4, dtype=torch.uint8)}],
        "plain": {"epoch": 3, "names": ("a", "b"), 1: None},
        "tensor": torch.ones(2, 2),
        "empty": {},
        "k/shard_0_1": "odd",
    }
    state = {name: ShardedObject(name, thing, (1, 2), (0, 1)) for name, thing in things.items()}
    SAVE.save(state, tmp_path)
    got = LOAD.load({name: leaf.without_data() for name, leaf in state.items()}, tmp_path)
    assert isinstance(got["bytes"], io.BytesIO)
    assert got["bytes"].read() == b"state"
    name, array, position = got["rng"][0]["np"]
    assert (name, array.tolist(), array.dtype, position) == ("MT19937", [0, 1, 2, 3, 4], np.uint32, 3)
    assert torch.equal(got["rng"][0]["torch"], torch.arange(4, dtype=torch.uint8))
    assert got["plain"] == things["plain"]
    assert torch.equal(got["tensor"], torch.ones(2, 2))
    assert (got["empty"], got["k/shard_0_1"]) == ({}, "odd")
    metadata = LOAD.load_sharded_metadata(tmp_path)
    assert metadata == {leaf.unique_key: leaf.without_data() for leaf in state.values()}


def test_the_state_may_change_as_soon_as_async_save_has_returned(tmp_path: Path) -> None:
    weight, buffer = torch.ones(1000), io.BytesIO(b"old")
    state = {
        "w": ShardedTensor.from_rank_offsets("w", weight),
        "o": ShardedObject("o", {"b": buffer, "t": weight}, (1,), (0,)),
    }
    request = SAVE.async_save(state, tmp_path)
    weight.zero_()
    buffer.write(b"new")
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    got = LOAD.load({key: leaf.without_data() for key, leaf in state.items()}, tmp_path)
    assert got["w"].tolist() == [1.0] * 1000
    assert got["o"]["b"].read() == b"old"
    assert got["o"]["t"].tolist() == [1.0] * 1000


def test_further_finalize_functions_run_behind_ours(tmp_path: Path) -> None:
    seen: list[bool] = []
    request = SAVE.async_save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, tmp_path)
    request.add_finalize_fn(lambda: seen.append((tmp_path / "sharded" / "manifests" / f"{0:012d}.json").exists()))
    request.execute_sync()
    assert seen == [True]


def test_what_fails_in_the_background_is_raised_by_the_queue_and_the_next_save_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
    seen: list[str] = []
    queue = AsyncCallsQueue()
    with monkeypatch.context() as patched:
        go = threading.Event()

        def refuse(*_: Any, **__: Any) -> None:
            assert go.wait(60)
            raise OSError(28, "No space left on device")

        patched.setattr("asyncckpt.storage.directory.Directory.create_file", refuse)
        request = SAVE.async_save(state, tmp_path)
        request.add_finalize_fn(lambda: seen.append("never"))
        queue.schedule_async_request(request)
        assert queue.maybe_finalize_async_calls() == []
        go.set()
        with pytest.raises(asyncckpt.IOFailedError, match="No space left"):
            queue.maybe_finalize_async_calls(blocking=True)
    with pytest.raises(NotFoundError):
        LOAD.load({"w": empty(state["w"])}, tmp_path)
    queue.schedule_async_request(SAVE.async_save(state, tmp_path))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert LOAD.load({"w": empty(state["w"])}, tmp_path)["w"].tolist() == [1.0, 1.0]
    assert seen == []


def test_saving_again_replaces_what_was_there(tmp_path: Path) -> None:
    for number in range(3):
        SAVE.save({"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), float(number)))}, tmp_path)
    assert asyncckpt.list_steps(tmp_path / "sharded") == [2]
    assert len(list((tmp_path / "sharded" / "data").iterdir())) == 1
    leaf = ShardedTensor("w", None, torch.float32, (2,), (2,), (0,), None)
    assert LOAD.load({"w": leaf}, tmp_path)["w"].tolist() == [2.0, 2.0]


def test_an_empty_state_is_saved_and_loaded(tmp_path: Path) -> None:
    assert LOAD.load({"nothing": []}, tmp_path / "is not there") == {"nothing": []}
    SAVE.save({}, tmp_path)
    assert LOAD.load({}, tmp_path) == {}
    assert LOAD.load_sharded_metadata(tmp_path) == {}


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"m": {"lr": 0.1}}, r"'m'\]?\['lr'\]"),
        ({"m": {"w": torch.ones(1)}}, r"'m'\['w'\]"),
        ({"w": ShardedTensor("w", None, torch.float32, (2,), (2,), (0,), None)}, "'w' .*no data"),
        ({"o": ShardedObject("o", {"f": [print]}, (1,), (0,))}, r"'o'\['f'\]\[0\]"),
        ([ShardedObject("o", 1, (1,), (0,)), ShardedObject("o", 2, (1,), (0,))], "two main replicas"),
        ([box("w", torch.ones(4), (0,), (2,)), box("w", torch.ones(5), (2,), (2,))], "disagree"),
        ([box("w", torch.ones(4), (0,), (2,)), box("w", torch.ones(4).int(), (2,), (2,))], "disagree"),
    ],
)
def test_what_cannot_be_saved_is_named_before_anything_is_changed(tmp_path: Path, state: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        SAVE.async_save(state, tmp_path / "iter")
    assert not (tmp_path / "iter").exists()


def test_pieces_that_leave_a_hole_are_not_committed(tmp_path: Path) -> None:
    with pytest.raises(asyncckpt.CheckpointError, match="w"):
        SAVE.save({"w": box("w", torch.ones(4), (0,), (3,))}, tmp_path)
    with pytest.raises(NotFoundError):
        LOAD.load_tensors_metadata(tmp_path)


def test_what_is_missing_is_named_with_what_is_near(tmp_path: Path) -> None:
    SAVE.save({"w": box("model.weight", torch.ones(4), (0,), (4,)), "o": ShardedObject("rng", 1, (1,), (0,))}, tmp_path)
    with pytest.raises(NotFoundError, match=r"model\.wieght.*'model\.weight'"):
        LOAD.load({"w": empty(box("model.wieght", torch.ones(4), (0,), (4,)))}, tmp_path)
    with pytest.raises(NotFoundError, match="rng/shard_1_2"):
        LOAD.load({"o": ShardedObject("rng", None, (2,), (1,))}, tmp_path)
    with pytest.raises(NotFoundError, match="has no 'sharded' state"):
        LOAD.load_tensors_metadata(tmp_path / "elsewhere")


def test_all_misfits_are_told_before_anything_is_changed(tmp_path: Path) -> None:
    SAVE.save([box(key, torch.ones(4), (0,), (4,)) for key in "abc"], tmp_path)
    targets = [
        ShardedTensor("a", torch.zeros(4, dtype=torch.int32), torch.int32, (4,), (4,), (0,), None),
        ShardedTensor("b", torch.zeros(5), torch.float32, (5,), (5,), (0,), None),
        ShardedTensor("c", torch.zeros(4), torch.float32, (4,), (4,), (0,), None),
    ]
    with pytest.raises(IncompatibleError, match=r"nothing was changed: 'a'.*int32.*'b'.*\(5,\)"):
        LOAD.load(targets, tmp_path)
    assert all(not target.data.any() for target in targets)


def test_a_damaged_file_is_corrupt(tmp_path: Path) -> None:
    SAVE.save({"w": box("w", torch.ones(4), (0,), (4,))}, tmp_path)
    (file,) = (tmp_path / "sharded" / "data").glob("*/*.safetensors")
    flip_byte(file)
    with pytest.raises(CorruptError):
        LOAD.load({"w": empty(box("w", torch.ones(4), (0,), (4,)))}, tmp_path)


def test_a_copied_checkpoint_is_as_good(tmp_path: Path) -> None:
    SAVE.save({"w": box("w", torch.ones(4), (0,), (4,))}, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert LOAD.load({"w": empty(box("w", torch.ones(4), (0,), (4,)))}, str(tmp_path / "b"))["w"].tolist() == [1.0] * 4


def test_other_backends_and_versions_are_refused() -> None:
    LOAD.check_backend_compatibility("asyncckpt")
    LOAD.check_version_compatibility(1)
    with pytest.raises(IncompatibleError, match="torch_dist"):
        LOAD.check_backend_compatibility("torch_dist")
    for version in (0, 2, "1", True):
        with pytest.raises(IncompatibleError, match="version"):
            LOAD.check_version_compatibility(version)  # type: ignore[arg-type]
