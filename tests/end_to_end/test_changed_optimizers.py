"""Moments and steps go to the parameters and tables that had them, or nobody gets them and somebody is told.

The oracle is arithmetic: each parameter has a moment of its own number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import asyncckpt
from asyncckpt import optim
from asyncckpt.errors import IncompatibleError, UsageError

State = dict[str, Any]
FAST = {"durability": "none"}


def layer() -> nn.Module:
    return nn.Linear(2, 2, bias=False)


def layers(names: Iterable[str]) -> nn.ModuleDict:
    return nn.ModuleDict({name: layer() for name in names})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


def save(path: Path, state: State) -> None:
    """Save a state whose optimizer "o" has the moments 1, 2, 3, ..."""
    optimizer = state["o"]
    for number, parameter in enumerate(parameters_of(optimizer), 1):
        parameter.grad = torch.full_like(parameter, float(number))
    optimizer.step()
    with asyncckpt.Checkpointer(path, every=1, options=FAST, **state) as ckpt:
        ckpt.step(0)


def restore(path: Path, state: State, **call: Any) -> tuple[asyncckpt.LoadReport, list[str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with asyncckpt.Checkpointer(path, every=1, options=FAST, **state) as ckpt:
            first = ckpt.restore(**call)
            ckpt.step(first)
            assert ckpt.report is not None
            return ckpt.report, [str(each.message) for each in found if "stays as it is" in str(each.message)]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def moments(state: State) -> list[float | None]:
    had = state["o"].state
    return [
        had[each]["momentum_buffer"].flatten()[0].item() if each in had and each.numel() else None
        for each in parameters_of(state["o"])
    ]


class WithModule(nn.Module):
    """A child is called as what wraps a module in DDP calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.module = layer()


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(0, 5))
        self.weight = nn.Parameter(torch.ones(2))


def of_two(prefix: str) -> State:
    a, b = layer(), layer()
    return {"a": a, "b": b, "o": sgd([*a.named_parameters(), *b.named_parameters(prefix)])}


def in_groups() -> State:
    a, b = layer(), layer()
    groups = [{"params": list(each.named_parameters())} for each in (a, b)]
    return {"a": a, "b": b, "o": sgd(groups)}


def of(module: nn.Module, *, named: bool = True) -> State:
    return {"m": module, "o": sgd(module.named_parameters() if named else module.parameters())}


def of_a_part(names: str, *, named: bool = True) -> State:
    """The optimizer names parameters as the part of the module does."""
    net = layers(names)
    return {"m": nn.ModuleDict({"net": net}), "o": sgd(net.named_parameters() if named else net.parameters())}


def compiled(names: str) -> State:
    net = nn.Sequential()
    for name in names:
        net.add_module(name, layer())
    return of(torch.compile(net))  # type: ignore[arg-type]


def of_the_last(count: int) -> State:
    """A slice numbers its modules anew."""
    net = nn.Sequential(*(layer() for _ in range(4)))
    return {"m": net, "o": sgd(net[-count:].named_parameters())}


def of_a_larger_model(beside: str) -> State:
    """The optimizer names parameters as the model around the one that is saved, and so is what is beside it."""
    outer = nn.ModuleDict({"model": layers("ab")})
    copies = {name: each.detach().clone() for name, each in outer.named_parameters()}
    shadow: dict[str, Any] = {"dict": copies, "module": layers("ab"), "numbers": list(copies.values())}
    names = map(str, range(2)) if beside == "numbers" else (name for name, _ in outer.named_parameters())
    return {"m": outer["model"], "ema": shadow[beside], "o": sgd(list(zip(names, outer.parameters(), strict=True)))}


def not_saved() -> State:
    a, b = layer(), layer()
    return {"o": sgd([{"params": list(a.named_parameters())}, {"params": list(b.named_parameters()), "lr": 0.5}])}


UNCHANGED: dict[str, tuple[Callable[[], State], Callable[[], State]]] = {
    "one name twice": (in_groups, in_groups),
    "a name of another module": (lambda: of_two("dec"), lambda: of_two("dec")),
    "a child called module": (lambda: of(WithModule()), lambda: of(WithModule())),
    "parameters without elements": (lambda: of(WithEmpty()), lambda: of(WithEmpty())),
    "unnamed now": (lambda: of_a_part("ab"), lambda: of_a_part("ab", named=False)),
    "named now": (lambda: of_a_part("ab", named=False), lambda: of_a_part("ab")),
    **{f"the last {count}": (lambda count=count: of_the_last(count),) * 2 for count in (1, 2, 3)},  # type: ignore[misc]
    **{
        f"beside a {each}": (lambda each=each: of_a_larger_model(each),) * 2  # type: ignore[misc]
        for each in ("dict", "module", "numbers")
    },
    "one name twice, not saved": (not_saved, not_saved),
}
CALLS: dict[str, State] = {
    "all must match": {},
    "not all must match": {"strict": False},
    "a filter": {"filter_func": lambda info: info},
    "a rename of something else": {"rename": {"other": "x"}},
    "a size of something else": {"resize": ["x"]},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", UNCHANGED)
def test_an_unchanged_model_gets_all_moments(tmp_path: Path, case: str, call: str) -> None:
    was, now = (make() for make in UNCHANGED[case])
    save(tmp_path, {**was, "x" if call != "a rename of something else" else "other": torch.ones(2)})
    report, told = restore(tmp_path, {**now, "x": torch.zeros(2)}, **CALLS[call])
    assert moments(now) == moments(was)
    assert (report.missing, told) == ((), [])


# What is made, saved, restored how, and its moments then; None: it stays as it is.
CHANGED: dict[str, tuple[Callable[[], State], Callable[[], State], State, list[float | None] | None]] = {
    "other order": (lambda: of(layers("abc")), lambda: of(layers("cab")), {}, [3, 1, 2]),
    "one gone, one new": (lambda: of(layers("abc")), lambda: of(layers("adc")), {}, [1, None, 3]),
    "of a part": (lambda: of_a_part("abc"), lambda: of_a_part("cxa"), {}, [3, None, 1]),
    "unnamed now": (lambda: of_a_part("ab"), lambda: of_a_part("ba", named=False), {}, [2, 1]),
    "renamed": (lambda: of(layers("ab")), lambda: of(layers("xb")), {"rename": {"m.a": "m.x"}}, [1, 2]),
    "renamed, to the end": (lambda: of(layers("ab")), lambda: of(layers("bx")), {"rename": {"m.a": "m.x"}}, [2, 1]),
    "renamed, of a part": (
        lambda: of_a_part("ab"), lambda: of_a_part("yxb"), {"rename": {"m.net.a": "m.net.x"}}, [None, 1, 2]
    ),
    "renamed, compiled": (lambda: compiled("xz"), lambda: compiled("yzw"), {"rename": {"m.x": "m.y"}}, [1, 2, None]),
    "left out by a filter": (
        lambda: of(layers("ab")),
        lambda: of(layers("ab")),
        {"filter_func": lambda info: {name: info[name] for name in info if name != "m.a.weight"}},
        [None, 2],
    ),
    "without names": (
        lambda: of(layers("ab"), named=False), lambda: of(layers("bc"), named=False), {}, None
    ),
    "without names, one more": (
        lambda: of(layers("ab"), named=False), lambda: of(layers("abc"), named=False), {}, None
    ),
    "one name twice": (
        in_groups, lambda: {**(it := in_groups()), "c": (c := layer()), "o": sgd([
            {"params": [*it["b"].named_parameters()]}, {"params": [*c.named_parameters()]}
        ])}, {}, None
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_moments_go_to_the_parameters_that_had_them(tmp_path: Path, case: str) -> None:
    make, change, call, wanted = CHANGED[case]
    save(tmp_path, make())
    for _ in range(2):  # The second time from what was saved under the new names.
        now = change()
        report, told = restore(tmp_path, now, **{"strict": False, **call})
        if wanted is None:
            assert moments(now) == [None] * len(moments(now))
            assert len(told) == 1
            assert "o" in report.missing
            return
        assert moments(now) == wanted
        assert told == []
        wanted = [None if each is None else each for each in wanted]


def test_a_copy_of_the_module_is_no_reason_to_give_up(tmp_path: Path) -> None:
    """As an average of the weights, which has the same names."""

    def make(names: str) -> State:
        return {"average": layers(names), **of(layers(names))}

    save(tmp_path, make("ab"))
    now = make("bx")
    restore(tmp_path, now, strict=False, rename={"m.a": "m.x", "average.a": "average.x"})
    assert moments(now) == [2, 1]


def test_a_part_of_a_module_with_a_child_called_module(tmp_path: Path) -> None:
    def make(groups: int) -> State:
        m = WithModule()
        named = [("weight", m.weight)] if groups == 1 else [("module.weight", m.module.weight), ("weight", m.weight)]
        return {"m": m, "o": sgd(named)}

    save(tmp_path, make(1))
    now = make(2)
    restore(tmp_path, now, strict=False)
    assert moments(now) == [None, 1]


def test_one_parameter_outside_of_modules_is_no_reason_to_guess(tmp_path: Path) -> None:
    m, x = layers("ab"), nn.Parameter(torch.zeros(2))
    save(tmp_path, {"m": m, "d": {"x": x.data}, "o": sgd([*m.named_parameters(), ("x", x)])})
    m, x = layers("ba"), nn.Parameter(torch.zeros(2))
    now = {"m": m, "d": {"x": x.data}, "o": sgd([*m.parameters(), x])}
    _, told = restore(tmp_path, now, strict=False)
    assert (moments(now), len(told)) == ([None] * 3, 1)


def test_a_rename_of_one_module_leaves_the_optimizer_of_another_one_alone(tmp_path: Path) -> None:
    def make(name: str) -> State:
        a, b = layers(name), layers("xy")
        return {"a": a, "b": b, "o": sgd(b.named_parameters())}

    save(tmp_path, make("x"))
    for strict in (True, False):
        now = make("y")
        restore(tmp_path, now, strict=strict, rename={"a.x": "a.y"})
        assert moments(now) == [1, 2]
        assert now["o"].param_groups[0]["param_names"] == ["x.weight", "y.weight"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("rename", [{"m.a": "m.b", "m.b": "m.a"}, {"m.a": "m.b", "m.b": "m.c"}])
def test_names_that_would_change_again_at_the_next_start_are_refused(
    tmp_path: Path, rename: dict[str, str], strict: bool
) -> None:
    save(tmp_path, of(layers("ab")))
    with pytest.raises(UsageError, match="rename gives names that it takes away"):
        restore(tmp_path, of(layers("abc")), strict=strict, rename=rename)


def test_a_name_that_is_given_again_is_not_renamed_again(tmp_path: Path) -> None:
    def tables(*names: str) -> State:
        return {name: asyncckpt.HashTable(name, 2) for name in names}

    was = tables("item")
    was["item"].insert(torch.arange(2), torch.ones(2, 2))
    with asyncckpt.Checkpointer(tmp_path, every=1, options=FAST, **was) as ckpt:
        ckpt.step(0)
    for _ in range(2):
        now = tables("article", "item")
        restore(tmp_path, now, strict=False, rename={"item": "article"})
        assert (len(now["article"]), len(now["item"])) == (2, 0)


# -- tables ------------------------------------------------------------------------------------------------------------


def bags(*names: str) -> nn.ModuleDict:
    slots = optim.SparseAdam.optimizer_slots()
    tables = [asyncckpt.HashTable(name, 2, optimizer_slots=slots) for name in names]
    return nn.ModuleDict({table.name: asyncckpt.nn.HashEmbeddingBag(table) for table in tables})


def trained(state: State, steps_count: int = 5) -> State:
    for _ in range(steps_count):
        sum(bag(torch.arange(4).view(2, 2)).square().sum() for bag in state["bags"].values()).backward()  # type: ignore[union-attr]
        for value in state.values():
            if isinstance(value, torch.optim.Optimizer):
                value.step()
    return state


def save_tables(path: Path, state: State) -> None:
    with asyncckpt.Checkpointer(path, every=1, options=FAST, **trained(state)) as ckpt:
        ckpt.step(0)


def steps(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    state = optimizer.state_dict()
    names = [name for group in state["param_groups"] for name in group["tables"]]
    return {name: state["state"].get(number, {}).get("step", 0) for number, name in enumerate(names)}


FILTERS: dict[str, Callable[[Any], Any]] = {
    "table": lambda info: {name: sources for name, sources in info.items() if name != "item"},
    "slots": lambda info: {
        name: {"item": ["id", "embedding"]} if name == "item" else sources for name, sources in info.items()
    },
}


@pytest.mark.parametrize("what", FILTERS)
def test_rows_that_a_filter_leaves_out_count_no_steps(tmp_path: Path, what: str) -> None:
    save_tables(tmp_path, {"bags": (was := bags("user", "item")), "o": optim.SparseAdam(was)})
    now = {"bags": (made := bags("user", "item")), "o": optim.SparseAdam(made)}
    restore(tmp_path, now, strict=False, filter_func=FILTERS[what])
    assert steps(now["o"]) == {"user": 5, "item": 0}


def test_a_table_that_moves_to_another_optimizer_keeps_its_steps(tmp_path: Path) -> None:
    was = bags("user", "item", "ad")
    first, second = optim.SparseAdam([was["user"], was["item"]]), optim.SparseAdam([was["ad"]])
    save_tables(tmp_path, {"bags": was, "first": first, "second": second})
    now = bags("user", "item", "ad")
    first, second = optim.SparseAdam([now["user"]]), optim.SparseAdam([now["ad"], now["item"]])
    restore(tmp_path, {"bags": now, "first": first, "second": second}, strict=False)
    assert (steps(first), steps(second)) == ({"user": 5}, {"ad": 5, "item": 5})


def test_a_table_with_a_key_that_is_not_its_name(tmp_path: Path) -> None:
    def make(rowwise: bool) -> tuple[Any, Any]:
        slots = optim.SparseAdagrad.optimizer_slots(rowwise=rowwise)
        table = asyncckpt.HashTable("inner", 2, optimizer_slots=slots)
        bag = asyncckpt.nn.HashEmbeddingBag(table)
        return table, optim.SparseAdagrad(trained({"bags": {"x": bag}}, 0)["bags"]["x"])

    table, optimizer = make(rowwise=False)
    table.insert(torch.arange(2), torch.ones(2, 2), sum=torch.ones(2, 2))
    optimizer.state[optimizer.parameters()[0]]["step"] = 5
    with asyncckpt.Saver(path=tmp_path, hashtables={"outer": table}, tensors={"o": optimizer}) as saver:
        saver.save(0)
    for rowwise, wanted in ((True, 0), (False, 5)):
        table, optimizer = make(rowwise)
        asyncckpt.Loader(tmp_path, hashtables={"outer": table}, tensors={"o": optimizer}, strict=False).load()
        assert steps(optimizer) == {"inner": wanted}


# -- groups and schedules ----------------------------------------------------------------------------------------------


def test_a_group_that_was_divided_keeps_its_own_options(tmp_path: Path) -> None:
    m = nn.Linear(2, 2)
    was = torch.optim.AdamW(m.named_parameters(), lr=0.5, weight_decay=0.1)
    save(tmp_path, {"m": m, "o": was})
    m = nn.Linear(2, 2)
    named = list(m.named_parameters())
    groups = [{"params": named[:1]}, {"params": named[1:], "weight_decay": 0.0}]
    now = torch.optim.AdamW(groups, lr=0.25, weight_decay=0.1)
    restore(tmp_path, {"m": m, "o": now}, strict=False)
    assert [(group["lr"], group["weight_decay"]) for group in now.param_groups] == [(0.25, 0.1), (0.25, 0.0)]
    assert [int(now.state[each]["step"]) for each in m.parameters()] == [1, 1]


def sequence(it: Any) -> Any:
    inner = [lr_scheduler.LinearLR(it, 0.5, 1, 3), lr_scheduler.CosineAnnealingLR(it, 10)]
    return lr_scheduler.SequentialLR(it, inner, [3])


@pytest.mark.parametrize("schedule", [sequence, lambda it: lr_scheduler.CosineAnnealingLR(it, 10)])
def test_a_schedule_of_other_groups_stays_as_it_is_and_goes_on(tmp_path: Path, schedule: Any) -> None:
    m = layers("ab")
    was = torch.optim.SGD(m.named_parameters(), lr=0.1, momentum=0.9)
    save(tmp_path, {"m": m, "o": was, "schedule": schedule(was)})
    m = layers("ab")
    named = list(m.named_parameters())
    now = torch.optim.SGD([{"params": named[:1]}, {"params": named[1:]}], lr=0.1, momentum=0.9)
    going = schedule(now)
    report, _ = restore(tmp_path, {"m": m, "o": now, "schedule": going}, strict=False)
    assert "schedule" in report.missing
    for _ in range(6):
        now.step()
        going.step()


def test_a_schedule_of_an_optimizer_that_stays_as_it_is_stays_too(tmp_path: Path) -> None:
    m = layer()
    was = torch.optim.AdamW(m.named_parameters(), lr=0.1)
    schedule = lr_scheduler.CosineAnnealingLR(was, 10)
    for _ in range(8):
        was.step()
        schedule.step()
    save(tmp_path, {"schedule": schedule, "m": m, "o": was})
    now = torch.optim.SGD(m.named_parameters(), lr=0.1)
    schedule = lr_scheduler.CosineAnnealingLR(now, 10)
    report, _ = restore(tmp_path, {"schedule": schedule, "m": m, "o": now}, strict=False)
    assert {"o", "schedule"} <= set(report.missing)
    assert (now.param_groups[0]["lr"], schedule.get_last_lr(), schedule.last_epoch) == (0.1, [0.1], 0)


# -- states of other forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop, torch.optim.Adagrad])
def test_a_wider_layer_trains_on_whatever_its_optimizer_keeps(tmp_path: Path, kind: Any) -> None:
    def step(module: nn.Module, optimizer: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(torch.ones(3, module.in_features)).square().sum()  # type: ignore[arg-type]
            loss.backward()
            return loss

        optimizer.step(closure)

    m = nn.Linear(4, 4)
    o = kind(m.named_parameters())
    step(m, o)
    with asyncckpt.Checkpointer(tmp_path, every=1, options=FAST, m=m, o=o) as ckpt:
        ckpt.step(0)
    m = nn.Linear(4, 6)
    o = kind(m.named_parameters())
    restore(tmp_path, {"m": m, "o": o}, strict=False, resize=["m"])
    if kind is torch.optim.Rprop:
        assert (o.state[m.weight]["step_size"][4:] == o.param_groups[0]["lr"]).all()
    step(m, o)


def test_an_optimizer_whose_state_a_hook_makes_is_loaded_as_ever(tmp_path: Path) -> None:
    save(tmp_path, of(layers("ab")))
    now = of(layers("ab"))
    now["o"].register_state_dict_post_hook(lambda _, state: {"wrapped": state})
    with asyncckpt.Checkpointer(tmp_path, every=1, options=FAST, **now) as ckpt:
        ckpt.restore(strict=False)
    assert moments(now) == [1, 2]


@pytest.mark.parametrize("call", [{"resize": 5}, {"resize": [1]}, {"rename": []}, {"rename": 0}, {"strict": "no"}])
def test_arguments_of_another_type_are_refused(tmp_path: Path, call: State) -> None:
    save(tmp_path, of(layers("ab")))
    (name,) = call
    with pytest.raises(UsageError, match=f"{name} must be"):
        restore(tmp_path, of(layers("ab")), **call)
    with pytest.raises(UsageError, match=f"{name} must be"):
        asyncckpt.Loader(tmp_path, tensors=of(layers("ab")), **call)


def test_a_load_of_nothing_where_warnings_are_errors_fills_nothing_and_stops_no_save(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"d": {"x": 1}}, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with asyncckpt.Checkpointer(tmp_path, every=1, options=FAST, e={"y": torch.zeros(1)}) as ckpt:
            with pytest.raises(RuntimeWarning, match="nothing was loaded"):
                ckpt.restore(strict=False)
            ckpt.step(1)


def test_moments_of_another_order_are_refused_where_all_must_match(tmp_path: Path) -> None:
    save(tmp_path, of(layers("ab")))
    with pytest.raises(IncompatibleError, match=r"'o' has its parameters in another order: number 0 is 'b.weight'"):
        restore(tmp_path, of(layers("ba")))
    renamed = of(layers("bx"))
    restore(tmp_path, renamed, rename={"m.a": "m.x"})
    assert moments(renamed) == [2.0, 1.0], "a rename may change the order"
