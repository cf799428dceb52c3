"""Composites come back bit for bit, into a target of their class or as their inner tensors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import IncompatibleError, Loader, Saver
from asyncckpt.plan.composite_tensors import on_device
from tests.worlds.composites import (
    CONTEXT,
    Int8Rows,
    Momentum8,
    RowsInExtraState,
    Twofold,
    inner_of,
    int8_rows,
    same,
    train,
)


def quantized(seed: int, context: Any = CONTEXT) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False), torch.nn.Linear(6, 8))
    model[0].weight = torch.nn.Parameter(int8_rows(seed, context=context), requires_grad=False)
    return model


def test_in_a_dict_it_is_filled_in_place(tmp_path: Path) -> None:
    stored, target = int8_rows(1, context=CONTEXT), int8_rows(2, context=CONTEXT)
    asyncckpt.save(tmp_path, {"w": stored, "other": torch.ones(2)})
    codes = target.codes
    asyncckpt.Loader(tmp_path, tensors={"w": target, "other": torch.zeros(2)}).load()
    assert same(inner_of(target), inner_of(stored))
    assert target.codes is codes


def test_a_module_of_quantized_weights_goes_on(tmp_path: Path) -> None:
    model, other = quantized(1), quantized(2)
    with Saver(path=tmp_path, tensors={"model": model}) as saver:
        saver.save(1)
    report = Loader(tmp_path, tensors={"model": other}).load()
    assert same(inner_of(other[0].weight), inner_of(model[0].weight))
    assert torch.equal(other[1].weight, model[1].weight)
    assert not report.missing
    assert not report.unexpected


def test_what_it_shows_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("an operation on the outer tensor")

    model, other = quantized(1), quantized(2)
    monkeypatch.setattr(Int8Rows, "__torch_dispatch__", classmethod(refuse))
    with Saver(path=tmp_path, tensors={"model": model, "w": model[0].weight}) as saver:
        saver.save_async(1).result()
    Loader(tmp_path, tensors={"model": other, "w": other[0].weight}).load()
    assert same(inner_of(other[0].weight), inner_of(model[0].weight))


def test_a_save_in_the_background_has_the_values_of_its_call(tmp_path: Path) -> None:
    tensor = int8_rows(1)
    wanted = inner_of(tensor)
    with Saver(path=tmp_path, tensors={"w": tensor}) as saver:
        future = saver.save_async(1)
        tensor.codes.zero_()
        tensor.scale.zero_()
        future.result()
    target = int8_rows(2)
    Loader(tmp_path, tensors={"w": target}).load()
    assert same(inner_of(target), wanted)


def test_an_inner_tensor_that_is_exchanged_is_saved(tmp_path: Path) -> None:
    tensor = int8_rows(1)
    with Saver(path=tmp_path, tensors={"w": tensor}) as saver:
        saver.save(1)
        tensor.codes = tensor.codes + 1
        saver.save(2)
    target = int8_rows(2)
    Loader(tmp_path, tensors={"w": target}).load()
    assert same(inner_of(target), inner_of(tensor))


@pytest.mark.parametrize("begins", ["fresh", "stepped"])
def test_an_optimizer_goes_on(tmp_path: Path, begins: str) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 8)
    other = copy.deepcopy(model)
    optimizer, second = (Momentum8(list(each.parameters())[:1], context=CONTEXT[1]) for each in (model, other))
    train(model, optimizer, 3)
    asyncckpt.save(tmp_path, {"model": model, "optimizer": optimizer})
    if begins == "stepped":
        train(other, second, 1)
        asyncckpt.Loader(tmp_path, tensors={"model": other, "optimizer": second}).load()
    else:
        with torch.serialization.safe_globals([Int8Rows]):
            asyncckpt.Loader(tmp_path, tensors={"model": other, "optimizer": second}).load()
    found = second.state[other.weight]["momentum"]
    assert type(found) is Int8Rows
    assert found.context == CONTEXT[1]
    assert same(inner_of(found), inner_of(optimizer.state[model.weight]["momentum"]))
    assert train(model, optimizer, 5) == train(other, second, 5)


def test_without_targets_it_is_a_dict_of_its_parts(tmp_path: Path) -> None:
    stored = Twofold(int8_rows(1), torch.arange(48.0).view(6, 8))
    asyncckpt.save(tmp_path, {"p": stored})
    found = asyncckpt.load(tmp_path)["p"]
    assert set(found) == {"first", "second"}
    assert set(found["first"]) == {"codes", "scale"}
    assert same((found["first"]["codes"], found["second"]), (stored.first.codes, stored.second))


def test_one_within_another_one(tmp_path: Path) -> None:
    stored, target = (Twofold(int8_rows(seed), int8_rows(seed + 10)) for seed in (1, 2))
    asyncckpt.save(tmp_path, {"p": stored})
    Loader(tmp_path, tensors={"p": target}).load()
    assert same(inner_of(target.first), inner_of(stored.first))
    assert same(inner_of(target.second), inner_of(stored.second))
    inside = Twofold(int8_rows(1, context=4), int8_rows(2))
    with pytest.raises(IncompatibleError, match=r"'p.first' is another tensor.*context is 4, the checkpoint's null"):
        Loader(tmp_path, tensors={"p": inside}).load()


def test_tied_ones_are_stored_once(tmp_path: Path) -> None:
    stored = int8_rows(1, rows=600)
    other = Int8Rows(stored.codes, stored.scale)
    result = asyncckpt.save(tmp_path, {"w": stored, "v": other})
    assert result.bytes_logical < 2 * stored.codes.nbytes
    found = asyncckpt.load(tmp_path)
    assert found["w"]["codes"].data_ptr() == found["v"]["codes"].data_ptr()


def test_functions_in_a_context_are_those_of_the_target(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"w": int8_rows(1, context={"f": print, "n": 1})})
    target = int8_rows(2, context={"f": len, "n": 1})
    Loader(tmp_path, tensors={"w": target}).load()
    assert target.context["f"] is len
    assert same(inner_of(target), inner_of(int8_rows(1)))


def test_an_optimizer_that_has_stepped_gets_a_state_of_before_its_first_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 8)
    optimizer = Momentum8([model.weight])
    asyncckpt.save(tmp_path, {"optimizer": optimizer})
    train(model, optimizer, 1)
    Loader(tmp_path, tensors={"optimizer": optimizer}).load()
    assert not optimizer.state


class CopiesOnDetach(Int8Rows):
    """What its detach() gives has inner tensors of its own."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes.clone(), args[0].scale.clone(), args[0].context)
        if function is torch.ops.aten.copy_.default:
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        return super().__torch_dispatch__(function, types, args, kwargs)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_module_whose_state_dict_gives_copies_is_filled(tmp_path: Path, is_asked: bool) -> None:
    def model_of(seed: int) -> torch.nn.Module:
        model, rows = quantized(1), int8_rows(seed)
        model[0].weight = torch.nn.Parameter(CopiesOnDetach(rows.codes, rows.scale), requires_grad=False)
        if is_asked:
            model.register_state_dict_post_hook(lambda *_: None)
        return model

    model, other = model_of(1), model_of(2)
    asyncckpt.save(tmp_path, {"model": model})
    Loader(tmp_path, tensors={"model": other}).load()
    assert same(inner_of(other[0].weight), inner_of(model[0].weight))


def test_what_hooks_make_of_it_is_loaded_through_them(tmp_path: Path) -> None:
    """The state dict has a composite that the module has not."""

    def quantize(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        rows = Int8Rows(torch.zeros(8, 6, dtype=torch.int8), torch.ones(8))
        rows.put(module.weight.detach())
        state[f"{prefix}weight"] = rows

    def restore(_: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].shown()

    models = [torch.nn.Linear(6, 8) for _ in range(2)]
    for model in models:
        model.register_state_dict_post_hook(quantize)
        model.register_load_state_dict_pre_hook(restore)
    asyncckpt.save(tmp_path, {"model": models[0]})
    Loader(tmp_path, tensors={"model": models[1]}).load()
    assert torch.equal(models[1].weight, models[0].state_dict()["weight"].shown())


def test_where_it_is_and_whether_it_is_trained_is_the_targets_own(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"w": int8_rows(1, context={"device": torch.device("cuda:1"), "requires_grad": True})})
    target = int8_rows(2, context={"device": torch.device("cpu"), "requires_grad": False})
    Loader(tmp_path, tensors={"w": target}).load()
    assert same(inner_of(target), inner_of(int8_rows(1)))


def test_an_extra_state_gets_composites(tmp_path: Path) -> None:
    model, other = RowsInExtraState(1), RowsInExtraState(2)
    asyncckpt.save(tmp_path, {"model": model})
    Loader(tmp_path, tensors={"model": other}).load()
    assert type(other.rows) is Int8Rows
    assert same(inner_of(other.rows), inner_of(model.rows))


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_an_optimizer_would_cast_stays_what_it_is(tmp_path: Path, is_alone: bool) -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 8).bfloat16()
    other = copy.deepcopy(model)
    optimizer, second = (Momentum8([each.weight]) for each in (model, other))
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    asyncckpt.save(tmp_path, {"model": model, "optimizer": optimizer})
    state = {"optimizer": second} if is_alone else {"optimizer": second, "model": other}
    with torch.serialization.safe_globals([Int8Rows]):
        Loader(tmp_path, tensors=state, strict=False).load()
    found = second.state[other.weight]["momentum"]
    assert type(found) is Int8Rows
    assert found.dtype is torch.float32
    assert same(inner_of(found), inner_of(optimizer.state[model.weight]["momentum"]))
    assert second.state[other.weight]["steps"] == 1


def test_it_moves_with_its_inner_tensors() -> None:
    tensor = Twofold(int8_rows(1), torch.ones(6, 8))
    assert on_device(tensor, torch.device("cpu")) is tensor
    moved = on_device(tensor, torch.device("meta"))
    assert type(moved) is Twofold
    assert moved.first.codes.is_meta
    assert moved.second.is_meta
