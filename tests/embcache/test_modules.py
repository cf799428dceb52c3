"""The collections: features, pooling, KeyedJaggedTensors, training, and batches that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import asyncckpt
from asyncckpt.embcache import (
    EmbCacheEmbeddingBagCollection,
    EmbCacheEmbeddingCollection,
    EmbCacheShardedEmbeddingBagCollection,
    EmbCacheShardedEmbeddingCollection,
    JaggedRows,
    PooledRows,
)
from tests.embcache.models import FEATURES, CachedNet, config, image, make_batch

UsageError = asyncckpt.UsageError


class Jagged:
    """What a collection needs of TorchRec's JaggedTensor."""

    def __init__(self, values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        self._parts = values, lengths, weights

    def values(self) -> torch.Tensor:
        return self._parts[0]

    def lengths(self) -> torch.Tensor:
        return self._parts[1]

    def offsets(self) -> torch.Tensor:
        """Of a view into the values of all features, as some versions give it: it does not begin at 0."""
        return torch.cat([torch.zeros(1), self._parts[1].cumsum(0)]).long() + 17

    def weights_or_none(self) -> torch.Tensor | None:
        return self._parts[2]


class KeyedJagged:
    """What a collection needs of TorchRec's KeyedJaggedTensor, which is no Mapping."""

    def __init__(self, items: dict[str, Jagged]) -> None:
        self._items = items

    def keys(self) -> list[str]:
        return list(self._items)

    def __getitem__(self, name: str) -> Jagged:
        return self._items[name]


def keyed(batch: dict[str, Any], *, weighted: bool = False) -> KeyedJagged:
    items = {}
    for name, (values, offsets) in batch.items():
        weights = torch.arange(1.0, len(values) + 1) if weighted else None
        items[name] = Jagged(values, (offsets[1:] - offsets[:-1]).to(torch.int32), weights)
    return KeyedJagged(items)


def expected(rows: torch.Tensor, offsets: torch.Tensor, mode: str) -> torch.Tensor:
    places = torch.arange(len(rows))
    return functional.embedding_bag(places, rows, offsets, mode=mode, include_last_offset=True)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_pooled_per_feature(mode: str) -> None:
    collection = EmbCacheEmbeddingBagCollection([config(pooling=mode), config("ad", ["ads"], dim=3)])
    batch = make_batch(3)
    pooled = collection(batch)
    assert list(pooled) == ["clicks", "likes", "ads"]
    for name, table in (("clicks", "user"), ("likes", "user")):
        values, offsets = batch[name]
        rows = collection.tables()[table].read(values)["embedding"]
        torch.testing.assert_close(pooled[name], expected(rows, offsets, mode))
    assert pooled["ads"].shape == (5, 3)
    assert set(collection.tables()["user"].ids().tolist()) == {
        *batch["clicks"][0].tolist(),
        *batch["likes"][0].tolist(),
    }


def test_pooled_rows_have_the_methods_of_a_keyed_tensor() -> None:
    pooled = EmbCacheEmbeddingBagCollection([config(), config("ad", ["ads"], dim=3)])(make_batch(3))
    assert isinstance(pooled, PooledRows)
    assert pooled.keys() == list(pooled) == list(pooled.to_dict()) == ["clicks", "likes", "ads"]
    assert (pooled.length_per_key(), pooled.offset_per_key()) == ([4, 4, 3], [0, 4, 8, 11])
    assert torch.equal(pooled.values(), torch.cat([pooled["clicks"], pooled["likes"], pooled["ads"]], dim=1))
    with pytest.raises(UsageError, match=r"different numbers of samples, found \{'a': 2, 'b': 3\}"):
        PooledRows({"a": torch.zeros(2, 1), "b": torch.zeros(3, 1)}).values()


@pytest.mark.parametrize("kind", [EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection])
def test_a_feature_of_two_tables_has_rows_of_both(kind: type[Any]) -> None:
    both = kind([config(), config("wide", ["likes"], dim=3)])
    alone = [kind([config()]), kind([config("wide", ["likes"], dim=3)])]
    batch = make_batch(3)
    found = both(batch)
    assert list(found) == ["clicks", "likes@user", "likes@wide"]
    for key, expected_rows in (("likes@user", alone[0](batch)["likes"]), ("likes@wide", alone[1](batch)["likes"])):
        assert torch.equal(found[key][0], expected_rows[0])
        assert torch.equal(found[key][1], expected_rows[1])
    for one in alone:
        [(name, table)] = one.tables().items()
        assert sorted(both.tables()[name].ids().tolist()) == sorted(table.ids().tolist())
    # Both tables learn from it.
    before = {name: table.read(batch["likes"][0])["embedding"] for name, table in both.tables().items()}
    optimizer = asyncckpt.optim.SparseSGD(both, lr=0.5)
    found = both(batch)
    rows = [found[key] if isinstance(found, PooledRows) else found[key].values for key in ("likes@user", "likes@wide")]
    sum(part.sum() for part in rows).backward()  # type: ignore[union-attr]
    optimizer.step()
    for name, table in both.tables().items():
        assert not torch.equal(table.read(batch["likes"][0])["embedding"], before[name])


def test_rows_of_a_sequence_come_one_by_one() -> None:
    collection = EmbCacheEmbeddingCollection([config(features=FEATURES)])
    batch = make_batch(4)
    found = collection(batch)
    for name in FEATURES:
        values, offsets = batch[name]
        assert isinstance(found[name], JaggedRows)
        assert torch.equal(found[name].offsets, offsets)
        assert torch.equal(found[name].values.detach(), collection.tables()["user"].read(values)["embedding"])


@pytest.mark.parametrize("kind", [EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection])
def test_keyed_jagged_tensor_gives_the_same(kind: type[Any]) -> None:
    one, two = kind([config(features=FEATURES)]), kind([config(features=FEATURES)])
    batch = make_batch(5)
    found, others = one(batch), two(keyed(batch))
    assert tuple(found) == FEATURES
    for name in found:
        assert torch.equal(found[name][0], others[name][0])
        assert torch.equal(found[name][1], others[name][1])


def test_offsets_may_be_int32_but_ids_may_not() -> None:
    one, two = EmbCacheEmbeddingBagCollection([config()]), EmbCacheEmbeddingBagCollection([config()])
    batch = make_batch(5)
    narrow = {name: (values, offsets.int()) for name, (values, offsets) in batch.items()}
    assert torch.equal(one(batch)["clicks"], two(narrow)["clicks"])


def test_weights_count_only_where_asked_for() -> None:
    batch = make_batch(6)
    plain, weighted = (
        EmbCacheEmbeddingBagCollection([config()]),
        EmbCacheEmbeddingBagCollection([config()], is_weighted=True),
    )
    assert torch.equal(plain(keyed(batch, weighted=True))["likes"], plain(batch)["likes"])
    values, offsets = batch["likes"]
    found = weighted(keyed(batch, weighted=True))["likes"]
    rows = weighted.tables()["user"].read(values)["embedding"] * torch.arange(1.0, len(values) + 1).unsqueeze(1)
    torch.testing.assert_close(found, expected(rows, offsets, "sum"))
    for unweighted in (batch, keyed(batch)):
        with pytest.raises(UsageError, match="no weights"):
            weighted(unweighted)
    with pytest.raises(UsageError, match="pool by 'sum'"):
        EmbCacheEmbeddingBagCollection([config(pooling="mean")], is_weighted=True)


def test_batches_without_ids_or_samples() -> None:
    bags, words = EmbCacheEmbeddingBagCollection([config()]), EmbCacheEmbeddingCollection([config("w", ["clicks"])])
    none = torch.empty(0, dtype=torch.int64)
    empty = {"clicks": (none, torch.zeros(4, dtype=torch.int64)), "likes": (none, torch.zeros(1, dtype=torch.int64))}
    pooled = bags(empty)
    assert torch.equal(pooled["clicks"], torch.zeros(3, 4))
    assert pooled["likes"].shape == (0, 4)
    assert words(empty)["clicks"].values.shape == (0, 4)


def test_shared_table_counts_an_id_once_a_batch() -> None:
    collection = EmbCacheEmbeddingBagCollection([config(admit_after=2)])
    ids, offsets = torch.tensor([5]), torch.tensor([0, 1])
    batch = {"clicks": (ids, offsets), "likes": (ids, offsets)}
    collection(batch)
    assert len(collection.tables()["user"]) == 0
    collection(batch)
    assert collection.tables()["user"].ids().tolist() == [5]


def test_optimizers_find_the_tables_and_train_them() -> None:
    one, two = CachedNet().trained(range(6)), CachedNet(cache_rows=1000).trained(range(6))
    start = CachedNet()
    assert image(one) == image(two)  # Of whatever size the cache is.
    start.bags(make_batch(0))
    id = int(make_batch(0)["clicks"][0][0])
    assert not torch.equal(
        one.bags.tables()["user"].read(torch.tensor([id]))["embedding"],
        start.bags.tables()["user"].read(torch.tensor([id]))["embedding"],
    )


def test_step_is_stamped_and_mentions_are_counted() -> None:
    collection = EmbCacheEmbeddingBagCollection([config()])
    collection.step = 41
    ids, offsets = torch.tensor([5, 5, -7]), torch.tensor([0, 3])
    collection({"clicks": (ids, offsets), "likes": (ids[:1], torch.tensor([0, 1]))})
    found = collection.tables()["user"].read(torch.tensor([5, -7]))
    assert found["last_seen"].tolist() == [41, 41]
    assert found["count"].tolist() == [3, 1]
    assert collection.step == 41


def test_prefetch_brings_known_ids_and_changes_nothing() -> None:
    collection = EmbCacheEmbeddingBagCollection([config(cache_rows=2)])
    ids = torch.arange(6)
    empty = (ids[:0], torch.tensor([0]))
    for id in ids:
        collection({"clicks": (id.reshape(1), torch.tensor([0, 1])), "likes": empty})
    before = collection.tables()["user"].read(ids)
    count = collection.prefetch({"clicks": (torch.tensor([0, 99]), torch.tensor([0, 2])), "likes": empty})
    assert count == 1
    assert len(collection.tables()["user"]) == 6
    after = collection.tables()["user"].read(ids)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_sharded_collections_hold_the_ids_of_their_rank() -> None:
    for kind in (EmbCacheShardedEmbeddingBagCollection, EmbCacheShardedEmbeddingCollection):
        collection = kind([config()], rank=1, world_size=3)
        assert collection.tables()["user"].shard == (1, 3)
        with pytest.raises(UsageError, match="holds shard 1 of 3"):
            collection({name: (torch.tensor([3]), torch.tensor([0, 1])) for name in ("clicks", "likes")})
        with pytest.raises(UsageError, match="rank is missing"):
            kind([config()])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: EmbCacheEmbeddingBagCollection([]), "tables of a collection must be"),
        (lambda: EmbCacheEmbeddingBagCollection("user"), "table of a collection must be"),  # type: ignore[arg-type]
        (lambda: EmbCacheEmbeddingBagCollection([config(), config(features=["x"])]), "have one name"),
        (lambda: EmbCacheEmbeddingBagCollection([config(features=["a", "a"])]), "'user' has a feature twice"),
        (
            lambda: EmbCacheEmbeddingBagCollection([config(features=["a", "a@ad"]), config("ad", ["a"])]),
            "named as another one",
        ),
        (lambda: config(""), "name of a table"),
        (lambda: config("a@b"), "without '@'"),
        (lambda: config(features=[]), "feature_names"),
        (lambda: config(features=[3]), "feature_names"),
        (lambda: config(pooling="max"), "pooling"),
        (lambda: EmbCacheEmbeddingBagCollection([config(cache_rows=0)]), "cache_rows"),
    ],
)
def test_wrong_configs_are_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda batch: [1, 2], "batch of a collection must be"),
        (lambda batch: {"clicks": batch["clicks"]}, "lacks feature 'likes'"),
        (lambda batch: {**batch, "likes": batch["likes"][0]}, "'likes' must be"),
        (lambda batch: {**batch, "likes": (batch["likes"][0].reshape(-1, 1), batch["likes"][1])}, "values of feature"),
        (lambda batch: {**batch, "likes": ([1], batch["likes"][1])}, "values of feature"),
        (lambda batch: {**batch, "likes": (batch["likes"][0].int(), batch["likes"][1])}, "wrong dtype"),
        (lambda batch: {**batch, "likes": (batch["likes"][0], batch["likes"][1].float())}, "offsets of feature"),
        (lambda batch: {**batch, "likes": (batch["likes"][0], batch["likes"][1][:0])}, "offsets of feature"),
        (lambda batch: {**batch, "likes": (batch["likes"][0], batch["likes"][1] + 1)}, "offsets of feature"),
        (lambda batch: {**batch, "likes": (batch["likes"][0][1:], batch["likes"][1])}, "offsets of feature"),
        (lambda batch: {**batch, "likes": (batch["likes"][0], batch["likes"][1][[0, 3, 2, 5]])}, "offsets of feature"),
    ],
)
@pytest.mark.parametrize("kind", [EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingCollection])
def test_wrong_batches_are_refused(kind: type[Any], change: Callable[[Any], Any], text: str) -> None:
    collection = kind([config()])
    with pytest.raises(UsageError, match=text):
        collection(change(make_batch(7)))
    assert len(collection.tables()["user"]) == 0
