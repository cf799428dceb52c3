"""A rename that stays in the script: every restore gives each parameter its value and its moment, whatever is added.

The oracle is the model that was saved: what a name becomes is known here, for the test has made the names.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.errors import IncompatibleError, UsageError
from tests.end_to_end.test_changed_optimizers import layer, layers, restore, save

State = dict[str, Any]
SEEDS, MORE_SEEDS = range(40), range(40, 640)


def with_adam(model: nn.Module) -> State:
    for number, parameter in enumerate(model.parameters(), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    return {"model": model, "o": torch.optim.Adam(model.named_parameters())}


def facts(state: State) -> dict[str, tuple[Any, ...]]:
    """The values and moments of parameters, by their names."""
    found = {}
    for name, parameter in state["model"].named_parameters():
        moment = state["o"].state.get(parameter, {}).get("exp_avg")
        found[name] = parameter.tolist(), None if moment is None else moment.tolist()
    return found


class Gated(nn.Module):
    """What is put around a layer, with a parameter of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.zeros(2))


def flat(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(layer() for _ in range(count)))


# What the model was, what it is now, and the rename.
CHANGES: dict[str, tuple[Any, Any, dict[str, str]]] = {
    "put into a gate": (
        lambda: nn.ModuleDict({"net": layer()}),
        lambda: nn.ModuleDict({"net": Gated(layer())}),
        {"model.net": "model.net.inner"},
    ),
    "put into a Sequential of one": (
        lambda: nn.ModuleDict({"net": flat(1)}),
        lambda: nn.ModuleDict({"net": nn.Sequential(flat(1))}),
        {"model.net": "model.net.0"},
    ),
    "put into a Sequential with one behind": (
        lambda: nn.ModuleDict({"net": flat()}),
        lambda: nn.ModuleDict({"net": nn.Sequential(flat(), layer())}),
        {"model.net": "model.net.0"},
    ),
    "taken out of a Sequential": (
        lambda: nn.ModuleDict({"net": nn.Sequential(flat())}),
        lambda: nn.ModuleDict({"net": flat()}),
        {"model.net.0": "model.net"},
    ),
    "the old name is taken by another form": (
        lambda: layers(["old"]),
        lambda: nn.ModuleDict({"new": layer(), "old": flat(1)}),
        {"model.old": "model.new"},
    ),
    "the old name is taken by the same form": (
        lambda: layers(["old"]),
        lambda: layers(["new", "old"]),
        {"model.old": "model.new"},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_renamed_once_is_restored_ever_after(tmp_path: Path, change: str) -> None:
    was, now, rename = CHANGES[change]
    before = with_adam(was())
    save(tmp_path, before)
    ((old, new),) = rename.items()
    old, new = f"{old[6:]}.", f"{new[6:]}."
    wanted = {(new + name[len(old) :] if name.startswith(old) else name): fact for name, fact in facts(before).items()}
    for step in range(1, 4):
        state = with_adam(now())
        restore(tmp_path, state, strict=False, rename=rename)
        found = facts(state)
        assert wanted.items() <= found.items(), f"restore {step}"
        state["o"].step()
        wanted = facts(state)
        with asyncckpt.Saver(path=tmp_path, tensors=state, durability="none") as saver:
            saver.save(10 * step)


def test_a_layer_that_is_added_later_gets_nothing_of_another_one(tmp_path: Path) -> None:
    """It got the weights and moments of a layer whose old name the rename still had."""
    call: State = {"strict": False, "rename": {"model.enc": "model.tower"}}
    save(tmp_path, with_adam(nn.ModuleDict({"enc": layers(["one"])})))
    second = with_adam(nn.ModuleDict({"tower": layers(["one"]), "enc": layers(["two"])}))
    restore(tmp_path, second, **call)
    second["o"].step()
    with asyncckpt.Saver(path=tmp_path, tensors=second, durability="none") as saver:
        saver.save(10)
    third = with_adam(nn.ModuleDict({"tower": layers(["one", "two"]), "enc": layers(["two"])}))
    report, _ = restore(tmp_path, third, **call)
    assert facts(second).items() <= facts(third).items()
    assert sorted(report.missing) == ["model.tower.two.weight", "o of model.tower.two.weight"]


def test_what_nobody_can_tell_is_refused(tmp_path: Path) -> None:
    save(tmp_path, with_adam(nn.ModuleDict({"enc": layers("ab"), "tower": layers("c")})))
    now = with_adam(nn.ModuleDict({"enc": layers("b"), "tower": layers("abc")}))
    before = facts(now)
    with pytest.raises(UsageError, match=r"nobody can tell whether 'model.enc.b.weight' is renamed already"):
        restore(tmp_path, now, strict=False, rename={"model.enc": "model.tower"})
    assert facts(now) == before


@pytest.mark.parametrize("changed", ["exchanged", "one moved"])
@pytest.mark.parametrize("call", [{"rename": {"model.c": "model.d"}}, {}])
def test_other_groups_are_refused_where_all_must_match(tmp_path: Path, changed: str, call: State) -> None:
    """With a rename of any layer, the schedule had the rates of the other group from then on."""

    def grouped(names: tuple[str, str], last: str) -> State:
        model = layers(["a", "b", "e", last])
        named = [[(f"{name}.weight", model[name].weight) for name in each] for each in names]
        optimizer = torch.optim.Adam([{"params": each, "lr": 0.1 / number} for number, each in enumerate(named, 1)])
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return {"model": model, "o": optimizer, "s": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)}

    save(tmp_path, grouped(("ab", "e"), "c"))
    now = grouped(("e", "ab") if changed == "exchanged" else ("a", "be"), "d" if call else "c")
    with pytest.raises(IncompatibleError, match=r"nothing was changed.*'o' (does not take|has)"):
        restore(tmp_path, now, **call)
    assert now["s"].base_lrs == [0.1, 0.05]


def model_of(names: list[str]) -> nn.Module:
    root = nn.Module()
    for name in names:
        module, (*above, last) = root, name.split(".")
        for each in above:
            if each not in module._modules:
                module.add_module(each, nn.Module())
            module = module._modules[each]  # type: ignore[assignment]
        module.register_parameter(last, nn.Parameter(torch.rand(2)))
    return root


def fit_together(names: list[str]) -> bool:
    return len({*names}) == len(names) and not any(b.startswith(f"{a}.") for a in names for b in names)


def renamed(name: str, old: str, new: str) -> str:
    return new + name[len(old) :] if name == old or name.startswith(f"{old}.") else name


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE_SEEDS)])
def test_random_names(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)

    def some_name() -> str:
        return ".".join(draw.choice("abc") for _ in range(draw.randint(1, 3)))

    while True:
        names = [some_name() for _ in range(draw.randint(1, 5))]
        old = ".".join(draw.choice(names).split(".")[: draw.randint(1, 3)])
        above = old.rpartition(".")[0]
        new = draw.choice([f"{old}.{draw.choice('ai')}", old[:-1] + draw.choice("xyab"), some_name(), above or "q"])
        now = [renamed(name, old, new) for name in names]
        added = [draw.choice([some_name(), f"{old}.{some_name()}", f"{new}.{some_name()}"]) for _ in range(2)]
        added = [name for name in added[: draw.randint(0, 2)] if name not in names]
        if new != old and fit_together(names) and fit_together([*now, *added]):
            break
    before = with_adam(model_of(names))
    save(tmp_path, before)
    call: State = {"strict": False, "rename": {f"model.{old}": f"model.{new}"}}
    wanted = {renamed(name, old, new): fact for name, fact in facts(before).items()}
    for step in range(1, 4):
        state = with_adam(model_of([*now, *added]))
        restore(tmp_path, state, **call)
        assert wanted.items() <= facts(state).items(), (names, old, new, now, added)
        state["o"].step()
        wanted = facts(state)
        with asyncckpt.Saver(path=tmp_path, tensors=state, durability="none") as saver:
            saver.save(10 * step)


@pytest.mark.parametrize("stepped", list(itertools.product([False, True], repeat=4)))
@pytest.mark.parametrize("strict", [True, False])
def test_an_optimizer_has_one_name_whatever_it_has_kept_so_far(
    tmp_path: Path, stepped: tuple[bool, ...], strict: bool
) -> None:
    """What one of both kept, and the other one not, was told by its parts: they were mixed, or refused."""
    call: State = {"strict": strict, "rename": {"o": "p"}}

    def made(*, old: bool, new: bool, lr: float) -> State:
        model = layers("ab")
        optimizers = {
            name: torch.optim.Adam(model[key].named_parameters(), lr=lr) for name, key in (("p", "a"), ("o", "b"))
        }
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, lr)
        for name, is_stepped in (("o", old), ("p", new)):
            if is_stepped:
                optimizers[name].step()
        return {"model": model, **optimizers}

    was = made(old=stepped[0], new=stepped[1], lr=0.25)
    save(tmp_path, was)
    now = made(old=stepped[2], new=stepped[3], lr=0.5)
    restore(tmp_path, now, **call)
    assert str([now[name].state_dict() for name in "op"]) == str([was[name].state_dict() for name in "op"])
