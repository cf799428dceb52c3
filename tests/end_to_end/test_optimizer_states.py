"""States of optimizers as they were stored, or a refusal that says in what the optimizer is another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.errors import IncompatibleError
from tests.worlds.bits import bits
from tests.worlds.saves import save_one

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Masters(torch.optim.Optimizer):
    """Keeps a float32 copy of each parameter, and odd things beside it, some of them nested."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(master=parameter.detach().float(), seen=torch.zeros(3, dtype=torch.uint8))
                    state.update(nested={"a": [torch.full((2,), 1 / 3)], "b": (torch.tensor([float("nan")]), 2)})
                state["master"] -= group["lr"] * 1e-3 * parameter.grad.float()
                state["seen"] += 1
                state["nested"]["a"][0] *= 1.001
                parameter.data.copy_(state["master"])


def model(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)).to(dtype)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        net(torch.full((3, 4), 0.1 * step).to(next(net.parameters()).dtype)).square().mean().backward()
        optimizer.step()


def saved(path: Path, make: Make, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model(dtype)
    optimizer = make(net)
    train(net, optimizer, range(3))
    asyncckpt.save(path, {"model": net, "optim": optimizer}, durability="none")
    return net, optimizer


@pytest.mark.parametrize("make", [
    lambda net: Masters(net.parameters()),
    lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01)),
    lambda net: torch.optim.Adam(net.parameters(), fused=True),
], ids=["masters", "lr is a tensor", "fused"])  # fmt: skip
def test_a_state_keeps_the_dtypes_that_were_stored_and_trains_on_bit_equal(tmp_path: Path, make: Make) -> None:
    net, optimizer = saved(tmp_path, make, torch.bfloat16)
    before = bits(optimizer.state_dict())
    other = model(torch.bfloat16, seed=1)
    resumed = make(other)
    asyncckpt.Loader(tmp_path, tensors={"model": other, "optim": resumed}).load()
    assert bits(resumed.state_dict()) == before
    assert type(resumed.param_groups[0]["lr"]) is type(optimizer.param_groups[0]["lr"])
    train(net, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    assert bits(resumed.state_dict()) == bits(optimizer.state_dict())
    assert bits(dict(other.state_dict())) == bits(dict(net.state_dict()))


def test_a_load_that_casts_a_parameter_casts_its_state(tmp_path: Path) -> None:
    saved(tmp_path, lambda net: torch.optim.Adam(net.parameters()))
    other = model(torch.bfloat16)
    resumed = torch.optim.Adam(other.parameters())
    asyncckpt.Loader(tmp_path, tensors={"model": other, "optim": resumed}, cast=True).load()
    assert resumed.state[other[0].weight]["exp_avg"].dtype is torch.bfloat16
    train(other, resumed, range(3, 5))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["single", "foreach", "fused"])
def test_parameters_of_another_dtype_that_are_not_loaded_have_their_state_cast_by_torch(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    saved(tmp_path, lambda net: torch.optim.Adam(net.parameters()))
    other = model(torch.bfloat16)
    resumed = torch.optim.Adam(other.parameters(), **options)
    asyncckpt.Loader(tmp_path, tensors={"optim": resumed}).load()
    assert resumed.state[other[0].weight]["exp_avg"].dtype is torch.bfloat16
    train(other, resumed, range(3, 5))


LAST, FIRST = torch.channels_last, torch.contiguous_format


@pytest.mark.parametrize(("was", "now", "options"), [
    (LAST, LAST, {"filters": [asyncckpt.filters.compress()]}),
    (LAST, LAST, {"filter_func": lambda blocks: blocks}),
    (LAST, FIRST, {}),
    (FIRST, LAST, {}),
], ids=["compressed", "filtered", "contiguous now", "channels_last now"])  # fmt: skip
def test_a_state_has_the_memory_order_of_its_parameter_now(
    tmp_path: Path, was: torch.memory_format, now: torch.memory_format, options: dict[str, Any]
) -> None:
    """Fused steps take the strides of a parameter for those of its state."""

    def made(order: torch.memory_format) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Conv2d(3, 4, 3).to(memory_format=order)
        return net, torch.optim.Adam(net.parameters(), lr=0.1, fused=True)

    def step_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        net(torch.arange(75.0).view(1, 3, 5, 5)).pow(2).mean().backward()
        optimizer.step()

    net, optimizer = made(was)
    step_of(net, optimizer)
    save_one(tmp_path, tensors={"model": net, "optim": optimizer}, durability="none", **options)
    other, resumed = made(now)
    asyncckpt.Loader(tmp_path, tensors={"model": other, "optim": resumed}).load()
    assert resumed.state[other.weight]["exp_avg"].stride() == other.weight.stride()
    step_of(net, optimizer)
    step_of(other, resumed)
    torch.testing.assert_close(other.weight, net.weight, rtol=1e-5, atol=1e-6)


class Elsewhere(nn.Linear):
    """Puts what it loads into other memory than it had."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        for name, parameter in self.named_parameters():
            parameter.data = state[prefix + name]


def test_a_state_keeps_its_dtypes_where_a_module_has_put_its_parameters_elsewhere(tmp_path: Path) -> None:
    was, now = (Elsewhere(3, 3, dtype=torch.bfloat16) for _ in range(2))
    optimizer, resumed = Masters(was.parameters()), Masters(now.parameters())
    for parameter in was.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    asyncckpt.save(tmp_path, {"net": was, "optimizer": optimizer}, durability="none")
    asyncckpt.Loader(tmp_path, tensors={"net": now, "optimizer": resumed}).load()
    assert bits(resumed.state_dict()) == bits(optimizer.state_dict())


class Inside(torch.optim.Optimizer):
    """Has the groups of another optimizer, and a state dict with a word of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def state_dict(self) -> Any:
        return {"inner": self.inner.state_dict()["state"], "param_groups": self.inner.state_dict()["param_groups"]}

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict({"state": state["inner"], "param_groups": state["param_groups"]})


def test_an_optimizer_with_a_state_dict_of_its_own_is_left_to_it(tmp_path: Path) -> None:
    net = model()
    optimizer = Inside(torch.optim.Adam(net.parameters()))
    train(net, optimizer.inner, range(3))
    asyncckpt.save(tmp_path, {"optim": optimizer}, durability="none")
    resumed = Inside(torch.optim.Adam(model().parameters()))
    asyncckpt.Loader(tmp_path, tensors={"optim": resumed}).load()
    assert bits(resumed.state_dict()) == bits(optimizer.state_dict())


def named_backwards(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        [*net[1].named_parameters("1"), *net[0].named_parameters("0"), *net[2].named_parameters("2")]
    )


def unnamed_backwards(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([*net[1].parameters(), *net[0].parameters(), *net[2].parameters()])


def of_other_shapes(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*net[2].parameters(), *net[1].parameters(), *net[0].parameters()], momentum=0.9)


def named(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.named_parameters())


class Renamed(torch.optim.SGD):
    pass


class NotTorchs(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "trust": 2.0})


@pytest.mark.parametrize(("was", "now", "why"), [
    (named, named_backwards, "parameters in another order: number 0 is '1.weight', in the checkpoint '0.weight'"),
    (named, unnamed_backwards, "parameters in another order: number 0 is '1.weight', in the checkpoint '0.weight'"),
    (lambda net: torch.optim.SGD(net.parameters(), momentum=0.9), of_other_shapes, "they may be in another order"),
    (named, lambda net: torch.optim.SGD(net.parameters(), momentum=0.9), "is of class 'SGD', .* state of 'Adam'"),
    (lambda net: Renamed(net.parameters()), lambda net: torch.optim.RAdam(net.parameters()), "of class 'RAdam'"),
    (named, lambda net: torch.optim.RAdam(net.parameters()), "is of class 'RAdam', .* state of 'Adam'"),
    (named, lambda net: torch.optim.Adamax(net.parameters()), "is of class 'Adamax', .* state of 'Adam'"),
    (named, lambda net: NotTorchs(net.parameters()), "of class 'NotTorchs', .* 'Adam', which differs in"),
], ids=range(8))  # fmt: skip
def test_an_optimizer_of_other_parameters_or_class_is_refused_before_anything_is_touched(
    tmp_path: Path, was: Make, now: Make, why: str
) -> None:
    saved(tmp_path, was)
    other = model(seed=1)
    optimizer = now(other)
    before = bits(dict(other.state_dict())), bits(optimizer.state_dict())
    with pytest.raises(IncompatibleError, match=f"nothing was changed: .*'optim' .*{why}"):
        asyncckpt.Loader(tmp_path, tensors={"model": other, "optim": optimizer}).load()
    assert (bits(dict(other.state_dict())), bits(optimizer.state_dict())) == before


def test_parameters_in_another_order_are_known_by_name_where_some_are_tied(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        net[2].weight = net[0].weight
        return net

    net, other = tied(), tied()
    asyncckpt.save(tmp_path, {"model": net, "optim": named(net)}, durability="none")
    target: dict[str, Any] = {"model": other, "optim": named(other)}
    asyncckpt.Loader(tmp_path, tensors=target).load()
    target["optim"] = torch.optim.Adam(list(other.parameters())[::-1])
    with pytest.raises(IncompatibleError, match=r"number 0 is '2.bias', in the checkpoint '0.weight'"):
        asyncckpt.Loader(tmp_path, tensors=target).load()


@pytest.mark.parametrize("kind", [torch.optim.Rprop, torch.optim.Adafactor, torch.optim.Adadelta])
def test_parameters_in_another_order_are_known_by_the_shapes_of_their_state(
    tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    """Where not all have one, no order of the shapes fits."""
    one, two, three = (nn.Parameter(torch.zeros(size)) for size in (2, 3, 4))
    optimizer, x = kind([one, two, three]), torch.zeros(1)
    one.grad = torch.ones(2)
    optimizer.step()
    asyncckpt.save(tmp_path, {"x": torch.ones(1), "optim": optimizer}, durability="none")
    with pytest.raises(IncompatibleError, match="they may be in another order"):
        asyncckpt.Loader(tmp_path, tensors={"x": x, "optim": kind([two, one, three])}).load()
    assert not x.any()


class Transposing(torch.optim.Optimizer):
    """Keeps the gradients transposed."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["turned"] = parameter.grad.t().clone()


def test_a_state_that_is_transposed_is_not_one_of_another_order(tmp_path: Path) -> None:
    def autoencoder() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4, bias=False))

    net, other = autoencoder(), autoencoder()
    optimizer, resumed = Transposing(net.parameters()), Transposing(other.parameters())
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    asyncckpt.save(tmp_path, {"optim": optimizer}, durability="none")
    asyncckpt.Loader(tmp_path, tensors={"optim": resumed}).load()
    assert bits(resumed.state_dict()) == bits(optimizer.state_dict())


def wider(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([nn.Parameter(torch.ones(9, 9)), *list(net.parameters())[1:]])


def test_a_model_of_other_shapes_is_not_said_to_have_another_order(tmp_path: Path) -> None:
    saved(tmp_path, lambda net: torch.optim.Adam(net.parameters()))
    with pytest.raises(IncompatibleError, match=r"'optim' has a parameter 0 of shape \(9, 9\)") as raised:
        asyncckpt.Loader(tmp_path, tensors={"optim": wider(model())}).load()
    assert "order" not in str(raised.value)


@pytest.mark.parametrize("now", [named_backwards, unnamed_backwards], ids=["named", "unnamed"])
def test_what_a_refusal_of_an_optimizer_says_helps(tmp_path: Path, now: Make) -> None:
    """load_state_dict by hand would give moments to other parameters without a word: it is not what helps."""
    net, optimizer = saved(tmp_path, named)
    other = model(seed=1)
    hint = "make such an object as the one that was saved; strict=False loads of it what names of parameters tell"
    with pytest.raises(IncompatibleError, match=hint) as raised:
        asyncckpt.Loader(tmp_path, tensors={"model": other, "optim": now(other)}).load()
    assert "load_state_dict" not in str(raised.value)
    resumed = named(other)
    asyncckpt.Loader(tmp_path, tensors={"model": other, "optim": resumed}).load()
    assert bits(resumed.state_dict()) == bits(optimizer.state_dict())
    left_out = model(seed=2)
    asyncckpt.Loader(tmp_path, tensors={"model": left_out}).load()
    assert bits(dict(left_out.state_dict())) == bits(dict(net.state_dict()))


def tagged(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": list(net.parameters()), "tag": "all", "initial_lr": 3.0}], lr=0.1)


def of_a_newer_torch(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.defaults["new_option"] = optimizer.param_groups[0]["new_option"] = False
    return optimizer


@pytest.mark.parametrize(("was", "now"), [
    (named, lambda net: torch.optim.Adam(net.parameters(), foreach=True)),
    (named, lambda net: torch.optim.Adam(net.parameters(), fused=True)),
    (lambda net: torch.optim.Adam(net.parameters()), named),
    (lambda net: torch.optim.SGD(net.parameters()), lambda net: Renamed(net.parameters())),
    (lambda net: Renamed(net.parameters()), lambda net: torch.optim.SGD(net.parameters())),
    (tagged, lambda net: torch.optim.SGD(net.parameters())),
    (tagged, of_a_newer_torch),
    (of_a_newer_torch, tagged),
    (named, lambda net: torch.optim.Adam((f"module.{name}", each) for name, each in net.named_parameters())),
    (lambda net: torch.optim.Adafactor(net.parameters()), lambda net: torch.optim.Adafactor(net.parameters())),
    (lambda net: torch.optim.LBFGS(net.parameters()), lambda net: torch.optim.LBFGS(net.parameters())),
], ids=range(11))  # fmt: skip
def test_what_does_not_change_an_optimizer_loads(tmp_path: Path, was: Make, now: Make) -> None:
    net = model()
    optimizer = was(net)
    if not isinstance(optimizer, torch.optim.LBFGS):
        train(net, optimizer, range(3))
    asyncckpt.save(tmp_path, {"model": net, "optim": optimizer}, durability="none")
    other = model(seed=1)
    asyncckpt.Loader(tmp_path, tensors={"model": other, "optim": now(other)}).load()


def test_a_renamed_class_with_the_same_options_loads(tmp_path: Path) -> None:
    first = type("First", (Masters,), {})
    second = type("Second", (torch.optim.Optimizer,), dict(vars(Masters), __init__=lambda self, them: (
        torch.optim.Optimizer.__init__(self, them, {"lr": 0.1}))))  # fmt: skip
    saved(tmp_path, lambda net: first(net.parameters()))
    other = model(seed=1)
    asyncckpt.Loader(tmp_path, tensors={"model": other, "optim": second(other.parameters())}).load()


def test_a_compacted_checkpoint_keeps_the_classes_of_optimizers(tmp_path: Path) -> None:
    net, table = model(), asyncckpt.HashTable("t", 2)
    state = {"model": net, "optim": torch.optim.Adam(net.parameters())}
    with asyncckpt.Saver(path=tmp_path, tensors=state, hashtables={"t": table}, durability="none") as saver:
        saver.save(1)
        table.insert(torch.arange(3), torch.ones(3, 2))
        saver.save(2, kind="delta")
    asyncckpt.compact(tmp_path, 2)
    with pytest.raises(IncompatibleError, match="is of class 'RAdam'"):
        asyncckpt.Loader(tmp_path, tensors={"optim": torch.optim.RAdam(net.parameters())}).load()
