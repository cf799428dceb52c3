"""Cases 94 to 99: states that cannot be taken apart or change meanwhile, filters with a fault, and no memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from round_trip import Save, assert_round_trip, loaded

import asyncckpt
from asyncckpt.staging.pool import pool

UsageError, UnsupportedError = asyncckpt.UsageError, asyncckpt.UnsupportedError
IOFailedError, FilterError = asyncckpt.IOFailedError, asyncckpt.errors.FilterError


# -- 94 to 96: the state -----------------------------------------------------------------------------------------------


def test_case_094_plain_values(save: Save, tmp_path: Path) -> None:
    values = {
        "none": None, "true": True, "int": -3, "big": 2**63, "bigger": -(2**100), "float": 0.1, "minus": -0.0,
        "complex": 1 - 2j, "text": "héllo", "bytes": b"\x00\xff", "empty": "",
    }  # fmt: skip
    save({"v": values})
    back = asyncckpt.Loader(tmp_path).load().values
    assert back == {f"v.{name}": value for name, value in values.items()}
    assert {name: type(value) for name, value in back.items()} == {f"v.{n}": type(v) for n, v in values.items()}
    assert math.copysign(1, back["v.minus"]) == -1


class Endless:
    """Every state dict holds another object with a state dict."""

    def state_dict(self) -> Endless:
        return Endless()


def cyclic() -> Any:
    state: dict[str, Any] = {}
    state["list"] = [1, {"again": state}]
    return state


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    state: Any = 1
    for _ in range(depth):
        state = wrap(state)
    return {"root": state}


@pytest.mark.parametrize(
    "state",
    [
        cyclic(),
        {"x": Endless()},
        nested(10_000, lambda inner: {"k": inner}),
        nested(10_000, lambda inner: [inner]),
        nested(10_000, lambda inner: (inner,)),
        nested(65, lambda inner: [inner]),
    ],
    ids=["cyclic", "endless", "dicts", "lists", "tuples", "one too many"],
)
def test_case_095_cyclic_or_too_deep_state(save: Save, tmp_path: Path, state: Any) -> None:
    with pytest.raises(UsageError, match=r"contains itself|nested too deeply"):
        save(state)
    assert asyncckpt.list_steps(tmp_path) == []


@pytest.mark.parametrize("wrap", [lambda inner: {"k": inner}, lambda inner: [inner], lambda inner: (inner,)])
def test_case_095_deepest_state_that_is_taken_can_be_read(
    save: Save, tmp_path: Path, wrap: Callable[[Any], Any]
) -> None:
    save(nested(63, wrap))
    assert list(asyncckpt.Loader(tmp_path).load().values.values()) == [1]


def test_case_096_same_object_twice(save: Save, tmp_path: Path) -> None:
    shared = {"t": torch.arange(3.0), "v": 1}
    model = torch.nn.Linear(2, 1)
    save({"a": shared, "b": shared, "list": [shared, shared], "m": model, "n": model})
    target = {"a": {"t": torch.zeros(3)}, "list": [{"t": torch.zeros(3)}, {"t": torch.zeros(3)}]}
    report = asyncckpt.Loader(tmp_path, tensors=target).load()
    assert target["list"][1]["t"].tolist() == [0, 1, 2]
    assert report.values == {"a.v": 1, "b.v": 1, "list.0.v": 1, "list.1.v": 1}


def test_case_096_same_table_twice(tmp_path: Path) -> None:
    table = asyncckpt.HashTable("t", 1)
    for make in (
        lambda: asyncckpt.Saver(path=tmp_path, hashtables={"a": table, "b": table}),
        lambda: asyncckpt.Loader(tmp_path, {"a": table, "b": table}),
    ):
        with pytest.raises(UsageError, match="'a' and 'b' are the same table"):
            make()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (asyncckpt.HashTable("t", 1), r"'a'\['b'\] is a hash table \(give it in hashtables"),
        (torch.Generator(), r"'a'\['b'\] is a generator of random numbers .*RngState\(generators="),
    ],
)
def test_what_is_saved_otherwise_says_how(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        asyncckpt.save(tmp_path, {"a": {"b": value}})
    assert asyncckpt.list_steps(tmp_path) == []


class Changing(dict[str, Any]):
    """A dict that another thread adds to each time its keys are listed."""

    def keys(self) -> Any:
        self[f"new{len(self)}"] = 1
        return list(dict.keys(self))


class Breaking(dict[str, Any]):
    """A mapping that notices it."""

    def keys(self) -> Any:
        raise RuntimeError("dictionary changed size during iteration")


class Short(dict[str, Any]):
    """One that has its keys again when they are looked at."""

    def values(self) -> Any:
        return [*dict.values(self)][1:]


@pytest.mark.parametrize("kind", [Changing, Breaking, Short])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"inner": x}, lambda x: {"list": [x]}])
def test_case_096_state_that_changes_while_it_is_read(
    save: Save, tmp_path: Path, kind: type[dict[str, Any]], wrap: Callable[[Any], Any]
) -> None:
    with pytest.raises(UsageError, match=r"changed by another thread"):
        save(wrap(kind(x=1)))
    assert asyncckpt.list_steps(tmp_path) == []


# -- 97: filters -------------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[[Any], Any]:
    def filter_func(blocks: Any) -> Any:
        raise error

    return filter_func


def replacing(**changes: Any) -> Callable[[Any], Any]:
    return lambda blocks: [block.replace(**changes) if block.tensor_name() == "x" else block for block in blocks]


FILTERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "raises": (raising(ValueError("my reason")), "ValueError: my reason"),
    "raises ours": (raising(asyncckpt.NotFoundError("my reason")), "my reason"),
    "exits": (raising(SystemExit(3)), "SystemExit: 3"),
    "stops": (raising(StopIteration(3)), "StopIteration"),
    "interrupts": (raising(KeyboardInterrupt()), "KeyboardInterrupt"),
    "none": (lambda blocks: None, "returned nonsense, found None"),
    "text": (lambda blocks: "blocks", "returned nonsense, found a str"),
    "dict": (lambda blocks: {}, "returned nonsense, found a dict"),
    "generator": (lambda blocks: (block for block in blocks), "returned nonsense, found a generator"),
    "list of none": (lambda blocks: [None], "found None, expected a WriteBlock"),
    "list of tensors": (lambda blocks: [block.data for block in blocks], "found a Tensor, expected a WriteBlock"),
    "twice": (lambda blocks: [*blocks, blocks[0]], "twice"),
    "no tensor": (replacing(data=[1.0]), "'x' by something that is not a tensor, found a list"),
    "sparse": (replacing(data=torch.eye(3).to_sparse()), "'x' badly.*sparse_coo"),
    "meta": (replacing(data=torch.ones(3, device="meta")), "'x' badly.*meta device"),
    "taken name": (replacing(name="y"), "'y' twice"),
    "no name": (replacing(name=5), "gave block 'x' a name that is not a string, found 5"),
    "no unicode": (replacing(name="\ud800"), "'x' badly.*Unicode"),
    "rows": (
        lambda blocks: [b.replace(data=b.data[:1]) if b.table else b for b in blocks],
        "'t@id' by another number of rows",
    ),
    "float ids": (
        lambda blocks: [b.replace(data=b.data.double()) if b.column == "id" else b for b in blocks],
        "'t@id' by no ids",
    ),
    "dropped ids": (lambda blocks: [b for b in blocks if b.column != "id"], "'t@embedding' of a table without its ids"),
}


@pytest.mark.parametrize("kind", FILTERS)
def test_case_097_filter_with_a_fault(save: Save, tmp_path: Path, kind: str) -> None:
    function, said = FILTERS[kind]
    table = asyncckpt.HashTable("t", 2)
    table.lookup(torch.tensor([1, 2]))
    state = {"x": torch.ones(3), "y": torch.ones(2)}
    with pytest.raises(FilterError, match=said) as caught:
        save(state, hashtables={"t": table}, filter_func=function)
    if kind.startswith(("raises", "exits", "stops", "interrupts")):
        assert type(caught.value.__cause__).__name__ in ("ValueError", "NotFoundError", "SystemExit", "StopIteration",
                                                         "KeyboardInterrupt")  # fmt: skip
    assert asyncckpt.list_steps(tmp_path) == []
    assert list((tmp_path / "data").iterdir()) == []
    assert table.lookup(torch.tensor([3])).tolist() == [2], "the table is free again"


def test_case_097_block_of_another_save(tmp_path: Path) -> None:
    kept: list[Any] = []

    def swap(blocks: list[Any]) -> list[Any]:
        kept.append(blocks)
        return kept[0]

    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}, filter_func=swap) as saver:
        saver.save_async(0).result()
        with pytest.raises(FilterError, match="returned block 'x' of another save"):
            saver.save_async(1).result()


def test_case_097_filter_gets_no_live_memory_and_runs_on_a_thread_of_ours(tmp_path: Path) -> None:
    threads: list[str] = []

    def scribble(blocks: list[Any]) -> list[Any]:
        threads.append(threading.current_thread().name)
        for block in blocks:
            block.data.fill_(-1)  # Forbidden, and yet the live tensor stays as it is.
        return blocks

    live = torch.ones(3)
    for staged in (False, True):
        with asyncckpt.Saver(path=tmp_path / str(staged), tensors={"x": live}, filter_func=scribble) as saver:
            saver.save_async(0).result() if staged else saver.save(0)
        assert live.tolist() == [1, 1, 1]
        assert asyncckpt.verify(tmp_path / str(staged)).blocks_count == 1  # What was written fits its digest.
    assert set(threads) == {"asyncckpt-worker"}


def test_case_097_filter_may_return_views_and_other_dtypes(save: Save, tmp_path: Path) -> None:
    base = torch.arange(6.0)

    def odd(blocks: list[Any]) -> list[Any]:
        views = {"a": base[::2], "b": base.view(2, 3).t(), "c": base.half().expand(4, 6)}
        return [block.replace(data=views[block.tensor_name()]) for block in blocks]

    save({name: torch.zeros(1) for name in "abc"}, filter_func=odd)
    like = {"a": torch.zeros(3), "b": torch.zeros(3, 2), "c": torch.zeros(4, 6, dtype=torch.float16)}
    back = loaded(tmp_path, like)
    assert back["a"].tolist() == [0, 2, 4]
    assert back["b"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert torch.equal(back["c"], base.half().expand(4, 6))


# -- 98 and 99 ---------------------------------------------------------------------------------------------------------


def test_case_098_snapshot_runs_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any, **__: Any) -> Any:
        raise MemoryError

    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}) as saver:
        with monkeypatch.context() as patched:
            patched.setattr(pool, "acquire", exhausted)
            with pytest.raises(IOFailedError, match=r"ran out of memory.*lower host_memory_limit, or use save"):
                saver.save_async(0)
        assert saver.save_async(0).result().step == 0


def test_case_098_filter_runs_out_of_memory(save: Save) -> None:
    with pytest.raises(FilterError, match="MemoryError"):
        save({"x": torch.ones(3)}, filter_func=raising(MemoryError()))


def test_case_098_snapshot_over_the_limit_is_saved_blocking(tmp_path: Path) -> None:
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.ones(3)}, host_memory_limit=0) as saver:
        with pytest.warns(RuntimeWarning, match=r"does not fit the host memory limit .0 bytes."):
            future = saver.save_async(0)
        assert future.done()
        assert future.result().fallback is not None
    assert asyncckpt.verify(tmp_path).step == 0


@pytest.mark.parametrize(
    "state", [5, "text", b"bytes", torch.ones(3), np.ones(3), [1, 2], [("a", 1, 2)], [("a", 1), 3]]
)
def test_case_099_state_that_is_no_mapping(tmp_path: Path, state: Any) -> None:
    for make in (
        lambda: asyncckpt.Saver(path=tmp_path, tensors=state),
        lambda: asyncckpt.Loader(tmp_path, tensors=state),
    ):
        with pytest.raises(UsageError, match=r"neither a mapping nor .name, tensor. pairs.*{'model': model"):
            make()
    asyncckpt.Saver(path=tmp_path).close()


@pytest.mark.parametrize("pairs", [[("a", 1), ("a", 2)], [(1, 2)], [(["a"], 2)]])
def test_case_099_pairs_without_names_of_their_own(tmp_path: Path, pairs: Any) -> None:
    with pytest.raises(UsageError, match=r"names an entry twice|neither a mapping"):
        asyncckpt.Saver(path=tmp_path, tensors=pairs)


@pytest.mark.parametrize("key", [1, None, 2.5, ("a",), b"a"])
def test_case_099_top_level_name_that_is_no_text(save: Save, key: Any) -> None:
    with pytest.raises(UsageError, match=r"top-level name is not a string|key of a type that cannot be stored"):
        save({key: torch.ones(1)})


def test_case_099_empty_names(save: Save, tmp_path: Path) -> None:
    assert_round_trip(save, tmp_path, **{"": torch.ones(2)})
