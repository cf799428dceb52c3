"""A load that does not fit is refused with all that is wrong, before anything is touched; and what a load that fails
later has left is not saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import asyncckpt
from asyncckpt import optim
from asyncckpt.errors import IncompatibleError, UsageError
from asyncckpt.nn import HashEmbeddingBag
from asyncckpt.trainer_state import DataPosition, ResumableSampler, RngState, StepCounter
from tests.untouched import looked_at

SPARSE = {"adagrad": optim.SparseAdagrad, "adam": optim.SparseAdam}


class Recommender:
    """Tables of these names, a head, and their optimizers: what a trainer gives to a Checkpointer."""

    def __init__(self, *names: str, rule: str = "adagrad", seed: int = 0) -> None:
        torch.manual_seed(seed)
        slots = SPARSE[rule].optimizer_slots()
        self.tables = {name: asyncckpt.HashTable(name, 4, optimizer_slots=slots) for name in names}
        self.model = nn.ModuleDict({name: HashEmbeddingBag(table) for name, table in self.tables.items()})
        self.model["head"] = nn.Linear(4, 1)
        self.dense = torch.optim.AdamW(self.model.parameters())
        self.sparse = SPARSE[rule](self.model, lr=0.1)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "dense": self.dense, "sparse": self.sparse}

    def train(self, step: int) -> None:
        ids = torch.arange(6).view(3, 2) + step
        pooled = sum(self.model[name](ids) for name in self.tables)
        self.model["head"](pooled).square().mean().backward()
        for optimizer in (self.dense, self.sparse):
            optimizer.step()
            optimizer.zero_grad()


def saved(path: Path) -> None:
    trained = Recommender("user", "item")
    with asyncckpt.Checkpointer(path, every=2, options={"durability": "none"}, **trained.parts()) as ckpt:
        for step in range(1, 5):
            trained.train(step)
            ckpt.step(step)


@pytest.mark.parametrize(("other", "whys"), [
    (lambda: Recommender("user", "item", "ad", seed=1), ["(1): 'ad'", "'sparse' does not take its state"]),
    (lambda: Recommender("user", seed=1), ["'sparse' does not take its state", "that of other tables"]),
    (lambda: Recommender("user", "item", rule="adam", seed=1), ["'exp_avg_sq'", "has the state of 'SparseAdagrad'"]),
], ids=["a new table", "a table less", "another optimizer"])  # fmt: skip
def test_a_changed_model_is_refused_with_all_that_is_wrong_and_nothing_changes(
    tmp_path: Path, other: Callable[[], Recommender], whys: list[str]
) -> None:
    saved(tmp_path)
    changed = other()
    changed.train(1)
    rows = {name: table.read(table.ids()) for name, table in changed.tables.items()}
    head = changed.model["head"].weight.detach().clone()
    with asyncckpt.Checkpointer(tmp_path, every=2, **changed.parts()) as ckpt:
        with pytest.raises(IncompatibleError, match="nothing was changed") as caught:
            ckpt.restore()
        assert all(why in str(caught.value) for why in whys), caught.value
    assert torch.equal(changed.model["head"].weight, head)
    for name, table in changed.tables.items():
        assert all(torch.equal(values, rows[name][column]) for column, values in table.read(table.ids()).items())


def test_dropped_columns_of_optimizers_are_reported_as_missing(tmp_path: Path) -> None:
    saved(tmp_path)
    changed = Recommender("user", "item", rule="adam")
    loader = asyncckpt.Loader(tmp_path, hashtables=changed.tables, tensors={"model": changed.model}, strict=False)
    assert loader.load().missing == ("user@exp_avg", "user@exp_avg_sq", "item@exp_avg", "item@exp_avg_sq")


def positions(count: int) -> DataPosition:
    return DataPosition(torch.utils.data.DataLoader(list(range(count)), sampler=ResumableSampler(count)))


@pytest.mark.parametrize(("was", "now"), [
    (StepCounter(3), RngState()),
    (RngState(generators={"mine": torch.Generator()}), RngState()),
    (positions(8), positions(9)),
    (torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")),
    (nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(2))])),
], ids=["step", "random numbers", "data", "scaler", "no optimizer"])  # fmt: skip
def test_objects_that_are_known_are_checked_before_anything_is_touched(tmp_path: Path, was: Any, now: Any) -> None:
    asyncckpt.save(tmp_path, {"x": torch.ones(2), "it": was}, durability="none")
    x = torch.zeros(2)
    with pytest.raises(IncompatibleError, match=r"nothing was changed: 'it' "):
        asyncckpt.Loader(tmp_path, tensors={"x": x, "it": now}).load()
    assert not x.any()


class Moody:
    """An object that nobody knows, and that may refuse its state."""

    refuses = False

    def state_dict(self) -> dict[str, int]:
        return {"mood": 1}

    def load_state_dict(self, state: object) -> None:
        if self.refuses:
            raise ValueError("not today")


def half_loaded(path: Path, on_error: Any = "raise") -> tuple[torch.Tensor, Moody, asyncckpt.Checkpointer]:
    """A Checkpointer whose restore has filled x, and then failed."""
    asyncckpt.save(path, {"x": torch.ones(2), "moody": Moody()}, 5, durability="none")
    x, moody = torch.zeros(2), Moody()
    ckpt = asyncckpt.Checkpointer(path, every=1, on_error=on_error, x=x, moody=moody)
    moody.refuses = True
    with pytest.raises(IncompatibleError, match=r"not today.*filled already"):
        ckpt.restore()
    assert x.all()
    return x, moody, ckpt


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_nothing_is_saved_after_a_load_that_failed_half_way(tmp_path: Path, on_error: str) -> None:
    _, _, ckpt = half_loaded(tmp_path, on_error)
    for save in (lambda: ckpt.step(6), lambda: ckpt.save_now(6)):
        with pytest.raises(
            UsageError, match=r"loading step 5 has failed .* \(call restore\(\) to load a step into it; or .*begin_anew"
        ):
            save()
    with pytest.raises(UsageError) if on_error == "raise" else pytest.warns(RuntimeWarning, match="loading step 5"):
        ckpt.close()
    assert asyncckpt.list_steps(tmp_path) == [5]


@pytest.mark.parametrize("is_restored", [True, False])
def test_saves_go_on_when_a_restore_succeeds_or_training_begins_anew(tmp_path: Path, is_restored: bool) -> None:
    _, moody, ckpt = half_loaded(tmp_path)
    with ckpt:
        if is_restored:
            moody.refuses = False
            assert ckpt.restore() == 6
        else:
            ckpt.begin_anew()
        ckpt.step(6)
    assert asyncckpt.list_steps(tmp_path) == [5, 6]


def test_what_is_advised_after_a_failure_half_way_leads_on(tmp_path: Path) -> None:
    """A new state has steps of its own, perhaps from 0, and the directory has newer ones."""
    _, _, ckpt = half_loaded(tmp_path)
    with ckpt:
        ckpt.begin_anew()
        with pytest.raises(UsageError, match=r"step 0 is not above step 5.*or use another directory"):
            ckpt.step(0)
        ckpt.step(6)
    assert asyncckpt.list_steps(tmp_path) == [5, 6]


def test_another_loop_over_the_same_objects_does_not_save_them_either(tmp_path: Path) -> None:
    x, moody, ckpt = half_loaded(tmp_path)
    with pytest.raises(UsageError, match="loading step 5 has failed"):
        ckpt.step(6)
    with pytest.raises(UsageError):
        ckpt.close()
    with asyncckpt.Checkpointer(tmp_path, every=1, x=x, moody=moody) as other:
        with pytest.raises(UsageError, match=r"loading step 5 has failed .*begin_anew"):
            other.step(7)
        other.begin_anew()
        other.step(8)
    assert asyncckpt.list_steps(tmp_path) == [5, 8]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_loop_does_not_save_what_a_loader_has_left_half_way(tmp_path: Path, is_new: bool) -> None:
    asyncckpt.save(tmp_path, {"x": torch.ones(2), "moody": Moody()}, 5, durability="none")
    state: dict[str, Any] = {"x": torch.zeros(2), "moody": Moody()}
    state["moody"].refuses = True
    with pytest.raises(IncompatibleError, match="filled already"):
        asyncckpt.Loader(tmp_path, tensors=state).load()
    with asyncckpt.Saver(path=tmp_path, tensors=state, durability="none") as saver:
        periodic = asyncckpt.PeriodicSaver(saver, every_steps=1)
        for save in (periodic.step, periodic.save_now):
            with pytest.raises(UsageError, match=r"loading step 5 has failed .* \(call restore\(\) to load"):
                save(6)
        if is_new:
            state |= {"x": torch.zeros(2), "moody": Moody()}
        else:
            state["moody"].refuses = False
            asyncckpt.Loader(tmp_path, tensors=state).load()
    with (
        asyncckpt.Saver(path=tmp_path, tensors=state, durability="none") as saver,
        asyncckpt.PeriodicSaver(saver, every_steps=1) as periodic,
    ):
        periodic.step(7)
    assert asyncckpt.list_steps(tmp_path) == [5, 7]


@pytest.mark.parametrize(("loads", "saves"), [
    (lambda model: model, nn.DataParallel),
    (nn.DataParallel, lambda model: model),
    (lambda model: model[0], lambda model: model),
    (lambda model: model, lambda model: model[0]),
], ids=["wrapped later", "wrapped before", "a part", "a part later"])  # fmt: skip
def test_a_loop_does_not_save_a_module_around_or_within_what_was_left_half_way(
    tmp_path: Path, loads: Callable[[nn.Module], nn.Module], saves: Callable[[nn.Module], nn.Module]
) -> None:
    model, moody = nn.Sequential(nn.Linear(2, 2)), Moody()
    state = {"part": loads(model), "moody": moody}
    asyncckpt.save(tmp_path, state, 5, durability="none")
    moody.refuses = True
    with pytest.raises(IncompatibleError, match="filled already"):
        asyncckpt.Loader(tmp_path, tensors=state).load()
    with asyncckpt.Checkpointer(tmp_path, every=1, model=saves(model)) as ckpt:
        with pytest.raises(UsageError, match="loading step 5 has failed"):
            ckpt.step(6)
        moody.refuses = False
        asyncckpt.Loader(tmp_path, tensors=state).load()
        ckpt.step(7)
    assert asyncckpt.list_steps(tmp_path) == [5, 7]


def test_a_refused_restore_stops_no_save(tmp_path: Path) -> None:
    asyncckpt.save(tmp_path, {"x": torch.ones(2)}, 5, durability="none")
    with asyncckpt.Checkpointer(tmp_path, every=1, x=torch.zeros(3)) as ckpt:
        with pytest.raises(IncompatibleError, match="nothing was changed"):
            ckpt.restore()
        ckpt.step(6)
    assert asyncckpt.list_steps(tmp_path) == [5, 6]


def test_a_check_that_is_left_out_is_noticed_by_the_looks_of_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of tests/untouched.py, which looks at each load of the suite."""
    saved(tmp_path)
    changed = Recommender("user", seed=1)
    changed.train(1)
    monkeypatch.setattr("asyncckpt.plan.load_plan.ObjectChecks.problems", lambda self, item: [])
    monkeypatch.setitem(sys.modules, "tests.simulated_device.memory", None)  # Where it has memory, nobody looks.
    loader = asyncckpt.Loader(tmp_path, hashtables=changed.tables, tensors=changed.parts())
    looks = r"changed \[\"target 'model.head.weight' .*state of 'dense'.*table 'user'"
    with pytest.raises(AssertionError, match=looks), looked_at():
        loader.load()
