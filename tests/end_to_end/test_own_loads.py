"""Optimizers that load in a way of their own, that are none of torch's, or that have a part of a tensor: each goes on
with the state of its own parameters, or stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt.errors import IncompatibleError
from asyncckpt.plan import image
from asyncckpt.trainer_state import TrainerState
from tests.end_to_end.test_changed_optimizers import State, restore
from tests.end_to_end.test_other_optimizers import kept
from tests.end_to_end.test_trainer_states import FloatMasters, step, stepped
from tests.shares import slow_but_for_a_share


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


class Merged(OwnLoad):
    """Saves its groups as one."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        groups = saved["param_groups"]
        lists = {key: [each for group in groups for each in group[key]] for key in ("params", "param_names")}
        return {**saved, "param_groups": [{**groups[0], **lists}]}

    def load_state_dict(self, state_dict: Any) -> None:
        groups = super().state_dict()["param_groups"]
        OwnLoad.load_state_dict(self, {**state_dict, "param_groups": groups})


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("change", ["none", "order", "size"])
def test_an_optimizer_that_saves_other_groups_than_it_has(tmp_path: Path, strict: bool, change: str) -> None:
    """It was refused in a program that had not changed; then it was asked nothing in one that had."""

    def made(change: str) -> tuple[Any, State]:
        model = nn.ModuleDict({name: nn.Linear(2, 3 if change == "size" else 2, bias=False) for name in "ab"})
        named = list(model.named_parameters())[:: -1 if change == "order" else 1]
        optimizer = Merged([{"params": [each]} for each in named], lr=0.25)
        step(model, optimizer)
        return optimizer, {"m": model, "o": optimizer}

    optimizer, state = made("none")
    kept(tmp_path, state)
    wanted = step(state["m"], optimizer, 20)
    optimizer, state = made(change)
    before = str(optimizer.state_dict())
    call: State = {"resize": ["m"]} if change == "size" else {"strict": strict}
    if change == "order" and strict:
        with pytest.raises(IncompatibleError, match="nothing was changed: 'o' has its parameters in another order"):
            restore(tmp_path, state, **call)
    elif change == "size":
        with pytest.raises(
            IncompatibleError, match="nothing was changed: 'o' has a parameter 0 that is of another shape"
        ):
            restore(tmp_path, state, **call)
    else:
        report, told = restore(tmp_path, state, **call)
        assert (list(report.missing), len(told)) == ((["o"], 1) if change == "order" else ([], 0))
    if change == "none":
        assert step(state["m"], optimizer, 20) == wanted
    else:
        assert str(optimizer.state_dict()) == before


PLACES = [
    *itertools.product([(0, 2, 4), (2, 4, 0, 2), (0, 3, 4), (0, 2, 6)], [image.BLOCK_BYTES_MAX]),
    *itertools.product([(0, 2, 4), (2, 4, 0, 2), (0, 2, 6)], [8]),
]


@pytest.mark.parametrize("kind", [OwnLoad, FloatMasters, torch.optim.AdamW, torch.optim.Adafactor])
@pytest.mark.parametrize(
    ("call", "of", "now", "block_bytes"),
    slow_but_for_a_share(
        [
            (call, of, *place)
            for call in ({}, {"strict": False}, {"rename": {"m": "n"}})
            for of in (slice(None), slice(1), slice(1, None))
            for place in PLACES
        ],
        "local parts",
        every=6,
    ),
)
def test_an_optimizer_of_local_parts_of_a_tensor_keeps_its_state_or_gets_none_of_other_parts(
    tmp_path: Path, kind: Any, call: State, of: slice, now: Sequence[int], block_bytes: int, monkeypatch: Any
) -> None:
    """Its parameter has another shape than what was stored of all ranks, and was taken for a resized one; or it was
    another part, and was taken for the same.

    of: which of the parts it has. now: where they begin and end. A large one is stored as several blocks.
    """

    def made(name: str, ends: Sequence[int]) -> tuple[Any, State]:
        rows = list(itertools.pairwise(ends)) if len(ends) == 3 else [(ends[0], ends[1]), (ends[2], ends[3])]
        parts = [nn.Parameter(torch.full((end - begin, 2), 1.0 + begin)) for begin, end in rows]
        optimizer = kind([(f"w{number}", part) for number, part in enumerate(parts)][of], lr=0.25)
        for part in parts:
            part.grad = part.detach().clone()
        optimizer.step()
        pieces = [asyncckpt.Piece(part.detach(), (begin, 0)) for part, (begin, _) in zip(parts, rows, strict=True)]
        return optimizer, {name: asyncckpt.Sharded((max(ends), 2), torch.float32, tuple(pieces)), "o": optimizer}

    monkeypatch.setattr(image, "BLOCK_BYTES_MAX", block_bytes)
    optimizer, state = made("m", (0, 2, 4))
    kept(tmp_path, state)
    wanted = str(optimizer.state_dict())
    name = "n" if "rename" in call else "m"
    optimizer, state = made(name, now)
    optimizer.state.clear()
    if max(now) != 4:
        call = {**call, "resize": [name]}
    if now == (0, 2, 4):
        report, _ = restore(tmp_path, state, **call)
        assert (list(report.missing), str(optimizer.state_dict())) == ([], wanted)
    elif call.keys() & ({"strict"} if kind is OwnLoad else {"strict", "rename", "resize"}):
        report, _ = restore(tmp_path, state, **call)
        assert all(each == "o" or each.startswith("o of ") for each in report.missing)
        assert len(report.missing) == (1 if kind is OwnLoad else len(optimizer.param_groups[0]["params"]))
        assert not any(optimizer.state.values())
    else:
        with pytest.raises(IncompatibleError, match="nothing was changed: 'o' has a parameter 0 that is of another"):
            restore(tmp_path, state, **call)


@pytest.mark.parametrize("strict", [True, False])
def test_ranks_that_exchange_their_parts_do_not_get_the_state_of_each_other(tmp_path: Path, strict: bool) -> None:
    def made(rank: int, begin: int) -> tuple[Any, State]:
        part = nn.Parameter(torch.full((2, 2), 1.0 + begin))
        optimizer = torch.optim.AdamW([("w", part)], lr=0.25)
        part.grad = part.detach().clone()
        optimizer.step()
        whole = asyncckpt.Sharded((4, 2), torch.float32, (asyncckpt.Piece(part.detach(), (begin, 0)),))
        return optimizer, {"m": whole, f"o{rank}": optimizer}

    in_turn = asyncckpt.RankOptions(in_turn=True)
    for rank in range(2):
        with asyncckpt.Saver(rank, 2, 8, tmp_path, tensors=made(rank, 2 * rank)[1], ranks=in_turn) as saver:
            saver.save(1)
    for rank, is_same in itertools.product(range(2), [True, False]):
        optimizer, state = made(rank, 2 * rank if is_same else 2 - 2 * rank)
        wanted = str(made(rank, 2 * rank)[0].state_dict())
        optimizer.state.clear()
        loader = asyncckpt.Loader(tmp_path, tensors=state, strict=strict, shard_index=rank, shard_num=2)
        if strict and not is_same:
            with pytest.raises(IncompatibleError, match="a parameter 0 that is of another shape or part"):
                loader.load()
            continue
        missing = loader.load().missing
        assert missing == (() if is_same else (f"o{rank} of m",))
        assert (str(optimizer.state_dict()) == wanted) == is_same


class SavedOtherwise(nn.Module):
    """Saves its parameter in another shape than it has, as a tensor or as a spread one."""

    def __init__(self, saved_as: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6))
        self._saved_as = saved_as
        self.register_state_dict_post_hook(self._change)
        self.register_load_state_dict_pre_hook(self._change_back)

    @staticmethod
    def _change(module: Any, state: State, prefix: str, _: Any) -> None:
        seen = state[f"{prefix}w"].view(2, 3)
        pieces = [asyncckpt.Piece(seen[:1], (0, 0)), asyncckpt.Piece(seen[1:], (1, 0))]
        spread = asyncckpt.Sharded((2, 3), seen.dtype, tuple(pieces))
        state[f"{prefix}w"] = spread if module._saved_as == "spread" else seen

    @staticmethod
    def _change_back(module: Any, state: State, prefix: str, *_: Any) -> None:
        state[f"{prefix}w"] = (
            module.w.detach().clone() if module._saved_as == "spread" else state[f"{prefix}w"].flatten()
        )


@pytest.mark.parametrize("saved_as", ["tensor", "spread"])
@pytest.mark.parametrize("kind", [OwnLoad, FloatMasters, torch.optim.AdamW])
@pytest.mark.parametrize("strict", [True, False])
def test_an_optimizer_of_what_is_saved_in_another_shape_goes_on(
    tmp_path: Path, saved_as: str, kind: Any, strict: bool
) -> None:
    """It was taken for one of a part of a tensor."""

    def made() -> tuple[Any, State]:
        model = SavedOtherwise(saved_as)
        optimizer = kind(model.named_parameters(), lr=0.25)
        step(model, optimizer)
        return optimizer, {"m": model, "o": optimizer}

    optimizer, state = made()
    kept(tmp_path, state)
    wanted = step(state["m"], optimizer, 5)
    optimizer, state = made()
    report, told = restore(tmp_path, state, strict=strict)
    assert (list(report.missing), told, step(state["m"], optimizer, 5)) == ([], [], wanted)


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
