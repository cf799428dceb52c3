"""HashEmbedding and HashEmbeddingBag against nn.Embedding and nn.EmbeddingBag over the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from asyncckpt.errors import UsageError
from asyncckpt.model.table import Role
from asyncckpt.tables import HashEmbedding, HashEmbeddingBag, HashTable, Slot, Uniform
from asyncckpt.tables.gradients import merged

DIM = 4
# Dense row i stands for IDS[i]: extreme, negative and out of order.
IDS = torch.tensor([7, -(2**63), 3, 2**63 - 1, -1, 100])


def table_with_rows() -> tuple[HashTable, torch.Tensor]:
    """Return a table of IDS, in rows that are not in the order of IDS, and their rows as a dense weight."""
    table = HashTable("user", DIM, initializer=Uniform(1.0, seed=5))
    table.lookup(IDS.flip(0))
    return table, table.embedding[table.lookup(IDS)].clone().requires_grad_()


def dense_gradient(module: HashEmbedding) -> torch.Tensor:
    """Return the pending gradient as one row per IDS."""
    entry = merged([module.pending])
    assert entry is not None
    ids, gradient = entry.ids, entry.leaf.grad
    assert gradient is not None
    module.pending.drop()
    dense = torch.zeros(len(IDS), DIM)
    for id, row in zip(ids.tolist(), gradient, strict=True):
        dense[IDS.tolist().index(id)] = row
    return dense


@pytest.mark.parametrize("shape", [(), (5,), (3, 2), (2, 3, 4), (0,), (2, 0)])
def test_forward_and_gradient_equal_a_dense_embedding(shape: tuple[int, ...]) -> None:
    table, weight = table_with_rows()
    module = HashEmbedding(table)
    places = torch.randint(len(IDS), shape, generator=torch.Generator().manual_seed(0))
    target = torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(1))
    rows, expected = module(IDS[places]), functional.embedding(places, weight)
    assert rows.shape == (*shape, DIM)
    assert torch.equal(rows, expected)
    (rows * target).sum().backward()
    torch.autograd.backward((expected * target).sum())
    assert weight.grad is not None
    assert torch.equal(dense_gradient(module), weight.grad)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("layout", ["2d", "offsets", "last_offset"])
def test_bag_and_gradient_equal_a_dense_bag(mode: str, layout: str) -> None:
    table, weight = table_with_rows()
    module = HashEmbeddingBag(table, mode=mode, include_last_offset=layout == "last_offset")
    places = torch.tensor([0, 3, 3, 1, 5, 3, 0, 2])
    offsets = {"2d": None, "offsets": torch.tensor([0, 3, 3]), "last_offset": torch.tensor([0, 3, 3, 8])}[layout]
    if layout == "2d":
        places = places.reshape(2, 4)
    dense: dict[str, Any] = {"mode": mode, "include_last_offset": layout == "last_offset"}
    bags, expected = module(IDS[places], offsets), functional.embedding_bag(places, weight, offsets, **dense)
    torch.testing.assert_close(bags, expected)
    target = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (bags * target).sum().backward()
    torch.autograd.backward((expected * target).sum())
    torch.testing.assert_close(dense_gradient(module), weight.grad)


def test_bag_weights_get_a_gradient() -> None:
    table, weight = table_with_rows()
    places, offsets = torch.tensor([0, 3, 3, 1]), torch.tensor([0, 2])
    ours, theirs = (torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True) for _ in range(2))
    module = HashEmbeddingBag(table, mode="sum")
    bags = module(IDS[places], offsets, ours)
    expected = functional.embedding_bag(places, weight, offsets, mode="sum", per_sample_weights=theirs)
    assert torch.equal(bags, expected)
    bags.square().sum().backward()
    torch.autograd.backward(expected.square().sum())
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(dense_gradient(module), weight.grad)


def test_bag_of_no_ids() -> None:
    module = HashEmbeddingBag(DIM, mode="sum")
    assert module(torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])).tolist() == [[0.0] * DIM] * 2


def test_duplicates_are_summed_in_batch_order() -> None:
    # In this order float32 gives 1, in the reverse order 0.
    parts = torch.tensor([2.0**30, -(2.0**30), 1.0])
    for order in (parts, parts.flip(0)):
        expected = torch.zeros(())
        for part in order:
            expected += part
        for module in (HashEmbedding(1), HashEmbeddingBag(1, mode="sum")):
            ids = torch.tensor([9, 9, 9]) if type(module) is HashEmbedding else torch.tensor([[9], [9], [9]])
            (module(ids).flatten() * order).sum().backward()
            (entry,) = module.pending.entries()
            gradient = entry.leaf.grad
            assert gradient is not None
            assert gradient.tolist() == [[expected.item()]]


def test_training_inserts_and_eval_does_not() -> None:
    module = HashEmbedding(HashTable("user", DIM, initializer=1.0, capacity=1))
    # What a free row holds must not show, not even as 0 * NaN.
    module.table.embedding.fill_(float("nan"))
    assert module.eval()(torch.tensor([[1, 2]])).tolist() == [[[0.0] * DIM] * 2]
    assert len(module.table) == 0
    module.train()(torch.tensor([1]))
    assert module.eval()(torch.tensor([1, 2])).tolist() == [[1.0] * DIM, [0.0] * DIM]
    assert module.table.ids().tolist() == [1]


def test_eval_gives_the_table_no_gradient() -> None:
    table, _ = table_with_rows()
    module = HashEmbedding(table).eval()
    assert not module(IDS).requires_grad
    assert len(module.pending) == 0


def test_no_grad_forward_leaves_nothing_pending() -> None:
    table, _ = table_with_rows()
    module = HashEmbedding(table)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not module(IDS).requires_grad
    assert len(module.pending) == 0


def test_output_does_not_alias_the_table() -> None:
    table, weight = table_with_rows()
    rows = HashEmbedding(table).eval()(IDS)
    table.embedding.zero_()
    assert torch.equal(rows, weight)


def test_step_is_stamped_in_training_only() -> None:
    module = HashEmbedding(HashTable("user", DIM, metadata={"last_seen": torch.int64}))
    module.step = 2**40
    module(torch.tensor([1, 2, 1]))
    module.step += 1
    module(torch.tensor([2]))
    module.step += 1
    module.eval()(torch.tensor([1, 2]))
    rows = module.table.lookup(torch.tensor([1, 2]))
    assert module.table.slot("last_seen")[rows].tolist() == [2**40, 2**40 + 1]


def test_step_column_may_have_another_name() -> None:
    module = HashEmbedding(DIM, step_column="step_filter")
    column = module.table.schema().column("step_filter")
    assert column is not None
    assert column.role is Role.METADATA
    module.step = 5
    module(torch.tensor([1]))
    assert module.table.slot("step_filter")[module.table.used_rows()].tolist() == [5]


@pytest.mark.parametrize("spec", [torch.int32, (torch.int64, (1,)), None])
def test_wrong_step_column_is_refused_only_where_it_was_named(spec: Any) -> None:
    table = HashTable("user", DIM, metadata={} if spec is None else {"last_seen": spec})
    HashEmbedding(table)(torch.tensor([1]))
    with pytest.raises(UsageError, match=r"step column 'last_seen' of table 'user' must be .*; got"):
        HashEmbedding(table, step_column="last_seen")


def test_state_dict_does_not_hold_the_table() -> None:
    model = nn.Sequential(HashEmbedding(DIM, name="user"), nn.Linear(DIM, 1))
    model(torch.tensor([1, 2])).sum().backward()
    assert set(model.state_dict()) == {"1.weight", "1.bias"}
    assert "HashTable('user', dim=4, rows=2" in repr(model)


def test_new_table_takes_the_options() -> None:
    module = HashEmbeddingBag(
        DIM, name="user", optimizer_slots={"sum": Slot(torch.float32, (), 0.5)}, initializer=2.0, mode="max"
    )
    rows = module.table.lookup(torch.tensor([1]))
    assert module.table.name == "user"
    assert module.table.slot("sum")[rows].tolist() == [0.5]
    assert module.table.embedding[rows].tolist() == [[2.0] * DIM]


@pytest.mark.parametrize("options", [{"optimizer_slots": {}}, {"initializer": 0.0}])
def test_options_beside_a_table_are_refused(options: Any) -> None:
    with pytest.raises(UsageError, match="table 'user' already exists, its slots and initializer are set"):
        HashEmbedding(HashTable("user", DIM), **options)


@pytest.mark.parametrize("ids", [torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32), [1], None])
def test_wrong_ids_are_refused(ids: Any) -> None:
    with pytest.raises(UsageError, match="ids for table 'embedding'"):
        HashEmbedding(DIM)(ids)


def test_foreign_ids_are_refused() -> None:
    module = HashEmbedding(HashTable("user", DIM, shard=(0, 2)))
    with pytest.raises(UsageError, match="id 3 belongs to shard 1 of 2, and table 'user' holds shard 0 of 2"):
        module(torch.tensor([2, 3]))


NO_OFFSETS = "offsets for a bag lookup in table 'embedding' must be"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.tensor([1]),), NO_OFFSETS),
        ((torch.tensor([1]), torch.tensor([[0]])), NO_OFFSETS),
        ((torch.tensor([1]), torch.tensor([0.0])), "offsets .* have the wrong dtype, found torch.float32"),
        ((torch.tensor([[1]]), torch.tensor([0])), "offsets .* make no sense"),
        ((torch.tensor(1),), r"ids for a bag lookup in table 'embedding' must be .*; got \(\)"),
        (([1],), "ids for a bag lookup in table 'embedding' must be .*; got a list"),
        (
            (torch.tensor([[1]]), None, torch.ones(1)),
            r"per_sample_weights .* must be of shape \(1, 1\); got \(1,\)",
        ),
    ],
)
def test_wrong_bags_are_refused(arguments: Any, message: str) -> None:
    module = HashEmbeddingBag(DIM, mode="sum")
    with pytest.raises(UsageError, match=message):
        module(*arguments)
    assert len(module.table) == 0


def test_wrong_bag_modes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"mode of HashEmbeddingBag must be .*; got 'min'"):
        HashEmbeddingBag(DIM, mode="min")
    with pytest.raises(UsageError, match=r"per_sample_weights .* need mode 'sum', found 'mean'"):
        HashEmbeddingBag(DIM)(torch.tensor([[1]]), None, torch.ones(1, 1))


@pytest.mark.parametrize("step", [5, np.int64(5), np.int32(5), np.uint8(5), np.array(5), torch.tensor(5), IDS[:1] - 2])
def test_a_step_is_an_integer_of_any_kind(step: Any) -> None:
    module = HashEmbedding(HashTable("user", DIM, metadata={"last_seen": torch.int64}))
    module.step = step
    assert type(module.step) is int
    module(torch.tensor([1]))
    assert module.table.read(torch.tensor([1]))["last_seen"].tolist() == [5]  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", [2**63 - 1, -(2**63), 0, None])
def test_a_step_goes_to_the_ends_of_int64(step: int | None) -> None:
    module = HashEmbedding(HashTable("user", DIM, metadata={"last_seen": torch.int64}))
    module.step = 3
    module.step = step
    module(torch.tensor([1]))
    assert module.table.read(torch.tensor([1]))["last_seen"].tolist() == [step or 0]  # type: ignore[attr-defined]


WRONG_STEPS: list[Any] = [1.5, 2.0, np.float64(1), torch.tensor(1.0), float("nan"), True, np.bool_(True), "1", 1j]
WRONG_STEPS += [torch.tensor(True), torch.tensor([1, 2]), np.array([1, 2]), 2**63, -(2**63) - 1, np.uint64(2**63), [1]]


@pytest.mark.parametrize("step", WRONG_STEPS, ids=repr)
def test_a_wrong_step_is_refused_where_it_is_set(step: Any) -> None:
    module = HashEmbedding(HashTable("user", DIM, metadata={"last_seen": torch.int64}))
    module.step = 7
    with pytest.raises(UsageError, match=r"step for table 'user' must be an int64 or None; got "):
        module.step = step
    module(torch.tensor([1]))
    assert module.table.read(torch.tensor([1]))["last_seen"].tolist() == [7]  # type: ignore[attr-defined]


def test_a_forward_that_is_computed_again_is_a_second_lookup() -> None:
    table = HashTable("user", DIM, metadata={"count": torch.int64}, initializer=1.0)
    module = HashEmbedding(table)
    scale = torch.ones((), requires_grad=True)
    checkpoint(lambda ids: (module(ids) * scale).sin(), IDS, use_reentrant=False).sum().backward()
    assert table.read(IDS)["count"].tolist() == [2] * len(IDS)
