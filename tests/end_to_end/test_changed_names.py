"""Names tell which parameter is which, or nobody gets a moment of another one: renames, twins, ties, filters.

The oracle is arithmetic: each parameter has a moment of its own number (test_changed_optimizers.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import asyncckpt
from asyncckpt import optim
from asyncckpt.errors import IncompatibleError, UsageError
from tests.end_to_end.test_changed_optimizers import layer, layers, moments, of, restore, save, sgd
from tests.worlds.composites import Int8Rows

State = dict[str, Any]


def moments_of(path: Path, was: State, now: State, **call: Any) -> dict[str, float | None]:
    """Save, restore twice, and return the moments by the names that the optimizer has."""
    save(path, was)
    restore(path, now, **call)
    found = moments(now)
    restore(path, now, **call)
    assert moments(now) == found, "the next start gives the same"
    names = [name for group in now["o"].param_groups for name in group["param_names"]]
    return dict(zip(names, found, strict=True))


def part_of(model: nn.Module, *names: str) -> torch.optim.Optimizer:
    return sgd([pair for pair in model.named_parameters() if pair[0].startswith(names)])


@pytest.mark.parametrize("call", [{"strict": False}, {"rename": {"m.other": "m.third"}}, {}])
def test_a_twin_does_not_get_the_moments_of_another_module(tmp_path: Path, call: State) -> None:
    was, now = layers(["net", "tower", "other"]), layers(["net", "tower", "third" if "rename" in call else "other"])
    states = {"m": was, "o": part_of(was, "net")}, {"m": now, "o": part_of(now, "tower")}
    if call == {"strict": False}:
        assert moments_of(tmp_path, *states, **call) == {"tower.weight": None}
        return
    save(tmp_path, states[0])
    before = now["tower"].weight.clone()
    with pytest.raises(IncompatibleError, match=r"nothing was changed.*'o' .*its? parameters"):
        restore(tmp_path, states[1], **call)
    assert torch.equal(now["tower"].weight, before)


@pytest.mark.parametrize("renamed", ["net", "tower"])
def test_a_twin_that_is_trained_from_now_on_has_no_moments(tmp_path: Path, renamed: str) -> None:
    was = layers(["net", "tower"])
    now = layers("core" if name == renamed else name for name in ("net", "tower"))
    found = moments_of(
        tmp_path,
        {"m": was, "o": part_of(was, "net")},
        of(now),
        strict=False,
        rename={f"m.{renamed}": "m.core"},
    )
    kept = "core" if renamed == "net" else "net"
    assert found == {f"{name}.weight": 1.0 if name == kept else None for name in now}


class Blocks(nn.Module):
    """A block has a norm, and so has the model; with a parameter without elements, and one to rename."""

    def __init__(self, order: Iterable[str], last: str) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.ones(0, 3))
        for name in order:
            self.add_module(name, layer() if name == "norm" else layers(["norm"]))
        self.add_module(last, layer())


@pytest.mark.parametrize("strict", [True, False])
def test_a_name_that_ends_another_one_is_not_taken_for_it(tmp_path: Path, strict: bool) -> None:
    was, now = of(Blocks(["norm", "blk"], "z")), of(Blocks(["blk", "norm"], "y"))
    found = moments_of(tmp_path, was, now, strict=strict, rename={"m.z": "m.y"})
    assert found == {"empty": None, "blk.norm.weight": 3.0, "norm.weight": 2.0, "y.weight": 4.0}


@pytest.mark.parametrize("change", ["a new layer", "a rename", "nothing"])
def test_tied_weights_keep_their_moments(tmp_path: Path, change: str) -> None:
    class Tied(nn.Module):
        def __init__(self, middle: str, *more: str) -> None:
            super().__init__()
            self.emb, self.head = layer(), layer()
            self.head.weight = self.emb.weight
            for name in (middle, *more):
                self.add_module(name, layer())

    new = {"a new layer": ("mid", "extra"), "a rename": ("middle",), "nothing": ("mid",)}[change]
    call: State = {"rename": {"m.mid": "m.middle"}} if change == "a rename" else {"strict": change == "nothing"}
    found = moments_of(tmp_path, of(Tied("mid")), of(Tied(*new)), **call)
    wanted: dict[str, float | None] = {"emb.weight": 1.0, f"{new[0]}.weight": 2.0}
    assert found == wanted | ({"extra.weight": None} if change == "a new layer" else {})


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("way", ["exchange", "copy"])
def test_moments_go_with_what_a_filter_loads(tmp_path: Path, way: str, strict: bool, named: bool) -> None:
    give = {"m.b.weight": "m.a.weight"} | ({"m.a.weight": "m.b.weight"} if way == "exchange" else {})
    now = of(layers("ab"), named=named)
    save(tmp_path, of(layers("ab"), named=named))

    def filtered(info: Any) -> Any:
        return {name: {give.get(name, source): [] for source in info[name]} for name in info}

    call = {"strict": strict, "filter_func": filtered}
    if way == "copy" and strict:
        with pytest.raises(IncompatibleError, match="left out by the filter"):
            restore(tmp_path, now, **call)
        return
    restore(tmp_path, now, **call)
    assert moments(now) == ([2.0, 1.0] if way == "exchange" else [1.0, 1.0])
    buffers = [now["o"].state[each.weight]["momentum_buffer"] for each in now["m"].values()]
    assert buffers[0].data_ptr() != buffers[1].data_ptr(), "a copy has moments of its own"


@pytest.mark.parametrize("strict", [True, False])
def test_steps_go_with_the_rows_that_a_filter_exchanges(tmp_path: Path, strict: bool) -> None:
    def made() -> State:
        slots = optim.SparseAdam.optimizer_slots()
        tables = [asyncckpt.HashTable(name, 2, optimizer_slots=slots) for name in "ab"]
        bags = nn.ModuleDict({table.name: asyncckpt.nn.HashEmbeddingBag(table) for table in tables})
        return {"m": bags, "s": optim.SparseAdam(bags, lr=0.1)}

    was, now = made(), made()
    for name, count in (("a", 5), ("b", 1)):
        for _ in range(count):
            was["m"][name](torch.tensor([[1]])).sum().backward()
            was["s"].step()
            was["s"].zero_grad()
    with asyncckpt.Checkpointer(tmp_path, every=1, **was) as ckpt:
        ckpt.step(0)
    other = {"a": "b", "b": "a"}
    restore(
        tmp_path,
        now,
        strict=strict,
        filter_func=lambda info: {
            name: {other.get(source, source): columns for source, columns in info[name].items()} for name in info
        },
    )
    steps = {each.table.name: now["s"].state[each]["step"] for each in now["s"].parameters()}
    assert steps == {"a": 1, "b": 5}


def test_a_parameter_outside_of_modules_is_not_given_to_a_new_one(tmp_path: Path) -> None:
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    save(tmp_path, {"w": {"a": a, "b": b}, "o": sgd([a, b])})
    now = {"w": {"a": nn.Parameter(torch.ones(2)), "c": c}}
    now["o"] = sgd([now["w"]["a"], c])  # type: ignore[assignment]
    _, told = restore(tmp_path, now, strict=False)
    assert moments(now) == [None, None]
    assert len(told) == 1


# -- renames -----------------------------------------------------------------------------------------------------------


def nested(path: str) -> nn.Module:
    made = layer()
    for name in reversed(path.split(".")):
        made = nn.ModuleDict({name: made})
    return made


@pytest.mark.parametrize(("old", "new"), [("enc.inner", "enc"), ("enc", "enc.inner"), ("a.b", "a.c"), ("a", "b.c")])
def test_something_is_put_around_a_layer_or_taken_away(tmp_path: Path, old: str, new: str) -> None:
    found = moments_of(tmp_path, of(nested(old)), of(nested(new)), rename={f"m.{old}": f"m.{new}"})
    assert found == {f"{new}.weight": 1.0}


def test_a_table_may_get_the_name_of_a_module(tmp_path: Path) -> None:
    was = asyncckpt.HashTable("customer", 2)
    was.insert(torch.arange(3), torch.ones(3, 2))
    module = layer()
    with asyncckpt.Saver(path=tmp_path, hashtables={"customer": was}, tensors={"m": {"user": module}}) as saver:
        saver.save(0)
    for strict in (True, False):
        now, target = asyncckpt.HashTable("m", 2), layer()
        asyncckpt.Loader(
            tmp_path, hashtables={"m": now}, tensors={"m": {"user": target}}, rename={"customer": "m"}, strict=strict
        ).load()
        assert len(now) == 3
        assert torch.equal(target.weight, module.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rename", [{"m.a": "m.b", "m.b.weight": "m.c"}, {"m.a.weight": "m.b.weight", "m.b": "m.c"}, {"m.a": "m.a"}]
)
def test_names_that_overlap_are_refused(tmp_path: Path, rename: dict[str, str]) -> None:
    save(tmp_path, of(layers("ab")))
    with pytest.raises(UsageError, match="the next restore would rename it once more"):
        restore(tmp_path, of(layers("ab")), rename=rename)


def test_a_name_that_the_checkpoint_has_before_and_after_is_refused_or_is_done(tmp_path: Path) -> None:
    save(tmp_path, of(layers("ab")))
    now = of(layers("b"))
    before = now["m"]["b"].weight.clone()
    with pytest.raises(UsageError, match=r"gives .* the name .*, and the checkpoint has both"):
        restore(tmp_path, now, rename={"m.a": "m.b"}, strict=False)
    assert torch.equal(now["m"]["b"].weight, before)
    both = of(layers("ab"))
    restore(tmp_path, both, rename={"m.a": "m.b"})
    assert moments(both) == [1.0, 2.0], "the model has both, so it was renamed before"


def test_a_list_of_renames_may_have_more_than_is_there(tmp_path: Path) -> None:
    rename = {"m.a": "m.b", "m.gone": "m.there"}
    save(tmp_path, of(layers(["a", "gone"])))
    for _ in range(2):
        now = of(layers("b"))
        restore(tmp_path, now, rename=rename, strict=False)
        assert moments(now) == [1.0]
    with pytest.raises(UsageError, match="unknown names"):
        restore(tmp_path, of(layers("b")), rename=rename)


def test_a_number_stays_a_number(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"x": {1: torch.ones(2)}})
    target = {"x": {5: torch.zeros(2)}}
    asyncckpt.Loader(tmp_path, tensors=target, rename={"x.1": "x.5"}).load()
    assert target["x"].keys() == {5}
    assert torch.equal(target["x"][5], torch.ones(2))


# -- schedules, composites, what nobody has saved ----------------------------------------------------------------------


@pytest.mark.parametrize("change", ["exchanged", "divided otherwise", "not loaded", "the same"])
def test_a_schedule_is_loaded_with_the_groups_that_it_was_made_for(tmp_path: Path, change: str) -> None:
    def made(groups: list[list[str]], rates: list[float], name: str = "o") -> State:
        net = layers("abc")
        parts = [
            {"params": [(f"{one}.weight", net[one].weight) for one in group], "lr": rate}
            for group, rate in zip(groups, rates, strict=True)
        ]
        optimizer = torch.optim.SGD(parts, momentum=0.9)  # type: ignore[arg-type]
        return {"m": net, name: optimizer, "s": lr_scheduler.StepLR(optimizer, 2)}

    was = made([["a"], ["b", "c"]], [0.1, 0.5])
    was["s"].step()
    with asyncckpt.Checkpointer(tmp_path, every=1, **was) as ckpt:
        ckpt.step(0)
    now = {
        "exchanged": lambda: made([["b", "c"], ["a"]], [0.5, 0.1]),
        "divided otherwise": lambda: made([["a", "b"], ["c"]], [0.3, 0.7]),
        "not loaded": lambda: made([["a"], ["b", "c"]], [0.3, 0.7], "p"),
        "the same": lambda: made([["a"], ["b", "c"]], [0.3, 0.7]),
    }[change]()
    given = [group["lr"] for group in now.get("o", now.get("p")).param_groups]
    report, told = restore(tmp_path, now, strict=False)
    optimizer = now.get("o", now.get("p"))
    rates = [group["lr"] for group in optimizer.param_groups]
    if change == "the same":
        assert (now["s"].last_epoch, told) == (1, [])
        return
    assert now["s"].last_epoch == 0
    assert "s" in report.missing
    assert any("'s' is of an optimizer that" in each for each in told)
    optimizer.step()
    now["s"].step()
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert rates == ([0.5, 0.1] if change == "exchanged" else given)


@pytest.mark.parametrize("call", [{"resize": ["m"]}, {"cast": True}])
def test_parts_of_one_tensor_are_neither_resized_nor_cast(tmp_path: Path, call: State) -> None:
    asyncckpt.save(tmp_path, {"m": {"w": Int8Rows(torch.ones(4, 4, dtype=torch.int8), torch.ones(4))}})
    kind, count = (torch.int16, 4) if "cast" in call else (torch.int8, 2)
    other = Int8Rows(torch.zeros(4, 4, dtype=kind), torch.zeros(count))
    with pytest.raises(IncompatibleError, match="is a part of one tensor, and is neither resized nor cast"):
        asyncckpt.Loader(tmp_path, tensors={"m": {"w": other}}, **call).load()
    assert not other.codes.any()


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_that_no_optimizer_has_saved_is_no_raw_error(tmp_path: Path, strict: bool) -> None:
    class Forged:
        def state_dict(self) -> State:
            return {"state": {}, "param_groups": [{"params": [[0]], "lr": 0.1}]}

        def load_state_dict(self, state: State) -> None:
            raise AssertionError

    net = layers("a")
    with asyncckpt.Checkpointer(tmp_path, every=1, m=net, o=Forged()) as ckpt:
        ckpt.step(0)
    now = of(layers("a"))
    if strict:
        with pytest.raises(IncompatibleError, match="'o' "):
            restore(tmp_path, now)
    else:
        assert len(restore(tmp_path, now, strict=False)[1]) == 1


def test_state_of_no_parameter_stays(tmp_path: Path) -> None:
    was = of(layers("a"))
    was["o"].state["global"]["n"] = 3
    save(tmp_path, was)
    now = of(layers("ab"))
    restore(tmp_path, now, strict=False)
    assert now["o"].state["global"] == {"n": 3}
    assert moments(now) == [1.0, None]
