"""What is in a TrainerState is saved and loaded as if it stood alone: by its class, its dtypes, its own names.

The oracle is the same object that stands alone, or the training that was not interrupted.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.errors import IncompatibleError, UsageError
from asyncckpt.trainer_state import StepCounter, TrainerState
from tests.end_to_end.test_changed_optimizers import State, layers, restore
from tests.end_to_end.test_other_optimizers import kept


class Settings(dict[str, Any]):
    """A part that is a dict, and says itself what its state is."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": dict(self)}

    def load_state_dict(self, state: Any) -> None:
        self.update(state["kept"])


def stepped(kind: Any, *, inside: int, dtype: torch.dtype = torch.float32, part: str = "o") -> tuple[Any, State]:
    """Make a model and an optimizer that has stepped; inside: of how many TrainerStates."""
    model = layers("ab").to(dtype)
    optimizer = held = kind(model.named_parameters(), lr=0.25)
    step(model, optimizer)
    for _ in range(inside):  # In two beside a dict, which is an object like the others.
        more = {} if inside == 1 else {"settings": Settings(rate=0.25)}
        held = TrainerState(StepCounter(3), **{part: held}, **more)
    return optimizer, {"m": model, "t": held}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 1) -> list[float]:
    for _ in range(count):
        for number, parameter in enumerate(model.parameters(), 1):
            parameter.grad = parameter.detach() + number
        optimizer.step()
    return [float(parameter.float().sum()) for parameter in model.parameters()]


class FloatMasters(torch.optim.Optimizer):
    """Keeps moments and weights in float32, whatever the parameters are."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                if not entry:
                    entry |= {"m": torch.zeros(parameter.shape), "master": parameter.detach().float().clone()}
                entry["m"].mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
                entry["master"].add_(entry["m"], alpha=-group["lr"])
                parameter.copy_(entry["master"])


@pytest.mark.parametrize("inside", [0, 1, 2])
@pytest.mark.parametrize("kind", [FloatMasters, torch.optim.NAdam, torch.optim.Adafactor])
def test_training_goes_on_bit_for_bit(tmp_path: Path, inside: int, kind: Any) -> None:
    """Moments in float32 of parameters in bfloat16 were rounded to these."""
    optimizer, state = stepped(kind, inside=inside, dtype=torch.bfloat16)
    kept(tmp_path, state)
    wanted = step(state["m"], optimizer, 20)
    optimizer, state = stepped(kind, inside=inside, dtype=torch.bfloat16)
    step(state["m"], optimizer, 3)
    restore(tmp_path, state)
    assert step(state["m"], optimizer, 20) == wanted


@pytest.mark.parametrize("inside", [1, 2])
@pytest.mark.parametrize("rename", [{}, {"t": "t"}, {"t.o": "t.new"}])
def test_the_class_is_kept_whatever_the_names(tmp_path: Path, inside: int, rename: dict[str, str]) -> None:
    """A rename of a part lost the class, and one in two TrainerStates raised StopIteration."""
    is_renamed = "t.o" in rename and inside == 1
    rename = {f"t{'.o' * (inside - 1)}{old[1:]}": f"t{'.o' * (inside - 1)}{new[1:]}" for old, new in rename.items()}
    part = "new" if is_renamed else "o"
    if not is_renamed and rename:
        rename = {"m.a": "m.a2"}
    kept(tmp_path, stepped(torch.optim.AdamW, inside=inside)[1])

    def made(kind: Any) -> tuple[Any, State]:
        optimizer, state = stepped(kind, inside=inside, part=part)
        if "m.a" in rename:
            state["m"]["a2"] = state["m"].pop("a")
        return optimizer, state

    optimizer, state = made(torch.optim.Adam)
    before = str(optimizer.state_dict())
    with pytest.raises(IncompatibleError, match=r"is of class 'Adam', the checkpoint has the state of 'AdamW'"):
        restore(tmp_path, state, rename=rename)
    assert str(optimizer.state_dict()) == before
    optimizer, state = made(torch.optim.AdamW)
    optimizer.param_groups[0]["lr"] = 0.5
    restore(tmp_path, state, rename=rename)
    assert optimizer.param_groups[0]["lr"] == 0.25


class Odd:
    """Has attributes that are called like those of a TrainerState."""

    _inner_objects = _objects = ("what", "ever")

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}


class OldTrainerState:
    """As TrainerState once was, with all parts as plain state dicts."""

    def __init__(self, **parts: Any) -> None:
        self._parts = vars(TrainerState(**parts))["_inner_objects"]

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_a_derived_class_with_a_way_of_its_own_is_refused_when_a_saver_is_made(tmp_path: Path, method: str) -> None:
    """Its parts cannot be asked one by one, so they would get the state of something else, or fail when all is filled.

    Another derived class is a TrainerState like any other.
    """
    kind = type("Own", (TrainerState,), {method: lambda self, *state: getattr(super(kind, self), method)(*state)})
    target: State = {"m": nn.Linear(2, 2), "t": kind()}
    calls = (
        partial(asyncckpt.Saver, path=tmp_path, tensors=target),
        partial(asyncckpt.Checkpointer, tmp_path, **target),
        partial(asyncckpt.save, tmp_path, target, 1),
    )
    for call in calls:
        with pytest.raises(UsageError, match=r"Own saves or loads a TrainerState in a way of its own \(give"):
            call()
    assert not any(tmp_path.iterdir())
    kept(tmp_path, {"t": type("Derived", (TrainerState,), {})(StepCounter(4))})
    with pytest.raises(UsageError, match="in a way of its own"):
        restore(tmp_path, target)
    restore(tmp_path, {"t": (trainer := TrainerState())})
    assert int(trainer.step) == 4


def test_objects_with_odd_attributes_are_saved(tmp_path: Path) -> None:
    kept(tmp_path, {"odd": Odd()})
    assert asyncckpt.load(tmp_path) == {"odd": {"x": 1}}


def test_older_checkpoints_are_read(tmp_path: Path) -> None:
    optimizer, state = stepped(torch.optim.Adam, inside=0)
    kept(tmp_path, {"m": state["m"], "t": OldTrainerState(step=StepCounter(7), o=optimizer)})
    wanted = str(optimizer.state_dict())
    optimizer, state = stepped(torch.optim.Adam, inside=0)
    step(state["m"], optimizer)
    trainer = TrainerState(o=optimizer)
    restore(tmp_path, {"m": state["m"], "t": trainer})
    assert (str(optimizer.state_dict()), int(trainer.step)) == (wanted, 7)


def test_parts_come_and_go(tmp_path: Path) -> None:
    def made(**more: Any) -> State:
        return {"t": TrainerState(**more)}

    average = nn.Linear(2, 2)
    kept(tmp_path, made(step=StepCounter(5), gone=nn.Linear(2, 2), average=average))
    new = nn.Linear(2, 2)
    before, state = new.weight.clone(), made(average=nn.Linear(2, 2), new=new)
    with pytest.raises(IncompatibleError, match=r"nothing was changed: only in this state .*'t.new.weight'"):
        restore(tmp_path, state)
    assert int(state["t"].step) == 0
    report, _ = restore(tmp_path, state, strict=False)
    assert {"t.new.bias", "t.new.weight"} <= set(report.missing)
    assert sorted(report.unexpected) == ["t.gone.bias", "t.gone.weight"]
    assert int(state["t"].step) == 5
    assert torch.equal(new.weight, before)
    assert torch.equal(state["t"]._inner_objects["average"].weight, average.weight)


@pytest.mark.parametrize("gone", ["plain", "tensors"])
def test_a_part_that_is_not_here_any_more_is_told(tmp_path: Path, gone: str) -> None:
    """A strict load went on without it, and said nothing."""
    more = StepCounter(9) if gone == "plain" else nn.Linear(2, 2)
    kept(tmp_path, {"t": TrainerState(StepCounter(5), more=more, inner=TrainerState(StepCounter(6), more=more))})
    trainer = TrainerState(inner=TrainerState())
    with pytest.raises(
        IncompatibleError, match=r"only in the checkpoint.*'t.inner.more.*'t.more|'t.more.*'t.inner.more"
    ):
        restore(tmp_path, {"t": trainer})
    assert int(trainer.step) == 0
    restore(tmp_path, {"t": trainer}, strict=False)
    assert (int(trainer.step), int(trainer._inner_objects["inner"].step)) == (5, 6)


def test_a_part_that_is_a_dict_with_a_state_dict_is_asked(tmp_path: Path) -> None:
    kept(tmp_path, {"t": TrainerState(StepCounter(5), settings=Settings(rate=0.25))})
    trainer = TrainerState(settings=(settings := Settings(rate=0.5)))
    restore(tmp_path, {"t": trainer})
    assert (int(trainer.step), settings) == (5, {"rate": 0.25})


@pytest.mark.parametrize("change", ["shape", "dtype"])
@pytest.mark.parametrize("more", [{}, {"settings": Settings(rate=0.25)}])
def test_a_module_beside_a_dict_is_refused_before_anything_is_filled(tmp_path: Path, change: str, more: State) -> None:
    """One part that is a dict made all parts load in a way of their own."""
    kept(tmp_path, {"m": nn.Linear(2, 2), "t": TrainerState(average=nn.Linear(2, 3), **more)})
    average = nn.Linear(2, 4) if change == "shape" else nn.Linear(2, 3).double()
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(IncompatibleError, match=f"nothing was changed: 't.average.weight' has {change}"):
        restore(tmp_path, {"m": model, "t": TrainerState(average=average, **more)}, strict=change == "dtype")
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("stored", [5, torch.zeros(2), OldTrainerState(), Odd()])
def test_something_else_where_a_trainer_state_is_now_is_told(tmp_path: Path, stored: Any) -> None:
    """IndexError, where a value or a tensor was stored at its path."""
    asyncckpt.save(tmp_path, {"x": torch.ones(2), "t": stored}, 1)
    trainer = TrainerState(StepCounter(3), more=StepCounter(2))
    with pytest.raises(IncompatibleError, match=r"nothing was changed: only in this state .*'t.more'"):
        restore(tmp_path, {"x": torch.zeros(2), "t": trainer})
    assert int(trainer.step) == 3


@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.parametrize("part", [StepCounter, lambda count: nn.Linear(2, count)])
def test_a_part_that_only_some_ranks_had_is_not_gone(tmp_path: Path, holder: int, part: Any) -> None:
    """Other ranks may want it, so that it is not told where a load is one of another number of ranks."""
    for rank in range(2):
        trainer = TrainerState(StepCounter(5), **({"log": part(9)} if rank == holder else {}))
        in_turn = asyncckpt.RankOptions(in_turn=True)
        with asyncckpt.Saver(rank, 2, 8, tmp_path, tensors={"t": trainer}, ranks=in_turn) as saver:
            saver.save(1)
    asyncckpt.Loader(tmp_path, tensors={"t": (trainer := TrainerState())}).load()
    assert int(trainer.step) == 5
    with pytest.raises(IncompatibleError, match=r"only in the checkpoint.*'t.rng'"):
        asyncckpt.Loader(tmp_path, tensors={"t": _without(trainer, "rng")}).load()


def _without(trainer: TrainerState, name: str) -> TrainerState:
    trainer._inner_objects.pop(name)
    return trainer


def test_a_part_that_a_filter_loads_into_another_one_is_not_gone(tmp_path: Path) -> None:
    kept(tmp_path, {"t": TrainerState(old=(old := nn.Linear(2, 2)))})
    new = nn.Linear(2, 2)

    def moved(info: Any) -> Any:
        return {name: {name.replace("new", "old"): []} for name in info}

    asyncckpt.Loader(tmp_path, tensors={"t": TrainerState(new=new)}, filter_func=moved).load()
    assert torch.equal(new.weight, old.weight)


@pytest.mark.parametrize("door", ["Checkpointer", "Saver"])
def test_tables_of_a_module_in_it_are_not_left_out(tmp_path: Path, door: str) -> None:
    """They were, without a word."""

    def made() -> tuple[asyncckpt.HashTable, State]:
        module = asyncckpt.nn.HashEmbeddingBag(table := asyncckpt.HashTable("user", 4))
        return table, {"t": TrainerState(inner=TrainerState(model=module))}

    table, state = made()
    table.insert(torch.arange(8), torch.ones(8, 4))
    if door == "Saver":
        with pytest.raises(UsageError, match=r"would not be saved, found t.inner.model.table \(table 'user'\)"):
            asyncckpt.Saver(path=tmp_path, tensors=state)
        return
    kept(tmp_path, state)
    table, state = made()
    restore(tmp_path, state)
    assert len(table) == 8


@pytest.mark.parametrize("strict", [True, False])
def test_a_module_in_it_is_filled_as_one_alone(tmp_path: Path, strict: bool) -> None:
    """A buffer with another number of values failed when all weights were filled."""

    def made(count: int) -> tuple[nn.Module, State]:
        module = nn.Linear(2, 2)
        module.register_buffer("sparse", torch.eye(4)[:count].t().to_sparse_csr())
        return module, {"t": TrainerState(module=module)}

    was, state = made(4)
    kept(tmp_path, state)
    module, state = made(4)
    module.sparse = torch.zeros(4, 4).to_sparse_csr()
    restore(tmp_path, state, strict=strict)
    assert torch.equal(module.sparse.to_dense(), was.sparse.to_dense())
    assert torch.equal(module.weight, was.weight)
