"""A composite that a save or load cannot take as a whole is refused by name, before anything is changed."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncckpt
from asyncckpt import CorruptError, IncompatibleError, Loader, Saver, UnsupportedError
from asyncckpt.format.composite import decode_composite
from tests.worlds.composites import (
    CONTEXT,
    Granularity,
    Int8Rows,
    Momentum8,
    Rounding,
    RowsInExtraState,
    Twofold,
    inner_of,
    int8_rows,
    same,
    train,
)


def test_a_fresh_optimizer_needs_a_class_that_the_process_has_said(tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 8)
    optimizer, second = (Momentum8([model.weight]) for _ in range(2))
    train(model, optimizer, 1)
    asyncckpt.save(tmp_path, {"optimizer": optimizer, "model": model})
    before = model.weight.clone()
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(IncompatibleError, match=r"momentum.*Int8Rows.*add_safe_globals"):
        Loader(tmp_path, tensors={"optimizer": second, "model": model}).load()
    assert torch.equal(model.weight, before + 1)
    assert not second.state


def test_a_context_with_objects_is_made_by_no_class(tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 8)
    optimizer, second = (Momentum8([model.weight], context=CONTEXT) for _ in range(2))
    train(model, optimizer, 1)
    asyncckpt.save(tmp_path, {"optimizer": optimizer})
    with torch.serialization.safe_globals([Int8Rows]), pytest.raises(IncompatibleError, match="context holds objects"):
        Loader(tmp_path, tensors={"optimizer": second}).load()


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "another context": (
        lambda: int8_rows(2, context=(Granularity(2, Rounding.NEAREST), CONTEXT[1])),
        r"context\[0\].rows is 2",
    ),
    "another enum": (lambda: int8_rows(2, context=(Granularity(1, Rounding.DOWN), CONTEXT[1])), "rounding"),
    "another value": (
        lambda: int8_rows(2, context=(CONTEXT[0], {"bits": 4, "kind": torch.int8})),
        r"context\[1\].bits is 4",
    ),
    "one key less": (lambda: int8_rows(2, context=(CONTEXT[0], {"bits": 8})), "kind is only in the checkpoint"),
    "another class": (lambda: Twofold(torch.zeros(6, 8), torch.zeros(6)), "Twofold, a .*Int8Rows in the checkpoint"),
    "another shape": (lambda: int8_rows(2, rows=7, context=CONTEXT), "shape"),
    "plain": (lambda: torch.zeros(6, 8), "plain tensor"),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("other", OTHERS)
def test_what_does_not_fit_is_refused_before_anything_is_changed(tmp_path: Path, other: str, strict: bool) -> None:
    made, match = OTHERS[other]
    asyncckpt.save(tmp_path, {"w": int8_rows(1, context=CONTEXT), "bias": torch.ones(3)})
    target, bias = made(), torch.zeros(3)
    before = [each.clone() for each in vars(target).values() if isinstance(each, torch.Tensor)]
    with pytest.raises(IncompatibleError, match=match):
        Loader(tmp_path, tensors={"w": target, "bias": bias}, strict=strict).load()
    now = [each for each in vars(target).values() if isinstance(each, torch.Tensor)]
    assert same(tuple(now), tuple(before))
    assert not bias.any()


def test_a_plain_tensor_does_not_become_one(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"w": torch.ones(6, 8)})
    target = int8_rows(2)
    before = inner_of(target)
    for strict in (True, False):
        with pytest.raises(IncompatibleError, match=r"Int8Rows.*plain tensor in the checkpoint"):
            Loader(tmp_path, tensors={"w": target}, strict=strict).load()
    assert same(inner_of(target), before)


def test_an_older_reader_refuses_it_by_name(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"w": int8_rows(1)})
    (manifest,) = (
        (tmp_path / "checkpoints").glob("*.json")
        if (tmp_path / "checkpoints").is_dir()
        else tmp_path.glob("**/0*.json")
    )
    assert "composite" in json.loads(manifest.read_bytes())["requires"]


def test_a_filter_takes_all_of_it_or_nothing(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"w": int8_rows(1), "v": int8_rows(3), "b": torch.ones(2)})
    target = {"w": int8_rows(2), "v": int8_rows(4), "b": torch.zeros(2)}
    before = inner_of(target["w"])

    def without_scales(info: Any) -> Any:
        return {name: item for name, item in info.items() if name != "w.scale"}

    def exchanged(info: Any) -> Any:
        return {**info, "w.scale": {"v.scale": []}}

    for wrong in (without_scales, exchanged):
        with pytest.raises(IncompatibleError, match="'w' is one tensor"):
            Loader(tmp_path, tensors=target, filter_func=wrong, strict=False).load()
    assert same(inner_of(target["w"]), before)
    assert not target["b"].any()

    def by_another_name(info: Any) -> Any:
        return {"w.codes": {"v.codes": []}, "w.scale": {"v.scale": []}}

    Loader(tmp_path, tensors=target, filter_func=by_another_name, strict=False).load()
    assert same(inner_of(target["w"]), inner_of(int8_rows(3)))
    assert same(inner_of(target["v"]), inner_of(int8_rows(4)))


def broken(**methods: Any) -> torch.Tensor:
    kind: Any = type("Broken", (Int8Rows,), methods)
    found: torch.Tensor = kind(torch.zeros(6, 8, dtype=torch.int8), torch.ones(6))
    return found


def raises(self: Any) -> Any:
    raise ValueError("no parts today")


BROKEN = {
    "raises": lambda: broken(__tensor_flatten__=raises),
    "a name that is not there": lambda: broken(__tensor_flatten__=lambda self: (["codes", "gone"], None)),
    "no tensor": lambda: broken(__tensor_flatten__=lambda self: (["codes", "context"], None)),
    "itself": lambda: broken(__tensor_flatten__=lambda self: (["me"], None), me=property(lambda self: self)),
    "a name twice": lambda: broken(__tensor_flatten__=lambda self: (["codes", "codes"], None)),
    "too many": lambda: broken(
        __tensor_flatten__=lambda self: ([f"t{n}" for n in range(17)], None),
        **{f"t{n}": torch.zeros(1) for n in range(17)},
    ),
    "no answer": lambda: broken(__tensor_flatten__=lambda self: None),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_class_that_breaks_the_protocol_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedError, match=r"'w' cannot be taken apart.*Broken"):
        asyncckpt.save(tmp_path / "new", {"w": BROKEN[kind]()})
    assert not list(asyncckpt.list_steps(tmp_path / "new")) if (tmp_path / "new").exists() else True


def test_one_that_makes_itself_anew_without_an_end(tmp_path: Path) -> None:
    class Deep(Twofold):
        def __tensor_flatten__(self) -> tuple[list[str], Any]:
            return ["more"], None

        @property
        def more(self) -> Deep:
            return Deep(self.first, self.second)

    with pytest.raises(asyncckpt.UsageError, match="nested too deeply"):
        asyncckpt.save(tmp_path, {"w": Deep(torch.zeros(2), torch.zeros(2))})


class Hidden(torch.Tensor):
    """It says nothing of what it is made of."""

    @staticmethod
    def __new__(cls: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


def with_a_buffer(value: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.register_buffer("odd", value)
    return torch.nn.Sequential(module)


@pytest.mark.parametrize("where", ["tensor", "module", "list"])
@pytest.mark.parametrize("kind", ["hidden", "mkldnn", "of half a byte"])
def test_what_no_save_takes_is_told_when_the_saver_is_made(tmp_path: Path, kind: str, where: str) -> None:
    made: dict[str, Callable[[], torch.Tensor]] = {
        "hidden": Hidden,
        "mkldnn": lambda: torch.eye(3).to_mkldnn(),
        "of half a byte": lambda: torch.quantize_per_channel(
            torch.ones(4, 4), torch.ones(4), torch.zeros(4), 0, torch.quint4x2
        ),
    }
    value = made[kind]()
    state = {"tensor": value, "module": with_a_buffer(value), "list": [{"a": (value,)}]}[where]
    with pytest.raises(UnsupportedError, match="'state"):
        Saver(path=tmp_path / "new", tensors={"state": state})
    assert not (tmp_path / "new").exists()


def test_what_a_hook_hides_is_no_problem(tmp_path: Path) -> None:
    module = with_a_buffer(torch.eye(3).to_mkldnn())

    def hide(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        del state[f"{prefix}0.odd"]

    module.register_state_dict_post_hook(hide)
    with Saver(path=tmp_path, tensors={"state": module}) as saver:
        saver.save(1)


def test_an_optimizer_of_another_class_is_told(tmp_path: Path) -> None:
    class Other8(Momentum8):
        """It would train on with states of a class that is not its own."""

    model = torch.nn.Linear(6, 8)
    optimizer = Momentum8([model.weight])
    train(model, optimizer, 1)
    asyncckpt.save(tmp_path, {"optimizer": optimizer})
    second = Other8([model.weight])
    with (
        torch.serialization.safe_globals([Int8Rows]),
        pytest.raises(IncompatibleError, match=r"'Other8'.*Int8Rows of a 'Momentum8'"),
    ):
        Loader(tmp_path, tensors={"optimizer": second}).load()
    assert not second.state


def test_one_of_another_context_in_an_optimizer_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 8)
    optimizer, second = Momentum8([model.weight], context=[1]), Momentum8([model.weight], context=[2])
    train(model, optimizer, 1)
    asyncckpt.save(tmp_path, {"optimizer": optimizer})
    train(model, second, 1)
    before = inner_of(second.state[model.weight]["momentum"])
    with torch.serialization.safe_globals([Int8Rows]), pytest.raises(IncompatibleError, match=r"context\[0\] is 2"):
        Loader(tmp_path, tensors={"optimizer": second}).load()
    assert same(inner_of(second.state[model.weight]["momentum"]), before)


class Picky(Int8Rows):
    """A newer version, which does not take what an older one has stored."""

    __qualname__ = "Int8Rows"

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Int8Rows:
        if context is None:
            raise TypeError("it has a context since version 2")
        return cls(inner["codes"], inner["scale"], [*context, "more"])


@pytest.mark.parametrize(("context", "match"), [(None, "since version 2"), ([1], "makes something else of it")])
def test_a_class_that_does_not_take_it_is_tried_before_anything_is_filled(
    tmp_path: Path, context: Any, match: str
) -> None:
    model = torch.nn.Linear(6, 8)
    optimizer = Momentum8([model.weight], context=context)
    train(model, optimizer, 1)
    asyncckpt.save(tmp_path, {"model": model, "optimizer": optimizer})
    target, second = torch.nn.Linear(6, 8), Momentum8([model.weight])
    before = target.weight.clone()
    with torch.serialization.safe_globals([Picky]), pytest.raises(IncompatibleError, match=match):
        Loader(tmp_path, tensors={"model": target, "optimizer": second}).load()
    assert torch.equal(target.weight, before)


class Optional(Int8Rows):
    """With a third inner tensor or without it."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale", *(["more"] if hasattr(self, "more") else [])], self.context


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("has_more", ["stored", "target"])
def test_all_inner_tensors_of_both_are_the_same_ones(tmp_path: Path, has_more: str, strict: bool) -> None:
    stored, target = (Optional(rows.codes, rows.scale) for rows in map(int8_rows, (1, 2)))
    vars({"stored": stored, "target": target}[has_more])["more"] = torch.ones(3)
    asyncckpt.save(tmp_path, {"w": stored})
    before = inner_of(target)
    with pytest.raises(IncompatibleError, match=r"inner tensors are .*'codes'.*'more'|is one tensor"):
        Loader(tmp_path, tensors={"w": target}, strict=strict).load()
    assert same(inner_of(target), before)


@pytest.mark.parametrize("sources", [("c", None), ("c", "s"), ("v.scale", "v.codes")])
def test_a_filter_gives_it_no_parts_of_something_else(tmp_path: Path, sources: tuple[str, str | None]) -> None:
    plain = int8_rows(5)
    asyncckpt.save(tmp_path, {"v": Twofold(torch.ones(6), torch.ones(6)), "c": plain.codes, "s": plain.scale})
    target = Twofold(torch.zeros(6), torch.zeros(6)) if sources[0][0] == "v" else int8_rows(2)
    names = ("w.first", "w.second") if sources[0][0] == "v" else ("w.codes", "w.scale")
    if sources[0][0] == "v":
        sources = ("v.second", "v.first")

    def exchange(_: Any) -> Any:
        return {name: {source: []} for name, source in zip(names, sources, strict=True) if source is not None}

    before = [inner.clone() for inner in vars(target).values() if isinstance(inner, torch.Tensor)]
    with pytest.raises(IncompatibleError, match="'w' is one tensor"):
        Loader(tmp_path, tensors={"w": target}, filter_func=exchange, strict=False).load()
    assert same(tuple(inner for inner in vars(target).values() if isinstance(inner, torch.Tensor)), tuple(before))


class Kind:
    pass


class OtherKind:
    pass


CONTEXTS: dict[str, tuple[Any, Any]] = {
    "numbers of NumPy": (np.float32(1), np.float32(2)),
    "classes": (Kind, OtherKind),
    "objects": (Kind(), OtherKind()),
    "an enum in a mapping": (OrderedDict(a=Rounding.DOWN), OrderedDict(a=Rounding.NEAREST)),
    "decimals": (Decimal(1), Decimal(2)),
    "memory formats": (torch.channels_last, torch.contiguous_format),
    "bool and int": ([True], [1]),
    "keys of bool and int": ({True: 2}, {1: 2}),
    "keys that are dtypes": ({torch.int8: 1}, {torch.int8: 2}),
    "keys that are enums": ({Rounding.DOWN: 1}, {Rounding.DOWN: 2}),
    "a number called device": ({"device": 1}, {"device": 2}),
    "kinds": ((1, 2), [1, 2]),
}


@pytest.mark.parametrize("which", CONTEXTS)
def test_contexts_that_differ_are_told_apart(tmp_path: Path, which: str) -> None:
    stored, own = CONTEXTS[which]
    asyncckpt.save(tmp_path, {"w": int8_rows(1, context=stored)})
    Loader(tmp_path, tensors={"w": int8_rows(2, context=stored)}).load()
    with pytest.raises(IncompatibleError, match=r"context.* the checkpoint's|context.*only in the checkpoint"):
        Loader(tmp_path, tensors={"w": int8_rows(2, context=own)}).load()


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


REFUSED: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: {"zero_point": torch.ones(2)},
    "too large": lambda: "\u00e4" * 40_000,
    "too deep": lambda: nested(66),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_context_that_no_load_could_take_is_refused_by_the_save(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedError, match="'w'"):
        asyncckpt.save(tmp_path, {"w": int8_rows(1, context=REFUSED[kind]())})
    asyncckpt.save(tmp_path, {"w": int8_rows(1, context=nested(60))})


def test_what_a_collective_has_yet_to_fill_is_refused(tmp_path: Path) -> None:
    pending = type("Pending", (Int8Rows,), {"trigger_wait": lambda self: None})
    with pytest.raises(UnsupportedError, match="Pending"):
        asyncckpt.save(tmp_path, {"w": pending(torch.zeros(6, 8, dtype=torch.int8), torch.ones(6))})


def test_a_state_that_contains_itself_twice_is_refused_by_its_save(tmp_path: Path) -> None:
    state: dict[str, Any] = {"x": torch.ones(2)}
    state["a"] = state["b"] = state
    with Saver(path=tmp_path, tensors=state) as saver, pytest.raises(asyncckpt.UsageError, match="contains itself"):
        saver.save(1)


FORGED: list[Any] = [
    {"record": []},
    {"record": ["A", 5]},
    {"record": [5, []]},
    {"record": ["A", [["x"]]]},
    {"dict": 5},
    {"dict": [[1]]},
    {"dict": [[1, 2]], "tuple": []},
    {"tuple": {}},
    {"opaque": 5},
    {"enum": "A"},
    {},
]


@pytest.mark.parametrize("context", FORGED, ids=json.dumps)
def test_a_forged_context_is_refused(context: Any) -> None:
    facts = {"class": "A", "module": "m", "dtype": "int8", "shape": [2], "strides": [1], "context": [context]}
    with pytest.raises(CorruptError, match="of no known form"):
        decode_composite(facts, owner="a manifest")


def test_torchs_own_safe_classes_are_made_by_no_name(tmp_path: Path) -> None:
    import torch.distributed.tensor  # It registers DTensor.

    kind: Any = type("DTensor", (Int8Rows,), {})
    model = torch.nn.Linear(6, 8)
    optimizer, second = Momentum8([model.weight]), Momentum8([model.weight])
    train(model, optimizer, 1)
    rows = optimizer.state[model.weight]["momentum"]
    optimizer.state[model.weight]["momentum"] = kind(rows.codes, rows.scale)
    asyncckpt.save(tmp_path, {"optimizer": optimizer})
    with pytest.raises(IncompatibleError, match=r"DTensor to load into, and none is registered"):
        Loader(tmp_path, tensors={"optimizer": second}).load()


@pytest.mark.parametrize("kind", ["alike", "other context", "plain"])
def test_ranks_hold_the_same_one_or_are_told(tmp_path: Path, kind: str) -> None:
    own = int8_rows(1, rows=900, context=[1])
    others = {"alike": own, "other context": int8_rows(1, rows=900, context=[2]), "plain": torch.ones(900, 8)}

    def save(rank: int, value: Any) -> None:
        in_turn = asyncckpt.RankOptions(in_turn=True)
        with Saver(shard_index=rank, shard_num=2, path=tmp_path, tensors={"w": value}, ranks=in_turn) as saver:
            saver.save(1)

    save(0, own)
    if kind == "other context":
        with pytest.raises(asyncckpt.ConflictError, match="w"):
            save(1, others[kind])
        return
    save(1, others[kind])
    found = asyncckpt.load(tmp_path)["w"]
    assert same((found["codes"], found["scale"]), inner_of(own))
    target = int8_rows(2, rows=900, context=[1])
    Loader(tmp_path, tensors={"w": target}, strict=kind == "alike").load()
    assert same(inner_of(target), inner_of(own))


@pytest.mark.parametrize("holder", ["optimizer", "extra state"])
def test_one_of_which_a_write_filter_has_dropped_a_part_is_refused_by_name(tmp_path: Path, holder: str) -> None:
    def made(seed: int) -> Any:
        if holder == "extra state":
            return RowsInExtraState(seed)
        model = torch.nn.Linear(6, 8)
        optimizer = Momentum8([model.weight])
        train(model, optimizer, seed)
        return optimizer

    def without_scales(blocks: Any) -> Any:
        return [block for block in blocks if not block.tensor_name().endswith(".scale")]

    with Saver(path=tmp_path, tensors={"it": made(1)}, filter_func=without_scales) as saver:
        saver.save(1)
    with torch.serialization.safe_globals([Int8Rows]), pytest.raises(IncompatibleError, match=r"it.*\.scale"):
        Loader(tmp_path, tensors={"it": made(2)}).load()
