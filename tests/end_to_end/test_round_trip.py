"""What goes in comes back: every dtype, every container, every kind of tensor."""

from __future__ import annotations

import collections
import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

import asyncckpt
from tests.end_to_end.state import State, load_image
from tests.worlds.bits import bits
from tests.worlds.objects import Stateful
from tests.worlds.saves import save_one


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("dtype", asyncckpt.checkpoints.supported_dtypes(), ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype, staged: bool) -> None:
    size = dtype.itemsize
    raw = torch.arange(24 * size, dtype=torch.int64).mul(37).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    source = raw.view(dtype).reshape(2, 3, 4)
    with asyncckpt.Saver(path=tmp_path, tensors={"x": source}) as saver:
        if staged:
            saver.save_async(1).result(60)
        else:
            saver.save(1)
    target = torch.zeros(24 * size, dtype=torch.uint8).view(dtype).reshape(2, 3, 4)
    asyncckpt.Loader(tmp_path, tensors={"x": target}).load()
    assert bits(target) == bits(source)
    assert asyncckpt.describe(tmp_path).blocks[0].dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("staged", [True, False])
def test_single_numbers_of_any_stride(tmp_path: Path, staged: bool, encoded: bool) -> None:
    """Torch calls them contiguous."""
    state = {
        "first": torch.arange(1.0, 3.0)[::2],
        "box": torch.arange(1, 9).reshape(2, 2, 2)[::2, ::2, ::2],
        "row": torch.arange(12.0).reshape(6, 2)[::6],
    }
    filters = [asyncckpt.filters.skip_zero_rows("*"), asyncckpt.filters.compress()] if encoded else []
    with asyncckpt.Saver(path=tmp_path, tensors=state, filters=filters) as saver:
        if staged:
            saver.save_async(1).result(60)
        else:
            saver.save(1)
    targets = {name: torch.zeros(values.shape, dtype=values.dtype) for name, values in state.items()}
    asyncckpt.Loader(tmp_path, tensors=targets).load()
    assert bits(targets) == bits(state)


@pytest.mark.parametrize("staged", [True, False])
def test_every_kind_of_tensor(tmp_path: Path, staged: bool) -> None:
    base = torch.arange(48, dtype=torch.float32).reshape(4, 12)
    complex_base = torch.randn(6, dtype=torch.complex64)
    state: dict[str, Any] = {
        "transposed": base.t(),
        "strided": base[:, ::3],
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "expanded": torch.ones(1, 5).expand(3, 5),
        "slice": base[1],
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 7),
        "conj": complex_base.conj(),
        "neg": torch._neg_view(base),
        "imag": complex_base.conj().imag,
        "leaf": torch.randn(3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "nan": torch.tensor([math.nan, -0.0, math.inf, 1e-45]),
        "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
        "numpy_fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "numpy_reversed": np.arange(5)[::-1],
    }
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        if staged:
            saver.save_async(1).result(60)
        else:
            saver.save(1)
    target = {
        name: torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, torch.Tensor)
        else np.zeros_like(value, order="C")
        for name, value in state.items()
    }
    target["numpy_reversed"] = np.zeros(5, dtype=np.int64)
    asyncckpt.Loader(tmp_path, tensors=target).load()
    for name, value in state.items():
        found = target[name]
        if isinstance(value, torch.Tensor):
            assert bits(found) == bits(value), name
        else:
            assert np.array_equal(found, value), name


class ExtraState(torch.nn.Module):
    """A module with extra state."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def get_extra_state(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.loss = state["loss"]


SCALARS: list[Any] = [np.float64(2.5), np.float32("nan"), np.int64(-(2**63)), np.uint8(255), np.bool_(True)]
SCALARS += [np.float16(0.1), np.complex64(1 - 2j)]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: value.dtype.name)
async def test_a_numpy_scalar_is_its_own_target(tmp_path: Path, value: Any) -> None:
    """Nobody can write to it, so it comes back as a value, of the same type and with the same bits."""
    save_one(tmp_path, tensors={"s": value, "deep": [{"s": value}], "m": ExtraState(value)})
    old, module = type(value)(), ExtraState(type(value)())
    target = {"s": old, "deep": [{"s": old}], "m": module}
    reports = [asyncckpt.Loader(tmp_path, tensors=target).load()]
    async for update in asyncckpt.follow(tmp_path, until=1):
        reports.append(await update.load(tensors=target))
    for report in reports:
        for name in ("s", "deep.0.s"):
            assert type(report.values[name]) is type(value)
            assert report.values[name].tobytes() == value.tobytes()
    assert type(module.loss) is type(value)
    assert module.loss.tobytes() == value.tobytes()
    with pytest.raises(asyncckpt.IncompatibleError, match="'other'"):
        asyncckpt.Loader(tmp_path, tensors={"other": old}).load()
    assert "other" not in asyncckpt.Loader(tmp_path, tensors={"other": old}, strict=False).load().values


EXTRA_STATES: list[Any] = [None, [], [1, (2.5, "x")], {"n": 5}, {"steps": [1]}, {1: {}, "n": np.int8(3)}]
EXTRA_STATES += [torch.ones(2), torch.ones(3), {"steps": [torch.ones(2)]}, {"n": torch.ones(2, dtype=torch.int64)}]


@pytest.mark.parametrize("new", EXTRA_STATES[::3], ids=repr)
@pytest.mark.parametrize("saved", EXTRA_STATES, ids=repr)
async def test_extra_state_of_a_module_has_the_form_that_was_stored(tmp_path: Path, saved: Any, new: Any) -> None:
    """What a module notes while it trains is not in a new one; `load_state_dict` gives it all the same."""
    asyncckpt.save(tmp_path, {"model": torch.nn.Sequential(ExtraState(copy.deepcopy(saved)))})
    loaded = torch.nn.Sequential(ExtraState(copy.deepcopy(new)))
    asyncckpt.Loader(tmp_path, tensors={"model": loaded}).load()
    assert repr(loaded[0].loss) == repr(saved)
    loaded[0].loss = copy.deepcopy(new)
    async for update in asyncckpt.follow(tmp_path, until=0):
        await update.load(tensors={"model": loaded})
    assert repr(loaded[0].loss) == repr(saved)


def test_extra_state_that_a_module_does_not_take_is_refused(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"model": ExtraState(torch.ones(2))})
    with pytest.raises(asyncckpt.IncompatibleError, match=r"only in the checkpoint .*loss'"):
        asyncckpt.Loader(tmp_path, tensors={"model": torch.nn.Module()}).load()


def test_a_buffer_whose_name_ends_so_is_no_extra_state(tmp_path: Path) -> None:
    """It is refused before anything is changed, as any tensor of another shape."""
    module = torch.nn.Linear(1, 1)
    module.register_buffer("my_extra_state", torch.ones(3))
    asyncckpt.save(tmp_path, {"module": module}, step=0)
    module.register_buffer("my_extra_state", torch.ones(2))
    with pytest.raises(asyncckpt.IncompatibleError, match="nothing was changed"):
        asyncckpt.Loader(tmp_path, tensors={"module": module}).load()


def test_a_masked_array_is_refused(tmp_path: Path) -> None:
    """The mask would be lost: among the data that is saved, and among the targets of a load."""
    state = {"m": [np.ma.masked_array(np.arange(5.0), mask=[0, 1, 0, 1, 0])]}
    with asyncckpt.Saver(path=tmp_path, tensors=state) as saver:
        with pytest.raises(asyncckpt.UsageError, match=r"array 'm'\[0\] is masked"):
            saver.save(1)
        state["m"][0] = np.arange(5.0)
        saver.save(1)
    with pytest.raises(asyncckpt.UsageError, match=r"array 'm'\[0\] is masked"):
        asyncckpt.Loader(tmp_path, tensors={"m": [np.ma.masked_array(np.zeros(5), mask=False)]}).load()


def test_targets_of_other_strides_are_filled(tmp_path: Path) -> None:
    source = torch.randn(4, 6)
    save_one(tmp_path, tensors={"x": source})
    for target in (torch.zeros(6, 4).t(), torch.zeros(4, 12)[:, ::2], torch.zeros(4, 6, requires_grad=True)):
        asyncckpt.Loader(tmp_path, tensors={"x": target}).load()
        assert target.detach().equal(source)


def test_nested_state_comes_back_by_load_state_dict(tmp_path: Path) -> None:
    state = State.filled(11)
    save_one(tmp_path, staged=True, hashtables=state.tables, tensors=state.dense)
    assert load_image(tmp_path) == state.image()


def test_plain_values_keep_type_and_bits(tmp_path: Path) -> None:
    point = collections.namedtuple("point", "x y")
    source = Stateful(
        {
            1: "int key",
            "1": "str key",
            False: "bool key",
            None: [1, 2.5, (3, [4]), {"deep": b"\x00\xff"}],
            0.5: 2**80,
            "nan": math.nan,
            "minus zero": -0.0,
            "tenth": 0.1,
            "inf": -math.inf,
            "complex": 1 - 2j,
            "point": point(1, 2),
            "ordered": collections.OrderedDict(b=1, a=torch.ones(2)),
            "set": {1, "two"},
            "frozen": frozenset({None, (3,)}),
            "size": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
            "device": torch.device("cuda", 1),
            "slice": slice(1, None),
            "range": range(2, 9, 3),
            "empty": {},
            "text": "naïve \U0001f600 \n\x00",
            "tensors": {0: torch.arange(3), "array": np.float32(1.5)},
        }
    )
    save_one(tmp_path, staged=True, tensors={"counter": source})
    target = Stateful({})
    asyncckpt.Loader(tmp_path, tensors={"counter": target}).load()
    found = target.state
    assert list(found) == list(source.state)
    assert [type(key) for key in found] == [type(key) for key in source.state]
    assert found[None] == source.state[None]
    assert type(found[None][2]) is tuple
    assert math.isnan(found["nan"])
    assert math.copysign(1, found["minus zero"]) == -1
    same = "tenth", "inf", "complex", "text", "empty", "set", "frozen", "size", "dtype", "device", "slice", "range"
    for key in (0.5, *same):
        assert found[key] == source.state[key]
        assert type(found[key]) is type(source.state[key])
    assert found["point"] == (1, 2)
    assert type(found["ordered"]) is collections.OrderedDict
    assert list(found["ordered"]) == ["b", "a"]
    assert found["ordered"]["a"].equal(torch.ones(2))
    assert found["tensors"][0].equal(torch.arange(3))
    assert found["tensors"]["array"] == 1.5


def test_values_and_metadata_come_back_in_the_report(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"epoch": 3, "extra": {"lr": 0.1, "names": ["a"]}}) as saver:
        saver.save_async(1, metadata={"note": "night run", "scores": [1.5, None], "big": 2**70}).result(60)
    report = asyncckpt.Loader(tmp_path, tensors={"epoch": 0, "extra": {"lr": 0.0, "names": [""]}}).load()
    assert report.values == {"epoch": 3, "extra.lr": 0.1, "extra.names.0": "a"}
    assert report.metadata == {"note": "night run", "scores": [1.5, None], "big": 2**70}
    assert report.step == 1
    assert report.missing == ()
    assert report.unexpected == ()


def test_pairs_are_accepted_as_tensors(tmp_path: Path) -> None:
    save_one(tmp_path, tensors=[("a", torch.ones(2)), ("b", torch.zeros(3))])
    a = torch.zeros(2)
    asyncckpt.Loader(tmp_path, tensors=[("a", a)]).load()
    assert a.equal(torch.ones(2))


def test_names_never_become_file_names(tmp_path: Path) -> None:
    names = [
        "",
        "a/b",
        "../../x",
        "con",
        "A",
        "a",
        "é",
        "e\u0301",
        "x" * 10_000,
        "\n",
        "\x00",
        "__metadata__",
        "a#2",
        ".",
    ]
    state = {name: torch.full((3,), float(index)) for index, name in enumerate(names)}
    state["nested"] = {"a": torch.ones(1), "b.c": torch.ones(2), "b": {"c": torch.ones(3)}}
    save_one(tmp_path, staged=True, tensors=state)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files[0] == "LOCK"
    assert files[1].endswith("/r00000-000.safetensors")
    assert files[2] == "manifests/000000000001.json"
    assert len(files) == 3
    target = {name: torch.zeros(3) for name in names}
    target["nested"] = {"a": torch.zeros(1), "b.c": torch.zeros(2), "b": {"c": torch.zeros(3)}}
    asyncckpt.Loader(tmp_path, tensors=target).load()
    assert bits(target) == bits(state)


def test_a_tensor_named_like_a_column_does_not_shadow_it(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("user", 4)
    table.lookup(torch.arange(5))
    save_one(tmp_path, hashtables={"user": table}, tensors={"user@id": torch.ones(2)})
    target, dense = asyncckpt.HashTable("user", 4), torch.zeros(2)
    asyncckpt.Loader(tmp_path, {"user": target}, {"user@id": dense}).load()
    assert target.ids().equal(table.ids())
    assert dense.equal(torch.ones(2))


def test_shards_open_with_safetensors(tmp_path: Path) -> None:
    state = State.filled(5)
    state.dense["complex"] = torch.randn(5, dtype=torch.complex128)
    save_one(tmp_path, staged=True, hashtables=state.tables, tensors=state.dense)
    tensors, tables = asyncckpt.describe(tmp_path).files
    with safetensors.safe_open(str(tmp_path / tables), "pt") as file:
        user = state.tables["user"]
        ids = file.get_tensor("user@id")
        assert sorted(ids.tolist()) == sorted(user.ids().tolist())
        assert file.get_tensor("user@embedding").equal(user.embedding[user.lookup(ids, insert=False)])
    with safetensors.safe_open(str(tmp_path / tensors), "pt") as file:
        assert file.get_tensor("w").equal(state.dense["w"])
        assert file.get_tensor("half").equal(state.dense["half"])
        assert torch.view_as_complex(file.get_tensor("complex")).equal(state.dense["complex"])
        assert file.metadata()["asyncckpt.step"] == "000000000001"


def test_state_without_leaves_is_a_checkpoint(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"empty": {}}) as saver:
        saver.save_async(1).result(60)
        saver.save(2)
    assert asyncckpt.Loader(tmp_path).load().step == 2


def test_empty_table(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("t", 4)
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}) as saver:
        saver.save_async(1).result(60)
        saver.save(2)
    for step in (1, 2):
        target = asyncckpt.HashTable("t", 4)
        target.lookup(torch.arange(3))
        assert asyncckpt.Loader(tmp_path, {"t": target}, step=step).load().rows == {"t": 0}
        assert len(target) == 0
