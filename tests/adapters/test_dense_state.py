"""What adapters leave of a module is saved once, beside its tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import asyncckpt
from asyncckpt.adapters import DenseState, dense_state_of, tables_of
from asyncckpt.errors import IncompatibleError, UnsupportedError, UsageError
from tests.worlds.bits import bits


class Scaled(nn.Embedding):
    """An embedding with state that is not in its table."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__(rows, dim)
        self.scale = nn.Parameter(torch.ones(dim))
        self.register_buffer("seen", torch.zeros(rows, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(rows), persistent=False)
        self.norm = nn.LayerNorm(dim)


class CountingLayer(nn.Linear):
    """A layer with extra state, and a hook that counts its loads."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.steps = 0
        self.loads = 0
        self.register_load_state_dict_post_hook(CountingLayer.loaded)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]

    @staticmethod
    def loaded(module: CountingLayer, incompatible: Any) -> None:
        module.loads += 1


def make_model(seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "user": nn.Embedding(7, 4),
            "item": Scaled(5, 4),
            "over": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), CountingLayer()),
        }
    )


def train(model: nn.ModuleDict, step: int) -> None:
    """Change every tensor in place, and the extra state."""
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict(keep_vars=True).values()):
            if isinstance(tensor, torch.Tensor):
                tensor.copy_((tensor.float() * 0.5 + step + number).to(tensor.dtype))
    model["over"][2].steps += step


def image(model: nn.ModuleDict) -> Any:
    return bits({name: value for name, value in model.state_dict().items()})


def saved(model: nn.Module, path: Path) -> None:
    with asyncckpt.Saver(path=path, hashtables=model, tensors={"model": dense_state_of(model)}) as saver:
        saver.save_async(1).result(60)


def load(model: nn.Module, path: Path, **options: Any) -> asyncckpt.LoadReport:
    return asyncckpt.Loader(path, model, {"model": dense_state_of(model)}, **options).load()


def memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def held_by_tables(model: nn.Module) -> Iterator[tuple[int, int]]:
    for table in tables_of(model).values():
        cut = table.begin_cut()
        yield from (memory(cut.column(column.name)) for column in table.schema().columns if column.name != "id")
        cut.end(ok=True)


def test_every_tensor_is_held_once() -> None:
    model = make_model()
    dense = dense_state_of(model)["module"].state_dict()
    held = [*held_by_tables(model), *(memory(value) for value in dense.values() if isinstance(value, torch.Tensor))]
    expected = [memory(value) for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
    assert sorted(held) == sorted(expected)
    assert "item.weight" not in dense
    assert "item.scratch" not in dense
    assert {"item.scale", "item.seen", "item.norm.weight", "over.1.running_mean", "over.2._extra_state"} <= dense.keys()


def test_round_trip_while_training_goes_on(tmp_path: Path) -> None:
    model = make_model()
    train(model, 1)
    tables, dense = tables_of(model), dense_state_of(model)
    with asyncckpt.Saver(path=tmp_path, hashtables=tables, tensors={"model": dense}) as saver:
        expected = image(model)
        future = saver.save_async(1)
        for step in range(2, 6):
            train(model, step)
        future.result(60)
    fresh = make_model(seed=5)
    assert image(fresh) != expected
    report = load(fresh, tmp_path)
    assert image(fresh) == expected
    assert fresh["over"][2].loads == 1
    assert fresh["over"][2].steps == 1
    assert set(report.rows) == {"user", "item"}
    assert asyncckpt.describe(tmp_path).step == 1


def test_a_checkpoint_of_a_wrapped_module_fits_an_unwrapped_one(tmp_path: Path) -> None:
    model = make_model()
    saved(nn.DataParallel(model), tmp_path)
    fresh = make_model(seed=5)
    load(fresh, tmp_path)
    assert image(fresh) == image(model)


def test_tied_weights_are_in_the_table_alone(tmp_path: Path) -> None:
    def make() -> nn.ModuleDict:
        # The layer that shares the rows comes first, and must not hold them all the same.
        model = nn.ModuleDict({"decoder": nn.Linear(4, 6, bias=False), "encoder": nn.Embedding(6, 4)})
        model["encoder"].weight = model["decoder"].weight
        return model

    model, fresh = make(), make()
    assert dense_state_of(model).state_dict() == {"module": {}}
    saved(model, tmp_path)
    load(fresh, tmp_path)
    assert torch.equal(fresh["decoder"].weight, model["decoder"].weight)


def test_a_tensor_that_two_layers_share_is_in_the_state_once(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    assert list(dense_state_of(model)["module"].state_dict()) == ["a.weight", "a.bias", "b.bias"]
    saved(model, tmp_path)
    weight = model["a"].weight.detach().clone()
    with torch.no_grad():
        model["b"].weight.zero_()
    load(model, tmp_path)
    assert torch.equal(model["b"].weight, weight)


def test_a_computed_weight_is_saved_as_what_it_is_computed_from(tmp_path: Path) -> None:
    def make(seed: int) -> nn.ModuleDict:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"user": nn.Embedding(3, 2)})
        parametrize.register_parametrization(model["user"], "weight", nn.Tanh())
        return model

    model, fresh = make(0), make(1)
    assert tables_of(model) == {}
    assert list(dense_state_of(model)["module"].state_dict()) == ["user.parametrizations.weight.original"]
    saved(model, tmp_path)
    load(fresh, tmp_path)
    assert torch.equal(fresh["user"].weight, model["user"].weight)


def test_extra_state_of_a_module_that_was_taken_is_refused() -> None:
    class Extra(nn.Embedding):
        def get_extra_state(self) -> int:
            return 3

    with pytest.raises(UnsupportedError, match="state '_extra_state' of a Extra is not a tensor, found an int"):
        dense_state_of(nn.ModuleDict({"user": Extra(2, 2)})).state_dict()


def test_another_shape_is_refused_before_anything_changes(tmp_path: Path) -> None:
    saved(make_model(), tmp_path)
    fresh = make_model(seed=5)
    fresh["over"][0] = nn.Linear(4, 3)
    before = image(fresh)
    with pytest.raises(IncompatibleError, match=r"'model.module.over.0.weight' has shape \(3, 4\)"):
        load(fresh, tmp_path)
    assert image(fresh) == before


def test_missing_and_unexpected_tensors_are_refused(tmp_path: Path) -> None:
    saved(make_model(), tmp_path)
    fresh = make_model(seed=5)
    fresh["new"] = nn.Linear(1, 1)
    with pytest.raises(IncompatibleError, match=r"only in this state .*'model.module.new.weight'"):
        load(fresh, tmp_path)
    fresh = make_model(seed=5)
    del fresh["over"]
    with pytest.raises(IncompatibleError, match=r"only in the checkpoint .*'model.module.over.0.weight'"):
        load(fresh, tmp_path)


def test_a_state_dict_can_be_loaded_without_a_checkpoint() -> None:
    model, fresh = make_model(), make_model(seed=5)
    train(model, 1)
    state = dense_state_of(model).state_dict()
    dense_state_of(fresh).load_state_dict(state)
    assert bits(dense_state_of(fresh).state_dict()) == bits(state)
    assert not torch.equal(fresh["user"].weight, model["user"].weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("module"), "a dense state has other parts than its module"),
        (lambda state: state.update(zch={}), "a dense state has other parts than its module"),
        (
            lambda state: state["module"].pop("item.scale"),
            r"has other names than its module.*expected \['item.scale'\]",
        ),
        (lambda state: state["module"].update(x=torch.zeros(1)), r"has other names than its module, found \['x'\]"),
        (
            lambda state: state["module"].update({"item.scale": torch.zeros(3)}),
            "dense state 'item.scale' has another shape",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(change: Any, message: str) -> None:
    state = dense_state_of(make_model()).state_dict()
    change(state)
    fresh = make_model(seed=5)
    before = image(fresh)
    with pytest.raises(IncompatibleError, match=message):
        dense_state_of(fresh).load_state_dict(state)
    assert image(fresh) == before


def test_two_tensors_of_one_name_are_refused() -> None:
    wrapper = nn.DataParallel(nn.ModuleDict({"a": nn.Linear(1, 1)}))
    wrapper.a = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"two modules have a dense tensor 'a.weight'"):
        dense_state_of(wrapper).state_dict()


def test_a_module_without_dense_state(tmp_path: Path) -> None:
    model, fresh = nn.Embedding(3, 2), nn.Embedding(3, 2)
    dense = dense_state_of(model)
    assert isinstance(dense, DenseState)
    assert len(dense) == 1
    saved(model, tmp_path)
    load(fresh, tmp_path)
    assert torch.equal(fresh.weight, model.weight)
