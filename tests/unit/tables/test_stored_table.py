"""Tables by value: copy.deepcopy, pickle and torch.save of tables and of models that hold them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import swa_utils

from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.tables import HashEmbedding, HashEmbeddingBag, HashTable, MultiLevelTable, Slot, SparseAdam, Uniform
from asyncckpt.tables.trained_table import TrainedTable
from tests.worlds.rows import named_rows


def by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": by_torch,
}
KINDS: dict[str, Callable[..., TrainedTable]] = {
    "hash": HashTable,
    "levels": lambda *args, **options: MultiLevelTable(*args, cache_rows=20, policy="lfu", admit_after=2, **options),
}


@pytest.fixture(params=WAYS)
def copied(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return WAYS[request.param]


@pytest.fixture(params=[(kind, shard) for kind in KINDS for shard in ((1, 2), (1, 2, 2))], ids=str)
def table(request: pytest.FixtureRequest) -> TrainedTable:
    kind, shard = request.param
    made = KINDS[kind](
        "user",
        3,
        optimizer_slots={**SparseAdam.optimizer_slots(), "sum": Slot(torch.float32, (), 0.25)},
        metadata={"last_seen": torch.int64},
        shard=shard,
        capacity=2,
        initializer=Uniform(0.5, seed=3),
    )
    for _ in range(2):
        made.lookup(torch.arange(1, 21, 2))
    made.remove(torch.tensor([5, 7]))
    made.lookup(torch.tensor([31, 33, 33]))  # Candidates, where ids are admitted.
    return made


def test_a_copy_has_the_rows_and_lives_on_its_own(table: TrainedTable, copied: Callable[[Any], Any]) -> None:
    before = named_rows(table)
    made = copied(table)
    assert type(made) is type(table)
    assert (made.name, made.shard, made.replicated, made.schema()) == ("user", table.shard, False, table.schema())
    assert named_rows(made) == before
    candidates = [
        [id for id in (31, 33) if id in companion]  # type: ignore[operator]
        for owner in (table, made)
        for companion in getattr(owner, "companions", dict)().values()
    ]
    assert candidates in ([], [[31, 33]] * 2)
    with made.rows(torch.tensor([9, 11])) as rows:
        rows["embedding"] += 1
    made.insert(torch.tensor([41]), torch.ones(1, 3))
    made.remove(torch.tensor([1]))
    assert named_rows(table) == before
    # A new row starts as one of the table itself does.
    for owner in (table, made):
        for _ in range(2):
            owner.lookup(torch.tensor([43]))
    assert named_rows(made)[43] == named_rows(table)[43]


def test_an_empty_table_and_a_replica_are_copied(copied: Callable[[Any], Any]) -> None:
    made = copied(HashTable("user", 2, replicated=True))
    assert (len(made), made.replicated) == (0, True)
    full = HashTable("user", 2, replicated=True)
    full.lookup(torch.arange(5))
    assert copied(full).ids_held() == full.ids_held()


def test_a_model_and_its_optimizer_train_on_as_the_original(copied: Callable[[Any], Any]) -> None:
    table = HashTable("user", 3, optimizer_slots=SparseAdam.optimizer_slots(), initializer=Uniform(0.5, seed=3))
    model = torch.nn.ModuleDict({"one": HashEmbedding(table), "bag": HashEmbeddingBag(table, mode="sum")})
    optimizer = SparseAdam(model, lr=0.1)

    def train(model: Any, optimizer: Any) -> None:
        ids = torch.arange(6)
        loss = model["one"](ids).square().sum() + model["bag"](ids.view(2, 3)).sum()
        loss.backward()
        optimizer.step()

    train(model, optimizer)
    other_model, other_optimizer = copied((model, optimizer))
    assert other_model["one"].table is other_model["bag"].table is not table
    assert other_optimizer.param_groups[0]["params"][0].table is other_model["one"].table
    train(model, optimizer)
    assert named_rows(other_model["one"].table) != named_rows(table)
    train(other_model, other_optimizer)
    assert named_rows(other_model["one"].table) == named_rows(table)


def test_gradients_that_wait_for_an_optimizer_are_not_copied(copied: Callable[[Any], Any]) -> None:
    module = HashEmbedding(2, name="user")
    module(torch.arange(3)).sum().backward()
    assert (len(module.pending), len(copied(module).pending)) == (1, 0)


def test_a_copy_is_whole_or_refused_while_the_table_is_in_a_cut(table: TrainedTable) -> None:
    cut = table.begin_cut()
    with pytest.raises(UsageError, match="reading of table 'user' waits for cut"):
        copy.deepcopy(table)
    cut.fence()
    assert named_rows(copy.deepcopy(table)) == named_rows(table)


AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.5)},
    "swa": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn(), "use_buffers": True},
    "own": {"avg_fn": lambda average, now, _: average.lerp(now, 0.5)},
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_a_table_is_averaged_without_it_or_not_at_all(kind: str, average: str) -> None:
    """torch's average is a copy whose parameters follow: rows would stay as they were, without a word."""
    table = KINDS[kind]("user", 3)
    model = torch.nn.ModuleDict({"embedding": HashEmbedding(table), "dense": torch.nn.Linear(3, 1)})

    class OwnAverage(swa_utils.AveragedModel):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(model, **AVERAGES[average])

    for averaged in (model, model["embedding"], torch.nn.Sequential(model)):
        with pytest.raises(UnsupportedError, match="table 'user' cannot be averaged") as refused:
            OwnAverage(averaged)
        assert "AveragedModel(model.dense)" in str(refused.value)
    OwnAverage(model["dense"]).update_parameters(model["dense"])
    assert len(copy.deepcopy(model)["embedding"].table) == 0
