"""What is in a TrainerState is saved and loaded as if it stood alone: by its class, its dtypes, its own names.

The oracle is the same object that stands alone, or the training that was not interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.errors import IncompatibleError
from asyncckpt.trainer_state import StepCounter, TrainerState
from tests.end_to_end.test_changed_optimizers import State, layers, restore
from tests.end_to_end.test_other_optimizers import kept


def stepped(kind: Any, *, inside: int, dtype: torch.dtype = torch.float32, part: str = "o") -> tuple[Any, State]:
    """Make a model and an optimizer that has stepped; inside: of how many TrainerStates."""
    model = layers("ab").to(dtype)
    optimizer = held = kind(model.named_parameters(), lr=0.25)
    step(model, optimizer)
    for _ in range(inside):
        held = TrainerState(StepCounter(3), **{part: held})
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


class OwnTrainerState(TrainerState):
    """Saves and loads in a way of its own: as TrainerState did, with all parts as plain state dicts."""

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._inner_objects.items()}

    def load_state_dict(self, state: Any) -> None:
        self.was_asked = True
        super().load_state_dict(state)


def test_objects_with_odd_attributes_are_saved(tmp_path: Path) -> None:
    kept(tmp_path, {"odd": Odd()})
    assert asyncckpt.load(tmp_path) == {"odd": {"x": 1}}


def test_a_class_that_is_derived_loads_in_its_own_way_and_older_checkpoints_are_read(tmp_path: Path) -> None:
    optimizer, state = stepped(torch.optim.Adam, inside=0)
    kept(tmp_path, {"m": state["m"], "t": OwnTrainerState(StepCounter(7), o=optimizer)})
    wanted = str(optimizer.state_dict())
    for kind in (OwnTrainerState, TrainerState):
        optimizer, state = stepped(torch.optim.Adam, inside=0)
        step(state["m"], optimizer)
        trainer = kind(o=optimizer)
        restore(tmp_path, {"m": state["m"], "t": trainer})
        assert (str(optimizer.state_dict()), int(trainer.step)) == (wanted, 7)
        assert hasattr(trainer, "was_asked") == (kind is OwnTrainerState)


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


class Settings(dict[str, Any]):
    """A part that is a dict, and says itself what its state is."""

    def state_dict(self) -> dict[str, Any]:
        return {"kept": dict(self)}

    def load_state_dict(self, state: Any) -> None:
        self.update(state["kept"])


def test_a_part_that_is_a_dict_with_a_state_dict_is_asked(tmp_path: Path) -> None:
    kept(tmp_path, {"t": TrainerState(StepCounter(5), settings=Settings(rate=0.25))})
    trainer = TrainerState(settings=Settings(rate=0.5))
    restore(tmp_path, {"t": trainer})
    assert (int(trainer.step), trainer._inner_objects["settings"]["rate"]) == (5, 0.25)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("change", ["order", "class", "groups"])
def test_parts_of_a_derived_class_are_checked_before_anything_is_filled(
    tmp_path: Path, change: str, strict: bool
) -> None:
    def made(kind: Any = torch.optim.AdamW, names: str = "ab") -> tuple[Any, State]:
        model = layers("ab")
        parameters = [(f"{name}.weight", model[name].weight) for name in names]
        optimizer = kind(parameters, lr=0.25)
        return optimizer, {"m": model, "t": OwnTrainerState(o=optimizer)}

    optimizer, state = made()
    step(state["m"], optimizer)
    kept(tmp_path, state)
    now: State = {"order": {"names": "ba"}, "class": {"kind": torch.optim.SGD}, "groups": {"names": "a"}}
    optimizer, state = made(**now[change])
    before = state["m"]["a"].weight.clone()
    if strict:
        with pytest.raises(IncompatibleError, match="nothing was changed"):
            restore(tmp_path, state)
        assert torch.equal(state["m"]["a"].weight, before)
    else:
        report, told = restore(tmp_path, state, strict=False)
        assert (list(report.missing), len(told), len(optimizer.state)) == (["t"], 1, 0)


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


# -- optimizers of others ----------------------------------------------------------------------------------------------


class OwnLoad(torch.optim.AdamW):
    """Loads in a way of its own, by the numbers of parameters, as those of bitsandbytes."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("inside", [0, 1])
@pytest.mark.parametrize(
    ("names", "call", "why"),
    [
        ("ba", {}, "has its parameters in another order"),
        ("ba", {"strict": False}, "has its parameters in another order"),
        ("abc", {"strict": False}, r"has groups of \[3\] parameters, the checkpoint \[2\]"),
        ("ac", {"strict": False}, "has a parameter 1 that is not loaded"),
        ("ab", {"strict": False, "resize": ["m"]}, "has a parameter 0 that is of another shape"),
        ("ab", {}, ""),
    ],
)
def test_an_optimizer_that_loads_in_its_own_way_is_taken_as_a_whole_or_not(
    tmp_path: Path, names: str, call: State, why: str, inside: int
) -> None:
    """It got the moments of other parameters, of other shapes, or failed when all was filled."""

    def made(names: str, size: int = 2) -> tuple[Any, State]:
        model = nn.ModuleDict({name: nn.Linear(2, size, bias=False) for name in names})
        optimizer = OwnLoad(model.named_parameters(), lr=0.25)
        return optimizer, {"m": model, "t": TrainerState(o=optimizer) if inside else optimizer}

    optimizer, state = made("ab")
    step(state["m"], optimizer)
    kept(tmp_path, state)
    optimizer, state = made(names, 3 if "resize" in call else 2)
    before = [parameter.clone() for parameter in state["m"].parameters()]
    if why and call.get("strict", True):
        with pytest.raises(IncompatibleError, match=why):
            restore(tmp_path, state, **call)
        assert all(map(torch.equal, state["m"].parameters(), before))
        return
    report, told = restore(tmp_path, state, **call)
    assert len(optimizer.state) == (0 if why else 2)
    assert len(told) == bool(why)
    if why:
        assert ("t.o" if inside else "t") in report.missing


@pytest.mark.parametrize("kind", [OwnLoad, torch.optim.AdamW])
@pytest.mark.parametrize("call", [{}, {"strict": False}, {"rename": {"m": "n"}}])
def test_an_optimizer_of_the_local_part_of_a_tensor_keeps_its_state(tmp_path: Path, kind: Any, call: State) -> None:
    """Its parameter has another shape than what was stored of all ranks, and was taken for a resized one."""

    def made(name: str) -> tuple[Any, State]:
        local = nn.Parameter(torch.ones(2, 2))
        whole = asyncckpt.Sharded(
            (4, 2), local.dtype, (asyncckpt.Piece(local.detach(), (0, 0)), asyncckpt.Piece(torch.ones(2, 2), (2, 0)))
        )
        optimizer = kind([("w", local)], lr=0.25)
        local.grad = torch.ones_like(local)
        optimizer.step()
        return optimizer, {name: whole, "o": optimizer}

    optimizer, state = made("m")
    kept(tmp_path, state)
    wanted = str(optimizer.state_dict())
    optimizer, state = made("n" if "rename" in call else "m")
    optimizer.state.clear()
    report, _ = restore(tmp_path, state, **call)
    assert (list(report.missing), str(optimizer.state_dict())) == ([], wanted)


class NotOfTorch(torch.optim.Optimizer):
    """Has the options and state of SGD, and is none of torch's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, torch.optim.SGD([torch.zeros(1)], lr=lr).defaults)

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum_buffer"] = parameter.grad.clone()


@pytest.mark.parametrize("inside", [0, 1])
@pytest.mark.parametrize(("was", "now"), [(NotOfTorch, torch.optim.SGD), (torch.optim.SGD, NotOfTorch)])
def test_one_that_is_not_torchs_is_another_one(tmp_path: Path, was: Any, now: Any, inside: int) -> None:
    kept(tmp_path, stepped(was, inside=inside)[1])
    optimizer, state = stepped(now, inside=inside)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(IncompatibleError, match=rf"is of class '{now.__name__}', the checkpoint has the state of"):
        restore(tmp_path, state)
    report, _ = restore(tmp_path, state, strict=False)
    assert report.missing == ("t.o" if inside else "t",)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("state", ["absent", None, [], "text", torch.zeros(2)])
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_no_optimizer_is_refused_before_anything_is_filled(tmp_path: Path, state: Any, strict: bool) -> None:
    optimizer, now = stepped(torch.optim.Adam, inside=0)
    stored = optimizer.state_dict() | {"state": state}
    if isinstance(state, str) and state == "absent":
        del stored["state"]
    kept(tmp_path, {"m": now["m"], "t": stored})
    optimizer, now = stepped(torch.optim.Adam, inside=0)
    before = now["m"]["a"].weight.clone()
    if strict:
        with pytest.raises(IncompatibleError, match="nothing was changed"):
            restore(tmp_path, now)
        assert torch.equal(now["m"]["a"].weight, before)
    else:
        report, _ = restore(tmp_path, now, strict=False)
        assert "t" in report.missing
