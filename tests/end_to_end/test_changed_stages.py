"""Training goes on right where another part of a model is trained from now on, or two of its parts were one.

The oracle is arithmetic: each parameter has a moment of its own number (test_changed_optimizers.py), and each step is
counted once.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import asyncckpt
from asyncckpt.errors import IncompatibleError
from asyncckpt.trainer_state import StepCounter, TrainerState
from tests.end_to_end.test_changed_optimizers import (
    FAST,
    State,
    layer,
    layers,
    moments,
    of,
    parameters_of,
    restore,
    save,
    sgd,
)

KINDS = {name: getattr(torch.optim, name) for name in ("Adam", "Adagrad", "NAdam", "ASGD", "Rprop")}


def train(optimizer: torch.optim.Optimizer, steps_count: int = 2) -> None:
    for _ in range(steps_count):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def begin(path: Path, state: State) -> None:
    """Train the optimizer "o" of a state for two steps, and save all."""
    train(state["o"])
    with asyncckpt.Checkpointer(path, every=1, options=FAST, **state) as ckpt:
        ckpt.step(0)


# -- one state for two -------------------------------------------------------------------------------------------------


def twins(kind: Any, how: str, *, are_two: bool) -> State:
    m = nn.ModuleDict({"a": layer()} | ({"b": layer()} if are_two or how == "tied" else {}))
    if not are_two and how == "tied":
        m["b"].weight = m["a"].weight
    return {"m": m, "o": kind(m.named_parameters())}


def doubled(info: Any) -> Any:
    return {name: ({"m.a.weight": []} if name == "m.b.weight" else info[name]) for name in info}


@pytest.mark.parametrize("how", ["tied", "copied by a filter"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_parameters_that_get_one_state_count_their_own_steps(tmp_path: Path, kind: str, how: str) -> None:
    begin(tmp_path, twins(KINDS[kind], how, are_two=False))
    now = twins(KINDS[kind], how, are_two=True)
    restore(tmp_path, now, strict=False, **({} if how == "tied" else {"filter_func": doubled}))
    first, second = (now["o"].state[each.weight] for each in now["m"].values())
    for key, value in first.items():
        if isinstance(value, torch.Tensor):
            assert value.data_ptr() != second[key].data_ptr(), key
    train(now["o"])
    assert [float(each["step"]) for each in (first, second)] == [4.0, 4.0]


# -- another part of the same form -------------------------------------------------------------------------------------

WAYS = "whole", "part", "none"
# The same names, or none, are those of the same part as before.
UNKNOWN = ("part", "part"), ("none", "none"), ("none", "whole"), ("none", "part")


def of_part(part: str, way: str, key: str = "m", width: int = 2) -> State:
    """Make an encoder and a decoder of the same form, and an optimizer of one of them."""
    m = nn.ModuleDict({name: nn.Sequential(layer(), nn.Linear(2, width)) for name in ("enc", "dec")})
    named = list(m[part].named_parameters(part if way == "whole" else ""))
    return {key: m, "o": sgd([parameter for _, parameter in named] if way == "none" else named)}


@pytest.mark.parametrize("key", ["m", "n"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("was", "now"), [pair for pair in itertools.product(WAYS, WAYS) if pair not in UNKNOWN])
def test_a_second_stage_does_not_get_the_moments_of_the_first(
    tmp_path: Path, was: str, now: str, strict: bool, key: str
) -> None:
    save(tmp_path, of_part("enc", was))
    state = of_part("dec", now, key)
    before = state[key]["dec"][0].weight.clone()
    call: State = {"strict": strict, "rename": {} if key == "m" else {"m": "n"}}
    if strict:
        with pytest.raises(IncompatibleError, match=r"nothing was changed: .*'o' .* its parameters"):
            restore(tmp_path, state, **call)
        assert torch.equal(state[key]["dec"][0].weight, before)
        return
    report, told = restore(tmp_path, state, **call)
    assert moments(state) == [None, None, None]
    assert told or all(f"o of {key}.dec.{name}" in report.missing for name in ("0.weight", "1.weight", "1.bias"))
    train(state["o"])


@pytest.mark.parametrize("key", ["m", "n"])
@pytest.mark.parametrize("now", WAYS)
@pytest.mark.parametrize("was", WAYS)
def test_a_part_with_a_form_of_its_own_keeps_its_moments(tmp_path: Path, was: str, now: str, key: str) -> None:
    """However it was named, and is: one of the same form is what makes it unknown."""

    def made(way: str, key: str) -> State:
        state = of_part("dec", way, key)
        del state[key]["enc"]
        return state

    save(tmp_path, made(was, "m"))
    for strict in (True, False):
        state = made(now, key)
        restore(tmp_path, state, strict=strict, rename={} if key == "m" else {"m": "n"})
        assert moments(state) == [1.0, 2.0, 3.0]


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = (nn.Sequential(layer(), layer()) for _ in range(2))

    def state(self, *trained: str, is_saved: bool = True) -> State:
        """Save both under other names than the model has."""
        o = sgd([pair for pair in self.named_parameters() if pair[0].startswith(trained)])
        return {"disc": self.discriminator, "o": o} | ({"gen": self.generator} if is_saved else {})


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_names_of_a_model_around_two_are_not_cut_to_those_of_the_other(
    tmp_path: Path, strict: bool, is_saved: bool
) -> None:
    save(tmp_path, Adversaries().state("generator", is_saved=is_saved))
    state = Adversaries().state("discriminator", is_saved=is_saved)
    if strict:
        with pytest.raises(IncompatibleError, match="'o' does not take its state: its parameters are others"):
            restore(tmp_path, state)
        return
    _, told = restore(tmp_path, state, strict=False)
    assert (moments(state), len(told)) == ([None, None], 1)


def test_a_second_one_of_a_model_around_two_is_trained_too(tmp_path: Path) -> None:
    save(tmp_path, Adversaries().state("generator"))
    state = Adversaries().state("discriminator", "generator")
    restore(tmp_path, state, strict=False)
    assert moments(state) == [1.0, 2.0, None, None]


# -- names that are those of two ---------------------------------------------------------------------------------------


def with_norms(way: str, *, fc: bool = True) -> State:
    """A decoder has a norm, and so has the model."""
    decoder = nn.ModuleDict({"norm": layer(), "fc": layer()} if fc else {"norm": layer()})
    m = nn.ModuleDict({"norm": layer(), "decoder": decoder})
    return {"m": m, "o": sgd((m if way == "whole" else decoder).named_parameters())}


def test_names_of_the_whole_are_not_taken_for_those_of_a_part(tmp_path: Path) -> None:
    save(tmp_path, with_norms("whole"))
    state = with_norms("part")
    report, told = restore(tmp_path, state, strict=False)
    assert (moments(state), report.missing, told) == ([2.0, 3.0], (), [])
    train(state["o"])


def test_names_of_a_part_are_not_taken_for_those_of_the_whole(tmp_path: Path) -> None:
    save(tmp_path, with_norms("part"))
    state = with_norms("whole")
    report, _ = restore(tmp_path, state, strict=False)
    assert moments(state) == [None, 1.0, 2.0]
    assert "o of m.norm.weight" in report.missing


def test_numbers_of_another_slice_are_not_believed(tmp_path: Path) -> None:
    """Each slice of a list numbers its modules from 0, so "0" is another one."""

    def made(count: int) -> State:
        m = nn.ModuleList([layer() for _ in range(4)])
        return {"m": m, "o": sgd(m[-count:].named_parameters())}

    save(tmp_path, made(2))
    state = made(3)
    _, told = restore(tmp_path, state, strict=False)
    assert (moments(state), len(told)) == ([None, None, None], 1)


def test_names_of_two_parts_are_not_taken_for_those_of_others(tmp_path: Path) -> None:
    def made(*parts: str, more: bool) -> State:
        m = nn.ModuleDict({name: nn.Sequential(layer(), layer()) for name in ("enc", "dec")} | {"head": layer()})
        named = [pair for part in parts for pair in m[part].named_parameters()]
        return {"m": m, "o": sgd([*named, *([("new", m["enc"][1].weight)] if more else [])])}

    save(tmp_path, made("enc", "head", more=False))
    state = made("dec", "head", more=True)
    _, told = restore(tmp_path, state, strict=False)
    assert (moments(state), len(told)) == ([None] * 4, 1)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("named", ["net", "0", ""])
def test_a_key_that_is_renamed_changes_no_names_in_it(tmp_path: Path, named: str, strict: bool) -> None:
    """One name is the end of another one."""

    def made(key: str, name: str) -> State:
        m = nn.ModuleDict({"0": layer(), "net": nn.ModuleDict({"0": layer()})})
        return {key: m, "o": sgd([pair for pair in m.named_parameters() if pair[0].startswith(name)])}

    save(tmp_path, made("m", "0"))
    state = made("other", named)
    if strict and named != "0":
        with pytest.raises(IncompatibleError, match=r"'o' .*its parameters are others"):
            restore(tmp_path, state, rename={"m": "other"})
        return
    restore(tmp_path, state, strict=strict, rename={"m": "other"})
    assert moments(state) == {"net": [None], "0": [1.0], "": [1.0, None]}[named]


WITH_MODULE = """
import sys, torch, asyncckpt
from torch import nn
def made():
    def net():
        return {"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)}
    m = nn.ModuleDict({"module": nn.ModuleDict(net()), **net()})
    parts = [[pair for pair in m.named_parameters() if pair[0].startswith("module.") == first] for first in (1, 0)]
    return {"m": m, "o": torch.optim.Adam(parts[0]), "p": torch.optim.Adam(parts[1])}
was = made()
for name, number in (("o", 1.0), ("p", 2.0)):
    for each in was[name].param_groups[0]["params"]:
        each.grad = torch.full_like(each, number)
    was[name].step()
asyncckpt.save(sys.argv[1], was, 0)
for call in ({}, {"strict": False}, {"strict": False, "resize": ["m.head"]}):
    now = made()
    asyncckpt.Loader(sys.argv[1], tensors=now, **call).load()
    for name in "op":
        for a, b in zip(*(each[name].param_groups[0]["params"] for each in (was, now))):
            assert torch.equal(was[name].state[a]["exp_avg"], now[name].state[b]["exp_avg"]), (call, name)
"""


@pytest.mark.parametrize("seed", [0, 3])
def test_a_module_that_is_called_as_a_wrapper_is_keeps_its_moments(tmp_path: Path, seed: int) -> None:
    """Under each order of sets."""
    env = {**os.environ, "PYTHONHASHSEED": str(seed)}
    subprocess.run([sys.executable, "-c", WITH_MODULE, str(tmp_path)], env=env, check=True, timeout=120)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("now", ["module.", ""])
@pytest.mark.parametrize("was", ["module.", ""])
def test_names_of_a_wrapper_are_not_those_of_an_average_that_is_one_too(
    tmp_path: Path, was: str, now: str, strict: bool
) -> None:
    """DDP and an average of the weights both call what they wrap `module`."""

    def made(names: str, prefix: str) -> State:
        m = layers(names)
        return {"m": m, "average": torch.optim.swa_utils.AveragedModel(m), "o": sgd(m.named_parameters(prefix))}

    save(tmp_path, made("ab", was.rstrip(".")))
    state = made("ab" if strict else "bca", now.rstrip("."))
    restore(tmp_path, state, strict=strict)
    assert moments(state) == ([1.0, 2.0] if strict else [2.0, None, 1.0])


# -- schedules, and what is in a TrainerState --------------------------------------------------------------------------

SCHEDULES = {
    "step": lambda it: lr_scheduler.StepLR(it, 30, 0.1),
    "exponential": lambda it: lr_scheduler.ExponentialLR(it, 0.99),
    "milestones": lambda it: lr_scheduler.MultiStepLR(it, [10, 20], 0.5),
    "sequence": lambda it: lr_scheduler.SequentialLR(it, [lr_scheduler.LinearLR(it), lr_scheduler.StepLR(it, 9)], [1]),
}
HOLDERS: dict[str, Callable[[Any, Any], Any]] = {
    "sequence": lambda it, make: lr_scheduler.SequentialLR(it, [lr_scheduler.LinearLR(it), make(it)], [1]),
    "chain": lambda it, make: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(it), make(it)]),
    "trainer": lambda it, make: TrainerState(schedule=make(it)),
    "plain": lambda it, make: make(it),
}


def scheduled(holder: str, kind: str) -> State:
    m = layer()
    o = torch.optim.SGD(m.named_parameters(), lr=1.0, momentum=0.9)
    return {"m": m, "o": o, "s": HOLDERS[holder](o, SCHEDULES[kind])}


def facts_of(schedule: Any) -> Any:
    return {key: value for key, value in schedule.state_dict().items() if key != "rng"}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("was", SCHEDULES)
@pytest.mark.parametrize("now", SCHEDULES)
def test_a_schedule_inside_of_something_does_not_take_the_state_of_another_class(
    tmp_path: Path, now: str, was: str, holder: str
) -> None:
    before = scheduled(holder, was)
    if holder == "plain":  # Saved as a dict, which says nothing of its class.
        before["s"] = before["s"].state_dict()
    save(tmp_path, before)
    state = scheduled(holder, now)
    wanted = facts_of(before["s"] if was == now and holder != "plain" else state["s"])
    if was == now:
        restore(tmp_path, state)
        assert facts_of(state["s"]) == (wanted if holder != "plain" else before["s"])
        return
    weight = state["m"].weight.clone()
    with pytest.raises(
        IncompatibleError, match=r"nothing was changed.*the checkpoint has the state of (another class|'\w+')"
    ):
        restore(tmp_path, state)
    assert torch.equal(state["m"].weight, weight)
    report, told = restore(tmp_path, state, strict=False)
    assert (facts_of(state["s"]), len(told)) == (wanted, 1)
    assert report.missing == ("s.schedule" if holder == "trainer" else "s",)
    assert moments(state) == [1.0]


@pytest.mark.parametrize("change", ["a layer more", "other groups", "nothing"])
def test_a_schedule_in_a_trainer_state_stays_with_its_optimizer(tmp_path: Path, change: str) -> None:
    def made(layers_count: int, *, is_divided: bool = False, named: bool = True) -> tuple[State, Any]:
        m = nn.Sequential(*(layer() for _ in range(layers_count)))
        parameters: Any = list(m.named_parameters() if named else m.parameters())
        groups = [{"params": [each]} for each in parameters] if is_divided else parameters
        o = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
        schedule = lr_scheduler.StepLR(o, 1, 0.5)
        return {"m": m, "o": o, "t": TrainerState(StepCounter(), schedule=schedule)}, schedule

    was, stepped = made(2, named=change == "other groups")
    was["t"].step.advance()
    for _ in range(4):
        was["o"].step()
        stepped.step()
    with asyncckpt.Checkpointer(tmp_path, every=1, options=FAST, **was) as ckpt:
        ckpt.step(0)
    is_divided, named = change == "other groups", change != "nothing"
    state, schedule = made(3 if change == "a layer more" else 2, is_divided=is_divided, named=named)
    before = schedule.state_dict()
    report, told = restore(tmp_path, state, strict=False)
    assert int(state["t"].step) == 1, "the rest of it is loaded"
    assert schedule.state_dict() == (stepped.state_dict() if change == "nothing" else before)
    if change == "nothing":
        return
    assert "t.schedule" in report.missing
    assert any("'t.schedule' " in each and "it stays as it is" in each for each in told)
    assert [group["lr"] for group in state["o"].param_groups] == [1.0] * len(state["o"].param_groups)


def test_an_optimizer_in_a_trainer_state_goes_by_names_too(tmp_path: Path) -> None:
    def made(names: str) -> tuple[State, torch.optim.Optimizer]:
        m = layers(names)
        o = sgd(m.named_parameters())
        return {"m": m, "t": TrainerState(o=o)}, o

    was, o = made("ab")
    for number, parameter in enumerate(parameters_of(o), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    o.step()
    with asyncckpt.Checkpointer(tmp_path, every=1, options=FAST, **was) as ckpt:
        ckpt.step(0)
    state, o = made("ba")
    before = state["m"]["a"].weight.clone()
    with pytest.raises(IncompatibleError, match=r"'t.o' has its parameters in another order"):
        restore(tmp_path, state)
    assert torch.equal(state["m"]["a"].weight, before)
    state, o = made("bca")
    report, told = restore(tmp_path, state, strict=False)
    assert moments({"o": o}) == [2.0, None, 1.0]
    assert (sorted(report.missing), told) == (["m.c.weight", "t.o of m.c.weight"], [])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("other", [nn.Linear(2, 3), nn.Sequential(nn.Linear(2, 2))])
def test_a_module_in_a_trainer_state_that_does_not_fit_is_known_before(
    tmp_path: Path, other: nn.Module, strict: bool
) -> None:
    """As one that stands alone: another shape is refused, layers of other names stay as they are if they may."""
    save(tmp_path, {**of(layers("a")), "t": TrainerState(StepCounter(7), average=nn.Linear(2, 2))})
    state = {**of(layers("a")), "t": TrainerState(average=other)}
    before, average = state["m"]["a"].weight.clone(), [each.clone() for each in other.parameters()]
    if strict or isinstance(other, nn.Linear):
        with pytest.raises(IncompatibleError, match=r"nothing was changed: .*'t.average\.[0w]"):
            restore(tmp_path, state, strict=strict)
        assert torch.equal(state["m"]["a"].weight, before)
        return
    report, _ = restore(tmp_path, state, strict=False)
    assert sorted(report.missing) == ["t.average.0.bias", "t.average.0.weight"]
    assert sorted(report.unexpected) == ["t.average.bias", "t.average.weight"]
    assert int(state["t"].step) == 7
    assert all(map(torch.equal, other.parameters(), average))


# -- options that need more state --------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[Any, State]] = {
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "centered": (torch.optim.RMSprop, {"centered": True}),
    "momentum": (torch.optim.RMSprop, {"momentum": 0.9}),
    "momentum, which is made": (torch.optim.SGD, {"momentum": 0.9}),
}


@pytest.mark.parametrize("off", [True, False])
@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_of_other_groups_that_needs_more_state_is_no_error_of_the_next_step(
    tmp_path: Path, case: str, off: bool
) -> None:
    """Switched on, or off: then more was saved than is needed."""
    kind, options = OPTIONS[case]
    m = layers("ab")
    begin(tmp_path, {"m": m, "o": kind(m.named_parameters(), **({} if off else options))})
    m = layers("ab")
    groups = [{"params": [pair]} for pair in m.named_parameters()]
    o = kind(groups, **(options if off else {}))
    report, told = restore(tmp_path, {"m": m, "o": o}, strict=False)
    stays = off and kind is not torch.optim.SGD
    assert (report.missing, len(told)) == ((("o",), 1) if stays else ((), 0))
    assert not stays or f"'o' does not take its state: its option {case!r} was off" in told[0]
    train(o)
    if kind is not torch.optim.SGD:
        assert [float(each["step"]) for each in o.state.values()] == [2.0 if stays else 4.0] * 2
