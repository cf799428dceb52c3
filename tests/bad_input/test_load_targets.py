"""Cases 100 to 105: targets that do not fit, tables of other shards, checkpoints that come and go."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crafted import Crafted, block, flip, picture
from sentinels import STEP, Targets, hooked_targets, refused, save_small, small_tensors

import asyncckpt
from asyncckpt.engine.process.save_lock import save_lock
from tests.worlds.rows import rows_of
from tests.worlds.saves import save_one

CorruptError, NotFoundError = asyncckpt.CorruptError, asyncckpt.NotFoundError
IncompatibleError, UnsupportedError = asyncckpt.IncompatibleError, asyncckpt.UnsupportedError
UsageError = asyncckpt.UsageError


# -- 100: what does not fit --------------------------------------------------------------------------------------------


def not_fitting(small: Crafted, targets: Targets, **options: Any) -> str:
    """The message of the IncompatibleError, after which nothing may be changed."""
    before = picture(small.root)
    with pytest.raises(IncompatibleError) as caught:
        targets.load(small.root, **options)
    assert picture(small.root) == before
    return str(caught.value)


def test_case_100_all_misfits_in_one_error(small: Crafted) -> None:
    targets = Targets()
    targets.tensors.update(
        w=torch.full((4, 3), -77.0), b=torch.full((5,), -77, dtype=torch.int32), more=torch.full((2,), -77.0), alpha=1.0
    )
    targets.table = asyncckpt.HashTable("user", 3, optimizer_slots={"sum": torch.float64, "moment": ()})
    message = not_fitting(small, targets)
    for part in (
        "step 7 does not match this state",
        "'w' has shape (4, 3), the checkpoint (3, 4)",
        "'b' has dtype torch.int32, the checkpoint torch.int64",
        "only in this state (2): ",
        "'more'",
        "'alpha'",
        "column 'embedding' of table 'user' has rows (3,), the checkpoint (2,)",
        "column 'sum' of table 'user' has dtype torch.float64, the checkpoint torch.float32",
        "columns ['moment'] of table 'user' are missing in the checkpoint",
        "nothing was changed",
        "strict=False",
    ):
        assert part in message
    assert all(bool(targets.tensors[name].eq(-77).all()) for name in ("w", "b", "more"))
    assert len(targets.table) == 0


def test_case_100_first_twenty_and_their_count(small: Crafted) -> None:
    targets = Targets()
    targets.tensors.update({f"extra{index:02d}": torch.zeros(1) for index in range(50)})
    message = not_fitting(small, targets)
    assert "only in this state (50): " in message
    assert message.count("'extra") == 20
    assert targets.untouched


def test_case_100_dtype_and_shape_are_never_let_pass(small: Crafted) -> None:
    targets = Targets()
    targets.tensors["w"] = torch.full((3, 4), -77.0, dtype=torch.float64)
    assert "'w' has dtype torch.float64" in not_fitting(small, targets, strict=False)
    assert bool(targets.tensors["b"].eq(-77).all())


def test_case_100_missing_table(small: Crafted) -> None:
    table = asyncckpt.HashTable("item", 2)
    with pytest.raises(IncompatibleError, match=r"only in this state \(1\): 'item'"):
        asyncckpt.Loader(small.root, {"item": table}).load()
    with pytest.warns(RuntimeWarning, match="nothing was loaded"):
        assert asyncckpt.Loader(small.root, {"item": table}, strict=False).load().missing == ("item",)


@pytest.mark.parametrize("change", ["renamed", "smaller", "larger", "without bias"])
def test_case_100_module_of_another_form(tmp_path: Path, change: str) -> None:
    saved = torch.nn.Linear(3, 2)
    save_one(tmp_path, 0, tensors={"model": saved})
    others: dict[str, torch.nn.Module] = {
        "renamed": torch.nn.Sequential(torch.nn.Linear(3, 2)),
        "smaller": torch.nn.Linear(3, 1),
        "larger": torch.nn.Linear(4, 2),
        "without bias": torch.nn.Linear(3, 2, bias=False),
    }
    other = others[change]
    before = [parameter.clone() for parameter in other.parameters()]
    with pytest.raises(IncompatibleError, match=r"(only in .*'model|'model.* has shape)"):
        asyncckpt.Loader(tmp_path, tensors={"model": other}).load()
    assert all(map(torch.equal, other.parameters(), before))


class Refusing(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        raise ValueError("another form")


def test_case_100_optimizer_of_another_form(tmp_path: Path) -> None:
    """Where only the optimizer itself can tell, it does when all else is filled; the error says so."""
    model = torch.nn.Linear(3, 2)
    save_one(tmp_path, 0, tensors={"optim": torch.optim.SGD(model.parameters(), lr=0.5)})
    with pytest.raises(IncompatibleError, match=r"load_state_dict of 'optim' failed: ValueError.*filled already"):
        asyncckpt.Loader(tmp_path, tensors={"optim": Refusing(model.parameters(), lr=0.1)}).load()


LOAD_FILTERS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "raises": (lambda info: 1 // 0, UsageError, "load filter raised.*ZeroDivisionError"),
    "none": (lambda info: None, UsageError, "nonsense"),
    "list": (lambda info: ["w"], UsageError, "nonsense.*{destination: {source: .columns.}}"),
    "columns": (lambda info: {"w": {"w": 5}}, UsageError, "nonsense"),
    "no source": (lambda info: {"w": {}}, IncompatibleError, "'w' has 0 sources"),
    "two sources": (lambda info: {"w": {"w": [], "b": []}}, IncompatibleError, "'w' has 2 sources"),
    "unknown source": (lambda info: {"w": {"v": []}}, IncompatibleError, "source 'v' of 'w' is not in the checkpoint"),
    "unknown target": (lambda info: {"v": {"w": []}}, IncompatibleError, "'v' is neither a table nor a tensor"),
    "other dtype": (lambda info: {"w": {"b": []}}, IncompatibleError, "'w' has dtype torch.float32, the checkpoint"),
    "unknown column": (
        lambda info: {"user": {"user": ["id", "momentum"]}},
        IncompatibleError,
        "column 'momentum' of table 'user' is not in the checkpoint",
    ),
    "no ids": (lambda info: {"user": {"user": ["embedding"]}}, IncompatibleError, "table 'user' needs 'id'"),
    "twice": (lambda info: {"user": {"user": ["id", "sum", "sum"]}}, IncompatibleError, "table 'user' needs 'id'"),
    "unknown table": (
        lambda info: {"user": {"item": ["id", "sum"]}},
        IncompatibleError,
        "source 'item' of table 'user'",
    ),
}


@pytest.mark.parametrize("kind", LOAD_FILTERS)
@pytest.mark.parametrize("strict", [False, True])
def test_case_100_load_filter_with_a_fault(small: Crafted, kind: str, strict: bool) -> None:
    function, error, said = LOAD_FILTERS[kind]
    targets = Targets()
    with pytest.raises(error, match=said):
        targets.load(small.root, filter_func=function, strict=strict)
    assert targets.untouched


# -- 101: targets that cannot be written, or not plainly ---------------------------------------------------------------


class Readable:
    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.zeros(1)}


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def freed() -> torch.Tensor:
    tensor = torch.full((3, 4), -77.0)
    tensor.untyped_storage().resize_(8)
    return tensor


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.full((3, 4), -77.0)


BAD_TARGETS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "meta": (lambda: torch.zeros(3, 4, device="meta"), UnsupportedError, "'w' is on the meta device"),
    "expanded": (lambda: torch.zeros(1, 4).expand(3, 4), UsageError, "'w' has overlapping elements"),
    "overlapping": (lambda: torch.zeros(8).as_strided((3, 4), (2, 1)), UsageError, "'w' has overlapping elements"),
    "read-only array": (lambda: read_only(np.zeros((3, 4), np.float32)), UsageError, "'w' is a read-only array"),
    "negative strides": (lambda: np.zeros((3, 4), np.float32)[::-1], UsageError, "'w' has negative strides"),
    "mkldnn": (lambda: torch.zeros(3, 4).to_mkldnn(), UnsupportedError, "'w' has a layout"),
    "freed": (freed, UsageError, "'w' has a freed or shrunk storage"),
    "inference": (inference, UsageError, "'w' is an inference tensor"),
    "no load_state_dict": (Readable, UsageError, "'w' has state_dict.. but no load_state_dict"),
    "set": (lambda: {object()}, UsageError, "'w' has type"),
    "big-endian array": (lambda: np.zeros((3, 4), ">f4"), UsageError, "'w' cannot be saved|'w'.*byte order"),
}


@pytest.mark.parametrize("kind", BAD_TARGETS)
def test_case_101_target_that_cannot_be_written(small: Crafted, kind: str) -> None:
    make, error, said = BAD_TARGETS[kind]
    targets = Targets()
    fine = targets.tensors["w"]
    targets.tensors["w"] = make()
    with pytest.raises(error, match=said):
        targets.load(small.root)
    targets.tensors["w"] = fine
    assert targets.untouched


GOOD_TARGETS: dict[str, Callable[[], Any]] = {
    "parameter": lambda: torch.nn.Parameter(torch.zeros(3, 4)),
    "transposed": lambda: torch.zeros(4, 3).t(),
    "slice": lambda: torch.zeros(3, 9)[:, 2:6],
    "every second": lambda: torch.zeros(6, 4)[::2],
    "flipped strides": lambda: torch.zeros(4, 6).t()[::2],
    "array": lambda: np.zeros((3, 4), np.float32),
    "strided array": lambda: np.zeros((3, 8), np.float32)[:, ::2],
    "shared": lambda: torch.zeros(3, 4).share_memory_(),
    "buffer": lambda: torch.nn.Buffer(torch.zeros(3, 4)),
}


@pytest.mark.parametrize("kind", GOOD_TARGETS)
def test_case_101_target_of_another_kind_of_memory(small: Crafted, kind: str) -> None:
    target = GOOD_TARGETS[kind]()
    asyncckpt.Loader(small.root, tensors={"w": target}).load()
    assert torch.equal(torch.as_tensor(target), small_tensors()["w"])
    assert getattr(target, "requires_grad", False) is (kind == "parameter")


def test_case_101_neighbours_of_a_strided_target_stay(small: Crafted) -> None:
    base = torch.full((3, 9), -77.0)
    asyncckpt.Loader(small.root, tensors={"w": base[:, 2:6]}).load()
    assert bool(base[:, [0, 1, 6, 7, 8]].eq(-77).all())


# -- 102: other shards, on one machine ---------------------------------------------------------------------------------

MANY_IDS = [0, 1, -1, 2**63 - 1, -(2**63), *range(5, 200, 3), *range(-400, -300, 7)]


def table_of(ids: list[int], shard: tuple[int, int] = (0, 1)) -> asyncckpt.HashTable:
    table = asyncckpt.HashTable("t", 2, optimizer_slots={"sum": ()}, shard=shard, capacity=4)
    if ids:
        embedding = torch.tensor([[float(id % 1009), float(id % 31)] for id in ids])
        table.insert(torch.tensor(ids), embedding, sum=torch.tensor([float(id % 17) for id in ids]))
    return table


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("ids", [MANY_IDS, [5], []], ids=len)
def test_case_102_resharded_from_one_to_many_and_back(tmp_path: Path, count: int, ids: list[int]) -> None:
    """Uneven shards and empty ones among them; ownership is by unsigned modulo."""
    save_one(tmp_path / "one", 0, hashtables={"t": table_of(ids)}, durability="none")
    indices = range(count) if count < 10 else sorted({id % 2**64 % count for id in ids} | {0, 1})
    parts = {f"t{index}": table_of([], shard=(index, count)) for index in indices}
    for index, table in zip(indices, parts.values(), strict=True):
        asyncckpt.Loader(tmp_path / "one", {"t": table}).load()
        assert set(rows_of(table)) == {id for id in ids if id % 2**64 % count == index}
    alone = asyncckpt.RankOptions(alone=True)
    save_one(tmp_path / "many", 0, hashtables=parts, durability="none", ranks=alone)
    whole = table_of([])
    columns = ["id", "embedding", "sum"]
    asyncckpt.Loader(
        tmp_path / "many",
        {"t": whole},
        filter_func=lambda info: {"t": {name: columns for name in parts}},
        strict=len(parts) == count,
    ).load()
    assert rows_of(whole) == rows_of(table_of(ids))


# -- 103: while others save and let go ---------------------------------------------------------------------------------


def test_case_103_newest_step_is_let_go_while_it_is_loaded(small: Crafted) -> None:
    """Another process's retention, between the manifest and the files: the newer step is loaded instead."""
    calls: list[int] = []

    def retention(info: Any) -> Any:
        if not calls:
            save_small(small.root, step=8)
            small.manifest_path.unlink()
            shutil.rmtree(next(small.root.glob("data/000000000007-*")))
        calls.append(1)
        return info

    targets = Targets()
    assert targets.load(small.root, filter_func=in_place_of_another_process(retention)).step == 8
    assert len(calls) == 2
    assert targets.loaded


def in_place_of_another_process(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A load holds the process's save lock; the other process of the test shares this one, so it does without."""

    def run(info: Any) -> Any:
        held, save_lock._held = save_lock._held, []
        try:
            return function(info)
        finally:
            save_lock._held = held

    return run


def test_case_103_given_step_is_let_go_while_it_is_loaded(small: Crafted) -> None:
    def retention(info: Any) -> Any:
        small.shard_path().unlink()
        small.manifest_path.unlink()
        return info

    targets = Targets()
    with pytest.raises(NotFoundError, match=f"step {STEP} is not in"):
        targets.load(small.root, filter_func=retention, step=STEP)
    assert targets.untouched


def test_case_103_the_only_step_is_let_go(small: Crafted) -> None:
    def retention(info: Any) -> Any:
        shutil.rmtree(small.shard_path().parent)
        small.manifest_path.unlink()
        return info

    targets = Targets()
    with pytest.raises(NotFoundError, match="there is no checkpoint"):
        targets.load(small.root, filter_func=retention)
    assert targets.untouched


def test_case_103_files_let_go_while_they_are_read(small: Crafted) -> None:
    targets = hooked_targets(lambda: shutil.rmtree(small.root))
    targets.load(small.root)
    assert targets.loaded, "open files stay to their end"


def test_case_103_load_during_a_save_of_the_process(small: Crafted) -> None:
    targets = Targets()
    errors: list[BaseException] = []

    def load_inside(blocks: Any) -> Any:
        with pytest.raises(asyncckpt.SaveInProgressError) as caught:
            targets.load(small.root, on_busy="raise")
        with pytest.raises(UsageError, match="save of step 9"):
            targets.load(small.root)  # The save waits for this filter.
        errors.append(caught.value)
        return blocks

    save_one(small.root, 9, staged=True, tensors=small_tensors(), filter_func=load_inside)
    assert "save of step 9" in str(errors[0])
    assert targets.untouched


# -- 104 and 105: damaged, or not there --------------------------------------------------------------------------------


def damage_data(found: Crafted) -> None:
    flip(found.shard_path(), block(found.document(), "w")["offset"], 1)


DAMAGES: Mapping[str, Callable[[Crafted], object]] = {
    "manifest": lambda found: flip(found.manifest_path, 20, 1),
    "empty manifest": lambda found: found.write_raw(b""),
    "missing shard": lambda found: found.shard_path().unlink(),
    "header": lambda found: flip(found.shard_path(), 20, 1),
    "data": damage_data,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("verify", [True, "before"])
def test_case_104_newest_is_damaged(small: Crafted, damage: str, verify: Any) -> None:
    newest = save_small(small.root, step=8)
    DAMAGES[damage](newest)
    refused(small.root, CorruptError, untouched=damage != "data" or verify == "before", verify=verify)
    targets = Targets()
    report = targets.load(small.root, fallback=True, verify=verify)
    assert (report.step, report.fallback_from) == (7, (8,))
    assert targets.loaded


def test_case_104_all_are_damaged(small: Crafted) -> None:
    newest = save_small(small.root, step=8)
    for found in (small, newest):
        found.shard_path().unlink()
    error = refused(small.root, CorruptError, "no checkpoint", "is sound", "[8, 7]", fallback=True)
    assert isinstance(error.__cause__, CorruptError)


def test_case_104_fallback_from_a_step_that_is_not_there(small: Crafted) -> None:
    save_small(small.root, step=8)
    report = Targets().load(small.root, step=9, fallback=True)
    assert (report.step, report.fallback_from) == (8, (9,))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"version": 2}, IncompatibleError),
        ({"kind": "differential"}, UnsupportedError),
        ({"byteorder": "big"}, UnsupportedError),
    ],
)
def test_case_104_newer_formats_are_not_passed_over(small: Crafted, fields: dict[str, Any], error: Any) -> None:
    """To go back to an old step because the program is old would lose work without a word."""
    newest = save_small(small.root, step=8)
    newest.edit(lambda document: document.update(fields))
    refused(small.root, error, fallback=True)


def test_case_105_no_checkpoint(tmp_path: Path, small: Crafted) -> None:
    with pytest.raises(NotFoundError, match=r"'.*nowhere' does not exist"):
        asyncckpt.Loader(tmp_path / "nowhere").load()
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"'.*empty' is not a checkpoint directory"):
        asyncckpt.Loader(tmp_path / "empty").load()
    assert list((tmp_path / "empty").iterdir()) == []
    asyncckpt.Saver(path=tmp_path / "new").close()
    with pytest.raises(NotFoundError, match=r"there is no checkpoint in '.*new'"):
        asyncckpt.Loader(tmp_path / "new").load()
    refused(small, NotFoundError, "step 6 is not in", "steps [7]", step=6)


@pytest.mark.parametrize("step", [-1, "7", 7.0, True, 2.5, [7]])
def test_case_105_step_that_is_no_number(small: Crafted, step: Any) -> None:
    with pytest.raises(UsageError, match="step must be"):
        asyncckpt.Loader(small.root, step=step)
    saver = asyncckpt.Saver(path=small.root, tensors={"n": 1})
    with saver, pytest.raises(UsageError, match="step must be"):
        saver.save_async(step)
    for question in (asyncckpt.describe, asyncckpt.verify, asyncckpt.compact):
        with pytest.raises(UsageError, match="step must be"):
            question(small.root, step)


def test_case_105_steps_end_at_twelve_digits(tmp_path: Path) -> None:
    last = 10**12 - 1
    with asyncckpt.Saver(path=tmp_path, tensors={"n": 1}) as saver:
        saver.save(last)
        for step in (None, last + 1):
            with pytest.raises(UsageError, match=rf"step must be an int in .0, {last}.; got {last + 1}"):
                saver.save(step)
    assert asyncckpt.list_steps(tmp_path) == [last]
    with pytest.raises(UsageError, match="step must be"):
        asyncckpt.Loader(tmp_path, step=last + 1)


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": 0}, {"parallel": 1000}, {"parallel": "8"}, {"parallel": True},
        {"verify": "after"}, {"on_busy": "skip"},
        {"on_busy": asyncckpt.BusyPolicy("skip")}, {"on_busy": asyncckpt.BusyPolicy("queue")}, {"ranks": None},
        {"hashtables": []}, {"hashtables": {"t": torch.ones(1)}}, {"hashtables": {"a@b": None}}, {"tensors": 5},
    ],
    ids=str,
)  # fmt: skip
def test_loader_options_of_wrong_kind(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        asyncckpt.Loader(tmp_path, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": 0}, {"parallel": 1000}, {"parallel": 2.0}, {"on_busy": "wait!"}, {"durability": "maybe"},
        {"deltas": 5}, {"device": None}, {"ranks": {}}, {"debug": True}, {"on_busy": 5},
        {"host_memory_limit": -1}, {"host_memory_limit": 1.5}, {"keep": 0}, {"keep": True},
        {"filter_func": None}, {"hashtables": []}, {"hashtables": {"t": torch.ones(1)}}, {"tensors": 5},
        {"shard_num": 0}, {"shard_index": 1}, {"shard_index": -1}, {"shard_num": "2"},
    ],
    ids=str,
)  # fmt: skip
def test_saver_options_of_wrong_kind(tmp_path: Path, options: dict[str, Any]) -> None:
    """Refused when the Saver is made, and before anything is made on disk."""
    with pytest.raises(UsageError):
        asyncckpt.Saver(path=tmp_path / "root", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_longer_list_gets_what_was_stored(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"x": [1, 2], "y": {0: 1}})
    report = asyncckpt.Loader(tmp_path, tensors={"x": [1, 2, 3], "y": {0: 1}}).load()
    assert (report.missing, {name for name in report.values if name.startswith("x")}) == ((), {"x.0", "x.1"})
    with pytest.raises(asyncckpt.IncompatibleError, match=r"only in this state .1.: .y.1."):
        asyncckpt.Loader(tmp_path, tensors={"x": [1, 2], "y": {0: 1, 1: 2}}).load()


def test_a_target_without_memory_is_told_how_to_get_some(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"m": torch.nn.Linear(2, 2)})
    target = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(asyncckpt.UnsupportedError, match=r"'m.weight' is on the meta device.*to_empty"):
        asyncckpt.Loader(tmp_path, tensors={"m": target}).load()


def test_a_text_of_numpy_is_no_array(tmp_path: Path) -> None:
    with pytest.raises(asyncckpt.UsageError, match=r"NumPy scalar 'x' cannot be saved.*of text, str\(\.\.\.\)"):
        asyncckpt.save(tmp_path, {"x": np.str_("a")})
