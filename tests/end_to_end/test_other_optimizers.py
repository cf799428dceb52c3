"""An optimizer of another class or form: refused, or left as it is, or its state begins anew; never some of it.

The oracle is an optimizer that nothing was loaded into.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt import optim
from asyncckpt.errors import IncompatibleError
from asyncckpt.model.object_classes import TABLE_OPTIMIZERS
from asyncckpt.trainer_state import StepCounter, TrainerState
from tests.end_to_end.test_changed_optimizers import State, layer, layers, restore, save, steps


class OwnAdam(torch.optim.Adam):
    """A class of a program."""


ADAMS = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "own": OwnAdam, "NAdam": torch.optim.NAdam}


def of(kind: str) -> State:
    net = layers("ab")
    return {"net": net, "o": ADAMS[kind](net.named_parameters(), lr=0.0, weight_decay=0.25)}


@pytest.mark.parametrize(
    ("was", "now"), [("Adam", "AdamW"), ("AdamW", "Adam"), ("own", "AdamW"), ("AdamW", "own"), ("NAdam", "Adam")]
)
def test_another_optimizer_of_torch_stays_as_it_is(tmp_path: Path, was: str, now: str) -> None:
    """AdamW took the options of Adam, and was Adam from then on: the one is derived from the other."""
    save(tmp_path, of(was))
    state = of(now)
    before = str(state["o"].state_dict())
    with pytest.raises(IncompatibleError, match=rf"is of class '{ADAMS[now].__name__}', the checkpoint has the state"):
        restore(tmp_path, state)
    assert str(state["o"].state_dict()) == before
    with (
        asyncckpt.Checkpointer(tmp_path, every=9, **state) as ckpt,
        pytest.warns(RuntimeWarning, match="it stays as it"),
    ):
        ckpt.restore(strict=False)
    assert str(state["o"].state_dict()) == before
    assert ckpt.report is not None
    assert list(ckpt.report.missing) == ["o"]


@pytest.mark.parametrize(("was", "now"), [("Adam", "own"), ("own", "Adam"), ("AdamW", "AdamW")])
def test_a_class_derived_from_the_same_is_the_same(tmp_path: Path, was: str, now: str) -> None:
    save(tmp_path, of(was))
    state = of(now)
    report, left = restore(tmp_path, state)
    assert (list(report.missing), left) == ([], [])
    assert len(state["o"].state) == 2


def table_of(*, rowwise: bool) -> State:
    table = asyncckpt.HashTable("t", 4, optimizer_slots=optim.SparseAdam.optimizer_slots(rowwise=rowwise))
    model = asyncckpt.nn.HashEmbeddingBag(table)
    return {"model": model, "o": optim.SparseAdam(model, lr=0.01)}


@pytest.mark.parametrize("was_rowwise", [False, True])
def test_of_slots_that_belong_together_none_is_loaded_where_one_is_not(tmp_path: Path, was_rowwise: bool) -> None:
    """The first moments came back without the second ones, and its updates were thirty times too large."""
    before, now = table_of(rowwise=was_rowwise), table_of(rowwise=not was_rowwise)
    for number in range(20):
        before["model"](torch.arange(40).view(10, 4) + number).square().mean().backward()
        before["o"].step()
    with asyncckpt.Checkpointer(tmp_path, every=1, **before) as ckpt:
        ckpt.step(0)
    with asyncckpt.Checkpointer(tmp_path, every=9, **now) as ckpt:
        with pytest.raises(IncompatibleError, match=r"column 'exp_avg_sq' of table 't' has rows .*strict=False"):
            ckpt.restore()
        ckpt.restore(strict=False)
        assert ckpt.report is not None
        assert sorted(ckpt.report.missing) == ["t@exp_avg", "t@exp_avg_sq"]
    rows = now["model"].table.read(torch.arange(59))
    assert torch.equal(rows["embedding"], before["model"].table.read(torch.arange(59))["embedding"])
    assert not rows["exp_avg"].any()
    assert not rows["exp_avg_sq"].any()
    assert steps(now["o"]) == {"t": 0}


# -- parts of a TrainerState -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_a_filter_that_leaves_out_an_optimizer_in_a_trainer_state_leaves_out_nothing_else(
    tmp_path: Path, strict: bool
) -> None:
    """The step counter beside it was not loaded, without a word."""

    def made() -> State:
        model = layers("ab")
        optimizer = torch.optim.Adam(model.named_parameters(), lr=0.5)
        return {"m": model, "t": TrainerState(StepCounter(), o=optimizer), "o": optimizer}

    was = made()
    was["t"].step.advance()
    with_o = was.pop("o")
    for parameter in was["m"].parameters():
        parameter.grad = torch.ones_like(parameter)
    with_o.step()
    with asyncckpt.Checkpointer(tmp_path, every=1, options={"durability": "none"}, **was) as ckpt:
        ckpt.step(0)
    now = made()
    optimizer = now.pop("o")
    restore(
        tmp_path,
        now,
        strict=strict,
        filter_func=lambda info: {name: info[name] for name in info if not name.startswith("t.o.")},
    )
    assert int(now["t"].step) == 1
    assert len(optimizer.state) == 0
    assert torch.equal(now["m"]["a"].weight, was["m"]["a"].weight)


@pytest.mark.parametrize("holder", ["trainer", "a plain dict"])
@pytest.mark.parametrize(
    ("was", "now"), [("Adamax", "Adam"), ("Adamax", "RAdam"), ("RAdam", "Adamax"), ("Adam", "NAdam")]
)
def test_a_state_without_what_an_optimizer_keeps_is_refused(tmp_path: Path, holder: str, was: str, now: str) -> None:
    """It was loaded, and the next step raised KeyError."""

    def made(kind: str, *, as_dict: bool = False) -> State:
        model = layers("ab")
        optimizer = getattr(torch.optim, kind)(model.named_parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if as_dict:
            optimizer.step()
        held = TrainerState(o=optimizer) if holder == "trainer" else optimizer.state_dict() if as_dict else optimizer
        return {"m": model, "t": held}

    with asyncckpt.Checkpointer(tmp_path, every=1, options={"durability": "none"}, **made(was, as_dict=True)) as ckpt:
        ckpt.step(0)
    state = made(now)
    before = state["m"]["a"].weight.clone()
    with pytest.raises(IncompatibleError, match=r"nothing was changed: '[to.]+' (keeps|is of class)"):
        restore(tmp_path, state)
    assert torch.equal(state["m"]["a"].weight, before)


def test_a_module_of_another_dtype_in_a_trainer_state_is_refused(tmp_path: Path) -> None:
    was = {"t": TrainerState(average=layer())}
    with asyncckpt.Checkpointer(tmp_path, every=1, options={"durability": "none"}, **was) as ckpt:
        ckpt.step(0)
    with pytest.raises(IncompatibleError, match=r"nothing was changed: 't.average.weight' has dtype torch.bfl"):
        restore(tmp_path, {"t": TrainerState(average=layer().bfloat16())})


class KeepsGradients(torch.optim.SGD):
    """Keeps tensors of each parameter in a list, or in a dict."""

    kind: type = list

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                entries = self.state[parameter]
                earlier = [*entries["kept"].values()] if self.kind is dict and entries else entries.get("kept", [])
                kept = [*earlier, parameter.grad.clone()]
                entries["kept"] = {str(at): each for at, each in enumerate(kept)} if self.kind is dict else kept
                parameter.data.sub_(sum(kept))


@pytest.mark.parametrize("kind", [list, dict])
def test_a_resize_begins_anew_where_a_state_has_containers_of_tensors(tmp_path: Path, kind: type) -> None:
    """The tensors in them kept their old shape, and the next step raised."""

    def made(size: int) -> State:
        model = nn.ModuleDict({"a": nn.Linear(2, size, bias=False)})
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = KeepsGradients(model.named_parameters(), lr=1.0)
        optimizer.kind = kind
        return {"m": model, "o": optimizer}

    was, now = made(2), made(3)
    was["o"].step()
    with asyncckpt.Checkpointer(tmp_path, every=1, options={"durability": "none"}, **was) as ckpt:
        ckpt.step(0)
    report, _ = restore(tmp_path, now, resize=["m"])
    assert list(report.missing) == ["o of m.a.weight"]
    now["o"].step()


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (torch.optim.Adadelta, torch.optim.SGD),
        (torch.optim.Adagrad, torch.optim.RMSprop),
        (torch.optim.SGD, torch.optim.Adagrad),
        (torch.optim.RMSprop, torch.optim.Rprop),
        (torch.optim.SGD, torch.optim.Adam),
    ],
)
@pytest.mark.parametrize("has_changed", [False, True])
def test_one_of_another_class_in_a_trainer_state_stays_also_where_the_model_has_changed(
    tmp_path: Path, was: Any, now: Any, has_changed: bool
) -> None:
    """Its groups had the options of the new one by then, so that nothing told them apart."""

    def made(kind: Any, layers: int, lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(layers)])
        optimizer = kind(model.named_parameters(), lr=lr)
        return model, optimizer, {"model": model, "trainer": TrainerState(opt=optimizer)}

    model, optimizer, state = made(was, 1, 0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with asyncckpt.Checkpointer(tmp_path, every=1, **state) as ckpt:
        ckpt.save_now(1)
    model, optimizer, state = made(now, 2 if has_changed else 1, 0.5)
    with asyncckpt.Checkpointer(tmp_path, every=99, **state) as ckpt:
        with pytest.warns(RuntimeWarning, match="stays as it is"):
            ckpt.restore(strict=False)
        assert ckpt.report is not None
        assert "trainer.opt" in ckpt.report.missing
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not any(optimizer.state.values()) or now is torch.optim.Adagrad
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(
    ("tables", "call"),
    [
        (("u", "i"), {}),
        (("i", "u"), {"strict": False}),
        (("u", "i", "new"), {"strict": False}),
        (("u", "x"), {"rename": {"i": "x"}}),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_an_optimizer_of_tables_in_a_trainer_state_is_fitted_as_one_alone(
    tmp_path: Path, tables: tuple[str, ...], call: dict[str, Any], inside: bool
) -> None:
    """What it would take was checked before it was fitted, so that all of the TrainerState stayed as it was."""

    def made(names: tuple[str, ...]) -> tuple[nn.ModuleDict, Any, torch.optim.Optimizer, dict[str, Any]]:
        slots = optim.SparseAdam.optimizer_slots()
        bags = nn.ModuleDict(
            {name: asyncckpt.nn.HashEmbeddingBag(asyncckpt.HashTable(name, 2, optimizer_slots=slots)) for name in names}
        )
        sparse, linear = optim.SparseAdam(bags, lr=0.1), nn.Linear(2, 2)
        dense = torch.optim.Adam(linear.named_parameters(), lr=0.1)
        parts = {"trainer": TrainerState(sparse=sparse, dense=dense)} if inside else {"s": sparse, "d": dense}
        return bags, sparse, dense, {"bags": bags, "linear": linear, **parts}

    bags, sparse, dense, state = made(("u", "i"))
    for _ in range(5):
        (sum(bag(torch.arange(8).view(4, 2)).sum() for bag in bags.values())).backward()
        state["linear"](torch.ones(1, 2)).sum().backward()
        sparse.step()
        dense.step()
    with asyncckpt.Checkpointer(tmp_path, every=1, **state) as ckpt:
        ckpt.save_now(1)
    bags, sparse, dense, state = made(tables)
    with asyncckpt.Checkpointer(tmp_path, every=99, **state) as ckpt:
        ckpt.restore(**call)
    steps_of = {p.table.name: sparse.state.get(p, {}).get("step", 0) for p in sparse.param_groups[0]["params"]}
    assert steps_of == {name: 0 if name == "new" else 5 for name in tables}
    assert len(dense.state) == 2


def kept(path: Path, state: State) -> None:
    with asyncckpt.Checkpointer(path, every=9, options={"durability": "none"}, **state) as ckpt:
        ckpt.save_now(0)


ADAM_LIKE = ("Adam", "AdamW", "RAdam", "NAdam")


@pytest.mark.parametrize(("was", "now"), list(itertools.permutations(ADAM_LIKE, 2)))
@pytest.mark.parametrize("strict", [True, False])
def test_adams_in_a_trainer_state_are_told_apart(tmp_path: Path, was: str, now: str, strict: bool) -> None:
    """They have the same keys, so the one went on as the other, with moments of other meaning."""

    def made(kind: str, lr: float) -> tuple[torch.optim.Optimizer, State]:
        model = layers("a")
        optimizer = getattr(torch.optim, kind)(model.named_parameters(), lr=lr)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return optimizer, {"m": model, "t": TrainerState(StepCounter(3 if lr == 0.25 else 0), o=optimizer)}

    optimizer, state = made(was, 0.25)
    optimizer.step()
    kept(tmp_path, state)
    optimizer, state = made(now, 0.5)
    if strict:
        with pytest.raises(
            IncompatibleError, match=rf"'t.o' is of class '{now}', the checkpoint has the state of '{was}'"
        ):
            restore(tmp_path, state)
        assert int(state["t"].step) == 0
    else:
        report, _ = restore(tmp_path, state, strict=False)
        assert list(report.missing) == ["t.o"]
        assert int(state["t"].step) == 3
    assert (optimizer.param_groups[0]["lr"], len(optimizer.state)) == (0.5, 0)


def test_schedules_in_a_trainer_state_are_told_apart(tmp_path: Path) -> None:
    """LambdaLR and MultiplicativeLR have the same state."""

    def made(kind: Any) -> State:
        optimizer = torch.optim.SGD(layers("a").parameters(), lr=1.0)
        return {"t": TrainerState(o=optimizer, s=kind(optimizer, lambda _: 0.5))}

    kept(tmp_path, made(torch.optim.lr_scheduler.LambdaLR))
    state = made(torch.optim.lr_scheduler.MultiplicativeLR)
    with pytest.raises(IncompatibleError, match=r"'t.s' is of class 'MultiplicativeLR'"):
        restore(tmp_path, state)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("was", "now"), list(itertools.permutations([optim.SparseAdam, optim.SparseAdamW])))
def test_adamw_of_tables_is_not_adam(tmp_path: Path, was: Any, now: Any, inside: bool) -> None:
    """It took the weight decay of the other one, which means something else there."""

    def made(kind: Any, decay: float) -> tuple[Any, State]:
        table = asyncckpt.HashTable("u", 2, optimizer_slots=kind.optimizer_slots())
        bag = asyncckpt.nn.HashEmbeddingBag(table)
        own = kind(bag, lr=0.1, weight_decay=decay)
        return own, {"bag": bag, "o": TrainerState(s=own) if inside else own}

    own, state = made(was, 0.25)
    for _ in range(2):
        state["bag"](torch.arange(4).view(2, 2)).sum().backward()
        own.step()
    kept(tmp_path, state)
    own, state = made(now, 0.5)
    with pytest.raises(IncompatibleError, match=rf"is of class '{now.__name__}', the checkpoint has the state of"):
        restore(tmp_path, state)
    restore(tmp_path, state, strict=False)
    assert own.param_groups[0]["weight_decay"] == 0.5
    assert [own.state[each]["step"] for each in own.parameters()] == [2]  # With the moments of both.


def test_a_class_of_a_program_derived_from_that_of_tables_is_the_same(tmp_path: Path) -> None:
    class Own(optim.SparseAdam):
        pass

    def made(kind: Any, lr: float) -> tuple[Any, State]:
        bag = asyncckpt.nn.HashEmbeddingBag(asyncckpt.HashTable("u", 2, optimizer_slots=kind.optimizer_slots()))
        own = kind(bag, lr=lr)
        return own, {"bag": bag, "o": own}

    kept(tmp_path, made(Own, 0.25)[1])
    own, state = made(optim.SparseAdam, 0.5)
    restore(tmp_path, state)
    assert own.param_groups[0]["lr"] == 0.25


def test_all_optimizers_of_tables_are_known_by_name() -> None:
    assert set(optim.__all__) == TABLE_OPTIMIZERS
