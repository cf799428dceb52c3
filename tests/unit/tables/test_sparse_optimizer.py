"""Sparse optimizers are optimizers of torch: groups, schedulers, scalers, clipping, hooks, states."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import StepLR

from asyncckpt.errors import UsageError
from asyncckpt.tables import HashEmbedding, HashTable, SparseAdagrad, SparseAdam, SparseSGD

IDS = torch.tensor([7, -3, 2**62])


def module_over(name: str = "user", dim: int = 2, **options: Any) -> HashEmbedding:
    slots = {**SparseSGD.optimizer_slots(), **SparseAdam.optimizer_slots(), "sum": torch.float32}
    return HashEmbedding(HashTable(name, dim, optimizer_slots=slots, **options))


def values(module: HashEmbedding, ids: torch.Tensor = IDS) -> list[list[float]]:
    rows: list[list[float]] = module.table.embedding[module.table.lookup(ids, insert=False)].tolist()
    return rows


def test_a_scheduler_sets_the_rate() -> None:
    module = module_over()
    optimizer = SparseSGD(module, lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        module(IDS).sum().backward()
        optimizer.step()
        scheduler.step()
    assert values(module) == [[-1.75, -1.75]] * 3
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_groups_have_numbers_of_their_own() -> None:
    users, items = module_over("user"), module_over("item")
    optimizer = SparseSGD([{"params": users, "lr": 1.0}, {"params": [items]}], lr=0.25)
    for module in (users, items):
        module(IDS).sum().backward()
    optimizer.step()
    assert (values(users)[0][0], values(items)[0][0]) == (-1.0, -0.25)
    assert [group["tables"] for group in optimizer.param_groups] == [["user"], ["item"]]


def test_a_group_is_added() -> None:
    users, items = module_over("user"), module_over("item")
    optimizer = SparseSGD(users, lr=1.0)
    optimizer.add_param_group({"params": nn.ModuleList([items]), "lr": 0.5})
    for module in (users, items):
        module(IDS).sum().backward()
    optimizer.step()
    assert (values(users)[0][0], values(items)[0][0]) == (-1.0, -0.5)


def test_wrong_groups_are_refused_and_not_added() -> None:
    users, other = module_over("user"), module_over("other")
    optimizer = SparseSGD(users, lr=1.0)
    for group, message in [
        ({"params": HashEmbedding(users.table)}, "table 'user' is in two groups of a sparse optimizer"),
        ({"params": nn.Linear(1, 1)}, "hold no HashEmbedding"),
        ({"params": other, "lr": -1}, "lr of a sparse optimizer must be"),
        ({"params": other, "slots": 3}, "slots of a sparse optimizer must be"),
        ({"lr": 1.0}, "group of a sparse optimizer must be"),
        ([other], "group of a sparse optimizer must be"),
    ]:
        with pytest.raises(UsageError, match=message):
            optimizer.add_param_group(group)  # type: ignore[arg-type]
    assert len(optimizer.param_groups) == 1
    with pytest.raises(UsageError, match="is in two groups"):
        SparseSGD([{"params": users}, {"params": HashEmbedding(users.table)}])


def test_a_closure_and_hooks_are_called() -> None:
    module, called = module_over(), []
    optimizer = SparseSGD(module, lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = module(IDS).sum()
        loss.backward()
        called.append("closure")
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert called == ["pre", "closure", "post"]
    assert loss.item() == 0.0
    assert values(module) == [[-1.0, -1.0]] * 3


def test_a_scaler_unscales_and_skips_infinities() -> None:
    module = module_over()
    optimizer = SparseSGD(module, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scaler.scale(module(IDS).sum()).backward()
    scaler.scale(module(IDS[:1]).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert values(module) == [[-2.0, -2.0], [-1.0, -1.0], [-1.0, -1.0]]
    assert optimizer.parameters()[0].grad is None
    scaler.scale(module(IDS).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert values(module) == [[-2.0, -2.0], [-1.0, -1.0], [-1.0, -1.0]]
    assert scaler.get_scale() == 512.0


def test_clipping_sees_the_norm_of_the_whole_gradient() -> None:
    module, linear = module_over(), nn.Linear(2, 1, bias=False)
    weight = nn.Embedding(3, 2)
    with torch.no_grad():
        weight.weight.zero_()
    dense = nn.Linear(2, 1, bias=False)
    dense.load_state_dict(linear.state_dict())
    places = torch.tensor([0, 1, 1, 2, 2, 2])
    for _ in range(2):  # Two forwards wait.
        (linear(module(IDS[places])).sum() * 3).backward()
        (dense(weight(places)).sum() * 3).backward()
    optimizer = SparseSGD(module, lr=1.0)
    norm = clip_grad_norm_([*linear.parameters(), *optimizer.parameters()], 1.0)
    expected = clip_grad_norm_([*dense.parameters(), *weight.parameters()], 1.0)
    torch.testing.assert_close(norm, expected)
    optimizer.step()
    torch.testing.assert_close(torch.tensor(values(module)), -weight.weight.grad)


def test_clipping_by_value() -> None:
    module = module_over()
    optimizer = SparseSGD(module, lr=1.0)
    (module(IDS) * torch.tensor([[10.0], [0.5], [-10.0]])).sum().backward()
    clip_grad_value_(optimizer.parameters(), 1.0)
    optimizer.step()
    assert values(module) == [[-1.0, -1.0], [-0.5, -0.5], [1.0, 1.0]]


def test_dense_optimizers_do_not_get_the_rows() -> None:
    model = nn.Sequential(module_over(), nn.Linear(2, 1))
    assert len(list(model.parameters())) == 2


def test_gradients_set_to_zero_make_a_step_and_dropped_ones_none() -> None:
    module = module_over()
    optimizer = SparseSGD(module, lr=1.0, weight_decay=0.5)
    module.table.embedding[module.table.lookup(IDS)] = 1.0
    module(IDS).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert values(module) == [[0.5, 0.5]] * 3
    module(IDS).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert values(module) == [[0.5, 0.5]] * 3
    assert optimizer.state_dict()["state"] == {0: {"step": 1}}


def test_state_dict_has_the_shape_of_torchs() -> None:
    users, items = module_over("user"), module_over("item")
    optimizer = SparseAdam([{"params": users, "lr": 0.1}, {"params": items}])
    users(IDS).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert state["state"] == {0: {"step": 1}}
    shared = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "slots": ["exp_avg", "exp_avg_sq"]}
    assert state["param_groups"] == [
        {**shared, "lr": 0.1, "tables": ["user"], "params": [0]},
        {**shared, "lr": 1e-3, "tables": ["item"], "params": [1]},
    ]
    target = SparseAdam([{"params": users}, {"params": items}], lr=1.0)
    target.load_state_dict(state)
    assert target.state_dict() == state
    assert target.param_groups[0]["params"][0].table is users.table


def test_loaded_steps_go_on() -> None:
    first, second = module_over(), module_over()
    going_on = SparseAdam(first, lr=0.1)
    for step in range(6):
        if step == 3:
            going_on, state = SparseAdam(first, lr=5.0), going_on.state_dict()
            going_on.load_state_dict(state)
        first(IDS).square().add(1).prod().backward()
        going_on.step()
    through = SparseAdam(second, lr=0.1)
    for _ in range(6):
        second(IDS).square().add(1).prod().backward()
        through.step()
    assert values(first) == values(second)


def good_state() -> dict[str, Any]:
    return SparseAdagrad(module_over(), lr=0.3).state_dict()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("state"), r"state of a sparse optimizer must be .*; got \['param_groups'\]"),
        (lambda state: state["param_groups"].clear(), "param_groups of the state of a sparse optimizer must be"),
        (lambda state: state["param_groups"][0].pop("eps"), r"not that of a SparseAdagrad: it lacks \['eps'\]"),
        (lambda state: state["param_groups"][0].update(eps="0"), "eps of a sparse optimizer must be .*; got '0'"),
        (lambda state: state["param_groups"][0].update(lr=math.inf), "lr of a sparse optimizer must be .*; got inf"),
        (lambda state: state["param_groups"][0].update(params=[0, 1]), "params of the state"),
        (lambda state: state["param_groups"][0].update(slots=["exp_avgs"]), "slot 'exp_avgs' of table 'user'"),
        (
            lambda state: state["param_groups"][0].update(tables=["item"]),
            r"is that of other tables, found \['item'\], expected \['user'\]",
        ),
        (lambda state: state.update(state={0: {"step": -1}}), "must be a mapping of parameter"),
        (lambda state: state.update(state=[]), "state of a sparse optimizer must be a mapping of parameter"),
    ],
)
def test_wrong_state_changes_nothing(spoil: Any, message: str) -> None:
    optimizer = SparseAdagrad(module_over(), lr=0.1)
    before = optimizer.state_dict()
    state = good_state()
    spoil(state)
    with pytest.raises(UsageError, match=message):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict() == before
    with pytest.raises(UsageError, match=r"state of a sparse optimizer must be .*; got a list"):
        optimizer.load_state_dict([("state", {})])  # type: ignore[arg-type]
    optimizer.load_state_dict(good_state())
    assert optimizer.param_groups[0]["lr"] == 0.3


def test_a_scheduled_state_loads_into_an_optimizer_without_a_scheduler() -> None:
    optimizer = SparseSGD(module_over(), lr=1.0)
    StepLR(optimizer, 1)
    target = SparseSGD(module_over(), lr=0.5)
    target.load_state_dict(optimizer.state_dict())
    assert target.param_groups[0]["initial_lr"] == 1.0


def test_two_optimizers_see_the_same_gradient() -> None:
    table = HashTable("user", 2, optimizer_slots={"sum": torch.float32})
    first, second = HashEmbedding(table), HashEmbedding(table)
    both, one = SparseSGD([first, second], lr=1.0), SparseSGD(first, lr=1.0)
    first(IDS).sum().backward()
    second(IDS).sum().backward()
    assert both.parameters()[0].grad is not None
    one.zero_grad()
    both.step()
    assert table.embedding[table.lookup(IDS)].eq(0).all()
    second(IDS).sum().backward()
    one.step()
    both.step()
    assert table.embedding[table.lookup(IDS)].eq(-1).all()


def test_steps_beside_growth_on_another_thread_lose_nothing() -> None:
    ids = torch.arange(3000)
    module = HashEmbedding(HashTable("user", 2, capacity=16))
    module.table.lookup(ids)
    optimizer = SparseSGD(module, lr=1.0)
    ended = threading.Event()

    def grow() -> None:
        begin = 10_000
        while not ended.is_set() and begin < 2_000_000:
            module.table.lookup(torch.arange(begin, begin + 5000))
            begin += 5000

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(100):
            module(ids).sum().backward()
            optimizer.step()
    finally:
        ended.set()
        thread.join()
    assert module.table.embedding[module.table.lookup(ids)].eq(-100).all()
